# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How much memory a script that streams tensors holds."""

import contextlib
import ctypes
import gc
from collections.abc import Callable, Iterator

_M_MMAP_THRESHOLD = -3  # malloc.h
_LARGE = 1 << 20


def return_freed_memory() -> None:
    """Has glibc give blocks of 1 MiB and more back to the system when they are freed.

    By default the first large blocks to be freed raise that size, up to 32 MiB, and
    smaller ones then stay in a heap of which only the end is given back: how much a
    script that works in chunks holds would depend on what happens to lie at the end
    (mallopt(3), M_MMAP_THRESHOLD). Does nothing with other C libraries.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE)


@contextlib.contextmanager
def collector() -> Iterator[Callable[[], int]]:
    """A cheap ``gc.collect`` for large objects in cycles (layers, whose parameters
    know their loaders): Python itself goes by the number of objects, not by their
    size. Cheap since what was there before is not looked at."""
    gc.collect()
    gc.freeze()
    try:
        yield gc.collect
    finally:
        gc.unfreeze()
