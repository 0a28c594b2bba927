# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Safetensors files, one tensor in memory at a time.

The safetensors library maps whole files, and its writer wants every tensor at
once; a converter of large checkpoints wants neither. The file format is an
8-byte little-endian header length, a JSON header, then the tensors' bytes.
"""

import json
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch

from .errors import ConversionError

INDEX_NAME = "model.safetensors.index.json"

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Of weights that can be converted.
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of a tensor on disk."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class StoredTensor(TensorSpec):
    """A tensor in a safetensors file: ``begin`` is its offset in bytes."""

    path: Path
    begin: int

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.name, self.dtype, self.shape)

    def read(self, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """The tensor, or its rows [begin, end), in memory of its own (no map of the
        file, whose pages would count as the process's)."""
        shape = self.shape
        if shape:
            rows = range(*slice(begin, end).indices(shape[0]))
            shape, begin = (len(rows), *shape[1:]), rows.start
        spec = TensorSpec(self.name, self.dtype, shape)
        if not spec.nbytes:
            return torch.empty(shape, dtype=self.dtype)
        raw = torch.empty(spec.nbytes, dtype=torch.uint8)
        with open(self.path, "rb") as file:
            file.seek(self.begin + begin * prod(shape[1:]) * self.dtype.itemsize)
            if file.readinto(raw.numpy()) != spec.nbytes:
                raise ConversionError(
                    f"{self.path}: tensor {self.name} ends beyond the file. "
                    "The file is truncated: download it again."
                )
        return raw.view(self.dtype).view(shape)


def read_header(path: Path) -> list[StoredTensor]:
    """Tensors of a safetensors file in the order of their bytes; raises
    ConversionError if the file is damaged."""
    size = path.stat().st_size
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > size - 8:
                raise ConversionError(
                    f"{path}: the header says {length} bytes, the file has {size}. "
                    "The file is truncated or no safetensors file: download it again."
                )
            header = json.loads(file.read(length))
        entries = [
            (name, entry["dtype"], tuple(entry["shape"]), begin, end)
            for name, entry in header.items()
            if name != "__metadata__"
            for begin, end in [entry["data_offsets"]]
        ]
    except (struct.error, ValueError, AttributeError, KeyError, TypeError) as e:
        raise ConversionError(
            f"{path}: no safetensors header ({e!r}). The file is damaged: download it "
            "again."
        ) from None
    tensors = []
    for name, dtype, shape, begin, end in entries:
        if dtype not in DTYPES:
            raise ConversionError(
                f"{path}: tensor {name} has dtype {dtype}, which is not "
                f"known. Known dtypes are {', '.join(DTYPES)}."
            )
        tensor = StoredTensor(
            name,
            DTYPES[dtype],
            shape,
            path,
            8 + length + begin,
        )
        if end - begin != tensor.nbytes:
            raise ConversionError(
                f"{path}: tensor {name} has {end - begin} bytes, its shape "
                f"{list(tensor.shape)} needs {tensor.nbytes}. The file is damaged."
            )
        if 8 + length + end > size:
            raise ConversionError(
                f"{path}: tensor {name} ends at byte {8 + length + end}, the file has "
                f"{size}. The file is truncated: download it again."
            )
        tensors.append(tensor)
    return sorted(tensors, key=lambda t: t.begin)


def read_checkpoint(directory: Path) -> dict[str, StoredTensor]:
    """All tensors of a checkpoint directory by name: those in the shards that the index
    lists, or in model.safetensors, or else in every ``*.safetensors`` file there.

    As transformers and vLLM do, the index is asked for the shards only: what they hold
    is read, by the index in another of them or not named at all. What it names and none
    holds is missing.
    """
    index = directory / INDEX_NAME
    listed: dict[str, str] = {}
    if index.is_file():
        listed = _read_index(index)
        names = sorted(set(listed.values()))
        missing = [n for n in names if not (directory / n).is_file()]
        if missing:
            raise ConversionError(
                f"{directory / missing[0]}: listed in {INDEX_NAME} but not there "
                f"({len(missing)} of {len(names)} shards are missing). "
                "Download the checkpoint again."
            )
        paths = [directory / n for n in names]
    elif (directory / "model.safetensors").is_file():
        # Some publishers put a second copy, "consolidated", beside it.
        paths = [directory / "model.safetensors"]
    else:
        paths = sorted(directory.glob("*.safetensors"))
    tensors: dict[str, StoredTensor] = {}
    for path in paths:
        for tensor in read_header(path):
            if tensor.name in tensors:
                raise ConversionError(
                    f"{path}: tensor {tensor.name} is also in "
                    f"{tensors[tensor.name].path.name}. Remove the file that does not "
                    "belong to the checkpoint."
                )
            tensors[tensor.name] = tensor
    lacking = [name for name in listed if name not in tensors]
    if lacking:
        raise ConversionError(
            f"{index}: names tensor {lacking[0]} in {listed[lacking[0]]}, which lacks "
            f"it ({len(lacking)} of {len(listed)} tensors are missing). Download "
            "both again; if the model does without, take the name out of the index."
        )
    return tensors


def _read_index(index: Path) -> dict[str, str]:
    """Names of tensors -> the files that they are in, by the index."""
    try:
        listed = json.loads(index.read_text())["weight_map"]
        if not all(isinstance(name, str) for name in listed.values()):
            raise TypeError("weight_map names no files")
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise ConversionError(
            f"{index}: no index of shards ({e!r}). The file is damaged: download it "
            "again."
        ) from None
    return listed


class ShardedWriter:
    """Writes tensors, declared beforehand, into one file or numbered shards with
    an index. Tensors must be written in the order declared."""

    def __init__(
        self, directory: Path, specs: Iterable[TensorSpec], max_shard_size: int
    ) -> None:
        self.directory = directory
        self.shards: list[list[TensorSpec]] = [[]]
        size = 0
        for spec in specs:
            if self.shards[-1] and size + spec.nbytes > max_shard_size:
                self.shards.append([])
                size = 0
            self.shards[-1].append(spec)
            size += spec.nbytes
        self._file: BinaryIO | None = None
        self._queue = [
            (number, spec) for number, shard in enumerate(self.shards) for spec in shard
        ]
        self._next = 0
        self._open_shard = -1

    def file_name(self, shard: int) -> str:
        if len(self.shards) == 1:
            return "model.safetensors"
        return f"model-{shard + 1:05d}-of-{len(self.shards):05d}.safetensors"

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Appends the next declared tensor."""
        number, spec = self._queue[self._next]
        found = TensorSpec(name, tensor.dtype, tuple(tensor.shape))
        assert found == spec, f"{found} was declared as {spec}"
        self._next += 1
        if number != self._open_shard:
            self._start(number)
        assert self._file is not None
        raw = tensor.contiguous().view(-1)
        if raw.numel():
            self._file.write(raw.view(torch.uint8).numpy())

    def _start(self, number: int) -> None:
        self._finish()
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for spec in self.shards[number]:
            header[spec.name] = {
                "dtype": NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [offset, offset + spec.nbytes],
            }
            offset += spec.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._file = open(self.directory / self.file_name(number), "wb")  # noqa: SIM115
        self._file.write(struct.pack("<Q", len(text)) + text)
        self._open_shard = number

    def _finish(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def close(self) -> None:
        """Completes the last shard and writes the index if there are several."""
        assert self._next == len(self._queue), "not every declared tensor was written"
        if self._open_shard < 0:
            self._start(0)
        self._finish()
        if len(self.shards) > 1:
            total = sum(spec.nbytes for _, spec in self._queue)
            index = {
                "metadata": {"total_size": total},
                "weight_map": {
                    spec.name: self.file_name(number) for number, spec in self._queue
                },
            }
            (self.directory / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")

    def abort(self) -> None:
        """Closes the file in progress."""
        if self._file is not None:
            self._file.close()
            self._file = None
