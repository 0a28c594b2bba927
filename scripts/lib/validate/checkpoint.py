# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A checkpoint on disk: which module is stored how, and its tensors, piece by piece."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from lib.convert import names
from lib.convert.errors import ConversionError
from lib.convert.experts import FusedExperts
from lib.convert.hf_safetensors import entries_of, find_quantization
from lib.convert.model import Weight
from lib.convert.safetensors_io import INDEX_NAME, StoredTensor, read_checkpoint

from . import codec
from .errors import ValidateError

PACKED = "packed_ternary_weight"
SCALE = "weight_scale"
ZERO_POINT = "weight_zero_point"
WEIGHT = "weight"


@dataclass
class Module:
    """A module of the checkpoint that has a weight.

    Attributes:
        name: full name.
        scheme: how config.json says that it is stored.
        tensors: names without the module's -> the tensor.
        size_n: output rows (0 if the weight has fewer than two dimensions).
        size_k: inputs.
        guessed_k: size_k is the most that the packed bytes can hold, because
            nothing says what it is.

    """

    name: str
    scheme: Any
    tensors: dict[str, StoredTensor]
    size_n: int = 0
    size_k: int = 0
    guessed_k: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def is_ternary(self) -> bool:
        """Whether it is stored packed, whatever config.json says."""
        return PACKED in self.tensors

    @property
    def stored_as(self) -> str:
        """What the module is, in a few words."""
        if self.is_ternary:
            return self.scheme.describe()
        weight = self.tensors.get(WEIGHT)
        if weight is None:
            return "incomplete"
        dtype = str(weight.dtype).removeprefix("torch.")
        if self.scheme.kind == "int8" and weight.dtype == torch.int8:
            return self.scheme.describe()
        return dtype

    @property
    def shape(self) -> list[int]:
        """[N, K] as unpacked."""
        weight = self.tensors.get(WEIGHT)
        if not self.is_ternary and weight is not None:
            return list(weight.shape)
        return [self.size_n, self.size_k]


class Tensors:
    """Reads tensors of a directory of safetensors files, without holding any.

    Args:
        path: the directory.

    Raises:
        ValidateError: it is no checkpoint, or a file is missing or cut short.

    """

    def __init__(self, path: Path):
        self.path = path
        if not path.is_dir():
            raise ValidateError(
                f"{path}: no such directory. Give a model directory; download a model "
                "of a hub first."
            )
        try:
            self.stored = read_checkpoint(path)
        except ConversionError as e:
            raise ValidateError(str(e)) from None
        except (OSError, KeyError, ValueError, TypeError) as e:
            raise ValidateError(
                f"{path / INDEX_NAME}: cannot be read ({e}). Download it again."
            ) from None
        if not self.stored:
            raise ValidateError(
                f"{path}: no *.safetensors file with tensors. Give the directory of a "
                "converted checkpoint."
            )

    def read(
        self, tensor: StoredTensor, begin: int = 0, end: int | None = None
    ) -> torch.Tensor:
        """Rows [begin, end) of a tensor, or all of one that has no rows.

        Raises:
            ValidateError: the file cannot be read.

        """
        try:
            return tensor.read(begin, end)
        except ConversionError as e:
            raise ValidateError(str(e)) from None
        except OSError as e:
            raise ValidateError(
                f"{tensor.path}: tensor {tensor.name} cannot be read ({e}). Download "
                "the file again."
            ) from None


@dataclass(frozen=True)
class _Part(StoredTensor):
    """A weight that the converter makes of a tensor with another shape."""

    make: Callable[[], Any]

    def read(self, begin: int = 0, end: int | None = None) -> torch.Tensor:
        return self.make()[begin:end].clone()


class Reference(Tensors):
    """A full-precision checkpoint, by the names that its conversion has.

    Args:
        path: the directory.

    Raises:
        ValidateError: it is no checkpoint, or a file is missing or cut short.

    """

    def __init__(self, path: Path):
        super().__init__(path)
        if not (path / "config.json").is_file():
            return
        for entry in list(entries_of(self.stored, read_config(path))):
            weights: Iterable[Weight] = ()
            if isinstance(entry, FusedExperts):
                weights = entry.parts
            elif isinstance(entry, Weight) and entry.transposed:
                weights = [entry]
            for w in weights:
                shape = (w.size_n, w.size_k)
                self.stored[w.name] = _Part(w.name, w.dtype, shape, path, 0, w.read)


