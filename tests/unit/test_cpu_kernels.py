# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""ternary_gemm and ternary_embedding on the CPU against float64.

Every instruction set that the processor has is forced in turn.
"""

import ctypes
import mmap

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


def _gemm(isa, x, weight, bias=None):
    with cpu_ops.isa(isa):
        return ops.ternary_gemm(x, *weight.arguments(bias))


def _check(isa, x, weight, bias=None):
    y = _gemm(isa, x, weight, bias)
    assert y.dtype == x.dtype and y.is_contiguous()
    assert y.shape == (x.shape[0], weight.size_n)
    reference = x.double() @ weight.dense.T
    if bias is not None:
        reference += bias.double()
    assert cpu_ops.relative_error(y, reference) < cpu_ops.TOLERANCE[x.dtype]


@per_isa
@per_dtype
@pytest.mark.parametrize("block_size", [32, 64, 128, 256, 384])
def test_every_number_of_tokens(isa, dtype, block_size):
    weight = cpu_ops.random_weight(96, 384, block_size, seed=block_size)
    for size_m in [*range(71), 100, 300, 513]:
        _check(isa, cpu_ops.random_x(size_m, 384, dtype, size_m), weight)


@pytest.mark.parametrize("size_k", [192, 1056, 4160])
@pytest.mark.parametrize("block_size", [32, 8192])
def test_bands_of_rows(size_k, block_size):
    """Many rows, whose last ones are no whole lane group, times many tokens."""
    weight = cpu_ops.random_weight(613, size_k, block_size, seed=size_k)
    bias = torch.randn(613).bfloat16()
    for size_m in (65, 80, 97, 160):
        x = cpu_ops.random_x(size_m, size_k, torch.bfloat16, size_m)
        _check(None, x, weight, bias)


@per_isa
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_shape(isa, data):
    size_n = data.draw(st.integers(1, 200), "N")
    size_k = data.draw(st.integers(1, 700), "K")
    block_size = data.draw(st.sampled_from([4, 12, 16, 32, 60, 64, 128, 1024]), "block")
    seed = data.draw(st.integers(0, 10**6), "seed")
    dtype = data.draw(st.sampled_from(DTYPES), "dtype")
    bias_dtype = data.draw(st.sampled_from([None, torch.float32, dtype]), "bias")
    weight = cpu_ops.random_weight(
        size_n,
        size_k,
        block_size,
        seed=seed,
        scale_dtype=data.draw(st.sampled_from(DTYPES), "scale"),
        zero_point=data.draw(
            st.sampled_from([None, torch.float32, torch.int32]), "zero point"
        ),
    )
    x = cpu_ops.random_x(data.draw(st.integers(0, 40), "M"), size_k, dtype, seed)
    bias = None
    if bias_dtype is not None:
        bias = torch.randn(size_n).to(bias_dtype)
    _check(isa, x, weight, bias)


@per_isa
@per_dtype
def test_long_rows(isa, dtype):
    """Panels of weights and sums that go on over several pieces of K."""
    for size_k, block_size in ((9728, 128), (9728, 9728), (12288, 8192)):
        weight = cpu_ops.random_weight(48, size_k, block_size, seed=size_k)
        for size_m in (1, 5, 33, 130):
            _check(isa, cpu_ops.random_x(size_m, size_k, dtype, size_m), weight)


@per_isa
@per_dtype
def test_strides(isa, dtype):
    weight = cpu_ops.random_weight(40, 96, 32, seed=1)
    for size_m in (1, 3, 20):
        x = cpu_ops.random_x(size_m, 96, dtype, 2)
        wide = torch.full((size_m, 300), torch.nan, dtype=dtype)
        wide[:, 3:291:3] = x
        reference = _gemm(isa, x, weight)
        for view in (
            wide[:, 3:291:3],
            x.t().contiguous().t(),
            x.flip(0).contiguous().flip(0),
            torch.cat([x, x], 1)[:, :96],
        ):
            assert torch.equal(view, x)
            assert torch.equal(_gemm(isa, view, weight), reference)
        repeated = x[:1].expand(size_m, -1)  # stride 0
        assert torch.equal(
            _gemm(isa, repeated, weight), _gemm(isa, repeated.clone(), weight)
        )


@per_isa
@per_dtype
@pytest.mark.parametrize("block_size", [16, 32, 64, 1024])
def test_infinity_and_nan_show_as_in_a_matmul(isa, dtype, block_size):
    weight = cpu_ops.random_weight(80, 130, block_size, seed=7)
    dense = weight.dense.float()
    for bad in (torch.nan, torch.inf, -torch.inf):
        for size_m in (1, 2, 3, 8, 40):
            x = cpu_ops.random_x(size_m, 130, dtype, size_m)
            x[size_m // 2, 129] = bad
            y = _gemm(isa, x, weight)
            reference = x.float() @ dense.T
            assert torch.equal(y.isnan(), reference.isnan())
            assert torch.equal(y.isinf(), reference.isinf())
            infinite = reference.isinf()
            assert torch.equal(y.float()[infinite], reference[infinite])


@per_isa
def test_a_nan_with_any_payload_stays_one(isa):
    weight = cpu_ops.random_weight(20, 64, 64, seed=7)
    for bits in (0x7F800001, 0x7FC00000, -0x7FFFFF, 0x7F80FFFF):
        for size_m in (1, 2, 20):
            x = torch.zeros(size_m, 64)
            x[0, 5] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
            assert _gemm(isa, x, weight)[0].isnan().all()


@per_isa
def test_full_range_of_float32_and_float16(isa):
    """Values that a split into bfloat16 could round up, down or away."""
    ternary = torch.eye(64, dtype=torch.int8)
    weight = cpu_ops.random_weight(64, 64, 64, seed=0, ternary=ternary)
    weight.scale.fill_(1)
    for dtype in (torch.float32, torch.float16):
        info = torch.finfo(dtype)
        edge = [info.max, info.min, info.tiny, -info.tiny, 1 + info.eps, 1 - info.eps]
        for size_m in (1, 2, 17):
            x = cpu_ops.random_x(size_m, 64, dtype, size_m)
            x[0, : len(edge)] = torch.tensor(edge, dtype=dtype)
            y = _gemm(isa, x, weight)
            # AMX takes what of a float32 lies below 2^-126 for zero.
            atol = 2.0**-125 if dtype == torch.float32 else 0
            torch.testing.assert_close(y, x, rtol=0, atol=atol)


@per_isa
def test_rows_do_not_depend_on_each_other(isa):
    """The same token alone, in a batch, and next to a poisoned one."""
    weight = cpu_ops.random_weight(64, 256, 128, seed=11)
    for dtype in DTYPES:
        x = cpu_ops.random_x(40, 256, dtype, 12)
        y = _gemm(isa, x, weight)
        poisoned = x.clone()
        poisoned[7] = torch.nan
        again = _gemm(isa, poisoned, weight)
        keep = torch.arange(40) != 7
        assert torch.equal(again[keep], y[keep]) and again[7].isnan().all()


@per_isa
def test_inputs_are_left_alone_and_results_repeat(isa):
    weight = cpu_ops.random_weight(100, 300, 100, seed=5, zero_point=torch.float32)
    x = cpu_ops.random_x(19, 300, torch.float16, 5)
    tensors = [x, weight.weight, weight.scale, weight.zero_point]
    before = [tensor.clone() for tensor in tensors]
    y = _gemm(isa, x, weight)
    assert all(torch.equal(*pair) for pair in zip(tensors, before))
    assert torch.equal(_gemm(isa, x, weight), y)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_threads_do_not_change_the_result(threads):
    weight = cpu_ops.random_weight(300, 256, 64, seed=6)
    before = torch.get_num_threads()
    for size_m in (1, 9, 100, 1025):
        x = cpu_ops.random_x(size_m, 256, torch.bfloat16, 6)
        try:
            torch.set_num_threads(1)
            y = _gemm(None, x, weight)
            torch.set_num_threads(threads)
            assert torch.equal(_gemm(None, x, weight), y)
        finally:
            torch.set_num_threads(before)


def _guarded(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that ends at a page which must not be touched."""
    page = mmap.PAGESIZE
    size = tensor.numel() * tensor.element_size()
    pages = -(-size // page) + 1
    memory = mmap.mmap(-1, pages * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    guard = ctypes.c_void_p(address + (pages - 1) * page)
    assert libc.mprotect(guard, ctypes.c_size_t(page), 0) == 0
    start = (pages - 1) * page - size
    view = torch.frombuffer(
        memory, dtype=tensor.dtype, count=tensor.numel(), offset=start
    ).view(tensor.shape)
    view.copy_(tensor)
    return view


@per_isa
@per_dtype
def test_nothing_is_read_past_the_end(isa, dtype):
    for size_n, size_k, block_size in ((1, 1, 4), (70, 130, 32), (64, 512, 512)):
        weight = cpu_ops.random_weight(size_n, size_k, block_size, seed=size_n)
        weight.weight = _guarded(weight.weight)
        weight.scale = _guarded(weight.scale)
        bias = _guarded(torch.randn(size_n).to(dtype))
        for size_m in (1, 2, 5, 17):
            x = _guarded(cpu_ops.random_x(size_m, size_k, dtype, 3))
            _check(isa, x, weight, bias)


@per_dtype
@pytest.mark.parametrize("zero_point", [None, torch.float32, torch.int32])
def test_embedding(dtype, zero_point):
    for size_n, size_k, block_size in ((100, 130, 32), (7, 20, 4), (65, 512, 512)):
        weight = cpu_ops.random_weight(
            size_n, size_k, block_size, seed=size_k, zero_point=zero_point
        )
        arguments = (weight.weight, weight.scale, weight.zero_point)
        sizes = (size_n, size_k, block_size)
        for shape in ((), (0,), (5,), (2, 3), (4, 1, 6)):
            for index_dtype in (torch.int64, torch.int32):
                ids = torch.randint(0, size_n, shape, dtype=index_dtype)
                y = ops.ternary_embedding(ids, *arguments, *sizes, dtype)
                assert y.shape == (*shape, size_k) and y.dtype == dtype
                # One rounding of the exact value to float32, one to dtype.
                exact = weight.dense[ids.long()].float().to(dtype)
                torch.testing.assert_close(y, exact)
        spaced = torch.randint(0, size_n, (6, 2))[:, 0]
        assert torch.equal(
            ops.ternary_embedding(spaced, *arguments, *sizes, dtype),
            ops.ternary_embedding(spaced.contiguous(), *arguments, *sizes, dtype),
        )


@pytest.mark.parametrize("index", [-1, 100, 2**40])
def test_an_index_outside_of_the_vocabulary_is_named(index):
    weight = cpu_ops.random_weight(100, 64, 64, seed=0)
    with pytest.raises(
        RuntimeError, match=rf"index {index} at position 1 .*\[0, 100\)"
    ):
        ops.ternary_embedding(
            torch.tensor([0, index]),
            weight.weight,
            weight.scale,
            None,
            100,
            64,
            64,
            torch.float32,
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 3, 64)}, r"x has shape \[2, 3, 64\]; flatten"),
        ({"x": torch.zeros(2, 60)}, "x has 60 columns but size_k=64"),
        ({"x": torch.zeros(2, 64, dtype=torch.float64)}, "x has dtype Double"),
        ({"weight": torch.zeros(1, 4, 64)}, "weight has dtype Float"),
        (
            {"weight": torch.zeros(2, 4, 64, dtype=torch.int32)},
            r"weight has shape \[2, 4, 64\] .* ask for \[1, 4, 64\]",
        ),
        ({"scale": torch.ones(1, 30)}, r"scale has shape \[1, 30\]"),
        ({"scale": torch.ones(1, 64).double()}, "scale has dtype Double"),
        ({"zero_point": torch.ones(2, 64)}, r"zero_point has shape \[2, 64\]"),
        ({"bias": torch.ones(31)}, r"bias has shape \[31\]"),
        ({"bias": torch.ones(30).half()}, "bias has dtype Half"),
        ({"block_size": 6}, "block_size=6 must be a positive multiple of 4"),
        ({"block_size": 0}, "block_size=0"),
        ({"size_n": 0}, "size_n=0"),
    ],
)
def test_bad_arguments_are_named(change, message):
    weight = cpu_ops.random_weight(30, 64, 64, seed=0)
    arguments = {
        "x": torch.zeros(2, 64),
        "weight": weight.weight,
        "scale": weight.scale,
        "zero_point": None,
        "bias": None,
        "size_n": 30,
        "size_k": 64,
        "block_size": 64,
    }
    with pytest.raises(RuntimeError, match=message):
        ops.ternary_gemm(*(arguments | change).values())


def test_an_unknown_isa_is_refused():
    weight = cpu_ops.random_weight(16, 16, 16, seed=0)
    with pytest.raises(RuntimeError, match="VLLM_TERNARY_CPU_ISA=sse is none of"):
        _gemm("sse", torch.zeros(1, 16), weight)


def test_portable_is_always_there():
    assert ISAS[0] == "portable"
