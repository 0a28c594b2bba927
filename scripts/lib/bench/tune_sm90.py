# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Regenerate csrc/quantization/ternary/sm90_tiles.h from measurements.

    PYTHONPATH=scripts python -m lib.bench.tune_sm90                # measure and fit
    PYTHONPATH=scripts python -m lib.bench.tune_sm90 --kernel many --tokens 1024
    PYTHONPATH=scripts python -m lib.bench.tune_sm90 --offline      # fit the JSON again

The Hopper kernels choose a tile and a cut of K by a table of costs per tile. This
measures the cuts that may be best (W2A16 with a float16 scale per 128 weights, W2A8
with a scale per row and per 128) on the GPU of this machine, fits the costs to the
times and writes both: sm90_tiles.json and sm90_tiles.h.
"""

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any

from lib.bench import measurements
from lib.bench.layers import LAYERS, Layer
from lib.bench.sm90_costs import (
    CSRC,
    KERNELS,
    SPLITS,
    UNKNOWN,
    Model,
    header,
    quality,
    refine,
)
from lib.cli import progress, run
from lib.errors import BuildError

MORE_LAYERS = (
    Layer("attention output, 0.6B", 1024, 2048),
    Layer("attention output, 8B", 4096, 4096),
)
TOKENS = {
    "many": (64, 128, 256, 512, 1024, 2048, 4096),
    "few": (8, 16, 32, 64, 128, 256, 512, 1024),
    "rows": (32, 64, 128, 256, 512, 1024, 2048, 4096),
    "blocks": (32, 64, 128, 256, 512, 1024, 2048, 4096),
}
# What a kernel says of a cut that it was not built for; any other error is one.
REFUSALS = ("no kernel for", "does not take this call")


def caller(kernel: str, tile: tuple[int, ...], split: int, sizes: tuple[int, int, int]):
    """The function of x, weight and scale that computes a product under one cut."""
    import torch

    ops = torch.ops._C
    if kernel in ("rows", "blocks"):
        tail = (1e-6, *sizes, 2, 0, 0, [*tile[:4], split])
        return lambda x, *pair: ops.ternary_gemm_w2a8_tuned(
            x, *pair, None, None, None, *tail
        )
    if kernel == "few":
        cut = [1, *tile[:4], split, tile[4]]
    else:
        cut = [0, *tile[:3], split, tile[4], tile[3]]
    return lambda x, *pair: ops.ternary_gemm_sm90(x, *pair, None, None, *sizes, cut)


def measure(
    model: Model, asked: list[tuple[str, int]], within: float, seconds: float
) -> dict[str, Any]:
    """The times of the promising cuts for each (kernel, number of tokens) of `asked`.

    `within`: how much more than the least a cut may cost by the present table.
    """
    import torch

    from lib.bench.ops import load_ops, random_weight
    from lib.bench.timing import graph_time, rotation

    measurements.require_cuda()
    load_ops()
    start = time.monotonic()
    clusters = device_clusters()
    if not any(clusters.values()):
        name = torch.cuda.get_device_name()
        raise BuildError(f"{name}: the Hopper kernels need compute capability 9.0")
    entries: list[dict[str, Any]] = []
    layers = [*LAYERS, *MORE_LAYERS]
    with progress(total=len(layers) * len(asked), unit=" sizes") as bar:
        for layer in layers:
            size_n, size_k = layer.size_n, layer.size_k
            block = random_weight(size_n, size_k)
            row = random_weight(size_n, size_k, size_k, scale_dtype=torch.float32)
            copies = rotation(size_n * size_k / 4, maximum=96)
            codes = [block.weight.clone() for _ in range(copies)]
            n_pad, k_pad = block.scale.shape[1], block.weight.shape[1] * 128
            for kernel, size_m in asked:
                w = row if kernel == "rows" else block
                x = torch.randn(size_m, size_k, device="cuda").bfloat16()
                sizes = size_n, size_k, w.block_size
                first = 0.0
                if kernel in ("rows", "blocks"):
                    first = graph_time([partial(quantize, x, w, sizes)] * copies)
                cuts = list(model.cuts(kernel, clusters, (size_m, n_pad, k_pad)))
                costs = [model.predict(kernel, cut, f) for cut, _, f in cuts]
                times = []
                for (cut, at_once, _), cost in zip(cuts, costs):
                    if within * min(costs) < cost < UNKNOWN:
                        continue
                    if time.monotonic() - start > seconds:
                        raise BuildError(f"not done after {seconds} s; raise --seconds")
                    tile = model.shapes[kernel][cut.tile]
                    product = caller(kernel, tile, cut.split, sizes)
                    calls = [partial(product, x, weight, w.scale) for weight in codes]
                    try:
                        total = graph_time(calls, 5)
                    except RuntimeError as error:
                        # After a fault every later call would fail, too.
                        if not any(text in str(error) for text in REFUSALS):
                            raise
                        continue
                    way = {"tile": tile, "split": cut.split, "clusters": at_once}
                    times.append({**way, "microseconds": round(total - first, 3)})
                size = {"M": size_m, "N_pad": n_pad, "K_pad": k_pad}
                entries.append({"kernel": kernel, **size, "times": times})
                bar.update()
    return measurements.origin() | {"entries": entries}


def device_clusters() -> dict[tuple[int, int], int]:
    """How many clusters the device runs at one time, as `Model.cuts` takes it."""
    import torch

    probe = torch.empty(1, device="cuda")
    return {
        (kind, split): torch.ops._C.ternary_sm90_clusters(probe, kind, split)
        for kind in range(4)
        for split in SPLITS
    }


def quantize(x, weight, sizes: tuple[int, int, int]):
    """The quantization that precedes a product of W2A8."""
    import torch

    op = torch.ops._C.ternary_quantize_tokens
    return op(x, weight.weight, weight.scale, None, None, 1e-6, *sizes)


def key(entry: dict[str, Any]) -> tuple[int, int, int, int]:
    """What an entry is about, in the order of the file."""
    kernel = KERNELS.index(entry["kernel"])
    return kernel, entry["N_pad"], entry["K_pad"], entry["M"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--offline", action="store_true", help="measure nothing, only fit and write"
    )
    parser.add_argument(
        "--folder", type=Path, default=CSRC, help="where the two files are"
    )
    parser.add_argument("--kernel", choices=KERNELS, help="only this one")
    parser.add_argument(
        "--tokens", type=int, nargs="+", help="only these numbers of tokens"
    )
    parser.add_argument(
        "--within",
        type=float,
        default=1.4,
        help="leave out cuts that cost so many times the least by the present table",
    )
    parser.add_argument(
        "--seconds", type=float, default=600, help="give up after so many seconds"
    )
    arguments = parser.parse_args()
    model = Model(arguments.folder)
    file = arguments.folder / "sm90_tiles.json"
    data = measurements.load(file, required=arguments.offline)
    if not arguments.offline:
        asked = measurements.asked(TOKENS, arguments.kernel, arguments.tokens)
        if not asked:
            raise BuildError(f"--tokens: no kernel is measured with {arguments.tokens}")
        new = measure(model, asked, arguments.within, arguments.seconds)
        data = measurements.merged(data, new, key)
        measurements.store(file, data, "kernel")
    assert data is not None
    for kernel in KERNELS:
        entries = [e for e in data["entries"] if e["kernel"] == kernel and e["times"]]
        if not entries:
            continue
        for when in ("before", "fitted"):
            q = quality(model, kernel, entries)
            print(
                f"{kernel}, {when}: costs off by {q.error:.1%} (rms), choices "
                f"{q.loss:.1%} above the best, at worst {q.worst:.1%} ({q.worst_size})"
            )
            if when == "before":
                refine(model, kernel, entries)
    source = f"{data['device']}, {data['date']}, CUDA {data['cuda']}."
    (arguments.folder / "sm90_tiles.h").write_text(header(model, source))
    return 0


if __name__ == "__main__":
    run(main)
