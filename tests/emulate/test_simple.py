# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Quantization, embedding, copies and the naive kernels, emulated."""

import ctypes

import harness
import numpy as np
import pytest
import torch
from harness import BFLOAT16, FLOAT, HALF, ROW, up

EPS = np.float32(1e-6)


def definition(v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 v [M, K] -> integers and scales, by float32 operations."""
    top = v.abs().amax(-1, keepdim=True).clamp(min=1e-5)
    q = (v * (127.0 * (1.0 / top))).round().clamp(-128, 127)
    return q.to(torch.int8), (top / 127)[:, 0]


def check_quantized(emulator, args, q, scale):
    """`q` [parts, M, K] and `scale` [parts, M] against what a call left."""
    k_pad = args.K_pad
    expected = torch.zeros((*q.shape[:2], k_pad), dtype=torch.int8)
    expected[..., : q.shape[2]] = q
    assert torch.equal(emulator.get(args.xq), harness.permuted(expected))
    assert torch.equal(emulator.get(args.xs), scale)
    assert torch.equal(emulator.get(args.xsum), expected.int().sum(-1).int())
    if args.xsum_tiles:
        sums = expected.int().reshape(*q.shape[:2], k_pad // 128, 128).sum(-1)
        assert torch.equal(emulator.get(args.xsum_tiles), sums.transpose(1, 2).int())
    emulator.free()


# The last one is beyond what threads keep in registers.
@pytest.mark.parametrize("dtype", [HALF, BFLOAT16])
@pytest.mark.parametrize("size_k", [1, 31, 515, 8200, 24_700])
def test_quantize(emulators, size_k, dtype):
    emulator = emulators[900]
    m = 7 if size_k < 1000 else 2
    rng = np.random.default_rng(size_k)
    x = torch.from_numpy(rng.standard_normal((m, size_k))).to(dtype)
    x[:, ::3] = (x[:, ::3].float() * 8).round().to(dtype) / 8  # ties
    for device in (harness.H200, harness.HOPPER_3):
        a = harness.quantize_arguments(
            emulator, x, None, 1, up(size_k, 128), device, with_tiles=size_k % 2 == 0
        )
        emulator.withhold(a.x, a.xq, a.xs, a.xsum)
        emulator.call("quantize", a, seed=size_k, device=device)
        q, scale = definition(x.float())
        check_quantized(emulator, a, q[None], scale[None])


@pytest.mark.parametrize("dtype", [HALF, BFLOAT16])
@pytest.mark.parametrize("norm_dtype", [None, FLOAT])
@pytest.mark.parametrize(
    "size_m, size_k", [(5, 515), (3, 9000), (12, 256), (1, 24_700)]
)
def test_quantize_with_norm(emulators, size_m, size_k, norm_dtype, dtype):
    """Inputs whose squares add up exactly, in whatever order."""
    emulator, parts = emulators[900], 3
    rng = np.random.default_rng(size_k)
    x = torch.from_numpy(rng.integers(-8, 9, (size_m, size_k)) / 4).to(dtype)
    norm = torch.from_numpy(rng.uniform(0.5, 1.5, (parts, size_k)))
    norm = norm.to(norm_dtype or dtype)
    mean = x.float().pow(2).sum(-1, keepdim=True) / size_k
    h = (x.float() * (1.0 / torch.sqrt(mean + EPS))).to(dtype).float()
    q, scale = [], []
    for weight in norm:
        v = h * weight.float()
        found = definition(v if norm_dtype else v.to(dtype).float())
        q.append(found[0])
        scale.append(found[1])
    # On the smaller device a thread block has several tokens, and all parts.
    for device in (harness.H200, harness.HOPPER_3):
        a = harness.quantize_arguments(
            emulator, x, norm, parts, up(size_k, 128), device, with_tiles=True
        )
        emulator.call("quantize", a, seed=size_k, device=device)
        check_quantized(emulator, a, torch.stack(q), torch.stack(scale))


def test_tokens_with_nan_or_infinity_are_marked(emulators):
    emulator = emulators[900]
    x = torch.ones((4, 700), dtype=BFLOAT16)
    x[1, 650], x[3, 0] = float("nan"), float("-inf")
    a = harness.quantize_arguments(emulator, x, None, 1, 768, 0, with_tiles=True)
    emulator.call("quantize", a)
    assert torch.isnan(emulator.get(a.xs)[0]).tolist() == [False, True, False, True]
    emulator.free()


@pytest.mark.parametrize("dtype", [HALF, BFLOAT16, FLOAT])
def test_gather(emulators, dtype):
    emulator = emulators[900]
    rng = np.random.default_rng(3)
    w = harness.make_weight(rng, 75, 300, 32, FLOAT, zero_point=True)
    for index_dtype in (torch.int64, torch.int32):
        rows = torch.tensor([74, 0, -1, 75, 3], dtype=index_dtype)
        a = harness.EmbeddingArgs()
        a.indices, a.indices_are_int64 = emulator.put(rows), index_dtype == torch.int64
        a.count, a.weight, a.scale = 5, emulator.put(w.packed), emulator.put(w.scale)
        a.scale_dtype, a.zero_point = harness.DTYPE[FLOAT], emulator.put(w.zero_point)
        a.out, a.dtype = emulator.empty((5, 300), dtype), harness.DTYPE[dtype]
        a.N, a.K, a.N_pad, a.K_pad, a.block_size = 75, 300, 128, 384, 32
        emulator.call("gather", a)
        expected = torch.zeros((5, 300), dtype=torch.float64)
        expected[[0, 1, 4]] = w.dense()[[74, 0, 3]]
        found = emulator.get(a.out).double()
        torch.testing.assert_close(found, expected, rtol=2**-8, atol=1e-6)
        emulator.free()


def test_copy(emulators):
    emulator = emulators[900]
    source = torch.arange(7 * 60, dtype=torch.int16).reshape(7, 60)
    to = emulator.empty((7, 24), torch.int16)
    P, L = ctypes.c_void_p, ctypes.c_int64
    given = (P(emulator.put(source)), L(60), L(3), P(to), L(24), L(7), L(20))
    emulator.call("copy", *given)
    expected = torch.zeros((7, 24), dtype=torch.int16)
    expected[:, :20] = source[:, ::3]
    assert torch.equal(emulator.get(to), expected)
    emulator.free()


@pytest.mark.parametrize("dtype", [HALF, BFLOAT16])
def test_naive_kernels(emulators, dtype):
    emulator = emulators[900]
    rng = np.random.default_rng(4)
    w = harness.make_weight(rng, 70, 150, 20, FLOAT, zero_point=True)
    x = harness.tokens(rng, 3, 150, dtype)
    bias = torch.randn(70, generator=torch.Generator().manual_seed(1)).to(dtype)
    y = harness.gemm(emulator, "reference_gemm", [], x, w, bias=bias)
    expected = harness.expected_gemm(x, w, bias)
    assert harness.error(y, expected) < harness.TOLERANCE[dtype]
    for block in (20, ROW):
        w = harness.make_weight(rng, 70, 150, block, HALF)
        q = harness.make_quantized(rng, 2, 3, 150, w.k_pad)
        ends = [33, 70]
        y = harness.w2a8(
            emulator, "reference_w2a8", [], q, w, dtype, bias=bias, ends=ends
        )
        expected = harness.expected_w2a8(q, w, bias, ends)
        assert harness.error(y, expected) < harness.TOLERANCE[dtype]
