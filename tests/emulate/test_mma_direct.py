# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The kernels with short chains of latencies (mma_s8_direct*.cuh), emulated for 9.0."""

import dataclasses

import harness
import numpy as np
import pytest
import torch
from harness import A100, BFLOAT16, FLOAT, H200, HALF, ROW, TOLERANCE, some

DTYPES = [HALF, BFLOAT16]
# Two, three and one CTA of a multiprocessor.
TWO, THREE, ONE = VARIANTS = (8, 9, 10)
# Variant, K of each CTA of a cluster, and N, by k tiles of a warp. Fewer than 16 k
# tiles leave several warps for one part of K; many rows leave a ring fewer slots than a
# warp has row tiles.
CUTS = [
    (TWO, 1024, 750),  # 1, two warps
    (THREE, 96, 150),  # 1, all warps
    (ONE, 2048, 520),  # 1
    (THREE, 1440, 130),  # 1 or 2, two warps
    (TWO, 2144, 300),  # 1 or 2
    (TWO, 4096, 140),  # 2
    (ONE, 4096, 330),  # 2
    (ONE, 4192, 230),  # 2 or 3
    (TWO, 6144, 64),  # 3
    (ONE, 11_936, 90),  # 5 or 6
    (ONE, 12_448, 80),  # 6 or 7
]

# From their variants to those of one token of 8 bits: kDirectOne - kDirect.
BYTES = 6


def case(seed: int, m: int, n: int, k: int, block: int, dtype, scale_dtype=HALF):
    rng = np.random.default_rng(seed)
    w = harness.make_weight(rng, n, k, block, scale_dtype)
    x = harness.tokens(rng, m, k, dtype)
    bias = torch.from_numpy(rng.standard_normal(n)).to(dtype) if seed % 2 else None
    return x, w, bias


def digits(emulators, cut, x, w, bias=None, seed=0):
    return harness.gemm(
        emulators[900], "mma_s8_digits", cut, x, w, bias=bias, seed=seed
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("i", range(len(CUTS)))
def test_16_bits(emulators, i, m, dtype):
    variant, k, n = CUTS[i]
    turn = i + 2 * m + (dtype == HALF)
    for j, split in some((1, 2, 4, 8), turn):
        seed = 100 * i + 10 * turn + j
        block = (128, 256, ROW)[(i + j) % 3]
        x, w, bias = case(seed, m, n, k * split, block, dtype)
        cut = (variant, 3 if turn % 8 == 7 else 1, split)
        y = digits(emulators, cut, x, w, bias, seed)
        assert harness.error(y, harness.expected_gemm(x, w, bias)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 2])
def test_outliers_leave_rows_without_them_exact(emulators, m, dtype):
    for i, (variant, k, n) in some(CUTS, 2 * m + (dtype == HALF), 3):
        x, w, _ = case(i + m, m, n, k, 128, dtype)
        at = (7 + 900 * i) % k
        x[:, at] = 40_000.0
        y, expected = digits(emulators, (variant, 1, 1), x, w, seed=i), x.double()
        expected = expected @ w.dense().t()
        for rows in (w.t[:, at] == 0, w.t[:, at] != 0):
            rows = torch.from_numpy(rows)
            assert harness.error(y[:, rows], expected[:, rows]) < TOLERANCE[dtype]


@pytest.mark.parametrize("power", [-124, 108])
def test_the_smallest_and_the_largest_values(emulators, power):
    rng = np.random.default_rng(3)
    whole = torch.from_numpy(rng.integers(-100, 101, (2, 640)))
    w = harness.make_weight(rng, 150, 640, 128)
    x = (whole.double() * 2.0**power).to(BFLOAT16)
    for m in (1, 2):
        y = digits(emulators, (TWO, 2, m), x[:m], w)
        expected = harness.expected_gemm(x[:m], w)
        assert harness.error(y, expected) < TOLERANCE[BFLOAT16]
        assert not digits(emulators, (TWO, 2, m), x[:m] * 0, w).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
