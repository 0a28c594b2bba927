#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Measure the ternary kernels beside their peers on this machine.

Every layer and number of tokens is timed in one run: the project's kernel, cuBLAS on
full-precision weights, dequantize + cuBLAS, and Humming where it is installed; with
16-bit activations and with 8-bit ones (the quantization of x in the time). Cold
L2 (weights rotate through more than 300 MB), CUDA graphs, medians. The memory floor
counts each byte once at the copy bandwidth measured in the same run.

With --device cpu: the W2A16 and W2A8 kernels beside vLLM's own bfloat16 linear, of an
installed patched CPU wheel; see docs/kernels_cpu.md.

Writes <out>.md and <out>.json, and <out>.png where matplotlib is installed.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from lib.arguments import positive_float, positive_int, some_of
from lib.errors import VLLM_PYTHON, BuildError, missing_module

try:
    from lib.cli import progress, run
except ModuleNotFoundError as error:
    sys.exit(missing_module(error, VLLM_PYTHON))

PEERS = ("cublas", "dequantize+cublas", "humming")
LABELS = {
    "ternary": "ternary (ours)",
    "cublas": "cuBLAS",
    "dequantize+cublas": "dequantize + cuBLAS",
    "humming": "Humming W2A16",
    "ternary_w2a8": "ternary W2A8 (ours)",
    "humming_w2a8": "Humming W2A8",
}


def token_counts(text: str) -> list[int]:
    """Numbers of tokens of the command line, like 1,8,16."""
    counts = [int(part) if part.isdecimal() else 0 for part in text.split(",")]
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of positive numbers such as 1,8,16"
        )
    return counts


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device",
        choices=["cuda", "cpu"],
        default="cuda",
        help="whose kernels (default: %(default)s)",
    )
    parser.add_argument(
        "--threads",
        type=positive_int,
        help="with --device cpu: threads (default: torch's; 1 measures CPU time)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="where to write, without a suffix (default: build/bench_kernels, or "
        "build/bench_kernels_cpu with --device cpu)",
    )
    parser.add_argument(
        "--tokens",
        type=token_counts,
        help="numbers of tokens, like 1,8,16 (default: 1 to 4096 in nine steps; on the "
        "CPU 1,8,64,512)",
    )
    parser.add_argument(
        "--layers", help="only layers whose name contains this text (8B, down, ...)"
    )
    parser.add_argument(
        "--dtype",
        choices=["bfloat16", "float16"],
        default="bfloat16",
        help="type of the activations (default: %(default)s)",
    )
    parser.add_argument(
        "--peers",
        type=some_of(PEERS),
        default=",".join(PEERS),
        help="which peers, separated by commas (default: %(default)s)",
    )
    parser.add_argument(
        "--seconds",
        type=positive_float,
        default=3600,
        help="start no further measurement after this many seconds",
    )
    parser.add_argument("--json", action="store_true", help="print the JSON result too")
    return parser.parse_args()


def make_peers(layer: Any, dtype: Any, wanted: list[str], problems: list[str]) -> list:
    from lib.bench import peers

    made: list[Any] = [peers.Ours(layer, dtype), peers.OursW2A8(layer)]
    if "cublas" in wanted:
        made.append(peers.Cublas(layer, dtype))
    if "dequantize+cublas" in wanted:
        made.append(peers.Dequantized(layer, made[0]))
    for int8 in (False, True):
        if "humming" not in wanted or not peers.humming_version():
            break
        try:
            made.append(peers.Humming(layer, dtype, int8))
        except Exception as error:  # a peer that fails must not stop the others
            problems.append(f"humming, {layer.name}: {error!r}"[:300])
    return made


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    import torch

    from lib.bench.layers import LAYERS, TOKENS, floor_matrix, floor_memory
    from lib.bench.ops import load_ops
    from lib.bench.peers import humming_version
    from lib.bench.timing import copy_bandwidth, graph_time

    if not torch.cuda.is_available():
        raise BuildError("there is no CUDA device; run this on a machine with a GPU")
    load_ops()
    torch.manual_seed(0)
    dtype = getattr(torch, arguments.dtype)
    tokens = arguments.tokens or list(TOKENS)
    layers = [x for x in LAYERS if not arguments.layers or arguments.layers in x.name]
    if not layers:
        raise BuildError(f"--layers {arguments.layers}: no layer has that in its name")
    start = time.monotonic()
    bandwidth = copy_bandwidth()
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    with progress(total=len(layers) * len(tokens), unit=" sizes") as bar:
        for layer in layers:
            made = make_peers(layer, dtype, arguments.peers, problems)
            for size_m in tokens:
                if time.monotonic() - start > arguments.seconds:
                    problems.append(f"{layer.name}, M = {size_m}: out of time")
                    continue
                x = torch.randn(size_m, layer.size_k, device="cuda", dtype=dtype)
                row: dict[str, Any] = {
                    "layer": layer.name,
                    "N": layer.size_n,
                    "K": layer.size_k,
                    "M": size_m,
                    "floor_memory": floor_memory(layer, size_m, bandwidth),
                    "floor_matrix": floor_matrix(layer, size_m),
                }
                for peer in made:
                    try:
                        row[peer.name] = graph_time(peer.calls(x))
                    except Exception as error:
                        what = f"{peer.name}, {layer.name}, M = {size_m}"
                        problems.append(f"{what}: {error!r}"[:300])
                rows.append(row)
                bar.update()
            del made
            torch.cuda.empty_cache()
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "humming": humming_version(),
        "date": time.strftime("%Y-%m-%d"),
        "dtype": arguments.dtype,
        "copy_bandwidth": bandwidth,
        "seconds": time.monotonic() - start,
        "rows": rows,
        "problems": problems,
    }


def main_cpu(arguments: argparse.Namespace) -> int:
    from lib.bench import cpu

    names = [layer.name for layer in cpu.LAYERS]
    if arguments.layers and not any(arguments.layers in name for name in names):
        raise BuildError(
            f"--layers {arguments.layers}: no layer has that in its name; there are "
            f"{', '.join(names)}"
        )
    result = cpu.run(arguments)
    out = arguments.out or Path("build/bench_kernels_cpu")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    text = cpu.markdown(result)
    out.with_suffix(".md").write_text(text)
    print(json.dumps(result) if arguments.json else text)
    return 0 if result["rows"] else 1


def main() -> int:
    arguments = parse_arguments()
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        print(missing_module(error, VLLM_PYTHON), file=sys.stderr)
        return 2
    if arguments.device == "cpu":
        return main_cpu(arguments)
    arguments.out = arguments.out or Path("build/bench_kernels")
    result = measure(arguments)
    from lib.bench.report import markdown, plot

    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    text = markdown(result, LABELS)
    arguments.out.with_suffix(".md").write_text(text)
    plot(result, LABELS, arguments.out.with_suffix(".png"))
    print(json.dumps(result) if arguments.json else text)
    finite = all(math.isfinite(row.get("ternary", math.nan)) for row in result["rows"])
    return 0 if finite and result["rows"] else 1


if __name__ == "__main__":
    run(main)
