#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Check a ternary checkpoint three times, integer by integer and bit by bit.

CPU_UNPACK  the unpacked integers and the scales equal those rebuilt from the
            full-precision weights (--reference); without a reference, the tensors
            keep the format's rules and survive unpacking and packing.
GPU_LOAD    what sits on the device equals what is on disk, per dtype, also after
            the way into the layout of the device's kernels and back.
TP_SHARD    the shards that vLLM's own loaders make for each rank, put together
            again, equal the whole: column-parallel, row-parallel and fused.

Each line says OK, FAIL, or SKIPPED and why. A failure names the tensor and the
position and shows 64 bytes of both sides.
"""

import argparse
import json
import sys
from pathlib import Path

from lib.errors import VLLM_PYTHON, missing_module
from lib.memory import return_freed_memory
from lib.validate.errors import ValidateError


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit status: 0 no check failed, 1 one did, 2 the checks could not be "
        "made (wrong arguments, no checkpoint, a damaged file).",
    )
    parser.add_argument("model", type=Path, help="directory of the checkpoint")
    parser.add_argument(
        "--reference",
        type=Path,
        metavar="MODEL",
        help="directory of the full-precision model that it was converted from",
    )
    parser.add_argument(
        "--tp",
        type=_sizes,
        default=[1, 2, 4, 8],
        metavar="N,N,...",
        help="tensor-parallel sizes to cut for (default: 1,2,4,8)",
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        help="where GPU_LOAD puts the weights (default: cuda if there is one); on the "
        "CPU the line says SKIPPED",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser.parse_args(arguments)


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of positive numbers such as 1,2,4,8"
        )
    return sorted(set(sizes))


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    return_freed_memory()
    try:
        from lib.validate.run import validate  # torch takes a while; --help does not

        report = validate(options.model, options.reference, options.tp, options.device)
    except ModuleNotFoundError as error:
        print(missing_module(error, VLLM_PYTHON), file=sys.stderr)
        return 2
    except ValidateError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    if options.json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        print(report.text())
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
