# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A look at a checkpoint before it is loaded: its files, and how they are read."""

import json
import struct
from pathlib import Path

from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.quantization.utils.ternary_format import (
    TernaryFormatError,
)

# Loaders of what vLLM saved of a loaded model, in the layout of its kernels.
_SAVED_MODEL_FORMATS = ("sharded_state", "runai_streamer_sharded", "tensorizer")

_PACKED = (".packed_ternary_weight", ".weight_scale")
_HEADER_LENGTH = struct.Struct("<Q")


def check_safetensors_files(folder: str) -> None:
    """Refuse a checkpoint with a file that was cut short, or one too many.

    Reads the header of each `*.safetensors` of a local model directory; anything else
    (a name on a hub) is left to vLLM's loader.

    Raises:
        TernaryFormatError: names the file, its size and the size that its header asks
            for; or the tensor and the two files that have it, of which vLLM would take
            either where no index says which.

    """
    path = Path(folder)
    if not path.is_dir():
        return
    indexed = any(path.glob("*.safetensors.index.json"))
    first: dict[str, Path] = {}
    for file in sorted(path.glob("*.safetensors")):
        found = file.stat().st_size
        expected, names = _read_header(file)
        for name in names:
            other = first.setdefault(name, file)
            if other is not file and not indexed and name.endswith(_PACKED):
                raise TernaryFormatError(
                    name,
                    f"is in {other.name} and in {file.name}, and no index says which "
                    "of them belongs to the checkpoint",
                    f"Remove the other file from {path}",
                )
        if found < expected:
            raise TernaryFormatError(
                str(file),
                f"the file is cut short: {found} bytes of {expected}",
                "Copy or download it again",
            )


def _read_header(file: Path) -> tuple[int, list[str]]:
    """Bytes of the whole file, by its header, and the tensors in it."""
    with file.open("rb") as stream:
        prefix = stream.read(_HEADER_LENGTH.size)
        if len(prefix) < _HEADER_LENGTH.size:
            return _HEADER_LENGTH.size, []
        (length,) = _HEADER_LENGTH.unpack(prefix)
        begin = _HEADER_LENGTH.size + length
        if file.stat().st_size < begin:
            return begin, []
        try:
            header = json.loads(stream.read(length))
            ends = {
                name: entry["data_offsets"][1]
                for name, entry in header.items()
                if name != "__metadata__"
            }
        except (ValueError, KeyError, TypeError, AttributeError):
            raise TernaryFormatError(
                str(file),
                "the header is not that of a safetensors file",
                "Copy or download it again",
            ) from None
    return begin + max(ends.values(), default=0), list(ends)


def loads_no_tensors() -> bool:
    """Whether the parameters are filled at random, without a weight loader."""
    return _load_format() == "dummy"


def refuse_load_format(method: str) -> None:
    """Raises ValueError for a load format that ternary layers do not have, and why."""
    if (load_format := _load_format()) in _SAVED_MODEL_FORMATS:
        raise ValueError(
            f"load_format is {load_format}, which quantization {method} does not "
            "support: it reads weights in the layout of the kernels, and ternary "
            "layers load those of the checkpoint. Leave --load-format out and give "
            "the checkpoint itself."
        )


def _load_format() -> str | None:
    config = get_current_vllm_config_or_none()
    return None if config is None else str(config.load_config.load_format)
