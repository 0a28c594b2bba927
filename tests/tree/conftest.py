# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""These tests need an installed patched vLLM, and no engine."""

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from lib.validate import ranks
from vllm.platforms import current_platform

# The same cases in every run.
settings.register_profile("fixed", derandomize=True)
settings.load_profile("fixed")

# Builders of checkpoints that need no vLLM are beside the unit tests.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "unit")]


@pytest.fixture(scope="session", autouse=True)
def kernels():
    current_platform.import_kernels()
    torch.set_num_threads(1)  # the layers are small, and tests may run side by side


@pytest.fixture(autouse=True)
def vllm_config():
    """The configuration and the default dtype that a model's layers are made with."""
    saved = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    with ranks.vllm_context():
        yield
    torch.set_default_dtype(saved)
