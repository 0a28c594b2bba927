# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Packed ternary weights in the order in which the CUDA kernels read them.

On disk a weight is two bits, four along K to a byte (``00`` 0, ``01`` +1, ``10`` -1,
``11`` reserved, read as 0). On a CUDA device it is the code ``t + 1`` in an int32
tensor ``[N_pad / 16, K_pad / 128, 32, 4]``: one 16 x 128 tile is 512 consecutive
bytes, of which lane ``l`` of a warp loads 16. With ``g = l // 4`` and ``t = l % 4``,
word ``j`` of the lane holds k-steps ``2j`` and ``2j + 1`` (16 weights along K each) of
the tile. Inside the word, bit ``2 * (4 * s + i) + 16 * h`` starts the code of step
``s``, register ``i`` and half ``h`` of the A operand of ``mma.m16n8k16``::

    row = 16 * R + g + 8 * (i % 2)
    k = 128 * T + 32 * j + 16 * s + 8 * (i // 2) + 2 * t + h

``N_pad`` is N rounded up to 64, ``K_pad`` is K rounded up to 128, and padding is code 1
(zero). Scales and zero points are ``[num_blocks, N_pad]``, padded with 0.

This module uses torch operations only, runs on the device of its inputs, and needs
temporaries of a fixed size (:data:`CHUNK_BYTES` per step, a handful of steps).
"""

import torch

ROW_TILE = 16
ROW_ALIGN = 64
K_ALIGN = 128
CHUNK_BYTES = 1 << 22

# Disk code -> t + 1, and back. The reserved code 3 reads as zero.
_TO_DEVICE = (1, 2, 0, 1)
_TO_DISK = (2, 0, 1, 0)
_MAX_EXACT_INT = 1 << 24


def padded_shape(size_n: int, size_k: int) -> tuple[int, int]:
    """Return ``(N_pad, K_pad)``, the sizes of a weight on the device."""
    return _round_up(size_n, ROW_ALIGN), _round_up(size_k, K_ALIGN)


def encode(
    packed: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    size_k: int,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Reorder a weight from the checkpoint's layout into the device's.

    Args:
        packed: uint8 ``[N, ceil(size_k / 4)]``. Codes past ``size_k`` are ignored.
        scale: float16, bfloat16 or float32 ``[N, ceil(size_k / block_size)]``.
        zero_point: float32 or int32 of ``scale``'s shape, or None.
        size_k: number of weights in a row.
        block_size: weights along K that share a scale; ``>= size_k`` is one scale a
            row.

    Returns:
        ``(weight, scale, zero_point)``: int32 ``[N_pad/16, K_pad/128, 32, 4]``,
        ``[blocks, N_pad]`` in the dtype of ``scale``, float32 ``[blocks, N_pad]`` or
        None.

    Raises:
        ValueError: a shape or dtype does not fit, or an int32 zero point is not exact
            in float32.

    """
    _check_disk(packed, scale, zero_point, size_k, block_size)
    size_n = packed.shape[0]
    n_pad, k_pad = padded_shape(size_n, size_k)
    weight = torch.empty(
        (n_pad // ROW_TILE, k_pad // K_ALIGN, 32, 4),
        dtype=torch.int32,
        device=packed.device,
    )
    table = _byte_table(_TO_DEVICE, packed.device)
    pad_byte = 0b01010101
    tail = size_k % 4
    rows = _rows_per_chunk(k_pad)
    for begin in range(0, n_pad, rows):
        end = min(begin + rows, n_pad)
        codes = torch.full(
            (end - begin, k_pad // 4), pad_byte, dtype=torch.uint8, device=packed.device
        )
        real = min(end, size_n) - begin
        if real > 0:
            body = table[packed[begin : begin + real].to(torch.int32)]
            if tail:
                keep = (1 << (2 * tail)) - 1
                body[:, -1] = (body[:, -1] & keep) | (pad_byte & ~keep)
            codes[:real, : body.shape[1]] = body
        weight[begin // ROW_TILE : end // ROW_TILE] = _words_from_codes(codes)
    zero_out = None
    if zero_point is not None:
        zero_out = _transpose_padded(_zero_point_float(zero_point), n_pad)
    return weight, _transpose_padded(scale, n_pad), zero_out


def decode(
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    size_n: int,
    size_k: int,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Undo :func:`encode`.

    The result equals the tensors that were encoded, bit for bit, with two exceptions:
    reserved codes and codes past ``size_k`` come back as 0, and an int32 zero point
    comes back as float32.

    Raises:
        ValueError: the tensors are not a ``[size_n, size_k]`` weight in the device's
            layout.

    """
    n_pad, k_pad = padded_shape(size_n, size_k)
    expected = (n_pad // ROW_TILE, k_pad // K_ALIGN, 32, 4)
    if tuple(weight.shape) != expected or weight.dtype != torch.int32:
        raise ValueError(
            f"weight is {weight.dtype} {tuple(weight.shape)}; a [{size_n}, {size_k}] "
            f"weight in the CUDA layout is torch.int32 {expected}"
        )
    blocks = _num_blocks(size_k, block_size)
    for name, tensor in (("scale", scale), ("zero_point", zero_point)):
        if tensor is not None and tuple(tensor.shape) != (blocks, n_pad):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; {blocks} blocks of {n_pad} "
                f"padded rows were expected"
            )
    width = (size_k + 3) // 4
    packed = torch.empty((size_n, width), dtype=torch.uint8, device=weight.device)
    table = _byte_table(_TO_DISK, weight.device)
    tail = size_k % 4
    rows = _rows_per_chunk(k_pad)
    for begin in range(0, size_n, rows):
        end = min(begin + rows, n_pad)
        codes = _codes_from_words(weight[begin // ROW_TILE : end // ROW_TILE])
        real = min(end, size_n) - begin
        body = table[codes[:real, :width].to(torch.int32)]
        if tail:
            body[:, -1] &= (1 << (2 * tail)) - 1
        packed[begin : begin + real] = body
    scale_out = scale[:, :size_n].t().contiguous()
    zero_out = None if zero_point is None else zero_point[:, :size_n].t().contiguous()
    return packed, scale_out, zero_out


def _words_from_codes(codes: torch.Tensor) -> torch.Tensor:
    """Gather code bytes ``[rows, K_pad/4]`` into ``[rows/16, K_pad/128, 32, 4]``."""
    tiles, steps = codes.shape[0] // ROW_TILE, codes.shape[1] * 4 // K_ALIGN
    wide = codes.to(torch.int32)
    # A nibble is the pair (k, k + 1): spread it over the two halves of a word.
    pairs = torch.stack((wide & 15, wide >> 4), dim=-1)
    pairs = (pairs & 3) | ((pairs >> 2) << 16)
    # tile, row half (i % 2), g, k tile, j, s, column half (i // 2), t
    pairs = pairs.view(tiles, 2, 8, steps, 4, 2, 2, 4)
    words = torch.zeros((tiles, steps, 8, 4, 4), dtype=torch.int32, device=codes.device)
    for s in range(2):
        for i in range(4):
            part = pairs[:, i % 2, :, :, :, s, i // 2, :]  # tile, g, k tile, j, t
            words |= part.permute(0, 2, 1, 4, 3) << (2 * (4 * s + i))
    return words.view(tiles, steps, 32, 4)


def _codes_from_words(words: torch.Tensor) -> torch.Tensor:
    """Undo :func:`_words_from_codes`."""
    tiles, steps = words.shape[0], words.shape[1]
    # tile, g, k tile, j, t
    lanes = words.view(tiles, steps, 8, 4, 4).permute(0, 2, 1, 4, 3)
    shape = (tiles, 2, 8, steps, 4, 2, 2, 4)
    pairs = torch.empty(shape, dtype=torch.uint8, device=words.device)
    for s in range(2):
        for i in range(4):
            shifted = lanes >> (2 * (4 * s + i))
            nibble = (shifted & 3) | ((shifted >> 14) & 12)
            pairs[:, i % 2, :, :, :, s, i // 2, :] = nibble.to(torch.uint8)
    nibbles = pairs.view(tiles * ROW_TILE, steps * K_ALIGN // 4, 2)
    return nibbles[..., 0] | (nibbles[..., 1] << 4)


def _byte_table(
    mapping: tuple[int, int, int, int], device: torch.device
) -> torch.Tensor:
    values = [
        sum(mapping[(byte >> (2 * i)) & 3] << (2 * i) for i in range(4))
        for byte in range(256)
    ]
    return torch.tensor(values, dtype=torch.uint8, device=device)


def _transpose_padded(per_row: torch.Tensor, n_pad: int) -> torch.Tensor:
    out = torch.zeros(
        (per_row.shape[1], n_pad), dtype=per_row.dtype, device=per_row.device
    )
    out[:, : per_row.shape[0]] = per_row.t()
    return out


def _zero_point_float(zero_point: torch.Tensor) -> torch.Tensor:
    if zero_point.dtype == torch.int32 and zero_point.numel():
        largest = int(zero_point.to(torch.int64).abs().max())
        if largest > _MAX_EXACT_INT:
            raise ValueError(
                f"weight_zero_point holds {largest}, which float32 cannot hold "
                f"exactly; store zero points of at most {_MAX_EXACT_INT} in size"
            )
    return zero_point.to(torch.float32)


def _check_disk(
    packed: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    size_k: int,
    block_size: int,
) -> None:
    if block_size < 4 or block_size % 4:
        raise ValueError(
            f"block_size is {block_size}; it must be a positive multiple of 4"
        )
    width = (size_k + 3) // 4
    if packed.dtype != torch.uint8 or packed.dim() != 2 or packed.shape[1] != width:
        raise ValueError(
            f"packed_ternary_weight is {packed.dtype} {tuple(packed.shape)}; "
            f"torch.uint8 [N, {width}] was expected for K = {size_k}"
        )
    expected = (packed.shape[0], _num_blocks(size_k, block_size))
    if tuple(scale.shape) != expected:
        raise ValueError(
            f"weight_scale has shape {tuple(scale.shape)}; {expected} was expected for "
            f"K = {size_k} in blocks of {block_size}"
        )
    if scale.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(
            f"weight_scale is {scale.dtype}; use float16, bfloat16 or float32"
        )
    if zero_point is not None:
        if tuple(zero_point.shape) != expected:
            raise ValueError(
                f"weight_zero_point has shape {tuple(zero_point.shape)}; "
                f"{expected} was expected"
            )
        if zero_point.dtype not in (torch.float32, torch.int32):
            raise ValueError(
                f"weight_zero_point is {zero_point.dtype}; use float32 or int32"
            )


def _num_blocks(size_k: int, block_size: int) -> int:
    return (size_k + block_size - 1) // block_size


def _rows_per_chunk(k_pad: int) -> int:
    rows = max(1, CHUNK_BYTES // max(k_pad // 4, 1))
    return _round_up(rows, ROW_ALIGN)


def _round_up(value: int, multiple: int) -> int:
    return (value + multiple - 1) // multiple * multiple
