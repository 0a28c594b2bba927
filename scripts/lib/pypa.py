# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What is used of `packaging`; pip's own copy where it is not installed, so that
scripts/install_wheel.py runs in any Python that has pip."""

try:
    from packaging.requirements import Requirement
    from packaging.utils import (
        InvalidWheelFilename,
        canonicalize_name,
        parse_wheel_filename,
    )
    from packaging.version import Version
except ModuleNotFoundError:
    from pip._vendor.packaging.requirements import Requirement  # type: ignore
    from pip._vendor.packaging.utils import (  # type: ignore
        InvalidWheelFilename,
        canonicalize_name,
        parse_wheel_filename,
    )
    from pip._vendor.packaging.version import Version  # type: ignore

__all__ = [
    "InvalidWheelFilename",
    "Requirement",
    "Version",
    "canonicalize_name",
    "parse_wheel_filename",
]
