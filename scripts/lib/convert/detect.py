# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Finds out which format SOURCE is in."""

from pathlib import Path

from .errors import ConversionError
from .hf_safetensors import SafetensorsSource, read_config
from .model import Source


def open_source(path: Path) -> Source:
    """Opens SOURCE, whose format is told by its config.json."""
    if not path.exists():
        raise ConversionError(f"{path} does not exist.")
    if not path.is_dir():
        raise ConversionError(f"{path} is not a model directory.")
    config = read_config(path)
    quantization = config.get("quantization_config")
    if not quantization:
        return SafetensorsSource.open(path, config)
    method = quantization.get("quant_method")
    if method == "ternary":
        raise ConversionError(f"{path} is a ternary checkpoint already.")
    raise ConversionError(
        f"{path}: config.json says quant_method {method!r}, which cannot be "
        "converted. Start from the model's full-precision checkpoint."
    )
