# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The error that a user can do something about."""


class BuildError(Exception):
    """A mistake in an input or in the environment, with its remedy in the message.

    Scripts print it without a traceback and exit with status 1. Anything else that
    is raised is a bug of this project and keeps its traceback.
    """
