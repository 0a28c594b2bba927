# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The int8 tensor core kernel for few tokens, W2A8: integers exact, cuts alike."""

import random

import pytest
import torch

from lib.bench.ops import load_ops, random_weight

DTYPES = [torch.float16, torch.bfloat16]
NAIVE, OUTSIDE, INSIDE = 0, 1, 3  # of ternary_gemm_w2a8_tuned
# The kernel with short chains (kDirect of mma_s8.h), quantizing: two CTAs or one of a
# multiprocessor, half as many warps along K; and on tokens quantized before. What it
# does not take, INSIDE and OUTSIDE do.
DIRECT = [INSIDE + 16 * variant for variant in (8, 10, 11)] + [OUTSIDE + 16 * 8]
# k tiles of a warp: 1; 1 or 2; 2; more than it takes. Fewer than 16 k tiles leave
# several warps for one part of K, fewer than 4 are too few.
DIRECT_K = [160, 512, 640, 1056, 2048, 3104, 4096, 4128, 8192, 14_336]
ROW = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def _ops():
    load_ops()


def generator(seed: int) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


def product(
    x, w, kernel=None, groups=132, split=1, *, bias=None, norms=None, ends=None
):
    """ternary_gemm_w2a8, or one kernel of it, into memory full of NaN."""
    size = (x.shape[0] * w.size_n * 2 + 511) // 512 * 512
    poison = [torch.full((max(size, 512),), 0xFF, dtype=torch.uint8, device="cuda")] * 2
    del poison
    args = (x, w.weight, w.scale, bias, norms, ends, 1e-6)
    sizes = (w.size_n, w.size_k, w.block_size)
    if kernel is None:
        return torch.ops._C.ternary_gemm_w2a8(*args, *sizes)
    return torch.ops._C.ternary_gemm_w2a8_tuned(*args, *sizes, kernel, groups, split)


def integers(size_m, size_k, gen, dtype=torch.float16):
    """Tokens that quantize to themselves: whole numbers, the largest 127."""
    x = torch.randint(-127, 128, (size_m, size_k), device="cuda", generator=gen)
    x[:, 0] = 127
    return x.to(dtype)


@pytest.mark.parametrize("kernel", [OUTSIDE, INSIDE, *DIRECT])
@pytest.mark.parametrize("size_m", [1, 2, 8, 9, 16])
def test_integer_sums_are_exact(size_m, kernel):
    """Scales of 1 show the int32 sums, which must be exact."""
    sizes = [(64, 128), (200, 515), (130, 4096)]
    if kernel in DIRECT:
        sizes += [(150, 544), (1000, 1024), (1000, 3104), (70, 8_160)]
    for size_n, size_k in sizes:
        gen = generator(size_m + size_k)
        w = random_weight(size_n, size_k, ROW, scale_dtype=torch.float32, generator=gen)
        x = integers(size_m, size_k, gen)
        full = x.to(torch.int64).double() @ w.ternary.double().t()
        # A power of two takes each sum to where float16 is exact.
        for shift in (0, 12):
            w.scale.fill_(2.0**-shift)
            for split in (1, 2):
                y = product(x, w, kernel, 7, split)
                assert torch.equal(y, (full * 2.0**-shift).half())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size_m", range(1, 71))
def test_every_number_of_tokens(size_m, dtype):
    """Kernels agree with the naive one to a rounding, inside and outside alike."""
    for block in (ROW, 128, 256):
        gen = generator(size_m + block)
        w = random_weight(
            192 + size_m % 3, 640 + 4 * (size_m % 5), block, generator=gen
        )
        x = torch.randn((size_m, w.size_k), device="cuda", generator=gen).to(dtype)
        naive = product(x, w, NAIVE)
        y = product(x, w, OUTSIDE)
        torch.testing.assert_close(y, naive, rtol=1e-2, atol=1e-2)
        assert torch.isfinite(y).all()
        if block == ROW:  # no float sums at all
            assert torch.equal(y, naive)
        if size_m <= 16:
            assert torch.equal(y, product(x, w, INSIDE))
        assert torch.isfinite(product(x, w)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [ROW, 128, 256])
