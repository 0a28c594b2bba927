# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The portable tensor core kernels, emulated for 8.0 (cp.async) and 9.0 (bulk copies,
clusters): every shape of a thread block, cuts of N and K, ragged edges."""

import harness
import numpy as np
import pytest
import torch
from harness import A100, BFLOAT16, FLOAT, H200, HALF, L40S, ROW, TOLERANCE, some

DTYPES = [HALF, BFLOAT16]
# Architecture, device, splits of K.
TARGETS = [(900, H200, (1, 2, 4, 8)), (800, A100, (1,)), (800, L40S, (1,))]
NAMES = ["9.0", "8.0", "8.9"]


def case(seed: int, m: int, n: int, k: int, block: int, dtype, scale_dtype, zero=False):
    rng = np.random.default_rng(seed)
    w = harness.make_weight(rng, n, k, block, scale_dtype, zero)
    x = harness.tokens(rng, m, k, dtype)
    bias = torch.from_numpy(rng.standard_normal(n)).to(dtype) if seed % 2 else None
    return x, w, bias


# Tokens, variant of the shape, groups of rows.
FAST = [(1, 0, 2), (8, 1, 3), (5, 2, 1), (9, 0, 2), (16, 1, 1), (12, 2, 5), (11, 3, 2)]
FAST += [(27, 0, 3), (70, 0, 2)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", TARGETS, ids=NAMES)
@pytest.mark.parametrize("m, variant, groups", FAST)
def test_one_scale_for_whole_k_tiles(emulators, m, variant, groups, target, dtype):
    arch, device, splits = target
    for i, split in some(splits, m + variant + (dtype == HALF)):
        seed = m * 10 + i
        block = (128, 256, ROW)[seed % 3]
        n, k = ((150, 1111), (64, 2000), (300, 390))[(m + i) % 3]
        x, w, bias = case(seed, m, n, k, block, dtype, HALF)
        cut = (variant, groups, split)
        y = harness.gemm(
            emulators[arch], "mma_gemm", cut, x, w, bias=bias, device=device, seed=seed
        )
        assert harness.error(y, harness.expected_gemm(x, w, bias)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", TARGETS, ids=NAMES)
@pytest.mark.parametrize("m", [3, 14, 25, 66])
def test_any_scales(emulators, m, target, dtype):
    """Blocks of any multiple of 32, scales of any type, zero points."""
    arch, device, splits = target
    for i, split in some(splits[:3], m + (dtype == HALF)):
        seed = m * 10 + i
        block, scale_dtype, zero = (
            (96, FLOAT, True),
            (32, BFLOAT16, False),
            (384, HALF, True),
        )[(m + i) % 3]
        n, k = ((150, 1111), (64, 1500), (200, 390))[(m + i) % 3]
        x, w, bias = case(seed, m, n, k, block, dtype, scale_dtype, zero)
        cut = (0, 2 + i, split)
        y = harness.gemm(
            emulators[arch], "mma_gemm", cut, x, w, bias=bias, device=device, seed=seed
        )
        assert harness.error(y, harness.expected_gemm(x, w, bias)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", TARGETS, ids=NAMES)
def test_tokens_staged_in_pieces(emulators, target, dtype):
    """K of which shared memory does not hold every token's part at once."""
    arch, device, _ = target
    for m, k, block in ((16, 7000, 128), (40, 2200, 64)):
        x, w, bias = case(k, m, 64, k, block, dtype, HALF)
        y = harness.gemm(
            emulators[arch], "mma_gemm", (0, 2, 1), x, w, device=device, seed=k
        )
        assert harness.error(y, harness.expected_gemm(x, w)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", TARGETS, ids=NAMES)
@pytest.mark.parametrize("m", [1, 2, 5])
def test_16_bits_in_four_bytes(emulators, m, target, dtype):
    arch, device, splits = target
    for i, split in some(splits, m + (dtype == HALF)):
        for variant in (0, 1):
            seed = m * 10 + i + 5 * variant
            block = (128, ROW)[(i + variant) % 2]
            n, k = ((150, 1111), (64, 4100), (300, 390))[(m + i + variant) % 3]
            x, w, bias = case(seed, m, n, k, block, dtype, HALF)
            x[0, 7] = 1000.0  # an outlier leaves the others exact
            cut = (variant, 1 + seed % 3, split)
            y = harness.gemm(
                emulators[arch], "mma_s8_digits", cut, x, w, bias=bias, device=device,
                seed=seed,
            )  # fmt: skip
            expected = harness.expected_gemm(x, w, bias)
            assert harness.error(y, expected) < TOLERANCE[dtype]


S8 = [(1, 0), (7, 1), (8, 2), (9, 0), (16, 1), (21, 0), (40, 0), (70, 0)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", TARGETS, ids=NAMES)
@pytest.mark.parametrize("m, variant", S8)
def test_w2a8(emulators, m, variant, target, dtype):
    arch, device, splits = target
    rng = np.random.default_rng(m)
    scales = [(ROW, FLOAT), ((128, 256)[m % 2], HALF), (96, BFLOAT16)]
    # Every kind of scale is a kernel of its own.
    always = 2 if arch == 900 else 0
    for i, split in some(splits, m + variant + (dtype == HALF)):
        for j, (block, scale_dtype) in some(scales, m // 2 + device, always):
            seed = m * 10 + i + j
            n, k = ((90, 1111), (64, 1500), (200, 390))[(m + i + j) % 3]
            w = harness.make_weight(rng, n, k, block, scale_dtype)
            parts = 1 + seed % 3
            q = harness.make_quantized(rng, parts, m, k, w.k_pad)
            ends = sorted(rng.integers(0, n + 1, parts - 1).tolist()) + [n]
            bias = torch.from_numpy(rng.standard_normal(n)).to(dtype)
            cut = (variant, 1 + seed % 3, split)
            y = harness.w2a8(
                emulators[arch], "mma_s8", cut, q, w, dtype, bias=bias, ends=ends,
                device=device, seed=seed, extra=[None],
            )  # fmt: skip
            expected = harness.expected_w2a8(q, w, bias, ends)
            assert harness.error(y, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", TARGETS, ids=NAMES)
@pytest.mark.parametrize("m, variant", [(1, 0), (8, 1), (3, 2), (16, 0), (10, 1)])
def test_w2a8_quantized_inside(emulators, m, variant, target, dtype):
    """The same bits as from quantize_tokens and the product of its bytes."""
    arch, device, splits = target
    emulator = emulators[arch]
    rng = np.random.default_rng(m + 50)
    cuts = [
        (i, split, j)
        for i, split in some(splits, m + variant + (dtype == HALF))
        for j in range(2 if arch == 900 else 1)
    ]
    blocks = (ROW, 128)
    for i, split, j in cuts:
        block = blocks[(m + i + j) % 2]
        n, k = ((150, 1111), (64, 3000), (300, 390))[(m + i) % 3]
        w = harness.make_weight(rng, n, k, block)
        x = harness.tokens(rng, m, k, dtype)
        cut = [variant, 1 + i, split]
        tiles = w.num_blocks > 1
        found = []
        for inside in (True, False):
            q = harness.quantize_arguments(emulator, x, None, 1, w.k_pad, device, tiles)
            a = harness.w2a8_arguments(emulator, w, None, [n], m, dtype, device)
            if not inside:
                emulator.call("quantize", q, seed=i, device=device)
                a.xq, a.xs, a.xsum, a.xsum_tiles = q.xq, q.xs, q.xsum, q.xsum_tiles
            emulator.call(
                "mma_s8", a, cut, q if inside else None, seed=i, device=device
            )
            found.append(emulator.get(a.y))
            emulator.free()
        assert torch.equal(*found)
        expected = harness.expected_int8(x, w.dense())
        assert harness.error(found[0], expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zero", [False, True])
def test_experts(emulators, zero, dtype):
    emulator = emulators[800]
    rng = np.random.default_rng(9)
    routes, top_k, n, k = 26, 2, 75, 300
    # Blocks of routes of a launch: more than there are, as many, and fewer.
    for block, scale_dtype, most in (
        (128, HALF, 65535),
        (48, FLOAT, 5),
        (ROW, BFLOAT16, 2),
    ):
        experts = [
            harness.make_weight(rng, n, k, block, scale_dtype, zero) for _ in range(3)
        ]
        x = harness.tokens(rng, routes // top_k, k, dtype)
        bias = torch.from_numpy(rng.standard_normal((3, n))).to(dtype)
        weight = torch.from_numpy(rng.uniform(0.2, 1, routes)).float()
        # Expert 0 has 18 routes, none has 3, expert 2 has 5; a block goes unused.
        order = rng.permutation(routes).tolist()
        filling = routes
        blocks = [order[:16], order[16:18], order[18:21], order[21:]]
        owner = [0, 0, -1, 2, 1]
        slots = [b + [filling] * (16 - len(b)) for b in [*blocks, []]]
        a = harness.MoeGemmArgs()
        a.dtype = harness.DTYPE[dtype]
        rows = torch.full((routes // top_k, 304), float("nan"), dtype=dtype)
        rows[:, :k] = x
        a.x, a.ldx = emulator.put(rows), 304
        a.weight = emulator.put(torch.stack([w.packed for w in experts]))
        a.scale = emulator.put(torch.stack([w.scale for w in experts]))
        a.scale_dtype = harness.DTYPE[scale_dtype]
        if zero:
            a.zero_point = emulator.put(torch.stack([w.zero_point for w in experts]))
        a.bias = emulator.put(bias)
        a.sorted_routes = emulator.put(torch.tensor(slots, dtype=torch.int32))
        a.experts = emulator.put(torch.tensor(owner, dtype=torch.int32))
        a.used = emulator.put(torch.tensor([64], dtype=torch.int32))
        a.route_weight = emulator.put(weight)
        a.y = emulator.empty((routes, n), dtype)
        a.routes, a.top_k, a.blocks = routes, top_k, 5
        first = experts[0]
        a.N, a.K, a.N_pad, a.K_pad = n, k, first.n_pad, first.k_pad
        a.block_size, a.num_blocks = block, first.num_blocks
        emulator.call("moe", a, most, seed=block)
        y = emulator.get(a.y)
        emulator.free()
        for routes_of, e in zip(blocks, owner):
            if e < 0:
                assert not y[routes_of].any()
                continue
            tokens = x[[r // top_k for r in routes_of]]
            expected = harness.expected_gemm(tokens, experts[e], bias[e])
            expected *= weight[routes_of].double()[:, None]
            assert harness.error(y[routes_of], expected) < TOLERANCE[dtype]
