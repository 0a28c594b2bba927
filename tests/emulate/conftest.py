# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Builds the emulated kernels once."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from compile_emulator import build  # noqa: E402
from harness import Emulator  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def emulators() -> dict[int, Emulator]:
    """By the architecture that device code is compiled for."""
    return {arch: Emulator(path) for arch, path in build().items()}
