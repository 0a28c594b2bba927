# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""From floating-point weights to the ``ternary`` format of ``ternary_format.py``.

Three ways: the mean magnitude as scale, the least squared error, and the lossless
detection of weights that are ternary already. Results are exact in the sense of
each function's text, and the same on every device: decisions are made in float64.
"""

import torch

from .ternary_format import (
    DEFAULT_BLOCK_SIZE,
    BlockSize,
    TernaryFormatError,
    as_blocks,
    block_length,
    check_block_size,
    dtype_name,
    expand_scale,
    num_blocks,
    row_chunks,
    scale_shape,
)


def quantize_absmean(
    w: torch.Tensor,
    block_size: BlockSize = DEFAULT_BLOCK_SIZE,
    scale_dtype: torch.dtype = torch.float16,
    *,
    min_scale: float = 0.0,
    name: str = "weight",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes ``[..., N, K]`` with the mean magnitude of each block as scale.

    The mean is taken in float64 over the block's true weights, raised to
    ``min_scale`` if below, and rounded to ``scale_dtype``; with that rounded s,
    ``t = clamp(round_half_even(w / s), -1, 1)``, that is ``sign(w)`` where
    ``2 * |w| > s``, else 0. A scale of 0 gives zeros. Returns (t int8, scale).
    Raises TernaryFormatError for weights that are not finite or a mean that
    ``scale_dtype`` cannot hold.
    """

    def mean(rows: torch.Tensor, block: int, counts: torch.Tensor) -> torch.Tensor:
        total = as_blocks(rows.to(torch.float64).abs_(), block).sum(-1)
        return round_to((total / counts).clamp_(min=min_scale), scale_dtype)

    return _quantize(w, block_size, scale_dtype, mean, name)