def test_16_bits_that_are_no_number(emulators, bad, dtype):
    """Also where the weight is zero: as in 16 bits, infinity times zero is NaN."""
    for split, k in ((1, 4192), (2, 1440)):
        x, w, _ = case(split, 2, 90, k, 128, dtype)
        good = digits(emulators, (ONE, 1, split), x, w)
        x[1, k - 1] = float(bad)
        y = digits(emulators, (ONE, 1, split), x, w)
        assert torch.isnan(y[1]).all()
        assert torch.equal(y[0], good[0])


def int8(emulators, cut, x, w, bias=None, seed=0, name=None):
    """By the kernel for 8-bit activations, or, of a variant below, by the other one."""
    emulator = emulators[900]
    tiles = w.num_blocks > 1
    q = harness.quantize_arguments(emulator, x, None, 1, w.k_pad, H200, tiles)
    a = harness.w2a8_arguments(emulator, w, bias, [w.size_n], x.shape[0], x.dtype, H200)
    emulator.withhold(q.x, a.y)
    name = name or ("mma_s8_direct" if cut[0] >= TWO else "mma_s8")
    emulator.call(name, a, cut, q, seed=seed)
    y = emulator.get(a.y)
    emulator.free()
    return y


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("i", range(len(CUTS)))
def test_8_bits_of_one_token(emulators, i, dtype):
    """As one column where 16 bits have four digits; the bits of the other kernel."""
    variant, k, n = CUTS[i]
    turn = i + 3 * (dtype == HALF)
    for j, split in some((1, 2), turn):
        seed = 100 * i + 10 * turn + j
        scale_dtype = (FLOAT, BFLOAT16, HALF)[seed % 3]
        x, w, bias = case(seed, 1, n, k * split, ROW, dtype, scale_dtype)
        cut = [variant + BYTES, 3 if turn % 4 == 3 else 1, split]
        y = int8(emulators, cut, x, w, bias, seed)
        expected = harness.expected_int8(x, w.dense(), bias)
        assert harness.error(y, expected) < TOLERANCE[dtype]
        assert torch.equal(y, int8(emulators, [0, 2, 1], x, w, bias, seed))


@pytest.mark.parametrize(
    "n, k", [(16, 32), (90, 160), (70, 832), (64, 1024), (64, 1920)]
)
def test_8_bits_of_one_token_and_few_rows(emulators, n, k):
    """Fewer row tiles than warps share a part of K: some warps have none."""
    for i, dtype in enumerate(DTYPES):
        x, w, bias = case(i, 1, n, k, ROW, dtype, FLOAT)
        cut = [VARIANTS[i] + BYTES, 132, 1 + i]
        y = int8(emulators, cut, x, w, bias, i)
        assert torch.equal(y, int8(emulators, [0, 2, 1], x, w, bias, i))


def test_8_bits_of_one_token_scale_the_sum_by_the_row_first(emulators):
    """A sum of zero stays zero where both scales together are infinite."""
    x, w, _ = case(2, 1, 90, 1024, ROW, BFLOAT16, FLOAT)
    w.t[3] = 0
    scale = w.scale * 1e5
    packed = harness.pack(w.t, w.n_pad, w.k_pad)
    w = dataclasses.replace(w, packed=packed, scale=scale)
    for split in (1, 2):
        y = int8(emulators, [TWO + BYTES, 3, split], x * 1e36, w)
        assert y[0, 3] == 0
        assert torch.equal(y, int8(emulators, [0, 2, 1], x * 1e36, w))


@pytest.mark.parametrize("block", [128, 512])
def test_8_bits_of_one_token_and_scales_of_blocks(emulators, block):
    """By the kernel for up to eight tokens, of half as many warps along K."""
    for i, dtype in enumerate(DTYPES):
        x, w, bias = case(i, 1, 90, 2048, block, dtype)
        y = int8(emulators, [VARIANTS[i] + BYTES, 3, 1 + i], x, w, bias, i)
        assert (
            harness.error(y, harness.expected_int8(x, w.dense(), bias))
            < TOLERANCE[dtype]
        )
        assert torch.equal(y, int8(emulators, [11 + i, 3, 1 + i], x, w, bias, i))


