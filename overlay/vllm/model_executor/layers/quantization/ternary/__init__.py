# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The `ternary` quantization method."""

from .config import TernaryConfig
from .linear import TernaryLinearMethod

__all__ = ["TernaryConfig", "TernaryLinearMethod"]
