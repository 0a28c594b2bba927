# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Experts of a layer that are stored in one tensor, cut into one module for each.

vLLM takes `<layer>.experts.gate_up_proj` [E, 2 I, H], gate before up, as well as
`<layer>.experts.<n>.gate_proj.weight` and so on; packed, only the latter. What a class
makes of the former (`is_fused_checkpoint_transposed` of `FusedMoEFactory`, its names,
its own loader) is written down here by type of model: no shape tells which half is the
gate.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from . import names
from .errors import ConversionError
from .model import Plain, Weight
from .safetensors_io import FLOATS, NAMES, StoredTensor

# [E, 2 I, H] and [E, H, I].
_ROWS = {
    "gemma4",
    "granitemoe",
    "granitemoe_swa",
    "granitemoehybrid",
    "granitemoeshared",
    "qwen3_5_moe",
    # Published with one tensor for each expert, but written in this way, too.
    "ernie4_5_moe",
    "glm4_moe",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
}
# [E, H, 2 I] and [E, I, H].
_TRANSPOSED = {"aria", "llama4", "qwen3_vl_moe"}
# These classes have other uses for names with gate_proj and up_proj.
_GATE_UP = {"aria"}
# transformers 5 reads both and writes the first, the published ones are the second.
_EITHER = {"qwen3_vl_moe"}
_REFUSED = {
    "gpt_oss": "vLLM's class wants gate and up interleaved, and has experts one by one "
    "of Quark's only",
    "step3_text": "vLLM's class takes them in no other form",
    "step3p5": "vLLM's class takes them in no other form",
}

_NAME = re.compile(
    r"(?P<layer>.*)\.(?:"
    r"(?P<experts>experts)\.(?:(?P<gate_up>gate_up_proj|fc1)|down_proj|fc2)(?:\.weight)?"
    r"|(?:(?P<granite>input_linear)|output_linear)\.weight)"
)


@dataclass(frozen=True)
class FusedExperts(Plain):
    """A tensor with a projection of all experts of a layer. It can be carried over as
    it is, or be replaced by `parts`."""

    parts: tuple[Weight, ...] = ()
    """One weight for each expert, or gate and up."""
    problem: str = ""
    """Why there are no parts."""
    separable: bool = True
    """Whether vLLM takes them one by one."""

    @classmethod
    def of(cls, entry: Plain) -> "FusedExperts":
        """The entry itself, or one of a format in which none is split."""
        if isinstance(entry, cls):
            return entry
        problem = "it does so in floating-point safetensors only"
        return cls(**vars(entry), problem=problem)

    def split(self, module: str) -> tuple[Weight, ...]:
        """The parts; raises ConversionError saying why there are none."""
        if self.problem:
            save = "Save the model with one tensor per expert, or leave"
            raise ConversionError(
                f"{self.name}: holds all experts in one tensor "
                f"{list(self.spec.shape)}, which the converter does not split: "
                f"{self.problem}. {save if self.separable else 'Leave'} them as they "
                f"are with --modules-to-not-convert {names.suffix(module)}"
            )
        return self.parts


def fused_experts(
    tensor: StoredTensor, tensors: Mapping[str, StoredTensor], config: dict[str, Any]
) -> FusedExperts:
    """What a tensor with all experts of a layer consists of, by the type of model and
    the sizes in its config; `tensors` are those of the checkpoint."""
    entry = FusedExperts(tensor.spec, tensor.read, NAMES[tensor.dtype], tensor.nbytes)
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    model_type = str(text.get("model_type", config.get("model_type")))
    if reason := _REFUSED.get(model_type):
        problem = f"in models of type {model_type} {reason}"
        return replace(entry, problem=problem, separable=False)
    try:
        parts = _parts(tensor, tensors, model_type, text.get("hidden_size"))
    except _Unknown as e:
        return replace(entry, problem=str(e))
    return replace(entry, parts=tuple(parts))


class _Unknown(Exception):
    """Says why a tensor is not split."""


