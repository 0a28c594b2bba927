# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The quantizers against exact references: rational numbers and brute force."""

from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.convert.codec import TernaryFormatError, quantize
from lib.convert.codec import format as codec

BLOCKS = [4, 64, 128, "row", "tensor"]
seeds = st.integers(0, 2**32 - 1)


def weights(seed: int, n: int, k: int, dtype=torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(n, k, generator=generator) * 0.05).to(dtype)


def blocks_of(w: torch.Tensor, block):
    """Pairs of (index into the scale, slice of a NumPy float64 row or tensor)."""
    a = w.to(torch.float64).numpy()
    if block == "tensor":
        return [((0,), a.reshape(-1))]
    k = a.shape[1]
    length = k if block == "row" else block
    return [
        ((row, i), a[row, i * length : (i + 1) * length])
        for row in range(a.shape[0])
        for i in range(-(-k // length))
    ]


def integers_of(t: torch.Tensor, block):
    return [list(map(int, part)) for _, part in blocks_of(t, block)]


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("k", [4, 130, 320])
def test_absmean_equals_exact_arithmetic(block, dtype, k):
    w = weights(k, 5, k, dtype)
    t, scale = quantize.quantize_absmean(w, block)
    codec.check_scale(scale, (5,), k, block, dtype=torch.float16)
    for (index, values), got in zip(blocks_of(w, block), integers_of(t, block)):
        exact = sum(Fraction(abs(v)) for v in values) / len(values)
        s = Fraction(float(scale[index]))
        # Nearest: no neighbour in float16 is closer to the exact mean.
        half = np.float16(float(s))
        for neighbour in (
            np.nextafter(half, np.float16(0)),
            np.nextafter(half, np.float16(9)),
        ):
            assert abs(Fraction(float(neighbour)) - exact) >= abs(s - exact)
        expected = [max(-1, min(1, round(Fraction(v) / s))) for v in values]
        assert got == expected


def test_absmean_ties_go_to_zero_and_min_scale_holds():
    w = torch.tensor([[1.0, -0.25, 0.25, 0.5]])  # mean 0.5: 0.25 is half of it
    t, scale = quantize.quantize_absmean(w, 4)
    assert scale.item() == 0.5 and t.tolist() == [[1, 0, 0, 1]]
    w = torch.tensor([[1e-6, -1e-6, 6e-6, 0.0]])
    t, scale = quantize.quantize_absmean(w, 4, torch.float32, min_scale=1e-5)
    assert scale.item() == np.float32(1e-5) and t.tolist() == [[0, 0, 1, 0]]


def squared_error(values, s, t) -> Fraction:
    return sum((Fraction(v) - s * i) ** 2 for v, i in zip(values, t))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mse_is_the_best_of_all_integers_and_scales(seed, dtype):
    """Every t of a block of 6, with the best scales that the dtype can hold."""
    values = weights(seed, 1, 6).to(torch.float64)[0].tolist()
    t, scale = quantize.quantize_mse(torch.tensor([values]), 8, dtype)
    s, got = Fraction(float(scale[0, 0])), t[0].tolist()
    values = torch.tensor(values, dtype=torch.float32).tolist()
    error = squared_error(values, s, got)
    for candidate in product((-1, 0, 1), repeat=6):
        count = sum(map(abs, candidate))
        if not count:
            continue
        mean = sum(v * i for v, i in zip(values, candidate)) / count
        near = torch.tensor(max(mean, 0.0)).to(dtype)
        around = torch.tensor([0.0, 9.0], dtype=dtype)
        for other in (near, *torch.nextafter(near.expand(2), around)):
            assert squared_error(values, Fraction(float(other)), candidate) >= error


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("k", [64, 320])
def test_mse_is_no_worse_than_a_scan_of_scales(block, k):
    w = weights(k, 4, k)
    t, scale = quantize.quantize_mse(w, block)
    for (index, values), got in zip(blocks_of(w, block), integers_of(t, block)):
        s = float(scale[index])
        error = ((values - s * np.array(got)) ** 2).sum()
        scan = np.linspace(0, np.abs(values).max(), 400).astype(np.float16)
        for other in scan.astype(np.float64):
            best = np.where(2 * np.abs(values) > other, np.sign(values), 0)
            assert ((values - other * best) ** 2).sum() >= error * (1 - 1e-12)


@pytest.mark.parametrize("quantizer", ["quantize_absmean", "quantize_mse"])
def test_special_blocks(quantizer):
    function = getattr(quantize, quantizer)
    t, scale = function(torch.zeros(2, 8), 4)
    assert not t.any() and not scale.any()
    t, scale = function(torch.tensor([[0.0, -2.0, 0.0, 0.0]]), 4)
    assert t.tolist() == [[0, -1, 0, 0]]
    t, _ = function(torch.full((1, 5), -3.0), 4)
    assert t.tolist() == [[-1] * 5]
    for bad in (float("nan"), float("inf")):
        w = torch.ones(3, 300)
        w[2, 200] = bad
        with pytest.raises(
            TernaryFormatError, match=r"up: block 1 of row 2 \(columns 128"
        ):
            function(w, 128, name="up")
    with pytest.raises(TernaryFormatError, match="exceeds the range of float16"):
        function(torch.full((1, 4), 1e6), 4)
    t, scale = function(torch.full((1, 4), 1e6), 4, torch.float32)
    assert scale.item() == 1e6 and t.tolist() == [[1] * 4]
    with pytest.raises(TernaryFormatError, match="int8 where a floating-point"):
        function(torch.ones(1, 4, dtype=torch.int8), 4)


@pytest.mark.parametrize(
    "quantizer", ["quantize_absmean", "quantize_mse", "find_ternary"]
)
@pytest.mark.parametrize("block", BLOCKS)
def test_chunks_change_nothing(quantizer, block, monkeypatch):
    function = getattr(quantize, quantizer)
    w = weights(7, 40, 130)
    if quantizer == "find_ternary":
        w = codec.dequantize(*quantize.quantize_mse(w, block), None, block)
    t, scale = function(w, block)
    monkeypatch.setattr(codec, "CHUNK_BYTES", 30000)
    small = function(w, block)
    assert torch.equal(t, small[0]) and torch.equal(scale, small[1])
    three = function(w.view(4, 10, 130), block)
    assert torch.equal(three[0].view(40, 130), t)
    assert torch.equal(three[1].flatten(), scale.flatten())


@given(
    st.integers(1, 6),
    st.integers(1, 300),
    st.sampled_from([4, 20, 128, "row", "tensor"]),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    seeds,
)
@settings(deadline=None)
def test_find_ternary_is_lossless(n, k, block, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    t = torch.randint(-1, 2, (n, k), generator=generator, dtype=torch.int8)
    shape = codec.scale_shape((n,), k, block)
    scale = (torch.rand(shape, generator=generator) + 2**-6).to(dtype)
    w = codec.dequantize(t, scale, None, block, dtype)
    found, s = quantize.find_ternary(w, block, dtype)
    assert torch.equal(found, t)
    assert torch.equal(codec.dequantize(found, s, None, block, dtype), w)
    used = s != 0
    assert torch.equal(s[used], scale[used])


def test_find_ternary_takes_minus_zero_as_zero():
    t, scale = quantize.find_ternary(torch.tensor([[-0.0, 0.5, -0.5, 0.0]]), 4)
    assert t.tolist() == [[0, 1, -1, 0]] and scale.tolist() == [[0.5]]


@pytest.mark.parametrize("block", BLOCKS)
def test_almost_ternary_is_refused_by_tensor_and_block(block):
    t, scale = quantize.quantize_mse(weights(3, 4, 320), block)
    w = codec.dequantize(t, scale, None, block, torch.float16)
    row, column = 2, int(t[2, 130:].nonzero()[0]) + 130
    w[row, column] = torch.nextafter(w[row, column], torch.tensor(0.0).half())
    words = {
        4: rf"block {column // 4} of row 2 \(columns {column // 4 * 4} to",
        64: "block 2 of row 2",
        128: r"block 1 of row 2 \(columns 128 to 255\)",
        "row": r"block 0 of row 2 \(columns 0 to 319\)",
        "tensor": "the tensor",
    }
    with pytest.raises(
        TernaryFormatError, match=f"k_proj: {words[block]}.*not ternary"
    ):
        quantize.find_ternary(w, block, name="k_proj")


def test_scale_is_kept_exactly_or_refused():
    s = 0.1  # float32 has it with 24 bits, float16 with 11
    w = torch.tensor([[s, 0.0, -s, s]])
    with pytest.raises(
        TernaryFormatError, match="float16 cannot hold exactly.*float32"
    ):
        quantize.find_ternary(w, 4)
    assert torch.equal(quantize.find_ternary(w, 4, torch.float32)[1], w[:, :1])
    small = torch.tensor([[2.0**-30, 0.0]], dtype=torch.bfloat16)
    with pytest.raises(TernaryFormatError, match="bfloat16 holds it"):
        quantize.find_ternary(small, 4)
    with pytest.raises(TernaryFormatError, match="cannot hold"):
        quantize.find_ternary(torch.tensor([[1e5, 0.0]]), 4)


@given(st.lists(st.floats(-7e4, 7e4, allow_nan=False), min_size=1, max_size=50))
def test_round_to_rounds_once(values):
    x = np.array(values)
    # Values half way between two float16, off by less than float32 resolves.
    with np.errstate(over="ignore"):
        half = x.astype(np.float16)
        next_half = np.nextafter(half, np.float16(np.inf)).astype(np.float64)
    middle = (half.astype(np.float64) + next_half) / 2
    x = np.concatenate([x, middle, middle * (1 + 2**-50), middle * (1 - 2**-50)])
    x = x[np.isfinite(x)]
    got = quantize.round_to(torch.from_numpy(x), torch.float16)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(got.numpy(), x.astype(np.float16))
