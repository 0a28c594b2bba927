# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The Hopper kernels, emulated: every tile that a plan may name, alone and split along
K, one and several tiles for a thread block, under several seeds."""

import harness
import numpy as np
import pytest
import torch
from harness import BFLOAT16, FLOAT, HALF, ROW, TOLERANCE, some

DTYPES = [HALF, BFLOAT16]

# Warpgroups, tiles of 64 rows each, tokens, sets.
S8_ROWS = [(2, 2, 128, 1), (3, 1, 128, 1), (2, 1, 128, 1), (3, 2, 64, 1), (2, 2, 64, 1)]
S8_ROWS += [(3, 1, 64, 1), (4, 1, 64, 1), (2, 1, 64, 2), (2, 1, 64, 1)]
S8_BLOCKS = [(2, 1, 128, 1), (3, 1, 64, 1), (2, 1, 64, 1)]


def s8_case(seed, tile, split, parts, k, scale_dtype, block, dtype, emulator, ragged):
    rng = np.random.default_rng(seed)
    rows, tokens = tile[0] * tile[1] * 64, tile[2]
    n = rows + 37 if ragged in (1, 4) else 2 * rows - 24
    m = tokens + 19 if ragged % 3 else tokens - 5
    w = harness.make_weight(rng, n, k, block, scale_dtype)
    q = harness.make_quantized(rng, parts, m, k, w.k_pad)
    ends = sorted(rng.integers(0, n + 1, parts - 1).tolist()) + [n]
    bias = torch.from_numpy(rng.standard_normal(n)).to(dtype) if seed % 2 else None
    y = harness.w2a8(
        emulator, "sm90_s8", (*tile, split), q, w, dtype, bias=bias, ends=ends,
        seed=seed, extra=[2 if seed % 2 else 1],
    )  # fmt: skip
    assert harness.error(y, harness.expected_w2a8(q, w, bias, ends)) < TOLERANCE[dtype]


def s8_cases(tiles, tile, blocks, emulator):
    """Every split; in the short form one or two of them, by the tile's place."""
    turn = tiles.index(tile)
    for i, split in some((1, 2, 4, 8, 1), turn, 1):
        # Of the short form's two, one in each type.
        dtype = DTYPES[(i + turn) % 2 if i else 0]
        k = (1111, 2500, 2700, 4300, 3300)[i]
        scale_dtype = (FLOAT, HALF, BFLOAT16)[i % 3]
        seed = i + 10 * sum(tile)
        s8_case(
            seed, tile, split, 1 + i % 3, k, scale_dtype, blocks[i], dtype, emulator, i
        )  # fmt: skip


@pytest.mark.parametrize("tile", S8_ROWS)
def test_s8_scale_per_row(emulators, tile):
    s8_cases(S8_ROWS, tile, [ROW] * 5, emulators[900])


@pytest.mark.parametrize("tile", S8_BLOCKS)
def test_s8_scale_per_block(emulators, tile):
    s8_cases(S8_BLOCKS, tile, (128, 384, 128, 256, 1024), emulators[900])


# Tiles of 64 rows, sets of warpgroups, tokens, thread blocks of a multiprocessor.
FEW = [(3, 2, 8, 1), (1, 3, 8, 2), (3, 2, 16, 1), (1, 3, 16, 2), (3, 1, 32, 1)]
FEW += [(1, 3, 32, 2), (3, 1, 64, 1), (2, 2, 64, 1), (1, 4, 64, 1)]


