# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Progress and exit status of a script, with the standard library alone."""

import errno
import sys
from collections.abc import Callable
from typing import Any

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


def progress(*args: Any, **options: Any) -> Any:
    """A tqdm progress bar on stderr; in a log file, one line every 10 seconds.

    A loop (with an iterable) goes without a bar where tqdm is not installed.
    """
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        if not args:
            raise
        return args[0]
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
