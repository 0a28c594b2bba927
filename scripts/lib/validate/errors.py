# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Why a checkpoint could not be validated at all."""


class ValidateError(Exception):
    """A mistake that the user can do something about: names what, and the remedy.

    The command prints it without a traceback and exits with status 2.
    """
