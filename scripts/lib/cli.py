# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the scripts' main functions share."""

import sys
from collections.abc import Callable

from lib.errors import BuildError


def run(main: Callable[[], int]) -> None:
    """Exit with main's status; a BuildError is a message and status 1, no traceback."""
    try:
        sys.exit(main())
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
