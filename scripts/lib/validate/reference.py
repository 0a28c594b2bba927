# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Ternary integers and scales rebuilt from the full-precision weights.

NumPy in float64 from the definitions in docs/quant_format.md; shares no code with the
converter that made the checkpoint.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from .checkpoint import WEIGHT, Module, Tensors
from .errors import ValidateError

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


@dataclass
class Rebuilt:
    """What a recipe makes of some rows.

    Attributes:
        t: int8 [rows, K].
        scale: in the dtype that it is stored in, [rows, blocks], or [1] for a tensor.
        free: bool of the scale's shape: any scale will do (a block of zeros).

    """

    t: np.ndarray
    scale: torch.Tensor
    free: np.ndarray


def reference_weight(reference: Tensors, module: Module) -> "Weight | None":
    """The full-precision weight of a module, fused or tied if need be.

    Raises:
        ValidateError: it is packed, as in the source of a conversion.

    """
    parent, _, last = module.name.rpartition(".")
    candidates = [[module.name]]
    if last in FUSED:
        candidates.append([f"{parent}.{part}" for part in FUSED[last]])
    if last == "lm_head":
        tied = [n for n in reference.stored if n.endswith("embed_tokens.weight")]
        candidates += [[n.removesuffix(f".{WEIGHT}")] for n in tied]
    for parts in candidates:
        stored = [reference.stored.get(f"{part}.{WEIGHT}") for part in parts]
        if all(s is not None and len(s.shape) == 2 for s in stored):
            weight = Weight(reference, stored)
            if not weight.dtype.is_floating_point:
                raise ValidateError(
                    f"{reference.path}: {weight.name} is packed ({weight.dtype}). A "
                    "reference has plain weights; compare with a packed source through "
                    "`convert_checkpoint.py --verify`"
                )
            return weight
    return None


class Weight:
    """A weight [N, K], or several with the same K, one below the other."""

    def __init__(self, reference: Tensors, stored: list[Any]):
        self.reference, self.stored = reference, stored
        self.shape = (sum(s.shape[0] for s in stored), stored[0].shape[1])
        self.dtype = stored[0].dtype
        self.name = ", ".join(s.name for s in stored)

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """Rows [begin, end)."""
        parts, offset = [], 0
        for s in self.stored:
            low, high = max(begin - offset, 0), min(end - offset, s.shape[0])
            if low < high:
                parts.append(self.reference.read(s, low, high))
            offset += s.shape[0]
        return torch.cat(parts) if len(parts) != 1 else parts[0]

    def whole(self, ranges: Iterable[range]) -> "Whole":
        """Statistics of all rows, taken a few at a time."""
        largest, total = 0.0, 0.0
        for part in ranges:
            magnitude = self.rows(part.start, part.stop).double().abs()
            largest = max(largest, float(magnitude.max()))
            total += float(magnitude.sum())
        return Whole(largest, total, self.shape[0] * self.shape[1])


@dataclass
class Whole:
    """Of a weight that has one scale: its largest magnitude, their sum and number."""

    largest: float
    total: float
    size: int


def lossless(
    w: np.ndarray, block: int, dtype: torch.dtype, whole: Whole | None
) -> Rebuilt | None:
    """Integers of weights that are ternary already, or None if they are not."""
    blocks = _blocks(w, block)
    magnitude = np.abs(blocks)
    s = magnitude.max(axis=-1) if whole is None else np.array([whole.largest])
    wide = s[..., None]
    if ((magnitude != 0) & (magnitude != wide)).any():
        return None
    scale = _round(s, dtype)
    if (scale.double().numpy() != s).any():
        return None
    t = np.sign(blocks).astype(np.int8).reshape(len(w), -1)[:, : w.shape[1]]
    return Rebuilt(t, scale, s == 0)


def absmean(
    w: np.ndarray,
    block: int,
    dtype: torch.dtype,
    whole: Whole | None,
    floor: float = 0.0,
) -> Rebuilt:
    """The mean magnitude of each block as its scale, t = clamp(round(w / s))."""
    if whole is not None:
        s = np.array([whole.total / whole.size])
    else:
        magnitude = np.abs(_blocks(w, block))
        counts = np.full(magnitude.shape[1], block, dtype=np.float64)
        counts[-1] = w.shape[1] - (len(counts) - 1) * block
        s = magnitude.sum(-1) / counts
    return _with_scale(w, block, _round(np.maximum(s, floor), dtype))


def least_squares(
    w: np.ndarray, block: int, dtype: torch.dtype, whole: Whole | None
) -> Rebuilt | None:
    """The scale with the least squared error of each block."""
    magnitude = np.abs(_blocks(w, block))
    if whole is not None:
        if w.size != whole.size:
            return None  # needs every weight at once
        magnitude = magnitude.reshape(1, -1)
    magnitude = -np.sort(-magnitude, axis=-1)
    total = magnitude.cumsum(-1)
    m = np.arange(1, total.shape[-1] + 1, dtype=np.float64)
    s = _round(total / m, dtype).double().numpy()
    with np.errstate(invalid="ignore", over="ignore"):
        gain = np.nan_to_num(2 * s * total - m * s * s, nan=-np.inf)
    best = gain.argmax(-1)[..., None]
    s = np.take_along_axis(s, best, -1)[..., 0]
    return _with_scale(w, block, _round(s, dtype))


RECIPES: dict[str, Callable[..., Rebuilt | None]] = {
    "already ternary": lossless,
    "absmean": absmean,
    "absmean, at least 1e-5": partial(absmean, floor=1e-5),
    "least squared error": least_squares,
}


def nearest(
    w: np.ndarray, scale: np.ndarray, zero_point: np.ndarray, block: int
) -> np.ndarray:
    """Integers clamp(round(w / scale + zero_point)); scales are [rows, blocks]."""
    blocks = _blocks(w, block)
    s = scale[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.where(s > 0, np.rint(blocks / s + zero_point[..., None]), 0)
    t = np.clip(np.nan_to_num(t), -1, 1)
    return t.astype(np.int8).reshape(len(w), -1)[:, : w.shape[1]]


def _with_scale(w: np.ndarray, block: int, scale: torch.Tensor) -> Rebuilt:
    s = scale.double().numpy()
    blocks = _blocks(w, block)
    keep = (2 * np.abs(blocks) > s[..., None]) & (s[..., None] > 0)
    t = (np.sign(blocks) * keep).astype(np.int8).reshape(len(w), -1)
    return Rebuilt(t[:, : w.shape[1]], scale, np.zeros(s.shape, dtype=bool))


def _blocks(w: np.ndarray, block: int) -> np.ndarray:
    w = np.pad(w, ((0, 0), (0, -w.shape[1] % block)))
    return w.reshape(len(w), -1, block)


def _round(x: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """float64 to the scale's dtype with one rounding, to nearest even."""
    if dtype == torch.bfloat16:
        return _round_bfloat16(x)
    with np.errstate(over="ignore"):
        kind = {torch.float16: np.float16, torch.float32: np.float32}[dtype]
        return torch.from_numpy(np.ascontiguousarray(x).astype(kind))


def _round_bfloat16(x: np.ndarray) -> torch.Tensor:
    # A bfloat16 has 8 significant bits: round the significand, then convert exactly.
    significand, exponent = np.frexp(x)
    near = np.ldexp(np.rint(np.ldexp(significand, 8)), exponent - 8)
    return torch.from_numpy(near.astype(np.float32)).to(torch.bfloat16)