@pytest.mark.parametrize("kernel", DIRECT)
@pytest.mark.parametrize("size_m", [1, 2, 3, 5, 8, 9, 12, 16])
def test_up_to_sixteen_tokens(size_m, kernel, block, dtype):
    """Any cut of N; one scale a row leaves no float sums at all."""
    rng = random.Random(f"{size_m} {kernel} {block} {dtype}")
    for size_k in DIRECT_K:
        gen = generator(rng.randrange(1 << 30))
        kinds = [torch.float16, torch.bfloat16, torch.float32]
        w = random_weight(
            rng.randint(1, 1500),
            size_k,
            block,
            scale_dtype=rng.choice(kinds) if block == ROW else torch.float16,
            generator=gen,
        )
        x = torch.randn((size_m, size_k), device="cuda", generator=gen).to(dtype)
        bias = None
        if rng.random() < 0.5:
            bias = torch.randn(w.size_n, device="cuda", generator=gen).to(dtype)
        naive = product(x, w, NAIVE, bias=bias)
        groups = rng.choice([1, 5, 66, 132, 264])
        y = product(x, w, kernel, groups, rng.choice([1, 2]), bias=bias)
        if w.scale.shape[0] == 1:
            assert torch.equal(y, naive)
        assert torch.isfinite(y).all()
        torch.testing.assert_close(y, naive, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [ROW, 128, 512, 32, 96])
def test_every_cut_of_the_work(block, dtype):
    """With integer sums every cut gives the same bits; with scales, nearly."""
    rng = random.Random(block)
    for size_m in (1, 7, 16, 20, 40):
        gen = generator(size_m)
        scale_dtype = torch.bfloat16 if block == 96 else torch.float16
        w = random_weight(1000, 1111, block, scale_dtype=scale_dtype, generator=gen)
        x = torch.randn((size_m, 1111), device="cuda", generator=gen).to(dtype)
        bias = torch.randn(1000, device="cuda", generator=gen).to(dtype)
        naive = product(x, w, NAIVE, bias=bias)
        for split in (1, 2, 4, 8):
            y = product(x, w, OUTSIDE, rng.choice([1, 3, 50, 132]), split, bias=bias)
            if block == ROW:
                assert torch.equal(y, naive)
            torch.testing.assert_close(y, naive, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [ROW, 128])
def test_parts_may_end_anywhere(block, dtype):
    """Each part has its own quantized activations; ends cut through row tiles."""
    for seed in range(6):
        gen, rng = generator(seed), random.Random(seed)
        size_m, size_n, size_k = rng.randint(1, 40), rng.randint(70, 900), 384
        parts = rng.randint(2, 4)
        cuts = [*sorted(rng.sample(range(1, size_n), parts - 1)), size_n]
        if seed == 5:
            cuts[0] = cuts[1]  # a part without rows
        w = random_weight(size_n, size_k, block, generator=gen)
        x = torch.randn((size_m, size_k), device="cuda", generator=gen).to(dtype)
        norms = torch.rand((parts, size_k), device="cuda", generator=gen).to(dtype)
        ends = torch.tensor(cuts, dtype=torch.int32, device="cuda")
        naive = product(x, w, NAIVE, norms=norms, ends=ends)
        for groups, split in [(132, 1), (3, 2)]:
            y = product(x, w, OUTSIDE, groups, split, norms=norms, ends=ends)
            torch.testing.assert_close(y, naive, rtol=1e-2, atol=1e-2)
            if block == ROW:
                assert torch.equal(y, naive)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("kernel", [NAIVE, OUTSIDE, INSIDE, None, *DIRECT])
def test_a_bad_token_gives_nan_in_its_row_only(kernel, bad):
    size_k = 704 if kernel in DIRECT else 700
    for block in (ROW, 128):
        w = random_weight(200, size_k, block, generator=generator(2))
        x = torch.randn((6, size_k), device="cuda", generator=generator(3)).bfloat16()
        good = product(x, w, kernel)
        x[4, 690] = bad
        y = product(x, w, kernel)
        assert torch.isnan(y[4]).all()
        keep = [0, 1, 2, 3, 5]
        assert torch.equal(y[keep], good[keep])


def test_long_rows_are_staged_in_pieces():
    for size_m, size_k in [(1, 250_000), (16, 60_000), (64, 9_000)]:
        for block in (ROW, 128):
            w = random_weight(80, size_k, block, generator=generator(size_m))
            x = torch.randn((size_m, size_k), device="cuda", generator=generator(4))
            naive = product(x.half(), w, NAIVE)
            y = product(x.half(), w, OUTSIDE)
            torch.testing.assert_close(y, naive, rtol=1e-2, atol=2e-2)
            if size_m <= 16:
                assert torch.equal(y, product(x.half(), w, INSIDE))


