# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The codec and the config reader of the overlay, loaded without vLLM.

These modules need torch only, but importing them by their full name would run
``vllm/__init__.py``. They are taken from the overlay beside this script, or else
from an installed patched vLLM, as members of a package of another name.
"""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

_QUANTIZATION = "vllm/model_executor/layers/quantization"
_PACKAGE = "_vllm_ternary"


def _directories() -> list[str]:
    roots = [Path(__file__).resolve().parents[3] / "overlay"]
    spec = importlib.util.find_spec("vllm")
    if spec and spec.submodule_search_locations:
        roots.append(Path(next(iter(spec.submodule_search_locations))).parent)
    for root in roots:
        base = root / _QUANTIZATION
        if (base / "utils/ternary_format.py").is_file():
            return [str(base / "utils"), str(base / "ternary")]
    raise ImportError(f"found no patched vLLM in {' or '.join(map(str, roots))}")


def _load(name: str) -> ModuleType:
    if _PACKAGE not in sys.modules:
        package = ModuleType(_PACKAGE)
        package.__path__ = _directories()
        sys.modules[_PACKAGE] = package
    return importlib.import_module(f"{_PACKAGE}.{name}")


format = _load("ternary_format")
quantize = _load("ternary_quantize")
schemes = _load("schemes")
TernaryFormatError = format.TernaryFormatError
