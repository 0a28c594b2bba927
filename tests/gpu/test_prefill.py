# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The Hopper kernels for few and many tokens against float64, past the dispatch table.

Needs an NVIDIA GPU of compute capability 9.0 and the ops: an installed patched vLLM,
or TERNARY_LIBRARY.
"""

import random

import pytest
import torch

from lib.bench.ops import TernaryWeight, load_ops, random_weight

HALF, BFLOAT16 = torch.float16, torch.bfloat16
TOLERANCE = {HALF: 1e-3, BFLOAT16: 4e-3}
GUARD = 2048  # elements of NaN around x

# Sizes of real layers whose cut differs: split along K, one wave, two launches.
LAYERS = [(6144, 1024), (1024, 3072), (4096, 12288), (24576, 4096), (34816, 5120)]


@pytest.fixture(scope="module", autouse=True)
def _ops():
    load_ops()
    assert torch.cuda.get_device_capability() == (9, 0)


def gemm(x: torch.Tensor, w: TernaryWeight, bias=None) -> torch.Tensor:
    return torch.ops._C.ternary_gemm_sm90(
        x, w.weight, w.scale, None, bias, w.size_n, w.size_k, w.block_size
    )


def activations(size_m, size_k, dtype, gen) -> torch.Tensor:
    """X [M, K] in rows padded to 8 with NaN, between stretches of NaN."""
    width = (size_k + 7) // 8 * 8
    buffer = torch.full((size_m * width + 2 * GUARD,), float("nan"), device="cuda")
    buffer = buffer.to(dtype)
    x = buffer[GUARD : GUARD + size_m * width].view(size_m, width)[:, :size_k]
    x.copy_(torch.randn((size_m, size_k), device="cuda", generator=gen))
    return x


def relative_error(y, expected) -> float:
    """By norm; the norm itself where the expected one is zero."""
    norm = float(expected.norm())
    return float((y.double() - expected).norm()) / (norm or 1.0)


def check(size_m, size_n, size_k, block_size, dtype, *, seed, scale_dtype=HALF):
    gen = torch.Generator("cuda").manual_seed(seed)
    w = random_weight(
        size_n, size_k, block_size, scale_dtype=scale_dtype, generator=gen
    )
    x = activations(size_m, size_k, dtype, gen)
    bias = None
    if seed % 2:
        bias = torch.randn(size_n, device="cuda", generator=gen).to(dtype)
    # The block that y will get holds NaN: every element must be written.
    del_me = torch.full((size_m, size_n), float("nan"), device="cuda", dtype=dtype)
    del del_me
    y = gemm(x, w, bias)
    expected = x.double() @ w.dequantize().t()
    if bias is not None:
        expected += bias.double()
    assert bool(torch.isfinite(y).all())
    error = relative_error(y, expected)
    assert error < TOLERANCE[dtype], (
        f"error {error:.2e}: M={size_m} N={size_n} K={size_k} block={block_size} "
        f"{dtype} scale={scale_dtype}"
    )


@pytest.mark.parametrize("dtype", [HALF, BFLOAT16])
@pytest.mark.parametrize("size_m", range(1, 71))
def test_every_number_of_tokens(size_m, dtype):
    check(size_m, 200, 328, 128, dtype, seed=size_m)


@pytest.mark.parametrize("dtype", [HALF, BFLOAT16])
@pytest.mark.parametrize("block_size", [32, 64, 128, 256, 384, 1 << 20])
@pytest.mark.parametrize("batch", range(8))
def test_random_cases(batch, block_size, dtype):
    rng = random.Random(f"{batch}-{block_size}-{dtype}")
    for _ in range(8):
        size_m = rng.choice([1, 63, 64, 65, 127, 129, 300, 513, rng.randint(1, 3000)])
        size_n = rng.choice([1, 7, 8, 64, 72, 1000, rng.randint(1, 9000)])
        size_k = rng.choice([1, 4, 31, 127, 128, 129, 1000, rng.randint(1, 4000)])
        one_scale = block_size >= size_k
        scale_dtype = HALF
        if dtype == BFLOAT16 or one_scale:
            scale_dtype = rng.choice([HALF, BFLOAT16, torch.float32])
        check(
            size_m,
            size_n,
            size_k,
            block_size,
            dtype,
            seed=rng.randint(0, 1 << 30),
            scale_dtype=scale_dtype,
        )


@pytest.mark.parametrize("dtype", [HALF, BFLOAT16])
@pytest.mark.parametrize("block_size", [128, 256, 384, 1 << 20])
@pytest.mark.parametrize("batch", range(4))
def test_random_cases_of_few_tokens(batch, block_size, dtype):
    """Scales of every type, also per block under float16 activations."""
    rng = random.Random(f"few-{batch}-{block_size}-{dtype}")
    for _ in range(12):
        check(
            rng.randint(1, 64),
            rng.choice([1, 7, 8, 64, 72, 1000, 1024, rng.randint(1, 9000)]),
            rng.choice([1, 4, 31, 127, 129, 1000, rng.randint(1, 13000)]),
            block_size,
            dtype,
            seed=rng.randint(0, 1 << 30),
            scale_dtype=rng.choice([HALF, BFLOAT16, torch.float32]),
        )


@pytest.mark.parametrize("size_m", [5, 8, 16, 24, 32, 48, 64, 130, 256, 1000])
@pytest.mark.parametrize("size_n, size_k", LAYERS)
def test_layers(size_n, size_k, size_m):
    check(size_m, size_n, size_k, 128, BFLOAT16, seed=size_m + size_n)


@pytest.mark.parametrize("dtype", [HALF, BFLOAT16])
@pytest.mark.parametrize("size_m", [9, 200])
def test_zero_scales_and_large_ones(size_m, dtype):
    gen = torch.Generator("cuda").manual_seed(3)
    w = random_weight(256, 1024, 128, generator=gen)
    x = activations(size_m, 1024, dtype, gen)
    w.row_scale[::3] = 0
    w.row_scale[1::3, ::2] = 2.0**-20  # subnormal in float16
    w.row_scale[2::3, 1::2] = 7.0
    w.scale.copy_(w.row_scale.t())
    y, expected = gemm(x, w), x.double() @ w.dequantize().t()
    assert not bool(y[:, ::3].any())
    assert relative_error(y, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("size_m", [10, 30, 64, 130])
def test_nan_and_infinity_come_through(size_m):
    gen = torch.Generator("cuda").manual_seed(4)
    w = random_weight(128, 512, 128, generator=gen)
    x = activations(size_m, 512, HALF, gen)
    x[5, 7], x[-1, 0] = float("nan"), float("inf")
    y = gemm(x, w)
    finite = torch.isfinite(y)
    assert not bool(finite[5].any()) and not bool(finite[-1].all())
    finite[5], finite[-1] = True, True
    assert bool(finite.all())


@pytest.mark.parametrize("size_n, size_k", LAYERS)
@pytest.mark.parametrize("size_m", [16, 32, 64, 128, 1024])
def test_runs_are_bit_identical(size_m, size_n, size_k):
    gen = torch.Generator("cuda").manual_seed(5)
    w = random_weight(size_n, size_k, 128, generator=gen)
    x = activations(size_m, size_k, BFLOAT16, gen)
    first = gemm(x, w)
    assert all(torch.equal(first, gemm(x, w)) for _ in range(4))


@pytest.mark.parametrize("size_m", [16, 192])
@pytest.mark.parametrize("size_n, size_k", LAYERS)
def test_chains_of_dependent_products(size_n, size_k, size_m):
    """Each product reads what the one before wrote, eager and as a graph."""
    gen = torch.Generator("cuda").manual_seed(6)
    there = random_weight(size_n, size_k, 128, generator=gen)
    back = random_weight(size_k, size_n, 128, generator=gen)
    x = activations(size_m, size_k, BFLOAT16, gen)
    # Keeps values in range without a kernel between the products, which would end
    # before the next begins.
    there.scale.mul_(2.0**-4)
    back.scale.mul_(2.0**-4)

    def chain(x, *, wait=False):
        for w in (there, back) * 3:
            x = gemm(x, w)
            if wait:
                torch.cuda.synchronize()
        return x

    expected = chain(x, wait=True)
    for _ in range(5):
        assert torch.equal(chain(x), expected)
    assert bool(torch.isfinite(expected).all())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        chain(x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(x)
    for _ in range(3):
        captured.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, expected)


@pytest.mark.parametrize("size_m", [16, 256])
def test_streams_side_by_side(size_m):
    gen = torch.Generator("cuda").manual_seed(7)
    w = [random_weight(2048, 2048, 128, generator=gen) for _ in range(4)]
    x = activations(size_m, 2048, HALF, gen)
    expected = [gemm(x, each) for each in w]
    streams = [torch.cuda.Stream() for _ in w]
    torch.cuda.synchronize()
    for _ in range(10):
        found = []
        for stream, each in zip(streams, w, strict=True):
            with torch.cuda.stream(stream):
                found.append(gemm(x, each))
        torch.cuda.synchronize()
        assert all(map(torch.equal, found, expected))


def test_what_the_kernel_does_not_take_is_refused():
    gen = torch.Generator("cuda").manual_seed(8)
    odd = random_weight(64, 480, 96, generator=gen)
    other = random_weight(64, 512, 128, scale_dtype=BFLOAT16, generator=gen)
    with pytest.raises(RuntimeError, match="does not take this call"):
        gemm(activations(64, 480, HALF, gen), odd)
    with pytest.raises(RuntimeError, match="does not take this call"):
        gemm(activations(65, 512, HALF, gen), other)
