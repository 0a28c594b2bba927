# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""ternary_gemm_w2a8 on CUDA against the definition, in integers and float64."""

import random

import pytest
import torch

from lib.bench.ops import load_ops, random_weight

DTYPES = [torch.float16, torch.bfloat16]


@pytest.fixture(scope="module", autouse=True)
def _ops():
    load_ops()


def quantize(x: torch.Tensor, norm: torch.Tensor | None, eps: float):
    """Per token: RMSNorm in float32 rounded to x's dtype, then 127 * (1 / max|x|)."""
    if norm is not None:
        wide = x.float()
        inverse = 1.0 / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        x = ((wide * inverse).to(x.dtype).float() * norm.float()).to(x.dtype)
    top = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-5)
    q = (x.float() * (127.0 * (1.0 / top))).round().clamp(-128, 127)
    return q, top.double() / 127


def expected_output(x, w, bias, norms, ends, eps):
    out = torch.zeros((x.shape[0], w.size_n), device="cuda", dtype=torch.float64)
    begin = 0
    for part, end in enumerate(ends):
        q, scale = quantize(x, None if norms is None else norms[part], eps)
        full = q.double() @ w.dequantize()[begin:end].t() * scale
        out[:, begin:end] = full
        begin = end
    return out if bias is None else out + bias.double()


def run_case(size_m, size_n, size_k, block, dtype, parts, *, seed, bias, strided):
    gen = torch.Generator("cuda").manual_seed(seed)
    scale_dtype = torch.float32 if seed % 2 else torch.float16
    w = random_weight(size_n, size_k, block, scale_dtype=scale_dtype, generator=gen)
    x = torch.randn((size_m, size_k * 2), device="cuda", generator=gen).to(dtype)
    x = x[:, ::2] if strided else x[:, :size_k].contiguous()
    norms = ends = None
    ends_list = [size_n]
    if parts:
        norms = (
            torch.rand((parts, size_k), device="cuda", generator=gen).to(dtype) + 0.5
        )
        cuts = sorted(random.Random(seed).sample(range(1, size_n), parts - 1))
        ends_list = [*cuts, size_n]
        ends = torch.tensor(ends_list, dtype=torch.int32, device="cuda")
    b = torch.randn(size_n, device="cuda", generator=gen).to(dtype) if bias else None
    y = torch.ops._C.ternary_gemm_w2a8(
        x, w.weight, w.scale, b, norms, ends, 1e-6, size_n, size_k, w.block_size
    )
    assert y.shape == (size_m, size_n) and y.dtype == dtype
    assert bool(torch.isfinite(y).all())
    expected = expected_output(x, w, b, norms, ends_list, 1e-6)
    found = float((y.double() - expected).norm() / expected.norm())
    # A value on the edge between two integers may round either way.
    bound = 1e-3 if dtype == torch.float16 else 4e-3
    assert found < bound, f"{found:.2e} {size_m=} {size_n=} {size_k=} {block=} {parts=}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [0, 1, 3])
@pytest.mark.parametrize("block", [128, 32, 100, 1 << 20])
def test_against_the_definition(block, parts, dtype):
    sizes = [
        (1, 192, 256),
        (5, 300, 515),
        (17, 1000, 1111),
        (64, 256, 3072),
        (130, 64, 128),
    ]
    for i, (m, n, k) in enumerate(sizes):
        seed = i + 10 * parts + block % 91
        run_case(
            m, n, k, block, dtype, parts, seed=seed, bias=i % 2 == 0, strided=i == 2
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size_m", range(1, 71))
def test_every_number_of_tokens(size_m, dtype):
    run_case(
        size_m, 200, 384, 1 << 20, dtype, 3, seed=size_m, bias=False, strided=False
    )


def test_integer_sums_are_exact():
    """Inputs that are integers already: the product must be exact."""
    gen = torch.Generator("cuda").manual_seed(1)
    w = random_weight(128, 512, 1 << 20, generator=gen)
    w.scale.fill_(1.0)
    x = torch.randint(-127, 128, (9, 512), device="cuda", generator=gen).float()
    x[:, 0] = 127
    y = torch.ops._C.ternary_gemm_w2a8(
        x.half(), w.weight, w.scale, None, None, None, 1e-6, 128, 512, w.block_size
    )
    assert torch.equal(y, (x.double() @ w.ternary.double().t()).half())


def test_zero_rows_and_empty_batch():
    w = random_weight(128, 256)
    args = (w.weight, w.scale, None, None, None, 1e-6, 128, 256, 128)
    zero = torch.zeros((3, 256), device="cuda", dtype=torch.bfloat16)
    # What the memory of the output holds before: every element must be written.
    nan = [torch.full_like(zero[:, :128], float("nan")) for _ in range(3)]
    del nan
    assert not torch.ops._C.ternary_gemm_w2a8(zero, *args).any()
    assert torch.ops._C.ternary_gemm_w2a8(zero[:0], *args).shape == (0, 128)


def test_parts_must_say_where_they_end():
    w = random_weight(128, 256)
    x = torch.zeros((3, 256), device="cuda", dtype=torch.float16)
    norms = torch.ones((2, 256), device="cuda", dtype=torch.float16)
    with pytest.raises(RuntimeError, match="part_ends"):
        torch.ops._C.ternary_gemm_w2a8(
            x, w.weight, w.scale, None, norms, None, 1e-6, 128, 256, 128
        )