@pytest.mark.parametrize("size_m", [1, 8, 16, 32, 64])
def test_runs_are_bit_identical_in_and_out_of_graphs(size_m):
    for block in (ROW, 128):
        w = random_weight(2048, 4096, block, generator=generator(size_m))
        x = torch.randn((size_m, 4096), device="cuda", generator=generator(1)).half()
        first = product(x, w)
        for _ in range(10):
            assert torch.equal(first, product(x, w))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = torch.ops._C.ternary_gemm_w2a8(
                x, w.weight, w.scale, None, None, None, 1e-6, 2048, 4096, w.block_size
            )
        for _ in range(3):
            captured.fill_(float("nan"))
            graph.replay()
            assert torch.equal(first, captured)


def test_a_refusal_is_one():
    """With 4 added nothing else computes what the kernel does not take."""
    for size_m, size_k, block in ((4, 515, ROW), (9, 4096, 128), (17, 1024, ROW)):
        w = random_weight(200, size_k, block, generator=generator(5))
        x = torch.randn((size_m, size_k), device="cuda", generator=generator(6)).half()
        # Eight tokens, as which they are quantized, leave room for block scales.
        for kernel in DIRECT[-1:] if size_m == 9 else (DIRECT[0], DIRECT[-1]):
            with pytest.raises(RuntimeError, match="does not take this call"):
                product(x, w, kernel + 4)


@pytest.mark.parametrize("kernel", DIRECT)
@pytest.mark.parametrize("size_m", [1, 2, 8, 16])
def test_up_to_sixteen_tokens_of_views_and_in_graphs(size_m, kernel):
    for block, size_k in ((ROW, 704), (128, 2048), (ROW, 4096), (128, 14_336)):
        w = random_weight(3000, size_k, block, generator=generator(size_k))
        base = torch.randn((32, 3 * size_k), device="cuda", generator=generator(20))
        base = base.half()
        views = (base[:size_m, 1::3], base[1 : size_m + 1, 3 : size_k + 3])
        for view in (*views, base[: 2 * size_m : 2, :size_k]):
            y = product(view, w, kernel)
            naive = product(view.contiguous(), w, NAIVE)
            torch.testing.assert_close(y, naive, rtol=1e-2, atol=1e-2)
        x = base[:size_m, :size_k]
        first = product(x, w, kernel)
        for _ in range(10):
            assert torch.equal(first, product(x, w, kernel))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = product(x, w, kernel)
        for _ in range(3):
            captured.fill_(float("nan"))
            graph.replay()
            assert torch.equal(first, captured)


@pytest.mark.parametrize("kernel", [INSIDE, *DIRECT])
@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("size_m", [1, 8, 16])
def test_a_product_waits_for_the_one_before(size_m, split, kernel):
    """Back to back: the next one starts early, and reads x only when it is there."""
    gen = generator(18)
    there = random_weight(4096, 2048, ROW, generator=gen)
    back = random_weight(2048, 4096, ROW, generator=gen)
    there.scale.mul_(2.0**-2)
    back.scale.mul_(2.0**-2)
    x = torch.randn((size_m, 2048), device="cuda", generator=gen).bfloat16()

    def chain(*, wait):
        h = x
        for w in (there, back) * 4:
            sizes = (w.size_n, w.size_k, w.block_size)
            h = torch.ops._C.ternary_gemm_w2a8_tuned(
                h, w.weight, w.scale, None, None, None, 1e-6, *sizes, kernel, 66, split
            )
            if wait:
                torch.cuda.synchronize()
        return h

    expected = chain(wait=True)
    assert bool(torch.isfinite(expected).all()) and bool(expected.any())
    for _ in range(20):
        assert torch.equal(chain(wait=False), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("variant", [14, 15, 16])
def test_one_token_by_the_16_bit_kernel(variant, split, dtype):
    """With a scale per row (kDirectOne of mma_s8.h): the bits of the naive kernel."""
    for i, size_k in enumerate(DIRECT_K):
        gen = torch.Generator("cuda").manual_seed(100 * variant + 10 * split + i)
        size_n, block = 333 + 16 * i, 1 << 20
        scale_dtype = (torch.float32, torch.bfloat16, torch.float16)[i % 3]
        w = random_weight(size_n, size_k, block, scale_dtype=scale_dtype, generator=gen)
        x = torch.randn(1, size_k, device="cuda", generator=gen).to(dtype)
        bias = torch.randn(size_n, device="cuda", generator=gen).to(dtype)
        for groups in (3, 66, 132):
            y = product(x, w, INSIDE + 4 + 16 * variant, groups, split, bias=bias)
            assert torch.equal(y, product(x, w, NAIVE, bias=bias)), (size_k, groups)