class Checkpoint(Tensors):
    """A checkpoint in the ternary format.

    Args:
        path: the directory.
        reference: the full-precision checkpoint, which knows every K.

    Raises:
        ValidateError: it is no checkpoint of this format.

    """

    def __init__(self, path: Path, reference: Tensors | None = None):
        self.config = read_config(path)
        try:
            where, quantization = find_quantization(path, self.config)
        except ConversionError as e:
            raise ValidateError(str(e)) from None
        if not isinstance(quantization, Mapping):
            raise ValidateError(
                f"{path / 'config.json'}: has no quantization_config. This is no "
                "quantized checkpoint; convert it with scripts/convert_checkpoint.py."
            )
        method = quantization.get("quant_method")
        if str(method).lower() != "ternary":  # as vLLM compares it
            raise ValidateError(
                f"{path / 'config.json'}: quant_method is {method!r} in {where}, this "
                'command validates "ternary". Convert the checkpoint with '
                "scripts/convert_checkpoint.py first."
            )
        try:
            self.schemes = codec.schemes.SchemeTable.from_config(quantization)
        except codec.schemes.TernaryConfigError as e:
            raise ValidateError(f"{path / 'config.json'}: {where}: {e}") from None
        super().__init__(path)
        self.reference = reference

    @cached_property
    def modules(self) -> list[Module]:
        """Every module with a weight, in the order of the names' numbers."""
        grouped: dict[str, dict[str, StoredTensor]] = {}
        for full, tensor in self.stored.items():
            owner, _, last = full.rpartition(".")
            if last in (PACKED, SCALE, ZERO_POINT, WEIGHT, "bias"):
                grouped.setdefault(owner, {})[last] = tensor
        modules = []
        for name in sorted(grouped, key=natural_order):
            tensors = grouped[name]
            if set(tensors) == {"bias"}:
                continue
            module = Module(name, self._scheme(name), tensors)
            if module.is_ternary:
                self._measure(module)
            modules.append(module)
        return modules

    def ternary(self) -> list[Module]:
        """The modules that are stored packed."""
        return [m for m in self.modules if m.is_ternary]

    def _scheme(self, name: str) -> Any:
        if names.is_embedding(name):
            return self.schemes.explicit(name) or codec.schemes.UNQUANTIZED
        return self.schemes.scheme(name)

    def _measure(self, module: Module) -> None:
        packed = module.tensors[PACKED].shape
        if len(packed) != 2:
            return
        module.size_n, width = packed
        low, high = 4 * width - 3, 4 * width
        if self.reference is not None:
            weight = self.reference.stored.get(f"{module.name}.{WEIGHT}")
            if weight is not None and len(weight.shape) == 2:
                module.size_k = weight.shape[1]
                return
        fitting = {
            k for k in self._sizes if low <= k <= high and self._blocks_fit(module, k)
        }
        likely = self._likely_k(module.name)
        if likely in fitting or not fitting:
            module.guessed_k = not fitting
            module.size_k = likely if fitting and likely else high
        else:
            module.size_k = high if high in fitting else max(fitting)
            module.guessed_k = len(fitting) > 1

    def _blocks_fit(self, module: Module, size_k: int) -> bool:
        scale = module.tensors.get(SCALE)
        if scale is None or len(scale.shape) != 2:
            return True
        blocks = codec.format.num_blocks(size_k, module.scheme.block_size)
        return scale.shape[1] == blocks

    @cached_property
    def _sizes(self) -> set[int]:
        """Every size in config.json that may be a K."""
        sizes: set[int] = set()

        def collect(values: Mapping[str, Any]) -> None:
            for key, value in values.items():
                if isinstance(value, Mapping) and key != "quantization_config":
                    collect(value)
                elif isinstance(value, int) and not isinstance(value, bool):
                    sizes.add(value)
            heads = values.get("num_attention_heads")
            hidden, head = values.get("hidden_size"), values.get("head_dim")
            if heads and (head or hidden):
                sizes.add(heads * (head or hidden // heads))

        collect(self.config)
        return sizes

    def _likely_k(self, name: str) -> int | None:
        """K by the module's name, for the common ones."""
        config = self.config.get("text_config") or self.config
        last = name.rpartition(".")[2]
        hidden = config.get("hidden_size")
        if last in ("down_proj", "w2", "fc2"):
            if ".experts." in name:
                return config.get("moe_intermediate_size") or config.get(
                    "intermediate_size"
                )
            return config.get("intermediate_size")
        if last in ("o_proj", "out_proj", "wo"):
            heads, head = config.get("num_attention_heads"), config.get("head_dim")
            return heads * head if heads and head else hidden
        return hidden


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a model directory.

    Raises:
        ValidateError: it is not there or not JSON.

    """
    file = path / "config.json"
    if not path.is_dir():
        raise ValidateError(
            f"{path}: no such directory. Give a model directory; download a model of "
            "a hub first."
        )
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError:
        raise ValidateError(f"{file}: not there. Give a model directory.") from None
    except (OSError, ValueError) as e:
        raise ValidateError(f"{file}: cannot be read ({e}).") from None
    if not isinstance(config, dict):
        raise ValidateError(f"{file}: is not a JSON object.")
    return config


def natural_order(name: str) -> list[Any]:
    """Sort key under which layers.10 comes after layers.9."""
    return [(int(p), "") if p.isdigit() else (-1, p) for p in re.split(r"\.", name)]


def table(modules: list[Module]) -> list[str]:
    """Which modules are what: a line for those that differ in their number only."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for module in modules:
        pattern = re.sub(r"\.\d+(?=\.|$)", ".*", module.name)
        shape = " x ".join(map(str, module.shape))
        groups.setdefault((pattern, module.stored_as, shape), []).append(module.name)
    rows = [("module", "count", "stored as", "shape")]
    rows += [
        (pattern if len(same) > 1 else same[0], str(len(same)), kind, shape)
        for (pattern, kind, shape), same in groups.items()
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return ["  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in rows]


def row_ranges(rows: int, row_bytes: int, limit: int = 64 << 20) -> Iterator[range]:
    """Ranges of rows of about `limit` bytes."""
    step = max(1, limit // max(1, row_bytes))
    for begin in range(0, rows, step):
        yield range(begin, min(begin + step, rows))
