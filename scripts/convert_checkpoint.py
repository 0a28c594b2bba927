#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Converts a checkpoint to the `ternary` format that the patched vLLM serves.

SOURCE is a directory with safetensors (floating point, Hugging Face bitnet, or MLX
2-bit) or a GGUF file (TQ1_0, TQ2_0, Q2_0, PQ2_0); which one is found out. Weights that
hold nothing but -s, 0 and +s in each block are converted without loss; others are
refused, or quantized with --quantize, which costs much accuracy unless the model was
trained for it.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lib.errors import VLLM_PYTHON, missing_module
from lib.memory import return_freed_memory

try:
    import torch
    from tqdm import tqdm

    from lib.convert import report
    from lib.convert.codec import TernaryFormatError, schemes
    from lib.convert.detect import open_source
    from lib.convert.errors import ConversionError
    from lib.convert.plan import Options, make_plan
    from lib.convert.run import check_destination, execute
except ModuleNotFoundError as error:
    sys.exit(missing_module(error, VLLM_PYTHON))

_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("source", type=Path, metavar="SOURCE", help="model directory or GGUF file")
    add(
        "dest",
        type=Path,
        metavar="DEST",
        nargs="?",
        help="directory to create; needed unless --dry-run",
    )
    add(
        "--quantize",
        choices=("absmean", "mse"),
        help="quantize weights that are not ternary: absmean takes the mean magnitude "
        "of a block as its scale, mse the scale with the least squared error. Weights "
        "that are ternary are still converted without loss. Default: refuse",
    )
    add(
        "--block-size",
        type=_block_size,
        metavar="N",
        help="weights along the input dimension that share a scale: a multiple of 4, "
        '"row" or "tensor" (default: 128, or that of a packed source)',
    )
    add(
        "--scale-dtype",
        choices=_DTYPES,
        help="dtype of the scales of floating-point sources (default: float16)",
    )
    add(
        "--modules-to-not-convert",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="modules to carry over as they are: beginning or end of the name, as "
        "transformers reads such lists",
    )
    add(
        "--embeddings",
        nargs="?",
        const="yes",
        default="auto",
        choices=("auto", "yes", "no"),
        help="convert the token embedding and the head: auto does where the source is "
        "ternary there (default), yes (or the bare option) always, no never",
    )
    add(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="GGUF: directory with the tokenizer (default: the one in the metadata)",
    )
    add(
        "--config",
        type=Path,
        metavar="FILE",
        help="GGUF: config.json of the model (default: made of the metadata)",
    )
    add(
        "--dtype",
        choices=_DTYPES,
        default="bfloat16",
        help="GGUF: dtype for config.json, in which vLLM then computes (default: "
        "%(default)s)",
    )
    add(
        "--max-shard-size",
        type=_size,
        default="5GB",
        metavar="SIZE",
        help="start a new file beyond this many bytes (default: %(default)s)",
    )
    add("--dry-run", action="store_true", help="print the table, write nothing")
    add(
        "--verify",
        action="store_true",
        help="read the result back and compare integers, scales and everything "
        "carried over with the source before it is put in place",
    )
    add("--overwrite", action="store_true", help="replace DEST if it exists")
    add("--json", action="store_true", help="print the report as JSON")
    args = parser.parse_args(argv)
    if args.dest is None and not args.dry_run:
        parser.error("DEST is needed unless --dry-run is given")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    return_freed_memory()

    def progress(items: Iterable[Any], title: str) -> Iterable[Any]:
        return tqdm(items, desc=title, unit="tensor", disable=None, leave=False)

    options = Options(
        quantize=args.quantize,
        block_size=args.block_size,
        scale_dtype=_DTYPES.get(args.scale_dtype),
        not_convert=tuple(args.modules_to_not_convert),
        embeddings=args.embeddings,
        measure=args.dry_run,
    )
    try:
        if not args.dry_run:
            others = (args.tokenizer, args.config)
            check_destination(args.source, args.dest, args.overwrite, others)
        source = open_source(args.source, args.tokenizer, args.config, args.dtype)
        plan = make_plan(source, options, progress)
        if not args.dry_run:
            plan = execute(
                plan,
                args.dest,
                max_shard_size=args.max_shard_size,
                verify=args.verify,
                progress=progress,
            )
    except (ConversionError, TernaryFormatError, schemes.TernaryConfigError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    except OSError as e:
        print(f"error: {e.filename or args.source}: {e.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted, nothing was written", file=sys.stderr)
        return 130
    if args.json:
        data = report.summary(plan)
        data |= {
            "dest": None if args.dry_run else str(args.dest),
            "verified": args.verify and not args.dry_run,
        }
        print(json.dumps(data, indent=2))
    else:
        print(report.table(plan))
        if args.dry_run:
            print("dry run: nothing was written")
        else:
            print(f"{args.dest}: written" + (" and verified" if args.verify else ""))
    return 0


def _block_size(text: str) -> int | str:
    if text in ("row", "tensor"):
        return text
    if text.isdecimal() and int(text) > 0 and int(text) % 4 == 0:
        return int(text)
    raise argparse.ArgumentTypeError(
        f'{text}: must be a positive multiple of 4, "row" or "tensor"'
    )


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+)\s*([KMG]?B?)", text.upper())
    if not match:
        raise argparse.ArgumentTypeError(f"{text}: must be like 5GB, 500MB or 1000000")
    unit = match[2].rstrip("B")
    return int(match[1]) * _UNITS[unit + "B" if unit else ""]


if __name__ == "__main__":
    sys.exit(main())
