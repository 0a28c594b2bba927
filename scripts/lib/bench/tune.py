# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Regenerate csrc/quantization/ternary/dispatch_table.h from measurements.

    PYTHONPATH=scripts python -m lib.bench.tune             # measure, then write both
    PYTHONPATH=scripts python -m lib.bench.tune --op w2a8 --tokens 1 8   # these anew
    PYTHONPATH=scripts python -m lib.bench.tune --offline   # the header from the JSON

Measures every cut of the tensor core kernels, and the Hopper kernels for many tokens
where they take the size, on the GPU of this machine, for a grid of layer sizes and
numbers of tokens: W2A16 with a float16 scale per 128 weights, W2A8 with a scale per row
and with its quantization. All measurements go to dispatch_table.json beside the header;
the header holds the fastest of each, or a simpler one within 1% of it. At run time a
product uses the entry of its class of M whose N and K are nearest.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lib.bench import measurements
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
TOKENS = {
    "w2a16": (1, 2, 4, 8, 16, 32, 48, 64, 96),
    "w2a8": (1, 4, 8, 16, 32, 48, 64, 96),
}
SPLITS = (1, 2, 4, 8)
WAVES = (1, 2)
# Layers of few rows are faster on fewer multiprocessors: all read all of x. With more
# rows the shared memory of so few CTAs is too little and others take over, so that
# noise would choose between names of one launch, and smaller neighbours get the cut.
DIRECT_WAVES = (1, 2, 1 / 2, 1 / 3)
FEW_ROWS = 4096
# As dispatch_table.h numbers them.
KERNELS = {
    "w2a16": {"mma": 0, "sm90": 1, "s8": 2},
    "w2a8": {"s8": 0, "sm90": 1, "inside": 2},
}
# How many shapes of a CTA a kernel has for at most so many tokens; 1 elsewhere.
VARIANTS = {
    "mma": {8: 3, 16: 4},
    "s8": {16: 2},
    "inside": {8: 3, 16: 2},
}
# The kernels with short chains (kDirect in mma_s8.h), for at most so many tokens. 8, 9
# and 10: two, three CTAs or one share a multiprocessor; with 8-bit activations 11 to 13
# are these with half as many warps along K, and for one token the kernel of 16 bits has
# 8, 9 and 10 as 14 to 16.
DIRECT = 8
ONE_TOKEN = (14, 16)
DIRECT_VARIANTS = {
    ("w2a16", "s8"): (2, (8, 9, 10)),
    ("w2a8", "inside"): (16, (8, 10, 11, 13)),
    ("w2a8", "s8"): (16, (8, 11)),
}
# As ternary_gemm_w2a8_tuned numbers them.
TUNED_W2A8 = {"s8": 1, "sm90": 2, "inside": 3}
# What a kernel says of a size or a cut that it does not take; any other error is one.
REFUSALS = (
    "does not take this call",
    "does not quantize these activations",
    "kernel needs",
    "too little shared memory",
    "too many tokens",
)
# A cut must be faster by this much to displace a simpler one that came before it.
NOISE = 0.01


def candidates(op: str, size_m: int) -> Iterator[dict[str, Any]]:
    """Every way to compute a product of `size_m` tokens, simplest first."""
    few = size_m <= 32
    kernels = ["mma"] if op == "w2a16" else ["s8"]
    if op == "w2a16" and size_m <= 2:
        kernels.append("s8")
    if op == "w2a8" and size_m <= 16:
        kernels.append("inside")
    for kernel in kernels:
        counts = VARIANTS.get(kernel, {})
        variants = range(next((n for top, n in counts.items() if size_m <= top), 1))
        most, direct = DIRECT_VARIANTS.get((op, kernel), (0, ()))
        if (op, kernel, size_m) == ("w2a8", "inside", 1):
            direct += ONE_TOKEN
        for variant in (*variants, *(direct if size_m <= most else ())):
            for split in SPLITS if few else SPLITS[::2]:
                if kernel == "inside" and variant >= DIRECT and split > 2:
                    continue  # no more than two CTAs tell each other largest values
                several = DIRECT_WAVES if variant >= DIRECT else WAVES
                for waves in several if few else WAVES[:1]:
                    cut = {"split": split, "waves": waves, "variant": variant}
                    yield {"kernel": kernel, **cut}
    yield {"kernel": "sm90"}


def sixths(way: dict[str, Any]) -> int:
    """CTAs for every six multiprocessors."""
    return round(way.get("waves", 1) * 6)


