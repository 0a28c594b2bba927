# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The codec of the ``ternary`` checkpoint format.

Specification: ``docs/quant_format.md``; quantizers: ``ternary_quantize.py``. This
module needs torch and nothing else, runs on the device of its arguments, and works
through large tensors in chunks of rows, so that its temporaries stay near
``CHUNK_BYTES``.

Vocabulary, the same throughout:

- ``t``       int8 ``[..., N, K]``, values -1, 0, +1
- ``packed``  uint8 ``[..., N, ceil(K / 4)]``, four 2-bit codes per byte along K,
  the first in the lowest bits; ``00`` = 0, ``01`` = +1, ``10`` = -1, ``11``
  reserved and read as 0
- ``scale``   ``[..., N, ceil(K / block)]``, one per run of ``block`` weights along
  K; ``[..., N, 1]`` for block size ``"row"``; ``[1]`` for ``"tensor"``
- ``zero_point`` float32 or int32 of the scale's shape, or None
- the weight is ``W = scale * (t - zero_point)``
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

BlockSize = int | Literal["row", "tensor"]

DEFAULT_BLOCK_SIZE = 128
CODES_PER_BYTE = 4
SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
ZERO_POINT_DTYPES = (torch.float32, torch.int32)
CHUNK_BYTES = 8 << 20
"""Rough bound, in bytes, on the temporaries of one step over rows."""


class TernaryFormatError(ValueError):
    """A tensor or setting that is not in the format: says which, what, and what
    to do about it."""

    def __init__(self, name: str, problem: str, remedy: str) -> None:
        super().__init__(f"{name}: {problem}. {remedy}")
        self.name, self.problem, self.remedy = name, problem, remedy


# --------------------------------------------------------------------------
# Shapes


def check_block_size(block_size: object, name: str = "block_size") -> BlockSize:
    """Returns ``block_size`` if it is a positive multiple of 4, ``"row"`` or
    ``"tensor"``; raises TernaryFormatError otherwise."""
    if block_size in ("row", "tensor"):
        return block_size  # type: ignore[return-value]
    if (
        isinstance(block_size, int)
        and not isinstance(block_size, bool)
        and block_size > 0
        and block_size % CODES_PER_BYTE == 0
    ):
        return block_size
    raise TernaryFormatError(
        name,
        f"block size {block_size!r} is not usable",
        'Use a positive multiple of 4, "row" or "tensor"',
    )


