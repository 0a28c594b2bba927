# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Timing of GPU calls: CUDA graphs, cold L2 by rotation, medians."""

from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]


def graph_time(calls: Sequence[Call], repeats: int = 7) -> float:
    """Median microseconds per call when `calls` run back to back in one CUDA graph.

    Pass one call per copy of the weights, copies of more than the L2 cache in all, and
    each call finds its weights cold.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:3]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return sorted(times)[len(times) // 2]


def copy_bandwidth(size: int = 1 << 32) -> float:
    """Bytes per second, read plus written, of a device-to-device copy."""
    source = torch.empty(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(5):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return 2 * size / sorted(times[1:])[1]


def rotation(bytes_per_copy: float, minimum: int = 2, maximum: int = 128) -> int:
    """How many copies of a weight make up more than 300 MB."""
    return max(minimum, min(maximum, int(300e6 // bytes_per_copy) + 1))
