# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Files of measurements that the tuning scripts keep beside the tables made of them."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lib.errors import BuildError

Measurements = dict[str, Any]  # where they come from, and "entries"


def load(path: Path, required: bool) -> Measurements | None:
    """What the file holds; None if there is none.

    Raises:
        BuildError: there is none, and it is `required`.

    """
    if path.is_file():
        return json.loads(path.read_text())
    if required:
        raise BuildError(f"{path} is missing; run without --offline first")
    return None


def store(path: Path, data: Measurements, first: str) -> None:
    """Write the file, a line an entry. `first`: the key that entries begin with."""
    text = json.dumps(data, separators=(",", ":"))
    path.write_text(text.replace(f'{{"{first}"', f'\n{{"{first}"') + "\n")


def merged(
    old: Measurements | None,
    new: Measurements,
    key: Callable[[dict[str, Any]], Any],
) -> Measurements:
    """`new`, with the entries of `old` that it has not measured, by their keys."""
    entries = {key(e): e for e in [*(old["entries"] if old else []), *new["entries"]]}
    return new | {"entries": [entries[k] for k in sorted(entries)]}


def asked(
    tokens: Mapping[str, Sequence[int]], only: str | None, counts: Sequence[int] | None
) -> list[tuple[str, int]]:
    """(kind, number of tokens) of `tokens`, or of these kinds and numbers only."""
    return [
        (kind, size_m)
        for kind, sizes in tokens.items()
        for size_m in sizes
        if kind == (only or kind) and size_m in (counts or sizes)
    ]


def require_cuda() -> None:
    """Raises BuildError where there is nothing to measure on."""
    import torch

    if not torch.cuda.is_available():
        raise BuildError(
            "there is no CUDA device; use --offline, or a machine with one"
        )


def origin() -> dict[str, Any]:
    """Where measurements of bfloat16 activations come from that are made now."""
    import torch

    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "date": time.strftime("%Y-%m-%d"),
        "dtype": "bfloat16",
    }
