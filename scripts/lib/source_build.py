# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""vLLM's own build on the patched source tree."""

from pathlib import Path

from lib.build import Options
from lib.project import Project


def build(
    project: Project, options: Options, source: str, *, only_extension: bool
) -> Path:
    raise NotImplementedError
