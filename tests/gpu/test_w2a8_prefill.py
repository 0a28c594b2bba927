# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Hopper's kernels for W2A8 products, called past the dispatch by size.

Needs an NVIDIA GPU of compute capability 9.0 and the ops: an installed patched vLLM,
or TERNARY_LIBRARY.
"""

import random

import pytest
import torch

from lib.bench.ops import TernaryWeight, load_ops, random_weight

HALF, BFLOAT16 = torch.float16, torch.bfloat16
TOLERANCE = {HALF: 1e-3, BFLOAT16: 4e-3}
ROW = 1 << 20  # a block size beyond every K: one scale a row
EPS = 1e-6
FEW, HOPPER = 1, 2  # the numbers of the kernel for few tokens, and of these

# Sizes of real layers whose cut differs: split along K, one wave, several.
LAYERS = [(6144, 1024), (1024, 3072), (4096, 12288), (24576, 4096), (34816, 5120)]


@pytest.fixture(scope="module", autouse=True)
def _ops():
    load_ops()
    assert torch.cuda.get_device_capability() == (9, 0)


def generator(seed: int) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


def gemm(x, w: TernaryWeight, bias=None, norms=None, ends=None) -> torch.Tensor:
    sizes = (w.size_n, w.size_k, w.block_size)
    return torch.ops._C.ternary_gemm_w2a8_tuned(
        x, w.weight, w.scale, bias, norms, ends, EPS, *sizes, HOPPER, 0, 0
    )


def poison(size_m: int, size_n: int, dtype: torch.dtype) -> None:
    """Leave NaN in the block that y will get: every element must be written."""
    torch.full((size_m, size_n), float("nan"), device="cuda", dtype=dtype)


def integers(size_m, size_k, dtype, gen) -> torch.Tensor:
    """Tokens that their quantization to int8 leaves as they are, at scale 1."""
    x = torch.randint(-127, 128, (size_m, size_k), device="cuda", generator=gen)
    x[:, 0] = 127
    return x.to(dtype)


def power_scales(w: TernaryWeight, gen) -> None:
    """Scales whose products and sums float32 holds exactly."""
    power = torch.randint(-4, 1, w.scale.shape, device="cuda", generator=gen)
    w.scale.copy_(torch.exp2(power.float()) / 16)
    w.row_scale.copy_(w.scale.t()[: w.size_n])


def check_exact(size_m, size_n, size_k, block_size, dtype, scale_dtype, *, seed):
    """Integer inputs: only the last rounding is left, so every bit is known."""
    gen = generator(seed)
    w = random_weight(
        size_n, size_k, block_size, scale_dtype=scale_dtype, generator=gen
    )
    power_scales(w, gen)
    x = integers(size_m, size_k, dtype, gen)
    bias = None
    if seed % 2:
        bias = torch.randint(-9, 10, (size_n,), device="cuda", generator=gen).to(dtype)
    poison(size_m, size_n, dtype)
    y = gemm(x, w, bias)
    expected = x.double() @ w.dequantize().t()
    if bias is not None:
        expected += bias.double()
    assert torch.equal(y, expected.float().to(dtype)), (
        f"M={size_m} N={size_n} K={size_k} block={block_size} {dtype} {scale_dtype}"
    )


def quantized_product(x, weight, norm) -> torch.Tensor:
    """The definition: RMSNorm rounded to x's dtype, 127 / max|x|, integer product."""
    if norm is not None:
        wide = x.float()
        rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
        x = ((wide * rstd).to(x.dtype).float() * norm.float()).to(x.dtype)
    top = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-5)
    q = (x.float() * (127.0 * (1.0 / top))).round().clamp(-128, 127)
    return q.double() @ weight.t() * (top.double() / 127)


def check_parts(size_m, size_k, ends, block_size, dtype, *, seed):
    gen = generator(seed)
    size_n, parts = ends[-1], len(ends)
    w = random_weight(size_n, size_k, block_size, generator=gen)
    x = torch.randn((size_m, size_k), device="cuda", generator=gen).to(dtype)
    norms = torch.rand((parts, size_k), device="cuda", generator=gen).to(dtype) + 0.1
    poison(size_m, size_n, dtype)
    device_ends = torch.tensor(ends, dtype=torch.int32, device="cuda")
    y = gemm(x, w, None, norms, device_ends)
    assert bool(torch.isfinite(y).all())
    dense, begin = w.dequantize(), 0
    for part, end in enumerate(ends):
        if end == begin:
            continue
        expected = quantized_product(x, dense[begin:end], norms[part])
        error = float((y[:, begin:end].double() - expected).norm() / expected.norm())
        # A value on the edge between two integers may round either way.
        assert error < TOLERANCE[dtype], f"part {part} of {ends}: {error:.2e}"
        begin = end