@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
def test_8_bits_of_one_token_that_is_no_number(emulators, bad):
    for dtype, k, split in zip(DTYPES, (2144, 4096), (1, 2)):
        x, w, bias = case(split, 1, 90, k * split, ROW, dtype, FLOAT)
        # Below 1e-5 all are in units of the same size.
        tiny = x * 1e-7
        found = int8(emulators, [TWO + BYTES, 1, split], tiny, w, bias)
        assert torch.equal(found, int8(emulators, [0, 2, 1], tiny, w, bias))
        x[0, (0, k - 1)[split - 1]] = float(bad)
        y = int8(emulators, [TWO + BYTES, 1, split], x, w, bias)
        assert torch.isnan(y).all()


# Variant, K of each CTA of a cluster, N, and up to how many tokens, by k tiles of a
# warp. From 11 on half as many warps share K.
CUTS_8 = [
    (TWO, 512, 750, 16),  # 1, four warps
    (TWO, 1024, 330, 16),  # 1, two warps
    (ONE, 2016, 140, 16),  # 1
    (11, 992, 200, 16),  # 2, four warps
    (TWO, 1440, 130, 16),  # 1 or 2, two warps
    (13, 2048, 70, 16),  # 2, two warps
    (ONE, 3104, 90, 8),  # 1 or 2
    (TWO, 4096, 150, 8),  # 2
]
INT8 = [(i, m) for i, c in enumerate(CUTS_8) for m in (1, 3, 8, 9, 16) if m <= c[3]]
SCALES = [[(ROW, FLOAT), (ROW, BFLOAT16), (ROW, HALF)], [(128, HALF), (256, HALF)]]


def size_of(k: int, split: int) -> int:
    """K of `split` CTAs, the last of which has `k`, the others whole k tiles."""
    return (k + 127) // 128 * 128 * (split - 1) + k


