# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The int8 quantization in front of ternary_gemm_w2a8 on CUDA, bit for bit."""

import pytest
import torch

from lib.bench.ops import load_ops, random_weight

DTYPES = [torch.float16, torch.bfloat16]
EPS = 1e-6


@pytest.fixture(scope="module", autouse=True)
def _ops():
    load_ops()


def position(k: int) -> int:
    """Where value k of a group of 32 lies: the order of the bytes of a word."""
    return 2 * (k & 8) + 2 * (k & 6) + ((k >> 4) & 1) + 2 * (k & 1)


def quantize(x, norms=None, ends=None, block_size=128):
    """(xq in the order of k [P, M, K_pad], xs [P, M], xsum [P, M], sums of tiles)."""
    size_m, size_k = x.shape
    parts = 1 if norms is None else norms.shape[0]
    w = random_weight(64, size_k, block_size)
    raw = torch.ops._C.ternary_quantize_tokens(
        x, w.weight, w.scale, norms, ends, EPS, 64, size_k, w.block_size
    )
    k_pad = (size_k + 127) // 128 * 128
    count, tokens = parts * size_m * k_pad, parts * size_m
    order = torch.tensor([position(k) for k in range(32)], device="cuda")
    xq = raw[:count].view(parts, size_m, k_pad // 32, 32)[..., order]
    rest = raw[count:].view(torch.int32)
    xs = rest[:tokens].view(torch.float32).view(parts, size_m)
    xsum = rest[tokens : 2 * tokens].view(parts, size_m)
    tiles = rest[2 * tokens :]
    if tiles.numel():
        tiles = tiles.view(parts, k_pad // 128, size_m)
    return xq.reshape(parts, size_m, k_pad), xs, xsum, tiles


def definition(v: torch.Tensor):
    """Float32 v [M, K] -> integers and scales, by float32 operations of torch."""
    top = v.abs().amax(-1, keepdim=True).clamp(min=1e-5)
    q = (v * (127.0 * (1.0 / top))).round().clamp(-128, 127)
    return q.to(torch.int8), quotient(top, 127)[:, 0]


def quotient(v: torch.Tensor, by: float) -> torch.Tensor:
    """V / by, rounded once: torch multiplies by the inverse of a number on CUDA."""
    return v / torch.full_like(v, by)


def check(found, q, scale):
    xq, xs, xsum, tiles = found
    parts, size_m, k_pad = xq.shape
    size_k = q.shape[-1]
    assert torch.equal(xq[..., :size_k], q)
    assert not xq[..., size_k:].any()
    assert torch.equal(xs, scale)
    wide = xq.to(torch.int64)
    assert torch.equal(xsum.long(), wide.sum(-1))
    if tiles.numel():
        sums = wide.view(parts, size_m, k_pad // 128, 128).sum(-1)
        assert torch.equal(tiles.long(), sums.transpose(1, 2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size_k", [1, 31, 128, 515, 4096, 8200, 16_376, 17408, 40_001])
def test_integers_and_sums_are_exact(size_k, dtype):
    for size_m in (1, 3, 33):
        gen = torch.Generator("cuda").manual_seed(size_k + size_m)
        x = torch.randn((size_m, size_k), device="cuda", generator=gen)
        # Halves of the largest value are ties of the rounding.
        x[:, ::3] = (x[:, ::3] * 8).round() / 8
        x = x.to(dtype)
        q, scale = definition(x.float())
        for block_size in (128, 1 << 20):
            check(quantize(x, block_size=block_size), q[None], scale[None])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm_dtype", [None, torch.float32])
@pytest.mark.parametrize("parts", [1, 3])
def test_norm_by_the_roundings_of_the_models(parts, norm_dtype, dtype):
    """Inputs whose squares add up exactly, in whatever order."""
    for size_m, size_k in [(2, 96), (5, 515), (300, 1024), (2, 20_000), (2, 50_003)]:
        gen = torch.Generator("cuda").manual_seed(size_k + parts)
        x = torch.randint(-8, 9, (size_m, size_k), device="cuda", generator=gen)
        x = (x / 4).to(dtype)
        norms = torch.rand((parts, size_k), device="cuda", generator=gen) + 0.5
        norms = norms.to(norm_dtype or dtype)
        cuts = [64 * (i + 1) // parts for i in range(parts)]
        ends = torch.tensor(cuts, dtype=torch.int32, device="cuda")
        wide = x.float()
        mean = quotient(wide.pow(2).sum(-1, keepdim=True), size_k)
        inverse = 1.0 / torch.sqrt(mean + EPS)
        h = (wide * inverse).to(dtype).float()
        q, scale = [], []
        for weight in norms:
            v = h * weight.float()
            if norm_dtype is None:
                v = v.to(dtype).float()
            for to, what in zip((q, scale), definition(v), strict=True):
                to.append(what)
        check(quantize(x, norms, ends), torch.stack(q), torch.stack(scale))


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_and_zero_tokens(dtype):
    gen = torch.Generator("cuda").manual_seed(3)
    base = torch.randn((9, 3 * 300), device="cuda", generator=gen).to(dtype)
    for view in (base[:, 1::3], base[:, 5:305], base[::2, :300], base[:, :300]):
        q, scale = definition(view.float())
        check(quantize(view), q[None], scale[None])
    zero = torch.zeros((4, 300), device="cuda", dtype=dtype)
    q, scale = definition(zero.float())
    check(quantize(zero), q[None], scale[None])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_tokens_with_nan_or_infinity_are_marked(bad):
    x = torch.ones((5, 700), device="cuda", dtype=torch.bfloat16)
    x[1, 650], x[4, 0] = bad, bad
    _, xs, _, _ = quantize(x)
    assert torch.isnan(xs[0]).tolist() == [False, True, False, False, True]
