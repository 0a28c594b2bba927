# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Tensor-parallel ranks as threads of one process, with real collectives."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from vllm.distributed import parallel_state


class ThreadGroup:
    """Stands in for the group coordinator: a thread is a rank."""

    def __init__(self, size: int):
        self.world_size = size
        self._local = threading.local()
        self._barrier = threading.Barrier(size)
        self._slots: list[torch.Tensor] = [torch.empty(0)] * size

    def join(self, rank: int) -> None:
        self._local.rank = rank

    @property
    def rank_in_group(self) -> int:
        return self._local.rank

    def abort(self) -> None:
        """Release ranks that wait for one that failed."""
        self._barrier.abort()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange(x)).sum(0)

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat(self._exchange(x), dim)

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._slots[self.rank_in_group] = x
        self._barrier.wait(60)
        parts = list(self._slots)
        self._barrier.wait(60)
        return parts


def run_ranks(size: int, work: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
    """Call `work(rank)` as each rank of `size` at once; needs a vLLM config around."""
    group = ThreadGroup(size)
    saved = parallel_state._TP
    parallel_state._TP = group

    def one(rank: int) -> torch.Tensor:
        group.join(rank)
        try:
            with torch.no_grad():
                return work(rank)
        except BaseException:
            group.abort()
            raise

    try:
        with ThreadPoolExecutor(size) as pool:
            futures = [pool.submit(one, rank) for rank in range(size)]
        errors = [e for f in futures if (e := f.exception())]
        # A rank that failed breaks the others' barrier: its error comes first.
        errors.sort(key=lambda e: isinstance(e, threading.BrokenBarrierError))
        if errors:
            raise errors[0]
        return [f.result() for f in futures]
    finally:
        parallel_state._TP = saved