def gemm_case(emulator, name, choice, seed, m, n, k, block, dtype, scale_dtype, extra):
    rng = np.random.default_rng(seed)
    w = harness.make_weight(rng, n, k, block, scale_dtype)
    x = harness.tokens(rng, m, k, dtype)
    bias = torch.from_numpy(rng.standard_normal(n)).to(dtype) if seed % 2 else None
    y = harness.gemm(emulator, name, choice, x, w, bias=bias, seed=seed, extra=extra)
    assert harness.error(y, harness.expected_gemm(x, w, bias)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", FEW)
def test_few_tokens(emulators, tile, dtype):
    """Clusters of 1 to 8 blocks, two at most, so that each has several tiles."""
    rows, _, tokens, _ = tile
    for i, split in some((1, 2, 3, 5, 8, 1), 2 * FEW.index(tile) + (dtype == HALF)):
        seed = i + 10 * sum(tile)
        scale_dtype = (HALF, FLOAT, BFLOAT16)[seed % 3]
        block = (128, ROW, 256, 384)[seed % 4]
        k = (1111, 1500, 2900, 1800, 2100, 4200)[i]
        n = (rows * 64 + 36, rows * 192 - 30, rows * 128 + 61)[i % 3]
        m = tokens - 3 if i % 2 else 2 * tokens + 1
        gemm_case(
            emulators[900], "sm90_few", (*tile, split), seed, m, n, k, block, dtype,
            scale_dtype, [2],
        )  # fmt: skip


# Warpgroups, tiles of 64 rows each, tokens; sets.
MANY = [(3, 1, 64), (3, 1, 128), (2, 1, 64), (2, 2, 64), (2, 1, 128), (2, 2, 128)]
MANY += [(2, 1, 256), (1, 1, 128, 2)]


# Blocks of 32 and 64 are built for three warpgroups only.
MANY_BLOCKS = [(t, b) for t in MANY for b in (ROW, 128, 32) if b != 32 or t[0] == 3]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile, block", MANY_BLOCKS)
def test_many_tokens(emulators, tile, block, dtype):
    warpgroups, tiles, tokens, *sets = tile
    rows = warpgroups * tiles * 64
    # Blocks that split K, that share tokens, k-blocks between starts.
    cuts = [(1, 1, 0), (2, 1, 0), (4, 1, 0), (8, 1, 0), (1, 2, 0), (2, 2, 0), (1, 1, 2)]
    if sets:
        cuts[-1] = (1, 4, 0)  # one tile a block: nothing to stagger
    turn = MANY.index(tile) + (dtype == HALF) + block % 5
    for i, (split, multicast, stagger) in some(cuts, turn, 1):
        seed = i + 10 * sum(tile)
        size = block
        if block == 128:
            size = (128, 256, 384)[seed % 3]
        if block == 32:
            size = (32, 64)[i % 2]
        scale_dtype = (HALF, FLOAT, BFLOAT16)[seed % 3]
        if dtype == HALF and block != ROW:
            scale_dtype = HALF
        k = (1500, 700, 1111, 2100, 1300, 900, 600)[i]
        n = rows * multicast + (40, 61, -24, 36, 61, 40, 0)[i]
        if stagger:
            n = 6 * rows
        m = tokens - 5 if i % 2 else tokens + 17
        n_pad = harness.up(n, 64)
        shape = (warpgroups, tiles, tokens)
        choice = (*shape, split, multicast, stagger, 0, n_pad, 0, *(sets or [1]))
        gemm_case(
            emulators[900], "sm90_many", choice, seed, m, n, k, size, dtype,
            scale_dtype, [2],
        )  # fmt: skip


@pytest.mark.parametrize(
    "scale_dtype, low, high", [(HALF, -24, 15), (FLOAT, -80, 33), (BFLOAT16, -80, 33)]
)
def test_bfloat16_tokens_and_scales_of_any_size(emulators, scale_dtype, low, high):
    """Weights are decoded small, so that no float16 scale is too large or small."""
    rng = np.random.default_rng(high)
    w = harness.make_weight(rng, 100, 400, 128, scale_dtype)
    w.scale[:, :100] = torch.ldexp(
        torch.ones(100), torch.linspace(low, high, 100).int()
    )
    x = harness.tokens(rng, 50, 400, BFLOAT16)
    choice = (2, 1, 64, 1, 1, 0, 0, w.n_pad, 0, 1)
    y = harness.gemm(emulators[900], "sm90_many", choice, x, w, extra=[2])
    # Of every row for itself: the largest would hide the others.
    assert harness.error(y.t(), harness.expected_gemm(x, w).t()) < TOLERANCE[BFLOAT16]


@pytest.mark.parametrize("block", [ROW, 128])
def test_s8_marked_tokens_are_nan_and_no_others(emulators, block):
    rng = np.random.default_rng(8)
    w = harness.make_weight(rng, 200, 600, block)
    q = harness.make_quantized(rng, 1, 70, 600, w.k_pad)
    q.xs[0, [3, 69]] = float("nan")
    for split in (1, 2):
        choice = (2, 1, 64, 1, split)
        y = harness.w2a8(emulators[900], "sm90_s8", choice, q, w, HALF, extra=[2])
        assert y.isnan().all(1).nonzero()[:, 0].tolist() == [3, 69]
        assert y.isnan().any(1).sum() == 2
