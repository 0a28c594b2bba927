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

_HEADER_LENGTH = struct.Struct("<Q")


def check_safetensors_files(folder: str) -> None:
    """Refuse a checkpoint with a file that was cut short, before loading begins.

    Reads the header of each `*.safetensors` of a local model directory; anything else
    (a name on a hub) is left to vLLM's loader.

    Raises:
        TernaryFormatError: names the file, its size and the size that its header asks
            for.

    """
    path = Path(folder)
    if not path.is_dir():
        return
    for file in sorted(path.glob("*.safetensors")):
        found, expected = file.stat().st_size, _expected_size(file)
        if found < expected:
            raise TernaryFormatError(
                str(file),
                f"the file is cut short: {found} bytes of {expected}",
                "Copy or download it again",
            )


def _expected_size(file: Path) -> int:
    """Bytes of the whole file, by its header."""
    with file.open("rb") as stream:
        prefix = stream.read(_HEADER_LENGTH.size)
        if len(prefix) < _HEADER_LENGTH.size:
            return _HEADER_LENGTH.size
        (length,) = _HEADER_LENGTH.unpack(prefix)
        begin = _HEADER_LENGTH.size + length
        if file.stat().st_size < begin:
            return begin
        try:
            header = json.loads(stream.read(length))
            ends = [
                entry["data_offsets"][1]
                for name, entry in header.items()
                if name != "__metadata__"
            ]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise TernaryFormatError(
                str(file),
                "the header is not that of a safetensors file",
                "Copy or download it again",
            ) from None
    return begin + max(ends, default=0)


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