def some_scales(i: int, m: int, turn: int):
    """Kinds of scales; more than eight tokens of two k tiles leave none but a row's."""
    kinds = SCALES[:1] if m > 8 and i > 2 else SCALES
    for kind, scales in (
        some(kinds, turn, int(m > 1)) if len(kinds) > 1 else [(0, kinds[0])]
    ):
        for j, (block, scale_dtype) in some(scales, turn // 2):
            yield 100 * i + 20 * kind + m + j, block, scale_dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("i, m", INT8)
def test_8_bits(emulators, i, m, dtype):
    """With one scale a row there are no float sums: the bits of the other kernel."""
    variant, k, n, _ = CUTS_8[i]
    turn = i + m + (dtype == HALF)
    for seed, block, scale_dtype in some_scales(i, m, turn):
        split = 1 + (turn + seed) % 2
        x, w, bias = case(seed, m, n, size_of(k, split), block, dtype, scale_dtype)
        cut = [variant, 1 + seed % 3, split]
        y = int8(emulators, cut, x, w, bias, seed)
        expected = harness.expected_int8(x, w.dense(), bias)
        assert harness.error(y, expected) < TOLERANCE[dtype]
        if w.num_blocks == 1:
            assert torch.equal(y, int8(emulators, [0, 2, 1], x, w, bias, seed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("i", range(len(CUTS_8)))
def test_8_bits_quantized_before(emulators, i, dtype):
    variant, k, n, most = CUTS_8[i]
    for m in (1 + i, most):
        turn = i + m + (dtype == HALF)
        for seed, block, scale_dtype in some_scales(i, m, turn):
            split = (1, 2, 4, 8)[(turn + seed) % 4]
            rng = np.random.default_rng(seed)
            size_k = size_of(k, split)
            w = harness.make_weight(rng, n, size_k, block, scale_dtype)
            bias = torch.from_numpy(rng.standard_normal(n)).to(dtype)
            q = harness.make_quantized(rng, 1, m, size_k, w.k_pad)
            y, other = (
                harness.w2a8(
                    emulators[900], name, cut, q, w, dtype, bias=bias, seed=turn,
                    extra=[None],
                )
                for name, cut in (
                    ("mma_s8_direct", [variant, 1 + seed % 3, split]),
                    ("mma_s8", [0, 2, 1]),
                )
            )  # fmt: skip
            expected = harness.expected_w2a8(q, w, bias)
            assert harness.error(y, expected) < TOLERANCE[dtype]
            if w.num_blocks == 1:
                assert torch.equal(y, other)


@pytest.mark.parametrize("block", [ROW, 128])
@pytest.mark.parametrize("m, k", [(1, 2144), (3, 2144), (8, 2144), (14, 2016)])
def test_8_bits_of_little_or_no_numbers(emulators, m, k, block):
    for i, bad in enumerate(("nan", "inf", "-inf", "nan")):
        dtype, cut = DTYPES[i % 2], [TWO, 1, 1 + (i + m) % 2]
        x, w, bias = case(m + i, m, 90, k, block, dtype)
        good = int8(emulators, cut, x, w, bias)
        last = x[-1].clone()
        x[-1, (0, k - 1)[m % 2]] = float(bad)
        y = int8(emulators, cut, x, w, bias)
        assert torch.isnan(y[-1]).all()
        assert torch.equal(y[:-1], good[:-1])
        # Below 1e-5 all are in units of the same size.
        x[-1] = last * 1e-6
        w.scale *= 1000
        y = int8(emulators, cut, x, w)
        expected = harness.expected_int8(x, w.dense())
        assert harness.error(y, expected) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_they_leave_to_the_others(emulators, variant, dtype):
    """K of other than whole 32, more tokens, too many k tiles, and before 9.0."""
    for m, n, k in ((1, 90, 1111), (3, 150, 640), (2, 64, 20_700)):
        x, w, bias = case(m, m, n, k, 128, dtype)
        y = digits(emulators, (variant, 2, 2), x, w, bias)
        assert harness.error(y, harness.expected_gemm(x, w, bias)) < TOLERANCE[dtype]
    x, w, bias = case(1, 2, 90, 1024, 128, dtype)
    y = harness.gemm(
        emulators[800], "mma_s8_digits", (variant, 2, 1), x, w, bias=bias, device=A100
    )
    assert harness.error(y, harness.expected_gemm(x, w, bias)) < TOLERANCE[dtype]
    # 8 bits: also few k tiles, 17 tokens, and more of K than they keep.
    sizes = [(4, 90, 1111), (3, 150, 352), (17, 150, 640), (9, 64, 6144)]
    for m, n, k in sizes:
        x, w, bias = case(m, m, n, k, (128, ROW)[m % 2], dtype)
        with pytest.raises(RuntimeError, match="no such kernel"):
            int8(emulators, [variant, 2, 1], x, w, bias)
    for m, n, k in sizes[:2] + sizes[3:]:
        x, w, bias = case(m, m, n, k, (128, ROW)[m % 2], dtype)
        y = int8(emulators, [variant, 2, 1], x, w, bias, name="mma_s8")
        expected = harness.expected_int8(x, w.dense(), bias)
        assert harness.error(y, expected) < TOLERANCE[dtype]
    # Tokens that come as bytes, of two parts.
    rng = np.random.default_rng(variant)
    w = harness.make_weight(rng, 90, 1024, ROW)
    q = harness.make_quantized(rng, 2, 2, 1024, w.k_pad)
    y = harness.w2a8(
        emulators[900], "mma_s8", (variant, 2, 2), q, w, dtype, ends=[33, 90],
        extra=[None],
    )  # fmt: skip
    expected = harness.expected_w2a8(q, w, None, [33, 90])
    assert harness.error(y, expected) < TOLERANCE[dtype]
