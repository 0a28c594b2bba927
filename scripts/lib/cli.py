# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the scripts' main functions share."""

import errno
import sys
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from lib.errors import BuildError

# Failures of the user's folders and disks rather than of this project.
_WRITABLE = "Make that place writable for you"
_ROOM = "Make room there"
_IN_THE_WAY = "Move what is in the way aside"
_REMEDIES = {
    errno.EACCES: _WRITABLE,
    errno.EPERM: _WRITABLE,
    errno.EROFS: _WRITABLE,
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EEXIST: _IN_THE_WAY,
    errno.EISDIR: _IN_THE_WAY,
    errno.ENOTDIR: _IN_THE_WAY,
}


def progress(*args: Any, **options: Any) -> tqdm:
    """A tqdm progress bar on stderr; in a log file, one line every 10 seconds."""
    interval = 0.1 if sys.stderr.isatty() else 10
    return tqdm(*args, mininterval=interval, **options)


def run(main: Callable[[], int]) -> None:
    """Exit with main's status.

    A BuildError, or a folder that cannot be written, is a message and status 1, no
    traceback.
    """
    try:
        sys.exit(main())
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        if error.filename is None or error.errno not in _REMEDIES:
            raise
        print(
            f"error: {error.filename}: {error.strerror}. {_REMEDIES[error.errno]}, and "
            "run again.",
            file=sys.stderr,
        )
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
