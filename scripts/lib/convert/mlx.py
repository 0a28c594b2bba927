# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Source: MLX affine quantization, of which 2 bits may be ternary.

``weight`` uint32 ``[N, K * bits / 32]``, lowest bits first; ``scales`` and ``biases``
``[N, K / group]``; w = scales * q + biases.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .codec import TernaryFormatError
from .errors import ConversionError
from .hf_safetensors import full_weight, is_full_weight, plain, read_tensors
from .model import Source, Ternary, Weight, files_to_carry
from .safetensors_io import StoredTensor

_POWER_OF_TWO_BITS = (2, 4, 8)


@dataclass
class MlxSource(Source):
    """A directory that mlx-lm wrote."""

    @property
    def kind(self) -> str:
        return "MLX quantized"

    @classmethod
    def open(cls, directory: Path, config: dict[str, Any]) -> "MlxSource":
        config = dict(config)
        config.pop("quantization_config", None)
        settings = config.pop("quantization")
        mode = settings.get("mode", "affine")
        if mode != "affine":
            raise ConversionError(
                f"{directory}/config.json: MLX quantization mode {mode!r} is not "
                "ternary. Only the affine mode with 2 bits can be."
            )
        source = cls(directory, config)
        tensors = read_tensors(directory)
        for tensor in tensors.values():
            module, _, last = tensor.name.rpartition(".")
            scales = tensors.get(f"{module}.scales")
            biases = tensors.get(f"{module}.biases")
            if scales is not None and last in ("scales", "biases"):
                continue
            if scales is not None and last == "weight":
                own = settings.get(module)
                own = dict(settings, **(own if isinstance(own, dict) else {}))
                source.entries.append(
                    _weight(tensor, scales, biases, own["bits"], own["group_size"])
                )
            elif is_full_weight(tensor):
                source.entries.append(full_weight(tensor))
            else:
                source.entries.append(plain(tensor))
        return source

    def files(self) -> list[Path]:
        return files_to_carry(self.path)


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """uint32 ``[N, W]`` to uint8 ``[N, W * 32 / bits]``, for bits 2, 4 and 8."""
    octets = words.contiguous().view(torch.uint8).view(words.shape[0], -1)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    return ((octets.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(1)


def to_ternary(
    q: torch.Tensor, scales: torch.Tensor, biases: torch.Tensor, group: int, name: str
) -> Ternary:
    """Codes uint8 ``[N, K]``, scales and biases ``[N, K / group]`` to ternary.

    A group is ternary if at most three neighbouring codes occur in it: the middle one
    becomes t = 0, at the value o = scale * middle + bias. For o = 0 (MLX's
    ``biases = -scales``) that is all; else the zero point is -o / scale, refused unless
    exact. Raises TernaryFormatError naming the group otherwise.
    """
    blocks = q.view(q.shape[0], -1, group)
    low, high = blocks.amin(-1).to(torch.int8), blocks.amax(-1).to(torch.int8)
    if bool((wide := high - low > 2).any()):
        row, index = wide.nonzero()[0].tolist()
        raise TernaryFormatError(
            name,
            f"group {index} of row {row} (columns {index * group} to "
            f"{(index + 1) * group - 1}) has all four levels",
            "It is a general 2-bit weight, not a ternary one: start from the model's "
            "full-precision checkpoint and pass --quantize",
        )
    s, b = scales.to(torch.float64), biases.to(torch.float64)
    middle = torch.where(high == 3, 2, 1).to(torch.int8)
    # One level throughout, of any value: the value is the scale, or 0.
    constant = (low == high) | (s == 0)
    offset = s * middle + b
    t = blocks.to(torch.int8) - middle.unsqueeze(-1)
    value = s * low + b
    t = torch.where(
        constant.unsqueeze(-1), value.sign().to(torch.int8).unsqueeze(-1), t
    )
    s = torch.where(constant, value.abs(), s)
    offset = torch.where(constant, 0.0, offset)
    t = torch.where((s < 0).unsqueeze(-1), -t, t)
    offset = torch.where(s < 0, -offset, offset)
    s = s.abs()
    zero_point = torch.where(s == 0, 0.0, -offset / s).to(torch.float32)
    scale = s.to(scales.dtype)
    inexact = (scale.to(torch.float64) != s) | (
        zero_point.to(torch.float64) * s != -offset
    )
    if bool(inexact.any()):
        row, index = inexact.nonzero()[0].tolist()
        raise TernaryFormatError(
            name,
            f"group {index} of row {row} has scale {float(scales[row, index])!r} and "
            f"bias {float(biases[row, index])!r}, whose zero point is not exact",
            "Start from the model's full-precision checkpoint and pass --quantize",
        )
    zero = zero_point if bool(zero_point.any()) else None
    return Ternary(t.flatten(1).contiguous(), scale, zero, group)


def _weight(
    tensor: StoredTensor,
    scales: StoredTensor,
    biases: StoredTensor | None,
    bits: int,
    group: int,
) -> Weight:
    size_n = tensor.shape[0]
    size_k = tensor.shape[1] * 32 // bits
    want = (size_n, size_k // group)
    if biases is None or scales.shape != want or biases.shape != want:
        raise ConversionError(
            f"{tensor.path}: {tensor.name} {list(tensor.shape)} with {bits} bits in "
            f"groups of {group} needs scales and biases of shape {list(want)}; found "
            f"{list(scales.shape)} and {list(biases.shape) if biases else 'none'}."
        )
    if bits not in _POWER_OF_TWO_BITS:
        raise ConversionError(
            f"{tensor.path}: {tensor.name} has {bits} bits, which is not supported. "
            "Start from the model's full-precision checkpoint."
        )

    def read_ternary() -> Ternary:
        q = unpack(tensor.read(), bits)
        return to_ternary(q, scales.read(), biases.read(), group, tensor.name)

    def read_full() -> torch.Tensor:
        q = unpack(tensor.read(), bits).view(*want, group).to(torch.float32)
        w = q * scales.read().to(torch.float32).unsqueeze(-1)
        return (w + biases.read().to(torch.float32).unsqueeze(-1)).flatten(1)

    ternary = bits == 2
    return Weight(
        module=tensor.name.removesuffix(".weight"),
        size_n=size_n,
        size_k=size_k,
        nbytes=tensor.nbytes + scales.nbytes + biases.nbytes,
        stored=f"MLX {bits}-bit",
        dtype=scales.dtype if ternary else torch.float32,
        read=read_ternary if ternary else read_full,
        native=ternary,
        block_size=group,
    )