def _parts(
    tensor: StoredTensor,
    tensors: Mapping[str, StoredTensor],
    model_type: str,
    hidden: Any,
) -> list[Weight]:
    family = model_type.removesuffix("_text")
    match = _NAME.fullmatch(tensor.name)
    if match is None or family not in _ROWS | _TRANSPOSED:
        raise _Unknown(
            f"how vLLM reads it in models of type {model_type} is not known to it"
        )
    is_gate_up = bool(match["gate_up"] or match["granite"])
    gate_up = tensor if is_gate_up else tensors.get(_partner(tensor.name))
    down = tensors.get(_partner(tensor.name)) if is_gate_up else tensor
    if gate_up is None or down is None:
        raise _Unknown(f"there is no {_partner(tensor.name)}")
    if not isinstance(hidden, int):
        raise _Unknown(f"hidden_size in config.json is {hidden}")
    if tensor.dtype not in FLOATS:
        raise _Unknown(f"its dtype is {NAMES[tensor.dtype]}")
    stem = tensor.name.removesuffix(".weight")
    for bias in (f"{stem}_bias", f"{stem}.bias"):
        if bias in tensors:
            raise _Unknown(f"it has a bias, {bias}")
    orders = [family in _TRANSPOSED]
    if family in _EITHER:
        orders.append(not orders[0])
    fitting = [t for t in orders if _fits(gate_up, down, hidden, transposed=t)]
    if not fitting:
        raise _Unknown(
            f"with {_partner(tensor.name)} {list(tensors[_partner(tensor.name)].shape)}"
            f" and hidden_size {hidden} that is not what vLLM's class for models of "
            f"type {model_type} loads"
        )
    (transposed,) = fitting
    prefix = f"{match['layer']}.experts"
    parts = ["down_proj"]
    if is_gate_up:
        parts = ["gate_up_proj"] if family in _GATE_UP else ["gate_proj", "up_proj"]
    return [
        _weight(tensor, f"{prefix}.{expert}.{part}", expert, i, len(parts), transposed)
        for expert in range(tensor.shape[0])
        for i, part in enumerate(parts)
    ]


_PARTNERS = {
    "gate_up_proj": "down_proj",
    "fc1": "fc2",
    "input_linear": "output_linear",
}
_PARTNERS |= {b: a for a, b in _PARTNERS.items()}


def _partner(name: str) -> str:
    """The other tensor of the same experts."""
    parts = name.split(".")
    i = -2 if parts[-1] == "weight" else -1
    parts[i] = _PARTNERS[parts[i]]
    return ".".join(parts)


def _fits(
    gate_up: StoredTensor, down: StoredTensor, hidden: int, transposed: bool
) -> bool:
    """Whether both shapes are possible. Of the two orders at most one is: both would
    need H = 2 I and H = I."""
    if len(gate_up.shape) != 3 or len(down.shape) != 3 or 0 in down.shape:
        return False
    experts, rows, columns = gate_up.shape
    if transposed:
        rows, columns = columns, rows
    inner = (rows // 2, hidden) if transposed else (hidden, rows // 2)
    return columns == hidden and rows % 2 == 0 and down.shape == (experts, *inner)


def _weight(
    tensor: StoredTensor,
    module: str,
    expert: int,
    index: int,
    count: int,
    transposed: bool,
) -> Weight:
    """Part `index` of `count` of one expert, along its outputs."""
    _, size_n, size_k = tensor.shape
    size = size_n * size_k * tensor.dtype.itemsize
    whole = replace(tensor, shape=(size_n, size_k), begin=tensor.begin + expert * size)
    read: Callable[[], torch.Tensor]
    if transposed:
        size_n, size_k = size_k // count, size_n
        read = partial(_read_transposed, whole, index * size_n, size_n)
    else:
        size_n //= count
        begin = whole.begin + index * size // count
        read = replace(whole, shape=(size_n, size_k), begin=begin).read
    return Weight(
        module=module,
        size_n=size_n,
        size_k=size_k,
        nbytes=size // count,
        stored=NAMES[tensor.dtype],
        dtype=tensor.dtype,
        read=read,
    )


def _read_transposed(tensor: StoredTensor, first: int, count: int) -> torch.Tensor:
    """Columns of a matrix, as rows."""
    return tensor.read().narrow(1, first, count).t().contiguous()
