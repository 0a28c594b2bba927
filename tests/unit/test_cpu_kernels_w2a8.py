# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""ternary_gemm_w2a8 on the CPU: exact integers, and float64 around them."""

import cpu_ops
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

ops = cpu_ops.load_ops()
ISAS = cpu_ops.available_isas()
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
per_isa = pytest.mark.parametrize("isa", ISAS)
per_dtype = pytest.mark.parametrize("dtype", DTYPES)


def _gemm(isa, x, weight, bias=None, norm=None, ends=None, eps=1e-6):
    sizes = (weight.size_n, weight.size_k, weight.block_size)
    with cpu_ops.isa(isa):
        return ops.ternary_gemm_w2a8(
            x, weight.weight, weight.scale, bias, norm, ends, eps, *sizes
        )


def _quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize as transformers' AutoBitLinear does, with the int8 kept apart."""
    scale = 127 / x.float().abs().amax(-1, keepdim=True).clamp(min=1e-5)
    return (x.float() * scale).round().clamp(-128, 127), scale


def _reference(x: torch.Tensor, weight) -> torch.Tensor:
    q, scale = _quantize(x)
    return q.double() @ weight.dense.T / scale.double()


def _integers(size_m: int, size_k: int, seed: int) -> torch.Tensor:
    """Rows of integers up to 127, which quantize to themselves."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-127, 128, (size_m, size_k), generator=generator)
    x[:, 0] = 127
    return x


@per_isa
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_sums_are_exact(isa, data):
    """With scale 1 and integers below 2^24 the result is the int64 matmul."""
    size_n = data.draw(st.integers(1, 150), "N")
    size_k = data.draw(st.integers(1, 1500), "K")
    block_size = data.draw(st.sampled_from([4, 32, 36, 64, 128, 2048]), "block")
    size_m = data.draw(st.integers(0, 40), "M")
    seed = data.draw(st.integers(0, 10**6), "seed")
    weight = cpu_ops.random_weight(size_n, size_k, block_size, seed=seed)
    weight.scale.fill_(1)
    x = _integers(size_m, size_k, seed)
    exact = x @ weight.ternary.long().T
    assert torch.equal(_gemm(isa, x.float(), weight).long(), exact)


@pytest.mark.parametrize("size_k", [64, 448, 1088, 2112, 8256])
@pytest.mark.parametrize("size_n", [16, 48, 613, 1120])
def test_sums_of_bands_of_rows_are_exact(size_n, size_k):
    """Many tokens, rows of every part of a band, rounded to bfloat16 only once."""
    weight = cpu_ops.random_weight(size_n, size_k, size_k, seed=size_n + size_k)
    weight.scale.fill_(1)
    bias = torch.randint(-9, 10, (size_n,)).bfloat16()
    for size_m in (65, 80, 96, 131):
        x = _integers(size_m, size_k, size_m)
        exact = x.float() @ weight.ternary.float().T  # below 2^24
        y = _gemm(None, x.bfloat16(), weight, bias)
        assert torch.equal(y, (exact + bias.float()).bfloat16())


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_large_outputs_are_exact(dtype):
    """8 MiB and more, which ask for large pages."""
    size_m, size_n, size_k = 2500 * 4 // dtype.itemsize, 1101, 200
    weight = cpu_ops.random_weight(size_n, size_k, size_k, seed=dtype.itemsize)
    weight.scale.fill_(1)
    x = _integers(size_m, size_k, size_m)
    exact = x.float() @ weight.ternary.float().T  # below 2^24
    assert torch.equal(_gemm(None, x.to(dtype), weight), exact.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size_k", [40, 64, 200, 1088])
def test_quantization_is_the_same_on_every_isa(dtype, size_k):
    """Rows of whole vectors, and of parts of them."""
    weight = cpu_ops.random_weight(64, size_k, size_k, seed=size_k)
    x = cpu_ops.random_x(33, size_k, dtype, size_k) * torch.tensor(3.0).to(dtype)
    expected = _gemm("portable", x, weight)
    for isa in ISAS:
        assert torch.equal(_gemm(isa, x, weight), expected)


@per_isa
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_largest_sums_do_not_overflow(isa, sign):
    size_k = 12288
    ternary = torch.full((32, size_k), sign, dtype=torch.int8)
    for block_size in (size_k, 128):
        weight = cpu_ops.random_weight(32, size_k, block_size, seed=0, ternary=ternary)
        weight.scale.fill_(1)
        for size_m in (1, 4, 40):
            x = torch.full((size_m, size_k), -127.0)
            y = _gemm(isa, x, weight)
            assert (y == -127 * sign * size_k).all()


@per_isa
@per_dtype
def test_rounding_is_that_of_torch(isa, dtype):
    """An identity shows each int8; halves go to even."""
    size_k = 260
    ternary = torch.eye(size_k, dtype=torch.int8)
    weight = cpu_ops.random_weight(size_k, size_k, 512, seed=0, ternary=ternary)
    weight.scale.fill_(1)
    x = cpu_ops.random_x(300, size_k, dtype, 1)
    x[:50] = torch.randint(-254, 255, (50, size_k)).to(dtype) / 2  # many ties
    x[:50, 0] = 127
    q, scale = _quantize(x)
    for rows in (slice(0, 1), slice(0, 3), slice(0, 300)):
        y = _gemm(isa, x[rows].float(), weight)
        assert torch.equal((y * scale[rows]).round(), q[rows])


@per_isa
@per_dtype
@pytest.mark.parametrize("block_size", [32, 64, 128, 384])
def test_every_number_of_tokens(isa, dtype, block_size):
    weight = cpu_ops.random_weight(96, 384, block_size, seed=block_size)
    for size_m in [*range(36), 70, 300, 513]:
        x = cpu_ops.random_x(size_m, 384, dtype, size_m)
        y = _gemm(isa, x, weight)
        assert y.shape == (size_m, 96) and y.dtype == dtype
        error = cpu_ops.relative_error(y, _reference(x, weight))
        assert error < cpu_ops.TOLERANCE[dtype]


@per_isa
@pytest.mark.parametrize("scale_dtype", DTYPES)
def test_bias_strides_and_scale_types(isa, scale_dtype):
    weight = cpu_ops.random_weight(70, 200, 64, seed=2, scale_dtype=scale_dtype)
    bias = torch.randn(70)
    for size_m in (1, 6, 33):
        x = cpu_ops.random_x(size_m, 200, torch.float32, 3)
        spaced = torch.stack([x, x], -1)[..., 0]
        assert not spaced.is_contiguous() or size_m == 0
        y = _gemm(isa, spaced, weight, bias)
        error = cpu_ops.relative_error(y, _reference(x, weight) + bias.double())
        assert error < 1e-5


@per_isa
@per_dtype
@pytest.mark.parametrize("norm_dtype", [None, torch.float32])
def test_norm_per_part(isa, dtype, norm_dtype):
    """Parts that end within a vector of rows, each with a norm of its own."""
    size_k = 192
    weight = cpu_ops.random_weight(150, size_k, size_k, seed=4)
    ends = [37, 37, 90, 150]  # one part is empty
    generator = torch.Generator().manual_seed(9)
    norm = torch.rand(4, size_k, generator=generator).to(norm_dtype or dtype) + 0.5
    for size_m in (1, 3, 16, 40):
        x = cpu_ops.random_x(size_m, size_k, dtype, size_m) * 3
        y = _gemm(isa, x, weight, norm=norm, ends=torch.tensor(ends, dtype=torch.int32))
        wide = x.float()
        inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        normed = (wide * inverse).to(dtype)
        begin = 0
        for part, end in enumerate(ends):
            q, scale = _quantize(norm[part] * normed)
            exact = q.double() @ weight.dense[begin:end].T / scale.double()
            # A sum of squares in another order may turn one tie.
            error = cpu_ops.relative_error(y[:, begin:end], exact)
            assert error < cpu_ops.TOLERANCE[dtype] + 2e-3
            begin = end


@per_isa
def test_one_norm_for_the_whole_layer(isa):
    weight = cpu_ops.random_weight(32, 64, 64, seed=4)
    norm = torch.rand(1, 64) + 0.5
    x = cpu_ops.random_x(5, 64, torch.float32, 1)
    ends = torch.tensor([32], dtype=torch.int32)
    assert torch.equal(
        _gemm(isa, x, weight, norm=norm),
        _gemm(isa, x, weight, norm=norm, ends=ends),
    )


@per_isa
@per_dtype
def test_infinity_and_nan_poison_their_token_only(isa, dtype):
    weight = cpu_ops.random_weight(40, 100, 32, seed=7)
    for bad in (torch.nan, torch.inf, -torch.inf):
        for size_m in (1, 2, 9, 40):
            x = cpu_ops.random_x(size_m, 100, dtype, size_m)
            clean = _gemm(isa, x, weight)
            x[size_m // 2, 99] = bad
            y = _gemm(isa, x, weight)
            keep = torch.arange(size_m) != size_m // 2
            assert y[size_m // 2].isnan().all()
            assert torch.equal(y[keep], clean[keep])


@per_isa
def test_zero_tokens_and_tokens_of_zero(isa):
    weight = cpu_ops.random_weight(40, 100, 32, seed=7)
    assert _gemm(isa, torch.zeros(0, 100), weight).shape == (0, 40)
    assert (_gemm(isa, torch.zeros(5, 100), weight) == 0).all()


def test_all_isas_give_the_same_sums():
    weight = cpu_ops.random_weight(200, 1000, 1024, seed=8)
    for size_m in (1, 7, 50):
        x = cpu_ops.random_x(size_m, 1000, torch.float32, 2)
        results = [_gemm(isa, x, weight) for isa in ISAS]
        for y in results[1:]:
            torch.testing.assert_close(y, results[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("inverse_scale", [True, False])
def test_transformers_bitlinear(inverse_scale):
    """The outside reference, in both conventions for the stored scale."""
    from transformers.integrations import bitnet

    generator = torch.Generator().manual_seed(3)
    ternary = torch.randint(-1, 2, (64, 96), generator=generator, dtype=torch.int8)
    stored = torch.tensor([0.37])
    scale = 1 / stored if inverse_scale else stored
    weight = cpu_ops.random_weight(64, 96, 96, seed=0, ternary=ternary)
    weight.scale = weight.scale.float()
    weight.scale[:, :64] = scale
    x = cpu_ops.random_x(9, 96, torch.float32, 5)
    if inverse_scale:
        layer = bitnet.BitLinear(96, 64, bias=False, dtype=torch.float32)
        # transformers packs with uint8 codes t + 1 along N.
        layer.weight.data = bitnet.pack_weights(ternary.float())
        layer.weight_scale.data = stored
        expected = layer(x)
    else:
        q, x_scale = _quantize(x)
        quantized = bitnet.ActQuant.apply(x)
        torch.testing.assert_close(quantized, q / x_scale)
        expected = torch.nn.functional.linear(quantized, ternary.float()) * stored
    y = _gemm(None, x, weight)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 3)}, "x has 3 columns but size_k=64"),
        ({"norm": torch.ones(64)}, r"norm_weight has shape \[64\]"),
        ({"norm": torch.ones(2, 64)}, r"norm_weight has shape \[2, 64\]"),
        ({"norm": torch.ones(1, 64).half()}, "norm_weight has dtype Half"),
        ({"ends": torch.tensor([30])}, "part_ends has shape .* dtype Long"),
        ({"ends": torch.tensor([20], dtype=torch.int32)}, "part_ends ends at 20"),
        (
            {"ends": torch.tensor([20, 10, 30], dtype=torch.int32)},
            r"part_ends\[1\]=10 is below",
        ),
    ],
)
def test_bad_arguments_are_named(change, message):
    weight = cpu_ops.random_weight(30, 64, 64, seed=0)
    arguments = {"x": torch.zeros(2, 64), "norm": None, "ends": None} | change
    with pytest.raises(RuntimeError, match=message):
        _gemm(
            None,
            arguments["x"],
            weight,
            norm=arguments["norm"],
            ends=arguments["ends"],
        )
