# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Conversion between the disk layout and the CPU kernels' layout.

Disk (see ``ternary_format.py``): ``packed`` uint8 ``[N, ceil(K/4)]``, four
codes per byte along K, low bits first, ``00 -> 0``, ``01 -> +1``,
``10 -> -1``; ``scale`` ``[N, nblocks]``.

CPU: ``weight`` int32 ``[N_pad/64, K_pad/16, 64]``. Word ``[i, g, r]`` holds
the 16 weights ``k = 16*g .. 16*g + 15`` of row ``64*i + r``, two bits each,
low bits first, as ``t + 1``. So the lanes of a vector are consecutive rows:
a kernel broadcasts x and never sums across lanes, and its per-row scales are
one vector load. ``scale`` and ``zero_point`` are block-major
``[nblocks, N_pad]`` and keep their dtype.

Padding: N to a multiple of 64 (scale 0); with more than one block, every
block of K to a multiple of 16; K as a whole to a multiple of 64. Padding
reads as weight 0. The kernels lay x out in the same padded K.
"""

import torch

ROWS_PER_TILE = 64
CODES_PER_WORD = 16
K_ALIGN = 64

# Bound on the temporaries of a conversion, in weights handled at once.
_CHUNK_WEIGHTS = 1 << 22

# Code byte by byte: disk code -> t + 1 (the reserved 11 reads as 0), and back.
_TO_DEVICE = (1, 2, 0, 1)
_TO_DISK = (2, 0, 1, 0)


def _byte_table(codes: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return uint8 [256] that maps each of a byte's four codes."""
    byte = torch.arange(256)
    code = torch.tensor(codes)
    table = sum(code[(byte >> s) & 3] << s for s in (0, 2, 4, 6))
    return table.to(torch.uint8).to(device)


