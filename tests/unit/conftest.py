# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Makes the builders beside the tests importable."""

import sys
from pathlib import Path

import torch
from hypothesis import settings

# The same cases in every run.
settings.register_profile("fixed", derandomize=True)
settings.load_profile("fixed")

# Threads only wait for each other on tensors as small as those of the unit tests.
torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).parent))