def packed_width(size_k: int) -> int:
    """Bytes per row: ceil(K / 4)."""
    return -(-size_k // CODES_PER_BYTE)


def block_length(size_k: int, block_size: BlockSize) -> int:
    """The block size as a number of weights; ``"row"`` and ``"tensor"`` become K
    rounded up to a multiple of 4."""
    if isinstance(block_size, str):
        return packed_width(size_k) * CODES_PER_BYTE
    return block_size


def num_blocks(size_k: int, block_size: BlockSize) -> int:
    """Blocks per row, the last one possibly partial: ceil(K / block), or 1 for
    ``"row"`` and ``"tensor"``."""
    if isinstance(block_size, str):
        return 1
    return -(-size_k // block_size)


def scale_shape(
    leading: Sequence[int], size_k: int, block_size: BlockSize
) -> tuple[int, ...]:
    """Shape of scale and zero point of a weight ``[*leading, K]``."""
    if block_size == "tensor":
        return (1,)
    return (*leading, num_blocks(size_k, block_size))


def expand_scale(
    scale: torch.Tensor, leading: Sequence[int], size_k: int, block_size: BlockSize
) -> torch.Tensor:
    """Scale (or zero point) as ``[*leading, blocks]`` for every block size: a
    ``"tensor"`` scale is repeated for each row, as a view."""
    if block_size == "tensor":
        return scale.reshape([1] * (len(leading) + 1)).expand(*leading, 1)
    return scale


# --------------------------------------------------------------------------
# Codes


def pack(t: torch.Tensor, *, name: str = "weight") -> torch.Tensor:
    """Packs int8 ``[..., K]`` of -1, 0, +1 into uint8 ``[..., ceil(K / 4)]``.

    A K that 4 does not divide is completed with code 0. Raises
    TernaryFormatError if ``t`` is not int8 or holds another value.
    """
    if t.dtype != torch.int8:
        raise TernaryFormatError(
            name,
            f"ternary integers have dtype {dtype_name(t.dtype)}, not int8",
            "Convert them to int8 before packing",
        )
    rows, size_k = t.reshape(-1, t.shape[-1]), t.shape[-1]
    width = packed_width(size_k)
    out = torch.empty(rows.shape[0], width, dtype=torch.uint8, device=t.device)
    shifts = _shifts(t.device)
    for part in row_chunks(rows.shape[0], 4 * size_k):
        chunk = rows[part]
        if chunk.numel():
            low, high = (int(v) for v in chunk.aminmax())
            if low < -1 or high > 1:
                bad = low if low < -1 else high
                raise TernaryFormatError(
                    name,
                    f"value {bad} is not one of -1, 0, +1",
                    "Quantize the weight to ternary before packing",
                )
        codes = chunk.contiguous().view(torch.uint8) & 3  # 0, 1, 3 for 0, +1, -1
        codes = codes ^ (codes >> 1)  # 0, 1, 2
        codes = F.pad(codes, (0, width * CODES_PER_BYTE - size_k))
        codes = codes.view(-1, width, CODES_PER_BYTE) << shifts
        out[part] = codes.sum(-1, dtype=torch.uint8)
    return out.view(*t.shape[:-1], width)


def unpack(
    packed: torch.Tensor,
    size_k: int,
    *,
    strict: bool = False,
    name: str = "packed_ternary_weight",
) -> torch.Tensor:
    """Unpacks uint8 ``[..., ceil(K / 4)]`` into int8 ``[..., K]``.

    Code 3 is read as 0, or refused with ``strict``. Codes beyond K are not
    looked at. Raises TernaryFormatError for a wrong dtype or width.
    """
    check_packed(packed, packed.shape[:-1], size_k, name=name)
    if strict:
        check_codes(packed, size_k, strict=True, name=name)
    rows = packed.reshape(-1, packed.shape[-1])
    out = torch.empty(rows.shape[0], size_k, dtype=torch.int8, device=packed.device)
    for part in row_chunks(rows.shape[0], 4 * size_k):
        codes = _codes(rows[part]).view(torch.int8)
        out[part] = ((codes & 1) - (codes >> 1))[:, :size_k]
    return out.view(*packed.shape[:-1], size_k)


def count_reserved(packed: torch.Tensor, size_k: int) -> int:
    """Number of weights (padding not counted) whose code is the reserved 3."""
    rows, total = packed.reshape(-1, packed.shape[-1]), 0
    for part in row_chunks(rows.shape[0], 4 * size_k):
        total += int((_codes(rows[part])[:, :size_k] == 3).sum())
    return total


def count_padding(packed: torch.Tensor, size_k: int) -> int:
    """Number of codes beyond K that are not 0, as they must be."""
    rest = packed_width(size_k) * CODES_PER_BYTE - size_k
    if not rest:
        return 0
    last = packed[..., -1:].reshape(-1, 1)
    return int((_codes(last)[:, CODES_PER_BYTE - rest :] != 0).sum())


def clear_padding(packed: torch.Tensor, size_k: int) -> torch.Tensor:
    """``packed`` with every code beyond K set to 0 (a copy if any was not)."""
    if not count_padding(packed, size_k):
        return packed
    packed = packed.clone()
    packed[..., -1] &= (1 << 2 * (size_k % CODES_PER_BYTE)) - 1
    return packed


# --------------------------------------------------------------------------
# Weights


def dequantize(
    t: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None = None,
    block_size: BlockSize = DEFAULT_BLOCK_SIZE,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """``W = scale * (t - zero_point)`` as ``[..., N, K]`` of ``dtype``.

    Computed in float32 (float64 for a float64 result), then rounded once to
    ``dtype``. Raises TernaryFormatError if the scale's shape does not fit.
    """
    size_k, leading = t.shape[-1], t.shape[:-1]
    check_scale(scale, leading, size_k, block_size, values=False)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    block = block_length(size_k, block_size)
    rows = t.reshape(-1, size_k)

    def by_row(x: torch.Tensor) -> torch.Tensor:
        x = expand_scale(x, leading, size_k, block_size)
        return x.reshape(rows.shape[0], -1)

    scale = by_row(scale)
    if zero_point is not None:
        check_zero_point(zero_point, leading, size_k, block_size, values=False)
        zero_point = by_row(zero_point)
    out = torch.empty(rows.shape, dtype=dtype, device=t.device)
    for part in row_chunks(rows.shape[0], 8 * size_k):
        w = as_blocks(rows[part].to(wide), block)
        if zero_point is not None:
            w -= zero_point[part].to(wide).unsqueeze(-1)
        w *= scale[part].to(wide).unsqueeze(-1)
        out[part] = w.flatten(1)[:, :size_k].to(dtype)
    return out.view(t.shape)


# --------------------------------------------------------------------------
# Blocks along K


@dataclass(frozen=True)
class KSlice:
    """Columns [start, stop) of a ternary weight, see ``slice_k``."""

    packed: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    lead: int
    """Codes of value 0 in front of the first column, so that block 0 begins at
    k = 0: the activation needs as many zeros in front."""
    size_k: int
    """lead + stop - start"""


def lead_padding(start: int, stop: int, size_k: int, block_size: BlockSize) -> int:
    """Zero codes that ``slice_k`` puts in front of column ``start``: its distance
    to the block's begin, or 0 if one block holds all columns asked for."""
    block = block_length(size_k, block_size)
    if stop <= start or start // block == (stop - 1) // block:
        return 0
    return start % block


def slice_k(
    packed: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    size_k: int,
    block_size: BlockSize,
    start: int,
    stop: int,
) -> KSlice:
    """Columns [start, stop) of a weight ``[..., N, K]``, exact for every start.

    The codes are unpacked, cut at their true positions and packed again behind
    ``lead`` zeros that restore the alignment with the blocks; scales and zero
    points are cut in step. The parts are copies, never views.
    """
    if not 0 <= start <= stop <= size_k:
        raise TernaryFormatError(
            "packed_ternary_weight",
            f"columns [{start}, {stop}) are not within K = {size_k}",
            "Cut within the weight",
        )
    block = block_length(size_k, block_size)
    lead = lead_padding(start, stop, size_k, block_size)
    begin = start - lead
    blocks = slice(start // block, max(start // block + 1, -(-stop // block)))

    def cut(x: torch.Tensor | None) -> torch.Tensor | None:
        if x is None or block_size == "tensor":
            return None if x is None else x.clone()
        return x[..., blocks].contiguous().clone()

    width = stop - begin
    first, rest = divmod(begin, CODES_PER_BYTE)
    part = packed[..., first : packed_width(stop)]
    if rest:
        part = pack(unpack(part, rest + width)[..., rest:])
    else:
        part = _zero_outside(part.contiguous().clone(), lead, width)
    new_scale = cut(scale)
    assert new_scale is not None
    return KSlice(part, new_scale, cut(zero_point), lead, width)


def _zero_outside(packed: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Sets the codes outside [begin, end) of ``packed`` to 0, in place."""
    first, rest = divmod(begin, CODES_PER_BYTE)
    packed[..., :first] = 0
    if rest:
        packed[..., first] &= (0xFF << 2 * rest) & 0xFF
    if end % CODES_PER_BYTE:
        packed[..., -1] &= (1 << 2 * (end % CODES_PER_BYTE)) - 1
    return packed


def split_blocks(x: torch.Tensor, size_k: int, old: int, new: int) -> torch.Tensor:
    """Scales (or zero points) ``[..., ceil(K / old)]`` of blocks of ``old`` for
    blocks of ``new``, which must divide ``old``: the same weights, exactly."""
    if new <= 0 or old % new:
        raise TernaryFormatError(
            "weight_scale",
            f"blocks of {old} do not split into blocks of {new}",
            "Choose a divisor of the block size",
        )
    x = x.repeat_interleave(old // new, dim=-1)
    return x[..., : num_blocks(size_k, new)].contiguous()


def merge_blocks(
    x: torch.Tensor, size_k: int, old: int, new: BlockSize
) -> torch.Tensor | None:
    """Scales (or zero points) ``[..., ceil(K / old)]`` of blocks of ``old`` for
    blocks of ``new`` (a multiple of ``old``, ``"row"`` or ``"tensor"``): only
    where all that fall together are equal, else None. Nothing is rounded."""
    if new == "tensor":
        first = x.reshape(-1)[:1]
        return first.clone() if bool((x == first).all()) else None
    whole = num_blocks(size_k, old)
    group = whole if new == "row" else new // old
    if new != "row" and (group < 1 or new % old):
        raise TernaryFormatError(
            "weight_scale",
            f"blocks of {old} do not merge into blocks of {new}",
            "Choose a multiple of the block size",
        )
    first = x[..., ::group]
    spread = first.repeat_interleave(group, dim=-1)[..., :whole]
    return first.contiguous() if bool((x == spread).all()) else None


# --------------------------------------------------------------------------
# Checks


def check_packed(
    packed: torch.Tensor | None,
    leading: Sequence[int],
    size_k: int,
    *,
    name: str = "packed_ternary_weight",
) -> torch.Tensor:
    """Returns ``packed`` if it is uint8 ``[*leading, ceil(K / 4)]``; raises
    TernaryFormatError otherwise."""
    if packed is None:
        raise TernaryFormatError(
            name,
            "is missing",
            "Convert the checkpoint again, or list the module in "
            "modules_to_not_convert if it is not ternary",
        )
    if packed.dtype != torch.uint8:
        raise TernaryFormatError(
            name,
            f"dtype is {dtype_name(packed.dtype)} where packed bytes (uint8) are due",
            "Store the packed bytes as uint8 and never convert them to another dtype",
        )
    want = (*leading, packed_width(size_k))
    if tuple(packed.shape) != want:
        raise TernaryFormatError(
            name,
            f"shape is {list(packed.shape)}, expected {list(want)} for K = {size_k} "
            "(four weights per byte along K)",
            "Check that the checkpoint and config.json belong to the same model",
        )
    return packed


def check_codes(
    packed: torch.Tensor,
    size_k: int,
    *,
    strict: bool = False,
    name: str = "packed_ternary_weight",
) -> int:
    """Number of reserved codes (3), which are read as 0. With ``strict`` raises
    TernaryFormatError if there is one, or if a code beyond K is not 0."""
    count = count_reserved(packed, size_k)
    if strict and count:
        raise TernaryFormatError(
            name,
            f"{count} weights have the reserved code 3",
            "Convert the checkpoint again; without `strict` they are read as 0",
        )
    if strict and (extra := count_padding(packed, size_k)):
        raise TernaryFormatError(
            name,
            f"{extra} padding codes beyond K = {size_k} are not 0",
            "Convert the checkpoint again; without `strict` they are ignored",
        )
    return count


def check_scale(
    scale: torch.Tensor | None,
    leading: Sequence[int],
    size_k: int,
    block_size: BlockSize,
    *,
    dtype: torch.dtype | None = None,
    values: bool = True,
    name: str = "weight_scale",
) -> torch.Tensor:
    """Returns ``scale`` if dtype (``dtype``, or any of SCALE_DTYPES), shape and,
    with ``values``, values (finite, not negative) are right; raises
    TernaryFormatError otherwise."""
    allowed = SCALE_DTYPES if dtype is None else (dtype,)
    scale = _check_per_block(scale, leading, size_k, block_size, allowed, name)
    if values:
        _check_values(scale, scale.isfinite() & (scale >= 0), name)
    return scale


def check_zero_point(
    zero_point: torch.Tensor | None,
    leading: Sequence[int],
    size_k: int,
    block_size: BlockSize,
    *,
    values: bool = True,
    name: str = "weight_zero_point",
) -> torch.Tensor:
    """As check_scale, for a zero point: float32 or int32, finite."""
    allowed = ZERO_POINT_DTYPES
    zero_point = _check_per_block(
        zero_point, leading, size_k, block_size, allowed, name
    )
    if values:
        _check_values(zero_point, zero_point.isfinite(), name)
    return zero_point


def _check_per_block(x, leading, size_k, block_size, allowed, name) -> torch.Tensor:
    if x is None:
        raise TernaryFormatError(
            name,
            "is missing",
            "A packed_ternary_weight needs it beside it: convert the checkpoint again",
        )
    if x.dtype not in allowed:
        wanted = " or ".join(map(dtype_name, allowed))
        raise TernaryFormatError(
            name,
            f"dtype is {dtype_name(x.dtype)}, expected {wanted}",
            "Make the checkpoint and quantization_config agree",
        )
    want = scale_shape(leading, size_k, block_size)
    if tuple(x.shape) != want:
        raise TernaryFormatError(
            name,
            f"shape is {list(x.shape)}, expected {list(want)} for K = {size_k} and "
            f"block size {block_size}",
            "Set block_size in quantization_config to the size the checkpoint was "
            "made with",
        )
    return x


def _check_values(x: torch.Tensor, good: torch.Tensor, name: str) -> None:
    if bool(good.all()):
        return
    index = (~good).nonzero()[0].tolist()
    raise TernaryFormatError(
        name,
        f"value {float(x[tuple(index)])} at {index} "
        f"({int((~good).sum())} such values in all) is not allowed",
        "It must be finite (and a scale not negative): convert the checkpoint again",
    )


# --------------------------------------------------------------------------
# Helpers


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name as config.json has it."""
    return str(dtype).removeprefix("torch.")


def row_chunks(rows: int, row_bytes: int) -> Iterator[slice]:
    """Slices over ``rows`` of about CHUNK_BYTES each."""
    step = max(1, CHUNK_BYTES // max(1, row_bytes))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _shifts(device: torch.device) -> torch.Tensor:
    return torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=device)


def _codes(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [R, B] to uint8 codes [R, 4 * B]."""
    return ((packed.unsqueeze(-1) >> _shifts(packed.device)) & 3).flatten(1)


def as_blocks(rows: torch.Tensor, block: int) -> torch.Tensor:
    """[R, K] to [R, ceil(K / block), block], the last block completed with 0."""
    size_k = rows.shape[-1]
    rows = F.pad(rows, (0, -size_k % block))
    return rows.view(rows.shape[0], -1, block)
