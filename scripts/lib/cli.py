# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the scripts' main functions share, where tqdm is there for their progress."""

import tqdm  # noqa: F401

from lib.status import progress, run

__all__ = ["progress", "run"]