def quantize_mse(
    w: torch.Tensor,
    block_size: BlockSize = DEFAULT_BLOCK_SIZE,
    scale_dtype: torch.dtype = torch.float16,
    *,
    name: str = "weight",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes ``[..., N, K]`` with the least squared error of each block.

    The optimum over all t and all scales that ``scale_dtype`` can hold: with
    the m largest magnitudes kept, the best scale is their mean rounded to
    ``scale_dtype``, so every m is tried (sums in float64; the smallest m wins a
    tie). Returns and raises as quantize_absmean. Block size ``"tensor"`` needs
    temporaries of 40 bytes per weight.
    """

    def best(rows: torch.Tensor, block: int, counts: torch.Tensor) -> torch.Tensor:
        magnitude = as_blocks(rows.abs(), block).sort(dim=-1, descending=True).values
        total = magnitude.to(torch.float64).cumsum(-1)
        m = torch.arange(1, total.shape[-1] + 1, device=w.device, dtype=torch.float64)
        s = round_to(total / m, scale_dtype).to(torch.float64)
        # The squared error saved against all zeros; NaN where the scale is beyond
        # the dtype's range.
        gain = 2 * s * total - m * s * s
        index = gain.nan_to_num_(nan=-torch.inf).argmax(-1, keepdim=True)
        return s.gather(-1, index).squeeze(-1).to(scale_dtype)

    return _quantize(w, block_size, scale_dtype, best, name)


def find_ternary(
    w: torch.Tensor,
    block_size: BlockSize = DEFAULT_BLOCK_SIZE,
    scale_dtype: torch.dtype = torch.float16,
    *,
    name: str = "weight",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ternary integers and scales of a floating-point weight ``[..., N, K]`` that
    already is ternary, without loss.

    Each block must hold nothing but -s, 0 and +s, and ``scale_dtype`` must hold
    s exactly; a block of zeros has s = 0. (-0.0 counts as 0.) Returns (t int8,
    scale); ``dequantize`` gives back exactly ``w``. Raises TernaryFormatError
    naming the tensor, the first block that fails and its values.
    """
    check_block_size(block_size, name)
    _check_float(w, name)
    size_k, leading = w.shape[-1], w.shape[:-1]
    rows = w.reshape(-1, size_k)
    block = block_length(size_k, block_size)
    t = torch.empty(rows.shape, dtype=torch.int8, device=w.device)
    shape = scale_shape((rows.shape[0],), size_k, block_size)
    scale = torch.empty(shape, dtype=scale_dtype, device=w.device)
    whole = None
    if block_size == "tensor":
        low, high = rows.aminmax()
        whole = torch.maximum(-low, high)
    for part in row_chunks(rows.shape[0], 16 * size_k):
        chunk = rows[part]
        if not chunk.isfinite().all():
            _raise_not_finite(chunk, part, leading, size_k, block_size, name)
        blocks = as_blocks(chunk, block)
        magnitude = blocks.abs()
        s = magnitude.amax(-1) if whole is None else whole.expand(len(chunk), 1)
        other = (magnitude != 0) & (magnitude != s.unsqueeze(-1))
        if other.any():
            row, index = other.any(-1).nonzero()[0].tolist()
            first = magnitude[row, index][other[row, index]][0]
            where = _block_name(part.start + row, index, leading, size_k, block_size)
            raise TernaryFormatError(
                name,
                f"{where} is not ternary: it holds magnitudes "
                f"{float(s[row, index])!r} and {float(first)!r}",
                "Convert with the block size the weights were made with, leave the "
                "module unconverted, or quantize it (which loses information)",
            )
        kept = s.to(scale_dtype)
        changed = kept.to(torch.float64) != s.to(torch.float64)
        if changed.any():
            row, index = changed.nonzero()[0].tolist()
            where = _block_name(part.start + row, index, leading, size_k, block_size)
            raise TernaryFormatError(
                name,
                f"{where} has scale {float(s[row, index])!r}, which "
                f"{dtype_name(scale_dtype)} cannot hold exactly",
                f"Choose a wider scale dtype ({dtype_name(w.dtype)} holds it)",
            )
        if whole is None:
            scale[part] = kept
        else:
            scale.copy_(kept[0])
        t[part] = blocks.sign().to(torch.int8).flatten(1)[:, :size_k]
    return t.view(w.shape), scale.view(scale_shape(leading, size_k, block_size))


def round_to(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float64 to ``dtype``, to nearest, ties to even, in one rounding. (torch
    goes through float32 on the way to 16 bits and may round twice.)"""
    if dtype in (torch.float32, torch.float64):
        return x.to(dtype)
    near = x.to(torch.float32)
    error = x - near.to(torch.float64)
    # Round to odd: of the two float32 neighbours of x take the odd one. Sixteen
    # bits and float32 differ by enough bits for the second rounding to be right.
    even = (near.view(torch.int32) & 1) == 0
    inexact = near.isfinite() & (error != 0) & even
    toward = torch.where(error > 0, torch.inf, -torch.inf).to(torch.float32)
    return torch.where(inexact, torch.nextafter(near, toward), near).to(dtype)


def _quantize(w, block_size, scale_dtype, scale_of, name):
    """Quantizes by chunks of rows; ``scale_of(rows, block, counts)`` gives the
    scales ``[rows, blocks]`` of full blocks of which ``counts`` weights are true."""
    check_block_size(block_size, name)
    _check_float(w, name)
    size_k, leading = w.shape[-1], w.shape[:-1]
    rows = w.reshape(-1, size_k)
    block, count = block_length(size_k, block_size), num_blocks(size_k, block_size)
    counts = torch.full((count,), block, device=w.device, dtype=torch.float64)
    counts[-1] = size_k - (count - 1) * block
    t = torch.empty(rows.shape, dtype=torch.int8, device=w.device)
    scale = torch.empty(
        scale_shape((rows.shape[0],), size_k, block_size),
        dtype=scale_dtype,
        device=w.device,
    )
    if block_size == "tensor":
        one = w.reshape(1, -1)
        total = torch.tensor([one.shape[-1]], dtype=torch.float64, device=w.device)
        scale.copy_(scale_of(one, one.shape[-1], total).view(1))
    for part in row_chunks(rows.shape[0], 40 * size_k):
        chunk = rows[part]
        if not chunk.isfinite().all():
            _raise_not_finite(chunk, part, leading, size_k, block_size, name)
        if block_size != "tensor":
            scale[part] = scale_of(chunk, block, counts)
        s = expand_scale(scale, (rows.shape[0],), size_k, block_size)[part]
        if not s.isfinite().all():
            row, index = (~s.isfinite()).nonzero()[0].tolist()
            where = _block_name(part.start + row, index, leading, size_k, block_size)
            raise TernaryFormatError(
                name,
                f"the scale of {where} exceeds the range of {dtype_name(scale_dtype)}",
                "Choose scale dtype bfloat16 or float32",
            )
        blocks, wide = as_blocks(chunk.to(torch.float64), block), s.to(torch.float64)
        keep = (2 * blocks.abs() > wide.unsqueeze(-1)) & (wide > 0).unsqueeze(-1)
        signs = blocks.sign_().mul_(keep).to(torch.int8)
        t[part] = signs.flatten(1)[:, :size_k]
    return t.view(w.shape), scale.view(scale_shape(leading, size_k, block_size))


def _check_float(w: torch.Tensor, name: str) -> None:
    if not w.dtype.is_floating_point:
        raise TernaryFormatError(
            name,
            f"dtype is {dtype_name(w.dtype)} where a floating-point weight is due",
            "Give the full-precision weight",
        )


def _block_name(row, index, leading, size_k, block_size) -> str:
    """Words for a block: its place in the tensor and its columns."""
    if block_size == "tensor":
        return "the tensor"
    place: list[int] = []
    for size in reversed(leading):
        row, rest = divmod(row, size)
        place.insert(0, rest)
    at = f"row {place[-1]}" if len(place) == 1 else f"row {place}"
    block = block_length(size_k, block_size)
    first, last = index * block, min((index + 1) * block, size_k) - 1
    return f"block {index} of {at} (columns {first} to {last})"


def _raise_not_finite(rows, part, leading, size_k, block_size, name) -> None:
    row, column = (~rows.isfinite()).nonzero()[0].tolist()
    index = column // block_length(size_k, block_size)
    where = _block_name(part.start + row, index, leading, size_k, block_size)
    raise TernaryFormatError(
        name,
        f"{where} holds {float(rows[row, column])}",
        "A weight must be finite: check the source checkpoint",
    )
