# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Reads GGUF files: metadata, and tensors one at a time.

The ``gguf`` package refuses a file with a type it does not know, and knows none of
the 2-bit types that ternary models are published in.
"""

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch

from . import gguf_types
from .errors import ConversionError
from .gguf_types import TensorType

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufTensor:
    """A tensor in a GGUF file; ``shape`` is in the order of torch, [N, K]."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    path: Path
    begin: int

    @property
    def nbytes(self) -> int:
        return self.type.nbytes(prod(self.shape))

    def read_bytes(self) -> torch.Tensor:
        """The stored bytes as uint8 ``[rows, bytes per row]``."""
        raw = torch.empty(self.nbytes, dtype=torch.uint8)
        with open(self.path, "rb") as file:
            file.seek(self.begin)
            if file.readinto(raw.numpy()) != self.nbytes:
                raise ConversionError(
                    f"{self.path}: tensor {self.name} ends beyond the file. The file "
                    "is truncated: download it again."
                )
        return raw.view(-1, self.type.nbytes(self.shape[-1]))


@dataclass(frozen=True)
class GgufFile:
    """Metadata and tensors of a GGUF file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    header: bytes
    """Version and metadata as stored, for a copy without tensors."""
    kv_count: int
    notes: tuple[str, ...] = ()


def read_gguf(path: Path) -> GgufFile:
    """Reads the header; raises ConversionError for damaged files, unknown types and
    types that cannot be converted."""
    with open(path, "rb") as file:
        if file.read(4) != b"GGUF":
            raise ConversionError(
                f"{path} is no GGUF file. Give one, or for safetensors the model's "
                "directory."
            )
        try:
            return _read_header(path, file)
        except (struct.error, UnicodeDecodeError, KeyError, OverflowError) as e:
            raise ConversionError(
                f"{path}: the header is damaged ({e}). Download the file again."
            ) from None


def _read_header(path: Path, file: BinaryIO) -> GgufFile:
    (version,) = _unpack(file, "I")
    if version not in (2, 3):
        raise ConversionError(
            f"{path}: GGUF version {version} is not supported (2 and 3 are; a very "
            "large number means a big-endian file)."
        )
    tensor_count, kv_count = _unpack(file, "QQ")
    start = file.tell()
    metadata: dict[str, Any] = {}
    for _ in range(kv_count):
        key = _string(file)
        (kind,) = _unpack(file, "I")
        metadata[key] = _value(file, kind)
    end = file.tell()
    infos = []
    for _ in range(tensor_count):
        name = _string(file)
        (rank,) = _unpack(file, "I")
        dims = _unpack(file, f"{rank}Q")
        type_id, offset = _unpack(file, "IQ")
        infos.append((name, tuple(reversed(dims)), type_id, offset))
    alignment = metadata.get("general.alignment", 32)
    data = -(-file.tell() // alignment) * alignment
    file.seek(start)
    header = file.read(end - start)
    size = path.stat().st_size
    if metadata.get("split.count", 0) > 1:
        raise ConversionError(
            f"{path} is one of {metadata['split.count']} parts. Join them first with "
            "llama.cpp's `llama-gguf-split --merge`."
        )
    layout, notes = _layout_of_id_42(path, infos, alignment, size - data)
    tensors = {}
    for name, shape, type_id, offset in infos:
        kind = layout if type_id == gguf_types.ID_42 else _type(path, name, type_id)
        assert kind is not None
        if prod(shape) and shape[-1] % kind.block:
            raise ConversionError(
                f"{path}: tensor {name} has rows of {shape[-1]}, which blocks of "
                f"{kind.block} ({kind.name}) do not divide. The file is damaged."
            )
        tensor = GgufTensor(name, shape, kind, path, data + offset)
        if tensor.begin + tensor.nbytes > size:
            raise ConversionError(
                f"{path}: tensor {name} ends at byte {tensor.begin + tensor.nbytes}, "
                f"the file has {size}. The file is truncated: download it again."
            )
        tensors[name] = tensor
    return GgufFile(path, metadata, tensors, header, kv_count, notes)


def _type(path: Path, name: str, type_id: int) -> TensorType:
    kind = gguf_types.TYPES.get(type_id)
    if kind is None:
        raise ConversionError(
            f"{path}: tensor {name} has type {type_id}, which is not known. Convert "
            "the model from its safetensors, or requantize the file to TQ2_0 with "
            "llama.cpp."
        )
    if kind.refused:
        raise ConversionError(f"{path}: tensor {name} is {kind.name}: {kind.refused}")
    return kind


def _layout_of_id_42(
    path: Path, infos: list[tuple], alignment: int, data_size: int
) -> tuple[TensorType | None, tuple[str, ...]]:
    """Which of the two layouts under id 42 the file's sizes agree with: each tensor
    must reach to the next one's offset, up to alignment. None if no tensor has it."""
    order = sorted(infos, key=lambda info: info[3])
    ends = [info[3] for info in order[1:]] + [data_size]
    candidates = []
    found = False
    for kind in (gguf_types.Q2_0, gguf_types.Q2_0_LEGACY):
        fits = True
        for i, (_, shape, type_id, offset) in enumerate(order):
            if type_id != gguf_types.ID_42:
                continue
            found = True
            if shape[-1] % kind.block:
                fits = False
                break
            nbytes = kind.nbytes(prod(shape))
            padded = -(-nbytes // alignment) * alignment
            room = ends[i] - offset
            last = i == len(order) - 1
            fits &= nbytes <= room <= padded if last else room == padded
        if fits:
            candidates.append(kind)
    if not found:
        return None, ()
    if len(candidates) == 1:
        kind = candidates[0]
        return kind, (
            f"type id 42 is {kind.name}: blocks of {kind.block} fit the file",
        )
    problem = "neither fits" if not candidates else "both fit"
    raise ConversionError(
        f"{path}: type id 42 stands for blocks of 64 (Q2_0) and, in older files, of "
        f"128. The sizes in this file do not decide: {problem}. Take a file that was "
        "made with a current llama.cpp, or convert the model from its safetensors."
    )


def _unpack(file: BinaryIO, layout: str) -> tuple:
    layout = "<" + layout
    return struct.unpack(layout, file.read(struct.calcsize(layout)))


def _string(file: BinaryIO) -> str:
    (length,) = _unpack(file, "Q")
    data = file.read(length)
    if len(data) != length:
        raise struct.error("a string ends beyond the file")
    return data.decode()


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _string(file)
    if kind == _ARRAY:
        item, count = _unpack(file, "IQ")
        if item in (_STRING, _ARRAY):
            return [_value(file, item) for _ in range(count)]
        return list(_unpack(file, f"{count}{_SCALARS[item]}"))
    value = _unpack(file, _SCALARS[kind])[0]
    return _shortest(value) if _SCALARS[kind] == "f" else value


def _shortest(value: float) -> float:
    """The number with the fewest digits that is the same in float32: 1e-6, where
    float32 has 9.999999974752427e-07."""
    for digits in range(1, 9):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == struct.pack("<f", value):
            return short
    return value
