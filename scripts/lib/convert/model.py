# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What a converter works on: a source checkpoint as a list of entries."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .safetensors_io import TensorSpec


@dataclass(frozen=True)
class Ternary:
    """A weight in the codec's terms: int8 ``[N, K]``, scale, zero point."""

    t: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    block_size: int | str


@dataclass(frozen=True)
class Plain:
    """A tensor carried over as it is."""

    spec: TensorSpec
    read: Callable[[], torch.Tensor]
    stored: str = ""
    """Name of the source's type where the tensor is not stored as ``spec.dtype``."""
    nbytes_source: int = 0

    @property
    def name(self) -> str:
        return self.spec.name


@dataclass(frozen=True)
class Weight:
    """The 2-D weight of a module, ``[size_n, size_k]``.

    ``read`` gives the floating-point weight, or a Ternary if the source stores
    ternary integers (``native``); ``dtype`` is that of the floating-point weight,
    also of one that is decoded because the module is not to be ternary.
    """

    module: str
    size_n: int
    size_k: int
    nbytes: int
    stored: str
    dtype: torch.dtype
    read: Callable[[], "torch.Tensor | Ternary"]
    native: bool = False
    block_size: int | str | None = None
    """Block size of a native weight."""
    must_convert: bool = False
    """A full-precision master that the model itself quantizes when it runs."""
    transposed: bool = False
    """Stored as ``[size_k, size_n]``, and read by vLLM so unless it is ternary."""

    @property
    def name(self) -> str:
        return self.module + ".weight"


@dataclass
class Source(ABC):
    """A checkpoint to convert. ``entries`` are in the order they are stored."""

    path: Path
    config: dict[str, Any] = field(default_factory=dict)
    entries: list[Plain | Weight] = field(default_factory=list)
    activation_bits: int | None = None
    input_norm: dict[str, Any] | None = None
    scale_dtype: torch.dtype | None = None
    """Dtype of native scales; None where the user chooses."""
    not_convert: list[str] = field(default_factory=list)
    """Names that the source's own config leaves unquantized."""
    notes: list[str] = field(default_factory=list)

    @property
    @abstractmethod
    def kind(self) -> str:
        """A few words for the report."""

    def files(self) -> list[Path]:
        """Files below ``path`` to carry over, relative to it."""
        return []

    def write_extra(self, directory: Path) -> None:
        """Writes further files (a tokenizer built from metadata) to the result."""
        del directory


_WEIGHT_SUFFIXES = {
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".ot",
    ".onnx",
    ".gguf",
    ".npz",
    ".lock",
}
_SKIPPED_DIRECTORIES = {
    ".git",
    ".cache",
    "__pycache__",
    "onnx",
    "openvino",
    "coreml",
    "original",
}
_MODULE_DIRECTORY = re.compile(r"\d+_\w+")
"""Further modules of sentence-transformers, such as 2_Dense, with weights of theirs."""


def files_to_carry(directory: Path) -> list[Path]:
    """Files of a Hugging Face directory that are neither the model's weights nor its
    config.json."""
    found = []
    for path in sorted(directory.rglob("*")):
        relative = path.relative_to(directory)
        if _SKIPPED_DIRECTORIES & set(relative.parts[:-1]) or not path.is_file():
            continue
        own = _MODULE_DIRECTORY.fullmatch(relative.parts[0]) and len(relative.parts) > 1
        is_weight = path.suffix in _WEIGHT_SUFFIXES or path.name.endswith(".index.json")
        if is_weight and not own:
            continue
        if str(relative) == "config.json":
            continue
        found.append(relative)
    return found
