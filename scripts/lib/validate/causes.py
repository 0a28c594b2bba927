# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Known mistakes, recognized by what they do to the data.

A cause is named only if the mistake, made on purpose with the expected tensor,
gives the tensor that was found, on every byte.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch

from . import spec
from .difference import raw_bytes

Candidate = tuple[str, Callable[[], np.ndarray | None]]
"""What the mistake is called, and the bytes that it makes of the expected tensor."""

# Codes of -1, 0 and +1.
_WRONG_CODES = {
    "01 and 10 swapped: every weight has the opposite sign": (1, 0, 2),
    "11 mapped to -1: -1 is stored as the reserved code 11": (3, 0, 1),
    "11 mapped to +1: +1 is stored as the reserved code 11": (2, 0, 3),
    "11 mapped to 0: 0 is stored as the reserved code 11": (2, 3, 1),
    "codes are t + 1 (00 for -1, 01 for 0, 10 for +1), as BitNet has them": (0, 1, 2),
}
_BIT_ORDER = "bit order: the first weight is in a byte's highest bits (big-endian)"
_NOT_PACKED = "not packed: the weights were converted to a byte each"
_COLUMN_FIRST = "column-first packing (along N)"


def of_packed(
    t: np.ndarray, found: np.ndarray, reference: torch.Tensor | None = None
) -> str:
    """The mistake that turns integers into these packed bytes, or "".

    Args:
        t: int8 [N, K], as they should be.
        found: uint8 [N, ceil(K / 4)].
        reference: the full-precision weight [N, K], if there is one.

    """
    return _first(_packed_candidates(t, found, reference), found.reshape(-1))


def of_scale(expected: torch.Tensor, found: torch.Tensor) -> str:
    """The mistake that turns a scale or zero point into this one, or "".

    Args:
        expected: [N, blocks].
        found: of the same dtype and shape.

    """
    if expected.dtype != found.dtype or expected.shape != found.shape:
        return ""
    return _first(_scale_candidates(expected, found), raw_bytes(found))


def of_codes(found: np.ndarray) -> str:
    """A mistake that shows without the expected integers, or "".

    Args:
        found: uint8 packed bytes, padding not included.

    """
    if np.isin(found, (0, 1, 255)).all() and (found == 255).any():
        return _NOT_PACKED
    counts = np.bincount(spec.codes_of(found).reshape(-1), minlength=4)
    if counts[3] and not counts[2]:
        return (
            "11 mapped to -1: -1 is stored as the reserved code 11 (its low two bits "
            "in two's complement) where 10 is due"
        )
    if counts[3]:
        return (
            "bytes that are no packed weights: all four codes occur, as when a float "
            "is read as bytes or a 2-bit format with four values is packed"
        )
    return ""


def _packed_candidates(
    t: np.ndarray, found: np.ndarray, reference: torch.Tensor | None
) -> Iterator[Candidate]:
    right, size_k = spec.encode(t), t.shape[1]
    for wrong, codes in _WRONG_CODES.items():
        for padding in (0, 1, 3):
            yield wrong, partial(_padded, spec.encode(t, codes), size_k, padding)
    yield _BIT_ORDER, partial(_reverse_codes, right)
    for size in (2, 4, 8):
        name = f"byte order: the bytes of each {8 * size}-bit word are big-endian"
        yield name, partial(_reverse_words, right, size)
    columns = np.ascontiguousarray(t.T)
    yield (
        f"{_COLUMN_FIRST}: the transposed weight was packed",
        partial(spec.encode, columns),
    )
    yield (
        f"{_COLUMN_FIRST}: a byte holds four rows that follow each other",
        lambda: np.ascontiguousarray(spec.encode(columns).T),
    )
    for codes, words in (((2, 0, 1), ""), ((0, 1, 2), " and codes are t + 1")):
        name = f"{_COLUMN_FIRST}: a byte holds rows n, n + N/4, n + N/2, n + 3N/4"
        yield f"{name}{words}, as BitNet packs them", partial(_interleaved, t, codes)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        short = str(dtype).removeprefix("torch.")
        yield (
            f"a byte was read as a float: this is the memory of the bytes as {short}",
            partial(_memory, torch.from_numpy(right), dtype, right.size),
        )
        if reference is not None:
            yield (
                f"a float was read as a byte: this is the memory of the {short} weight",
                partial(_memory, reference, dtype, right.size),
            )
    yield (
        _NOT_PACKED,
        lambda: np.ascontiguousarray(t).view(np.uint8).reshape(-1)[: right.size],
    )
    for shift in (1, 2, 3):
        yield (
            f"rows begin {shift} weights late: a cut inside a byte was moved",
            partial(spec.encode, np.roll(t, shift, axis=1)),
        )


