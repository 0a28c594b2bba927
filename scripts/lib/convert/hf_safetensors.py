# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Source: a Hugging Face directory with floating-point safetensors."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import names
from .errors import ConversionError
from .experts import fused_experts
from .model import Plain, Source, Weight, files_to_carry
from .safetensors_io import FLOATS, NAMES, StoredTensor, read_checkpoint


def read_config(path: Path) -> dict[str, Any]:
    """config.json (or that of a directory) as a dictionary; raises ConversionError
    if there is none, or none of a model."""
    path = path / "config.json" if path.is_dir() else path
    config = _read_object(path)
    # vLLM knows the class by architectures, or else by model_type; by the latter alone
    # what the settings and tensors mean.
    missing = [k for k in ("model_type", "architectures") if not config.get(k)]
    if "model_type" in missing:
        raise ConversionError(
            f"{path}: has no {' and no '.join(missing)}: nothing says which model this "
            "is. Download it again, or take the original model's."
        )
    return config


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConversionError(
            f"{path} is not there. SOURCE must be a model directory as downloaded "
            "from the Hugging Face hub, or a GGUF file."
        )
    try:
        config = json.loads(path.read_text())
    except ValueError as e:
        raise ConversionError(
            f"{path}: no valid JSON ({e}). Download it again, or mend it."
        ) from None
    if not isinstance(config, dict):
        raise ConversionError(f"{path}: is no JSON object. Download it again.")
    return config


def find_quantization(directory: Path, config: dict[str, Any]) -> tuple[str, Any]:
    """Where the settings of a quantized checkpoint stand, and what they are: None if
    there are none. They are looked for where vLLM 0.32.0 does."""
    key = "quantization_config"
    if config.get(key) is not None:
        return key, config[key]
    file = directory / "hf_quant_config.json"
    if file.is_file():
        return file.name, _read_object(file)
    for name in ("text_config", "llm_config"):
        if name in config:
            nested = config[name]
            if isinstance(nested, dict) and nested.get(key) is not None:
                return f"{name}.{key}", nested[key]
            break
    return "compression_config", config.get("compression_config")


def read_tensors(directory: Path) -> dict[str, StoredTensor]:
    """The checkpoint's tensors; raises ConversionError if there are none."""
    tensors = read_checkpoint(directory)
    if not tensors:
        others = [p.name for s in ("*.bin", "*.pt", "*.pth") for p in directory.glob(s)]
        hint = (
            f" It has {others[0]}: save it as safetensors first, with transformers' "
            "save_pretrained."
            if others
            else ""
        )
        raise ConversionError(f"{directory}: no *.safetensors file there.{hint}")
    return tensors


def plain(tensor: StoredTensor) -> Plain:
    return Plain(tensor.spec, tensor.read, NAMES[tensor.dtype], tensor.nbytes)


def full_weight(tensor: StoredTensor, must_convert: bool = False) -> Weight:
    return Weight(
        module=tensor.name.removesuffix(".weight"),
        size_n=tensor.shape[0],
        size_k=tensor.shape[1],
        nbytes=tensor.nbytes,
        stored=NAMES[tensor.dtype],
        dtype=tensor.dtype,
        read=tensor.read,
        must_convert=must_convert,
    )


def transposed_weight(tensor: StoredTensor) -> Weight:
    """The weight of a ``Conv1D``, [inputs, outputs] in the file."""
    size_k, size_n = tensor.shape
    return replace(
        full_weight(tensor),
        size_n=size_n,
        size_k=size_k,
        read=lambda: tensor.read().t().contiguous(),
        transposed=True,
    )


def is_full_weight(tensor: StoredTensor) -> bool:
    return (
        tensor.name.endswith(".weight")
        and len(tensor.shape) == 2
        and tensor.dtype in FLOATS
    )


def entries_of(
    tensors: Mapping[str, StoredTensor], config: dict[str, Any]
) -> Iterator[Plain | Weight]:
    """What the tensors of a checkpoint are, by their names and the type of model."""
    for tensor in tensors.values():
        if is_full_weight(tensor):
            module = tensor.name.removesuffix(".weight")
            turn = names.is_transposed(module, config.get("model_type"))
            yield transposed_weight(tensor) if turn else full_weight(tensor)
        elif len(tensor.shape) >= 3 and names.experts_in_one(tensor.name):
            yield fused_experts(tensor, tensors, config)
        else:
            yield plain(tensor)


@dataclass
class SafetensorsSource(Source):
    """Floating-point weights, ternary already or not."""

    @property
    def kind(self) -> str:
        return "floating-point safetensors"

    @classmethod
    def open(cls, directory: Path, config: dict[str, Any]) -> "SafetensorsSource":
        entries = entries_of(read_tensors(directory), config)
        return cls(directory, config, list(entries))

    def files(self) -> list[Path]:
        return files_to_carry(self.path)