def caller(op: str, way: dict[str, Any], sizes: tuple[int, int, int], processors: int):
    """The function of x, weight and scale that computes a product `way`."""
    import torch

    ops = torch.ops._C
    kernel, split, variant = way["kernel"], way.get("split", 1), way.get("variant", 0)
    groups = max(1, processors * sixths(way) // 6 // split)
    if op == "w2a8":
        number = TUNED_W2A8[kernel] + (4 if variant >= DIRECT else 0) + 16 * variant
        tail = (*sizes, number, groups, split)
        return lambda x, weight, scale: ops.ternary_gemm_w2a8_tuned(
            x, weight, scale, None, None, None, 1e-6, *tail
        )
    if kernel == "sm90":
        return lambda x, *pair: ops.ternary_gemm_sm90(x, *pair, None, None, *sizes)
    product = ops.ternary_gemm_s8 if kernel == "s8" else ops.ternary_gemm_tuned
    cut = (*sizes, variant, groups, split, True)
    return lambda x, *pair: product(x, *pair, None, None, *cut)


def measure(asked: list[tuple[str, int]], seconds: float) -> dict[str, Any]:
    """The times of every way for each (op, number of tokens) of `asked`."""
    import torch

    from lib.bench.ops import load_ops, random_weight
    from lib.bench.timing import graph_time, rotation

    measurements.require_cuda()
    load_ops()
    start = time.monotonic()
    properties = torch.cuda.get_device_properties(0)
    processors = properties.multi_processor_count
    entries: list[dict[str, Any]] = []
    layers = [*LAYERS, *MORE_LAYERS]
    with progress(total=len(layers) * len(asked), unit=" sizes") as bar:
        for layer in layers:
            size_n, size_k = layer.size_n, layer.size_k
            w = random_weight(size_n, size_k)
            row = random_weight(size_n, size_k, size_k, scale_dtype=torch.float32)
            copies = rotation(size_n * size_k / 4, maximum=96)
            weights = [(w.weight.clone(), w.scale.clone()) for _ in range(copies)]
            rows = [(weight, row.scale.clone()) for weight, _ in weights]
            for op, size_m in asked:
                x = torch.randn(size_m, size_k, device="cuda").bfloat16()
                block_size = w.block_size if op == "w2a16" else row.block_size
                times = []
                for way in candidates(op, size_m):
                    if time.monotonic() - start > seconds:
                        raise BuildError(f"not done after {seconds} s; raise --seconds")
                    product = caller(op, way, (size_n, size_k, block_size), processors)

                    def call(pair, product=product, x=x):
                        return lambda: product(x, *pair)

                    pairs = weights if op == "w2a16" else rows
                    try:
                        time_us = graph_time([call(pair) for pair in pairs], 5)
                    except RuntimeError as error:
                        # After a fault every later call would fail, too.
                        if not any(text in str(error) for text in REFUSALS):
                            raise
                        continue
                    times.append({**way, "microseconds": round(time_us, 3)})
                entries.append(
                    {"op": op, "N": size_n, "K": size_k, "M": size_m, "times": times}
                )
                bar.update()
    return measurements.origin() | {
        "capability": properties.major * 10 + properties.minor,
        "processors": processors,
        "entries": entries,
    }


def key(entry: dict[str, Any]) -> tuple[str, int, int, int]:
    """What an entry of the table is about, in the header's order."""
    return entry.get("op", "w2a16"), entry["M"], entry["N"], entry["K"]


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
        "// The fastest way measured, or a simpler one within 1% of it, for a product",
        "// of up to M tokens (more than the entry before has), with `split`, CTAs for",
        "// each six multiprocessors and the shape `variant` of a CTA. Behind one of a",
        "// kernel with short chains (from 8 on): the fastest of the others, for",
        "// products that it does not take.",
        "struct DispatchEntry {",
        "  int M, N, K;",
        "  unsigned char kernel, split, sixths, variant;",
        "};",
        "",
        "// clang-format off",
        "// W2A16. kernel 0: mma_gemm; 1: the Hopper kernel for many tokens; 2:",
        "// mma_s8_gemm.",
        *table("kDispatchTable", "w2a16", data),
        "",
        "// W2A8. kernel 0: mma_s8_gemm; 1: the Hopper kernel for many tokens; 2:",
        "// mma_s8_gemm that quantizes the tokens itself.",
        *table("kW2A8Table", "w2a8", data),
        "// clang-format on",
        "",
        "}  // namespace vllm::ternary",
    ]
    return "\n".join(lines) + "\n"


def table(name: str, op: str, data: dict[str, Any]) -> list[str]:
    """The lines of one array of the header."""
    lines = [f"inline constexpr DispatchEntry {name}[] = {{"]
    for entry in sorted(data["entries"], key=key):
        if key(entry)[0] != op:
            continue
        few = entry["N"] <= FEW_ROWS
        times = [t for t in entry["times"] if few or t.get("waves", 1) >= 1]
        ways = [best(times)]
        if ways[0].get("variant", 0) >= DIRECT:
            others = [t for t in times if t.get("variant", 0) < DIRECT]
            ways.append(best(others))
        for way in ways:
            kernel = KERNELS[op][way["kernel"]]
            split, variant = way.get("split", 1), way.get("variant", 0)
            cut = f"{kernel}, {split}, {sixths(way)}, {variant}"
            lines.append(
                f"    {{{entry['M']}, {entry['N']}, {entry['K']}, {cut}}},"
                f"  // {way['microseconds']:.1f} us"
            )
    return [*lines, "};"]


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
    parser.add_argument(
        "--op", choices=["w2a16", "w2a8"], help="only these, keeping the others"
    )
    parser.add_argument(
        "--tokens", type=int, nargs="+", help="only these numbers of tokens, likewise"
    )
    arguments = parser.parse_args()
    file = arguments.folder / "dispatch_table.json"
    data = measurements.load(file, required=arguments.offline)
    if not arguments.offline:
        asked = measurements.asked(TOKENS, arguments.op, arguments.tokens)
        data = measurements.merged(data, measure(asked, arguments.seconds), key)
        measurements.store(file, data, "op")
    assert data is not None
    (arguments.folder / "dispatch_table.h").write_text(header(data))
    return 0


if __name__ == "__main__":
    run(main)
