# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""16-bit activations on int8 tensor cores: four signed bytes lose nothing."""

import random

import pytest
import torch

from lib.bench.ops import TernaryWeight, load_ops, random_weight

DTYPES = [torch.float16, torch.bfloat16]
# Of the difference to the correctly rounded product: a few values on the other
# side of a tie. The op's bounds, 1e-3 and 4e-3, are of the rounding itself.
TOLERANCE = {torch.float16: 1e-4, torch.bfloat16: 8e-4}
# Variants of the kernels for one and two tokens (kDirect of mma_s8.h): two, three and
# one CTA of a multiprocessor. What they do not take, variant 0 does.
DIRECT = [8, 9, 10]
# k tiles of a warp: 1; 1 or 2; 2; 3 to 6; 7 to 10; more than they take. Fewer than 16
# k tiles leave several warps for one part of K.
DIRECT_K = [32, 160, 640, 1056, 2048, 3104, 4096, 4128, 10_016, 14_336, 20_480, 24_576]


@pytest.fixture(scope="module", autouse=True)
def _ops():
    load_ops()


def generator(seed: int) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


def product(x, w: TernaryWeight, groups=132, split=1, bias=None, variant=0):
    size = (x.shape[0] * w.size_n * 2 + 511) // 512 * 512
    poison = [torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")] * 2
    del poison
    sizes = (w.size_n, w.size_k, w.block_size)
    return torch.ops._C.ternary_gemm_s8(
        x, w.weight, w.scale, None, bias, *sizes, variant, groups, split, True
    )


def check(x, w, y, rows=None):
    """`rows` of y (all by default) against float64, rounded once."""
    rows = slice(None) if rows is None else rows
    expected = (x.double() @ w.dequantize().t())[:, rows]
    y = y[:, rows]
    assert torch.isfinite(y).all()
    norm = expected.norm(dim=1)
    assert bool((norm > 0).all())
    error = (y.double() - expected.to(x.dtype).double()).norm(dim=1) / norm
    assert float(error.max()) < TOLERANCE[x.dtype], f"{error.tolist()}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [128, 256, 1 << 20])
@pytest.mark.parametrize("size_m", range(1, 10))
def test_against_float64(size_m, block, dtype):
    for size_n, size_k in [(200, 640), (64, 30), (1000, 1111), (512, 4096)]:
        gen = generator(size_m * size_n)
        w = random_weight(size_n, size_k, block, generator=gen)
        x = torch.randn((size_m, size_k), device="cuda", generator=gen).to(dtype)
        check(x, w, product(x, w))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [128, 256, 1 << 20])
@pytest.mark.parametrize("variant", DIRECT)
@pytest.mark.parametrize("size_m", [1, 2, 3])
def test_one_or_two_tokens_against_float64(size_m, variant, block, dtype):
    rng = random.Random(f"{size_m} {variant} {block} {dtype}")
    for size_k in DIRECT_K:
        gen = generator(rng.randrange(1 << 30))
        w = random_weight(rng.randint(1500, 2000), size_k, block, generator=gen)
        x = torch.randn((size_m, size_k), device="cuda", generator=gen).to(dtype)
        groups, split = rng.choice([1, 5, 66, 132, 264]), rng.choice([1, 2, 4, 8])
        check(x, w, product(x, w, groups, split, variant=variant))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("split", [1, 2, 4, 8])
@pytest.mark.parametrize("groups", [1, 3, 50, 132])
@pytest.mark.parametrize("variant", [0, *DIRECT])
def test_every_cut_of_the_work(variant, groups, split, dtype):
    rng = random.Random(f"{variant} {groups} {split} {dtype}")
    for size_m in (1, 2, 3, 7):
        gen = generator(groups + split + variant)
        size_k = rng.choice(DIRECT_K) if variant else 1111
        w = random_weight(1000, size_k, 128, generator=gen)
        x = torch.randn((size_m, size_k), device="cuda", generator=gen).to(dtype)
        bias = torch.randn(1000, device="cuda", generator=gen).to(dtype)
        y = product(x, w, groups, split, bias, variant)
        expected = x.double() @ w.dequantize().t() + bias.double()
        error = (y.double() - expected).norm() / expected.norm()
        assert float(error) < 10 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [1000.0, 20_000.0])
@pytest.mark.parametrize("variant", [0, *DIRECT])
def test_a_huge_channel_costs_rows_without_it_nothing(variant, factor, dtype):
    """One channel far above the rest; half of the rows have a zero weight there."""
    gen = generator(int(factor))
    w = random_weight(512, 4096, generator=gen)
    for channel in (0, 77, 4000):
        zero = w.ternary[:, channel] == 0
        x = torch.randn((8, 4096), device="cuda", generator=gen)
        x[:, channel] = factor * (1 + torch.rand(8, device="cuda", generator=gen))
        for size_m in (1, 2, 4, 8):
            part = x[:size_m].to(dtype)
            y = product(part, w, variant=variant)
            check(part, w, y, zero)
            check(part, w, y, ~zero)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", [0, *DIRECT])