def _scale_candidates(
    expected: torch.Tensor, found: torch.Tensor
) -> Iterator[Candidate]:
    dtype = expected.dtype
    whole = expected.reshape(len(expected), -1)
    orders = {
        "the scales of each row are in reverse order": whole.flip(-1),
        "scales are stored block by block where row by row is due": whole.t(),
        "each block has the scale of the block after it": whole.roll(-1, -1),
        "each block has the scale of the block before it": whole.roll(1, -1),
        "the rows are in reverse order": whole.flip(0),
    }
    for name, made in orders.items():
        yield f"block order: {name}", partial(raw_bytes, made)
    yield (
        "byte order: the bytes of each scale are big-endian",
        partial(_reverse_words, raw_bytes(expected)[None], dtype.itemsize),
    )
    yield (
        "a float was read as a byte: the scales were converted to bytes",
        lambda: raw_bytes(expected.float().to(torch.uint8).to(dtype)),
    )
    yield (
        "a float was read as a byte: each byte of the scales became a number",
        lambda: raw_bytes(
            torch.from_numpy(raw_bytes(expected)[: expected.numel()].copy()).to(dtype)
        ),
    )
    for other in (torch.float16, torch.bfloat16):
        if other != dtype and dtype.itemsize == 2:
            short = str(other).removeprefix("torch.")
            yield (
                f"dtype: this is the memory of the scales as {short}",
                partial(_memory, expected, other, 2 * expected.numel()),
            )
    yield (
        "the scales are the inverse of what is due",
        lambda: raw_bytes(expected.float().reciprocal().to(dtype)),
    )
    for dim, name in ((-1, "each row has its scales"), (None, "the scales are there")):
        yield (
            f"block order: {name}, in another order",
            partial(_same_sorted, expected, found, dim),
        )


def _first(candidates: Iterator[Candidate], found: np.ndarray) -> str:
    for name, make in candidates:
        made = make()
        if made is not None and np.array_equal(made.reshape(-1), found):
            return name
    return ""


def _same_sorted(
    expected: torch.Tensor, found: torch.Tensor, dim: int | None
) -> np.ndarray | None:
    a, b = expected.float(), found.float()
    if dim is None:
        a, b = a.reshape(-1), b.reshape(-1)
    same = torch.equal(a.sort(-1).values, b.sort(-1).values)
    return raw_bytes(found) if same else None


def _padded(packed: np.ndarray, size_k: int, code: int) -> np.ndarray:
    """The packed bytes with `code` in the padding beyond K."""
    packed = packed.copy()
    for i in range(size_k % 4 or 4, 4):
        packed[:, -1] &= 0xFF ^ (3 << 2 * i)
        packed[:, -1] |= code << 2 * i
    return packed


def _reverse_codes(packed: np.ndarray) -> np.ndarray:
    codes = spec.codes_of(packed)[..., ::-1]
    return codes[..., 0] | codes[..., 1] << 2 | codes[..., 2] << 4 | codes[..., 3] << 6


def _reverse_words(rows: np.ndarray, size: int) -> np.ndarray | None:
    if rows.shape[-1] % size:
        return None
    words = rows.reshape(*rows.shape[:-1], -1, size)
    return np.ascontiguousarray(words[..., ::-1]).reshape(rows.shape)


def _interleaved(t: np.ndarray, codes: Sequence[int]) -> np.ndarray | None:
    """Bytes [N / 4, K] that hold rows n, n + N/4, n + N/2 and n + 3N/4."""
    if len(t) % 4:
        return None
    c = np.array(codes, dtype=np.uint8)[t + 1].reshape(4, len(t) // 4, -1)
    return c[0] | c[1] << 2 | c[2] << 4 | c[3] << 6


def _memory(x: torch.Tensor, dtype: torch.dtype, count: int) -> np.ndarray:
    """The first bytes in memory of a tensor that was converted."""
    return raw_bytes(x.reshape(-1)[: -(-count // dtype.itemsize)].to(dtype))[:count]