@pytest.mark.parametrize("dtype", [HALF, BFLOAT16])
@pytest.mark.parametrize("block_size", [ROW, 128, 256, 384])
@pytest.mark.parametrize("seed", range(6))
def test_random_sizes_are_exact(seed, block_size, dtype):
    rng = random.Random(1000 * seed + block_size % 97)
    size_m = rng.choice([1, 7, 65, 100, 128, 129, 257, 515, 1030])
    size_n = rng.choice([1, 8, 40, 65, 129, 200, 500, 1111, 3000])
    size_k = rng.choice([1, 5, 100, 128, 129, 256, 300, 1000, 1160])
    scale_dtype = rng.choice([HALF, BFLOAT16, torch.float32])
    check_exact(size_m, size_n, size_k, block_size, dtype, scale_dtype, seed=seed)


@pytest.mark.parametrize("dtype", [HALF, BFLOAT16])
@pytest.mark.parametrize("size_m", range(1, 200, 7))
def test_numbers_of_tokens(size_m, dtype):
    check_exact(size_m, 200, 328, ROW, dtype, HALF, seed=size_m)


@pytest.mark.parametrize("size_m", [16, 64, 128, 333, 1024])
@pytest.mark.parametrize("layer", LAYERS)
def test_layers(layer, size_m):
    for block_size in (ROW, 128):
        check_exact(size_m, *layer, block_size, BFLOAT16, torch.float32, seed=size_m)


@pytest.mark.parametrize("dtype", [HALF, BFLOAT16])
@pytest.mark.parametrize("block_size", [ROW, 128])
@pytest.mark.parametrize(
    "ends",
    [
        [4096, 5120, 6144],
        [64, 128, 1000],
        [100, 300],
        [1, 2, 3],
        [17, 200, 700],
        [0, 130, 130, 400],
        [5, 900, 901, 1024],
    ],
)
def test_fused_parts(ends, block_size, dtype):
    for size_m, size_k in ((64, 512), (200, 1111)):
        check_parts(size_m, size_k, ends, block_size, dtype, seed=size_m + len(ends))


def test_random_parts():
    rng = random.Random(5)
    for seed in range(12):
        size_n = rng.randint(4, 1500)
        cuts = sorted(rng.sample(range(1, size_n), rng.randint(1, 3)))
        size_m, size_k = rng.choice([65, 128, 400]), rng.choice([256, 640, 3000])
        check_parts(size_m, size_k, [*cuts, size_n], ROW, BFLOAT16, seed=seed)


@pytest.mark.parametrize("block_size", [ROW, 128])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_token_spoils_its_row_alone(bad, block_size):
    gen = generator(3)
    w = random_weight(520, 700, block_size, generator=gen)
    x = torch.randn((150, 700), device="cuda", generator=gen).half()
    good = gemm(x, w)
    x[77, 123] = bad
    y = gemm(x, w)
    assert bool(torch.isnan(y[77]).all())
    keep = torch.arange(150, device="cuda") != 77
    assert torch.equal(y[keep], good[keep])


@pytest.mark.parametrize("block_size", [ROW, 128])
def test_calls_are_bit_identical(block_size):
    gen = generator(4)
    for size_m, size_n, size_k in ((70, 1024, 3072), (64, 4096, 12288)):
        w = random_weight(size_n, size_k, block_size, generator=gen)
        x = torch.randn((size_m, size_k), device="cuda", generator=gen).half()
        first = gemm(x, w)
        for _ in range(5):
            assert torch.equal(gemm(x, w), first)


def test_chains_streams_and_graphs():
    """A layer reads what the kernel before it wrote, eagerly and from a graph."""
    gen = generator(6)
    up = random_weight(3072, 1024, ROW, generator=gen)
    down = random_weight(1024, 3072, ROW, generator=gen)
    inputs = [
        torch.randn((300, 1024), device="cuda", generator=gen).bfloat16()
        for _ in range(4)
    ]

    def chain(x):
        for _ in range(3):
            x = gemm(torch.tanh(gemm(x, up)), down)
        return x

    expected = [chain(x) for x in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    found = []
    for x, stream in zip(inputs, streams, strict=True):
        with torch.cuda.stream(stream):
            found.append(chain(x))
    torch.cuda.synchronize()
    assert all(map(torch.equal, found, expected))

    static = inputs[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(static)
    for x, want in zip(inputs, expected, strict=True):
        static.copy_(x)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, want)


def test_the_op_uses_them():
    """Many tokens reach these kernels through the op itself, as its bits show."""
    gen = generator(8)
    # Sums of integers times float16 scales are exact in any order, or nearly.
    w = random_weight(3000, 1111, 128, scale_dtype=torch.float32, generator=gen)
    x = torch.randn((700, 1111), device="cuda", generator=gen).half()
    sizes = (w.size_n, w.size_k, w.block_size)
    y = torch.ops._C.ternary_gemm_w2a8(
        x, w.weight, w.scale, None, None, None, EPS, *sizes
    )
    assert torch.equal(y, gemm(x, w))
    # The kernel for few tokens adds the blocks' sums in another order.
    few = torch.ops._C.ternary_gemm_w2a8_tuned(
        x, w.weight, w.scale, None, None, None, EPS, *sizes, FEW, 132, 1
    )
    assert not torch.equal(y, few)
