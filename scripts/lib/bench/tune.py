# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Regenerate csrc/quantization/ternary/dispatch_table.h from measurements.

    PYTHONPATH=scripts python -m lib.bench.tune             # measure, then write both
    PYTHONPATH=scripts python -m lib.bench.tune --offline   # the header from the JSON

Measures every cut of the tensor core kernel, and the Hopper kernel for many tokens
where it takes the size, on the GPU of this machine, for a grid of layer sizes and
numbers of tokens. All measurements go to dispatch_table.json beside the header; the
header holds the fastest of each. At run time a product uses the entry of its class of
M whose N and K are nearest.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lib.bench.layers import LAYERS, Layer
from lib.cli import progress, run
from lib.errors import BuildError

FOLDER = Path(__file__).resolve().parents[3] / "csrc" / "quantization" / "ternary"
# Layers beyond the benchmark's, so that every size has a near neighbour.
MORE_LAYERS = (
    Layer("attention output, 0.6B", 1024, 2048),
    Layer("qkv, 0.6B", 4096, 1024),
    Layer("attention output, 8B", 4096, 4096),
    Layer("down, 27B", 5120, 17408),
    Layer("small", 1024, 1024),
)
TOKENS = (1, 8, 16, 32, 48, 64, 96)
SPLITS = (1, 2, 4, 8)
WAVES = (1, 2)
HOPPER = {"kernel": "sm90"}
# A cut must be faster by this much to displace a simpler one that came before it.
NOISE = 0.01


def candidates(size_m: int) -> Iterator[dict[str, Any]]:
    """Every way to compute a product of `size_m` tokens, simplest first."""
    few = size_m <= 32
    for split in SPLITS if few else SPLITS[::2]:
        for waves in WAVES if few else WAVES[:1]:
            yield {"kernel": "mma", "split": split, "waves": waves}
    if size_m > 1:
        yield HOPPER


def measure(seconds: float) -> dict[str, Any]:
    import torch

    from lib.bench.ops import load_ops, random_weight
    from lib.bench.timing import graph_time, rotation

    if not torch.cuda.is_available():
        raise BuildError(
            "there is no CUDA device; use --offline, or a machine with one"
        )
    load_ops()
    start = time.monotonic()
    properties = torch.cuda.get_device_properties(0)
    processors = properties.multi_processor_count
    entries: list[dict[str, Any]] = []
    layers = [*LAYERS, *MORE_LAYERS]
    with progress(total=len(layers) * len(TOKENS), unit=" sizes") as bar:
        for layer in layers:
            w = random_weight(layer.size_n, layer.size_k)
            copies = rotation(layer.size_n * layer.size_k / 4, maximum=96)
            weights = [(w.weight.clone(), w.scale.clone()) for _ in range(copies)]
            sizes = (layer.size_n, layer.size_k, w.block_size)
            for size_m in TOKENS:
                x = torch.randn(size_m, layer.size_k, device="cuda").bfloat16()
                times = []
                for way in candidates(size_m):
                    if time.monotonic() - start > seconds:
                        raise BuildError(f"not done after {seconds} s; raise --seconds")
                    extra: tuple[int | bool, ...] = ()
                    if way is HOPPER:
                        op = torch.ops._C.ternary_gemm_sm90
                    else:
                        op = torch.ops._C.ternary_gemm_tuned
                        groups = max(1, processors * way["waves"] // way["split"])
                        extra = (0, groups, way["split"], True)

                    def call(pair, op=op, x=x, tail=(*sizes, *extra)):
                        return lambda: op(x, *pair, None, None, *tail)

                    try:
                        time_us = graph_time([call(pair) for pair in weights], 5)
                    except RuntimeError:  # the kernel does not take this size
                        continue
                    times.append({**way, "microseconds": round(time_us, 3)})
                entries.append(
                    {"N": layer.size_n, "K": layer.size_k, "M": size_m, "times": times}
                )
                bar.update()
    return {
        "device": torch.cuda.get_device_name(),
        "capability": properties.major * 10 + properties.minor,
        "processors": processors,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "date": time.strftime("%Y-%m-%d"),
        "dtype": "bfloat16",
        "entries": entries,
    }


def best(times: list[dict[str, Any]]) -> dict[str, Any]:
    """The fastest, or an earlier (simpler) one within the noise of it."""
    least = min(time["microseconds"] for time in times)
    return next(t for t in times if t["microseconds"] <= least * (1 + NOISE))


def header(data: dict[str, Any]) -> str:
    """dispatch_table.h."""
    lines = [
        "// SPDX-License-Identifier: Apache-2.0",
        "// SPDX-FileCopyrightText: Copyright contributors to the vLLM project",
        "//",
        "// Written by scripts/lib/bench/tune.py from dispatch_table.json.",
        f"// {data['device']}, {data['date']}, CUDA {data['cuda']}.",
        "#pragma once",
        "",
        "namespace vllm::ternary {",
        "",
        "// The fastest way measured for a product of up to M tokens (more than the",
        "// entry before has). kernel 0: mma_gemm with `split` and `waves` CTAs per",
        "// multiprocessor; 1: the Hopper kernel for many tokens.",
        "struct DispatchEntry {",
        "  int M, N, K;",
        "  unsigned char kernel, split, waves;",
        "};",
        "",
        "inline constexpr DispatchEntry kDispatchTable[] = {",
        "    // clang-format off",
    ]
    for entry in sorted(data["entries"], key=lambda e: (e["M"], e["N"], e["K"])):
        way = best(entry["times"])
        kernel = int(way["kernel"] == "sm90")
        cut = f"{kernel}, {way.get('split', 1)}, {way.get('waves', 1)}"
        lines.append(
            f"    {{{entry['M']}, {entry['N']}, {entry['K']}, {cut}}},"
            f"  // {way['microseconds']:.1f} us"
        )
    lines += ["    // clang-format on", "};", "", "}  // namespace vllm::ternary"]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--offline", action="store_true", help="measure nothing, only write the header"
    )
    parser.add_argument(
        "--folder", type=Path, default=FOLDER, help="where the two files are"
    )
    parser.add_argument(
        "--seconds", type=float, default=600, help="give up after so many seconds"
    )
    arguments = parser.parse_args()
    measurements = arguments.folder / "dispatch_table.json"
    if arguments.offline:
        if not measurements.is_file():
            raise BuildError(f"{measurements} is missing; run without --offline first")
        data = json.loads(measurements.read_text())
    else:
        data = measure(arguments.seconds)
        text = json.dumps(data, separators=(",", ":")).replace('{"N"', '\n{"N"')
        measurements.write_text(text + "\n")
    (arguments.folder / "dispatch_table.h").write_text(header(data))
    return 0


if __name__ == "__main__":
    run(main)
