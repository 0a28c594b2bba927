# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The codec and the device layouts that are validated: those of the installed vLLM.

The modules need torch only, so they are loaded without importing vLLM. Where no
patched vLLM is installed, the overlay beside the scripts stands in.
"""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from .errors import ValidateError

_QUANTIZATION = "vllm/model_executor/layers/quantization"
_PACKAGE = "_validated_ternary"


def _root() -> Path:
    roots = [Path(__file__).resolve().parents[3] / "overlay"]
    spec = importlib.util.find_spec("vllm")
    if spec and spec.submodule_search_locations:
        roots.insert(0, Path(next(iter(spec.submodule_search_locations))).parent)
    for root in roots:
        if (root / _QUANTIZATION / "utils/ternary_format.py").is_file():
            return root
    raise ValidateError(
        f"found no patched vLLM in {' or '.join(map(str, roots))}. Install the wheel "
        "that `make patched-wheel` builds."
    )


def _load(name: str) -> ModuleType:
    if _PACKAGE not in sys.modules:
        package = ModuleType(_PACKAGE)
        folder = root / _QUANTIZATION
        package.__path__ = [str(folder / "utils"), str(folder / "ternary")]
        sys.modules[_PACKAGE] = package
    return importlib.import_module(f"{_PACKAGE}.{name}")


root = _root()
"""Folder that holds the `vllm` package whose codec is validated."""
format = _load("ternary_format")
quantize = _load("ternary_quantize")
schemes = _load("schemes")
layout = _load("ternary_layout")
