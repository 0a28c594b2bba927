# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The error that a user can do something about."""

import sys

BUILD_PYTHON = "Run the script with .venv/bin/python, which `make verify` sets up."
INSTALL_PYTHON = "Run the script with the Python to install into, which needs pip."
VLLM_PYTHON = "Run the script with the Python that the patched wheel is installed in."


class BuildError(Exception):
    """A mistake in an input or in the environment, with its remedy in the message.

    Scripts print it without a traceback and exit with status 1. Anything else that
    is raised is a bug of this project and keeps its traceback.
    """


def missing_module(error: ModuleNotFoundError, remedy: str) -> str:
    """The message of a script that another Python was asked to run."""
    if (error.name or "").partition(".")[0] in ("", "lib"):
        raise error  # a mistake of this project
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return (
        f"error: {sys.executable} (Python {version}) has no module {error.name}. "
        f"{remedy}"
    )
