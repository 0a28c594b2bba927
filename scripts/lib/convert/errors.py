# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The error a user of the converter sees."""


class ConversionError(Exception):
    """Something the user can act on: names file or tensor, value and remedy. The
    command prints it without a traceback and exits with status 1."""
