# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the scripts' main functions share."""

import sys
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from lib.errors import BuildError


def progress(*args: Any, **options: Any) -> tqdm:
    """A tqdm progress bar on stderr; in a log file, one line every 10 seconds."""
    interval = 0.1 if sys.stderr.isatty() else 10
    return tqdm(*args, mininterval=interval, **options)


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