def test_channels_of_every_size(variant, dtype):
    """Values spread over twenty binary orders, and tokens of very different size."""
    gen = generator(9)
    w = random_weight(300, 2048, generator=gen)
    x = torch.randn((8, 2048), device="cuda", generator=gen)
    x *= torch.exp2(torch.randint(-14, 6, (2048,), device="cuda", generator=gen))
    x *= torch.exp2(torch.arange(-6.0, 2.0, device="cuda"))[:, None]
    for size_m in (1, 2, 4, 8):
        part = x[:size_m].to(dtype)
        check(part, w, product(part, w, variant=variant))


@pytest.mark.parametrize("variant", [0, *DIRECT])
def test_the_smallest_and_the_largest_values(variant):
    w = random_weight(200, 640, generator=generator(10))
    whole = torch.randint(-100, 101, (2, 640), device="cuda", generator=generator(11))
    tiny = (whole * 2.0**-24).half()  # subnormal float16
    found = product(tiny, w, variant=variant).double()
    expected = tiny.double() @ w.dequantize().t()
    assert float((found - expected).abs().max()) <= 2.0**-25 + 1e-12
    for power in (-133, -120, -100, 100, 112):
        x = (whole * 2.0 ** (power / 2)) * 2.0 ** (power / 2)
        x = x.to(torch.bfloat16)
        assert bool(x.any())
        expected = x.double() @ w.dequantize().t()
        y = product(x, w, variant=variant).double()
        error = (y - expected.to(torch.bfloat16).double()).abs().max()
        assert float(error) <= float(expected.abs().max()) * 2.0**-8 + 2.0**-133
    zero = torch.zeros((2, 640), device="cuda", dtype=torch.bfloat16)
    assert not product(zero, w, variant=variant).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("variant", [0, *DIRECT])
def test_nan_and_infinity_stay_in_their_token(variant, bad, dtype):
    """Also where the weight is zero: as in 16 bits, infinity times zero is NaN."""
    w = random_weight(256, 512, generator=generator(12))
    for size_m in (2, 4, 8):
        x = torch.randn((size_m, 512), device="cuda", generator=generator(13))
        x = x.to(dtype)
        good = product(x, w, variant=variant)
        x[1, 100] = bad
        for split in (1, 2):
            y = product(x, w, 50, split, variant=variant)
            assert torch.isnan(y[1]).all()
        keep = [m for m in range(size_m) if m != 1]
        assert torch.equal(product(x, w, variant=variant)[keep], good[keep])


def test_long_rows_views_and_repeated_runs():
    w = random_weight(80, 200_000, generator=generator(14))
    x = torch.randn((2, 200_000), device="cuda", generator=generator(15)).half()
    check(x, w, product(x, w))
    w = random_weight(300, 700, generator=generator(16))
    base = torch.randn((5, 2100), device="cuda", generator=generator(17)).half()
    for view in (base[:, 1::3], base[:, 3:703], base[::2, :700]):
        check(view, w, product(view, w))
    first = product(base[:, :700], w)
    for _ in range(10):
        assert torch.equal(first, product(base[:, :700], w))


@pytest.mark.parametrize("variant", DIRECT)
@pytest.mark.parametrize("size_m", [1, 2])
def test_one_or_two_tokens_of_views_and_in_graphs(size_m, variant):
    """Every run gives the same bits."""
    for size_k, split in ((704, 2), (4096, 1), (4096, 4), (14_336, 1)):
        w = random_weight(3000, size_k, generator=generator(size_k))
        base = torch.randn((5, 3 * size_k), device="cuda", generator=generator(20))
        base = base.half()
        views = (base[:size_m, 1::3], base[1 : size_m + 1, 3 : size_k + 3])
        for view in (*views, base[: 2 * size_m : 2, :size_k]):
            check(view, w, product(view, w, 132, split, variant=variant))
        x = base[:size_m, :size_k]
        first = product(x, w, 132, split, variant=variant)
        for _ in range(10):
            assert torch.equal(first, product(x, w, 132, split, variant=variant))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = product(x, w, 132, split, variant=variant)
        for _ in range(3):
            captured.fill_(float("nan"))
            graph.replay()
            assert torch.equal(first, captured)


@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("size_m", [1, 2])
@pytest.mark.parametrize("variant", [0, *DIRECT])
def test_a_product_waits_for_the_one_before(variant, size_m, split):
    """Back to back: the next one starts early, and reads x only when it is there."""
    gen = generator(18)
    there = random_weight(4096, 2048, generator=gen)
    back = random_weight(2048, 4096, generator=gen)
    there.scale.mul_(2.0**-2)
    back.scale.mul_(2.0**-2)
    x = torch.randn((size_m, 2048), device="cuda", generator=gen).bfloat16()

    def chain(*, wait):
        h = x
        for w in (there, back) * 4:
            sizes = (w.size_n, w.size_k, w.block_size)
            h = torch.ops._C.ternary_gemm_s8(
                h, w.weight, w.scale, None, None, *sizes, variant, 132, split, True
            )
            if wait:
                torch.cuda.synchronize()
        return h

    expected = chain(wait=True)
    assert bool(torch.isfinite(expected).all()) and bool(expected.any())
    for _ in range(20):
        assert torch.equal(chain(wait=False), expected)
