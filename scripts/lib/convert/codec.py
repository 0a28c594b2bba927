# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The codec and the config reader of the overlay, loaded without vLLM.

Both modules need no vLLM import, but importing them by their full name would run
``vllm/__init__.py``. They are taken from the overlay beside this script, or else
from an installed patched vLLM.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

_PACKAGE = "vllm/model_executor/layers/quantization"


def _roots() -> list[Path]:
    roots = [Path(__file__).resolve().parents[3] / "overlay"]
    spec = importlib.util.find_spec("vllm")
    if spec and spec.submodule_search_locations:
        roots.append(Path(next(iter(spec.submodule_search_locations))).parent)
    return roots


def _load(relative: str) -> ModuleType:
    name = "_ternary_" + Path(relative).stem
    if name in sys.modules:
        return sys.modules[name]
    paths = [root / _PACKAGE / relative for root in _roots()]
    for path in paths:
        if path.is_file():
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec and spec.loader
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            spec.loader.exec_module(module)
            return module
    raise ImportError(f"found no {relative} in {' or '.join(map(str, paths))}")


format = _load("utils/ternary_format.py")
schemes = _load("ternary/schemes.py")
TernaryFormatError = format.TernaryFormatError
