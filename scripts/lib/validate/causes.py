# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Known mistakes, recognized by what they do to the data.

A cause is named only if the mistake, made on purpose with the expected tensor,
gives the tensor that was found, on every byte.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from . import spec
from .difference import raw_bytes

Candidate = tuple[str, Callable[[], np.ndarray | None]]
"""What the mistake is called, and the bytes that it makes of the expected tensor."""


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
    right = spec.encode(t)
    size_n, size_k = t.shape
    yield (
        "01 and 10 swapped: every weight has the opposite sign",
        lambda: spec.encode(t, (1, 0, 2)),
    )
    yield (
        "11 mapped to -1: -1 is stored as the reserved code 11 where 10 is due",
        lambda: spec.encode(t, (3, 0, 1)),
    )
    yield (
        "11 mapped to +1: +1 is stored as the reserved code 11 where 01 is due",
        lambda: spec.encode(t, (2, 0, 3)),
    )
    yield (
        "11 mapped to 0: 0 is stored as the reserved code 11 where 00 is due",
        lambda: spec.encode(t, (2, 3, 1)),
    )
    yield (
        "codes are t + 1 (00 for -1, 01 for 0, 10 for +1), as BitNet packs them",
        lambda: _padded(spec.encode(t, (0, 1, 2)), size_k, 0),
    )
    yield (
        "codes are t + 1, padding included",
        lambda: _padded(spec.encode(t, (0, 1, 2)), size_k, 1),
    )
    yield (
        "bit order: the first weight is in the highest two bits of a byte "
        "(big-endian) where the lowest are due",
        lambda: _reverse_codes(right),
    )
    for size in (2, 4, 8):
        yield (
            f"byte order: the bytes of each {8 * size}-bit word are reversed "
            "(big-endian) where little-endian is due",
            lambda size=size: _reverse_words(right, size),
        )
    yield (
        "column-first packing: four weights along N share a byte (of the transposed "
        "weight) where four along K are due",
        lambda: spec.encode(np.ascontiguousarray(t.T)),
    )
    yield (
        "column-first packing: four rows share a byte where four weights along K "
        "are due",
        lambda: np.ascontiguousarray(spec.encode(np.ascontiguousarray(t.T)).T),
    )
    for name, codes in (("", (2, 0, 1)), (", with codes t + 1", (0, 1, 2))):
        yield (
            "column-first packing: rows n, n + N/4, n + N/2 and n + 3N/4 share a "
            f"byte, as BitNet packs them{name}",
            lambda codes=codes: _interleaved(t, codes),
        )
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        short = str(dtype).removeprefix("torch.")
        yield (
            f"a byte was read as a float: the bytes were converted to {short} and "
            "their memory stored",
            lambda dtype=dtype: _head(
                raw_bytes(torch.from_numpy(right).to(dtype)), right.size
            ),
        )
        if reference is not None:
            yield (
                f"a float was read as a byte: the memory of the {short} weight is "
                "stored where packed bytes are due",
                lambda dtype=dtype: _head(
                    raw_bytes(_rows_of(reference, dtype, right.size)), right.size
                ),
            )
    yield (
        "a float was read as a byte: weights were converted to bytes, not packed",
        lambda: _head(np.ascontiguousarray(t).view(np.uint8).reshape(-1), right.size),
    )
    for shift in (1, 2, 3):
        yield (
            f"rows begin {shift} weights late: a cut inside a byte was moved to "
            "the byte's begin",
            lambda shift=shift: spec.encode(np.roll(t, shift, axis=1)),
        )


def _scale_candidates(
    expected: torch.Tensor, found: torch.Tensor
) -> Iterator[Candidate]:
    def of(x: torch.Tensor) -> np.ndarray:
        return raw_bytes(x)

    dtype = expected.dtype
    yield (
        "block order: the scales of each row are in reverse order",
        lambda: of(expected.flip(-1)),
    )
    yield (
        "block order: scales are stored block by block ([blocks, N]) where row by row "
        "([N, blocks]) is due",
        lambda: of(expected.t().contiguous()),
    )
    yield (
        "block order: the scale of each block is stored for the block before it",
        lambda: of(expected.roll(-1, -1)),
    )
    yield (
        "block order: the scale of each block is stored for the block after it",
        lambda: of(expected.roll(1, -1)),
    )
    yield (
        "byte order: the bytes of each scale are reversed (big-endian)",
        lambda: _reverse_words(of(expected)[None], dtype.itemsize),
    )
    yield (
        "a float was read as a byte: scales were converted to integers",
        lambda: of(expected.float().to(torch.uint8).to(dtype)),
    )
    yield (
        "a float was read as a byte: each byte of the scales became a number",
        lambda: of(
            torch.from_numpy(_head(of(expected), expected.numel()).copy()).to(dtype)
        ),
    )
    for other in (torch.float16, torch.bfloat16):
        if other != dtype and dtype.itemsize == 2:
            yield (
                f"dtype: the memory of {str(other).removeprefix('torch.')} scales is "
                f"read as {str(dtype).removeprefix('torch.')}",
                lambda other=other: of(expected.to(other)),
            )
    yield (
        "the scales are the inverse of what is due",
        lambda: of(expected.float().reciprocal().to(dtype)),
    )
    yield (
        "rows are in reverse order",
        lambda: of(expected.flip(0)),
    )
    yield (
        "block order: each row has its scales, in another order",
        lambda: _same_sorted(expected, found, -1),
    )
    yield (
        "block order: the scales are all there, in another order",
        lambda: _same_sorted(expected.reshape(-1), found.reshape(-1), 0),
    )


def _first(candidates: Iterator[Candidate], found: np.ndarray) -> str:
    for name, make in candidates:
        made = make()
        if made is not None and np.array_equal(made.reshape(-1), found):
            return name
    return ""


def _same_sorted(
    expected: torch.Tensor, found: torch.Tensor, dim: int
) -> np.ndarray | None:
    a, b = (x.float().sort(dim).values for x in (expected, found))
    return raw_bytes(found) if torch.equal(a, b) else None


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


def _head(bytes_: np.ndarray, count: int) -> np.ndarray:
    return bytes_.reshape(-1)[:count]


def _rows_of(x: torch.Tensor, dtype: torch.dtype, count: int) -> torch.Tensor:
    """As many leading elements as `count` bytes of `dtype` need."""
    return x.reshape(-1)[: -(-count // dtype.itemsize)].to(dtype)
