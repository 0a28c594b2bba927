# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Finds out which format SOURCE is in."""

from pathlib import Path

from .errors import ConversionError
from .gguf_source import GgufSource
from .hf_bitnet import BitNetSource, NormedBitNetSource
from .hf_safetensors import (
    SafetensorsSource,
    find_quantization,
    read_config,
    read_tensors,
)
from .mlx import MlxSource
from .model import Source


def open_source(
    path: Path,
    tokenizer: Path | None = None,
    config_file: Path | None = None,
    dtype: str = "bfloat16",
) -> Source:
    """Opens SOURCE: a GGUF file, or a directory whose format is told by its
    config.json. The other arguments are for GGUF."""
    if not path.exists():
        raise ConversionError(
            f"{path} does not exist. Give a model directory or a GGUF file; download a "
            "model of a hub first."
        )
    if path.is_dir() and not (path / "config.json").exists():
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            path = files[0]
        elif files:
            raise ConversionError(
                f"{path} holds {len(files)} GGUF files. Name the one to convert."
            )
    if not path.is_dir():
        return GgufSource.open(
            path, tokenizer=tokenizer, config=config_file, dtype=dtype
        )
    if tokenizer or config_file:
        raise ConversionError(
            "--tokenizer and --config are for GGUF files; a directory has its own."
        )
    config = read_config(path)
    if "quantization" in config:
        return MlxSource.open(path, config)
    where, quantization = find_quantization(path, config)
    if not quantization:
        if NormedBitNetSource.recognizes(read_tensors(path)):
            return NormedBitNetSource.open(path, config)
        return SafetensorsSource.open(path, config)
    if not isinstance(quantization, dict):
        raise ConversionError(
            f"{path}/config.json: {where} is no JSON object. Download it again."
        )
    method = quantization.get("quant_method")
    kind = str(method).lower()  # as vLLM compares it
    if kind == "bitnet" and where == "quantization_config":
        return BitNetSource.open(path, config)
    if kind == "ternary":
        raise ConversionError(
            f"{path} is a ternary checkpoint already. Serve it as it is, or start from "
            "what it was made of."
        )
    raise ConversionError(
        f"{path}: {where} says quant_method {method!r}, which cannot be converted. "
        "Start from the model's full-precision checkpoint."
    )