def k_layout(size_k: int, block_size: int) -> tuple[int, int, int]:
    """Return ``(nblocks, block_pad, k_pad)``, the kernels' view of K.

    Weight ``k`` of block ``b = k // block_size`` sits at
    ``b * block_pad + k % block_size`` of ``k_pad``.
    """
    if size_k <= 0 or block_size <= 0 or block_size % 4:
        raise ValueError(
            f"size_k={size_k} must be positive and block_size={block_size} a "
            "positive multiple of 4"
        )
    if block_size >= size_k:
        k_pad = -(-size_k // K_ALIGN) * K_ALIGN
        return 1, k_pad, k_pad
    nblocks = -(-size_k // block_size)
    block_pad = -(-block_size // CODES_PER_WORD) * CODES_PER_WORD
    return nblocks, block_pad, -(-nblocks * block_pad // K_ALIGN) * K_ALIGN


def padded_rows(size_n: int) -> int:
    """Return N rounded up to whole tiles."""
    return -(-size_n // ROWS_PER_TILE) * ROWS_PER_TILE


def encode(
    packed: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    size_k: int,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Convert one weight from the disk layout to the CPU layout.

    Args:
        packed: uint8 ``[N, ceil(size_k/4)]``.
        scale: float16, bfloat16 or float32 ``[N, nblocks]``.
        zero_point: float32 or int32 of the scale's shape, or None.
        size_k: number of weights in a row.
        block_size: weights per scale; at least ``size_k`` means one per row.

    Returns:
        ``(weight, scale, zero_point)`` as described at the top of this file.

    Raises:
        ValueError: a shape or dtype does not match.

    """
    size_n = packed.shape[0]
    nblocks, block_pad, k_pad = k_layout(size_k, block_size)
    nbytes = -(-size_k // 4)
    if packed.dtype != torch.uint8 or packed.shape != (size_n, nbytes):
        raise ValueError(
            f"packed is {packed.dtype} {list(packed.shape)}; size_k={size_k} "
            f"asks for torch.uint8 [N, {nbytes}]"
        )
    for name, tensor in (("scale", scale), ("zero_point", zero_point)):
        if tensor is not None and tensor.shape != (size_n, nblocks):
            raise ValueError(
                f"{name} is {list(tensor.shape)}; size_k={size_k} with "
                f"block_size={block_size} asks for [{size_n}, {nblocks}]"
            )

    device = packed.device
    n_pad = padded_rows(size_n)
    table = _byte_table(_TO_DEVICE, device)
    # One byte per four codes: rows of blocks, each padded to block_pad.
    block_bytes = nbytes if nblocks == 1 else block_size // 4
    pad_bytes = block_pad // 4
    tail = size_k % 4
    weight = torch.empty(
        (n_pad // ROWS_PER_TILE, k_pad // CODES_PER_WORD, ROWS_PER_TILE),
        dtype=torch.int32,
        device=device,
    )
    for tile, end in _row_chunks(n_pad, k_pad):
        first, last = tile * ROWS_PER_TILE, min(end * ROWS_PER_TILE, size_n)
        rows = (end - tile) * ROWS_PER_TILE
        codes = torch.full((rows, k_pad // 4), 0x55, dtype=torch.uint8, device=device)
        chunk = table[packed[first:last].long()]
        if tail:  # codes beyond size_k in the last byte must not count
            keep = (1 << (2 * tail)) - 1
            chunk[:, -1] = (chunk[:, -1] & keep) | (0x55 & ~keep)
        whole = size_k // block_size if nblocks > 1 else 0
        if whole:
            view = codes[: last - first, : whole * pad_bytes]
            view.view(last - first, whole, pad_bytes)[:, :, :block_bytes] = chunk[
                :, : whole * block_bytes
            ].reshape(last - first, whole, block_bytes)
        rest = nbytes - whole * block_bytes
        if rest:
            start = whole * pad_bytes
            codes[: last - first, start : start + rest] = chunk[:, nbytes - rest :]
        words = codes.view(torch.int32).view(end - tile, ROWS_PER_TILE, -1)
        weight[tile:end] = words.transpose(1, 2)

    return (
        weight,
        _to_block_major(scale, n_pad),
        (None if zero_point is None else _to_block_major(zero_point, n_pad)),
    )


def decode(
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    size_n: int,
    size_k: int,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Convert back; the inverse of :func:`encode`, bit for bit.

    The reserved code 11 was read as 0 by :func:`encode` and comes back as 00,
    as do the unused bits of a row's last byte.

    Args:
        weight: int32 ``[N_pad/64, K_pad/16, 64]``.
        scale: ``[nblocks, N_pad]``.
        zero_point: ``[nblocks, N_pad]`` or None.
        size_n: number of rows.
        size_k: number of weights in a row.
        block_size: weights per scale.

    Returns:
        ``(packed, scale, zero_point)`` in the disk layout.

    Raises:
        ValueError: the weight's shape does not match the sizes.

    """
    nblocks, block_pad, k_pad = k_layout(size_k, block_size)
    n_pad = padded_rows(size_n)
    shape = (n_pad // ROWS_PER_TILE, k_pad // CODES_PER_WORD, ROWS_PER_TILE)
    if weight.dtype != torch.int32 or tuple(weight.shape) != shape:
        raise ValueError(
            f"weight is {weight.dtype} {list(weight.shape)}; size_n={size_n}, "
            f"size_k={size_k}, block_size={block_size} ask for torch.int32 "
            f"{list(shape)}"
        )
    device = weight.device
    nbytes = -(-size_k // 4)
    table = _byte_table(_TO_DISK, device)
    block_bytes = nbytes if nblocks == 1 else block_size // 4
    pad_bytes = block_pad // 4
    packed = torch.empty((size_n, nbytes), dtype=torch.uint8, device=device)
    for tile, end in _row_chunks(n_pad, k_pad):
        first, last = tile * ROWS_PER_TILE, min(end * ROWS_PER_TILE, size_n)
        codes = weight[tile:end].transpose(1, 2).contiguous().view(torch.uint8)
        codes = codes.view((end - tile) * ROWS_PER_TILE, k_pad // 4)[: last - first]
        blocks = codes[:, : nblocks * pad_bytes].view(-1, nblocks, pad_bytes)
        chunk = blocks[:, :, :block_bytes].reshape(last - first, -1)[:, :nbytes]
        packed[first:last] = table[chunk.long()]
    return (
        packed,
        _to_disk_major(scale, size_n),
        (None if zero_point is None else _to_disk_major(zero_point, size_n)),
    )


def _row_chunks(n_pad: int, k_pad: int):
    """Yield ``(first, end)`` tiles that bound the temporaries."""
    tiles = n_pad // ROWS_PER_TILE
    step = max(1, _CHUNK_WEIGHTS // (k_pad * ROWS_PER_TILE))
    for first in range(0, tiles, step):
        yield first, min(first + step, tiles)


def _to_block_major(value: torch.Tensor, n_pad: int) -> torch.Tensor:
    out = value.new_zeros((value.shape[1], n_pad))
    out[:, : value.shape[0]] = value.t()
    return out


def _to_disk_major(value: torch.Tensor, size_n: int) -> torch.Tensor:
    return value[:, :size_n].t().contiguous()
