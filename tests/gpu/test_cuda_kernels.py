# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The CUDA kernels of ternary_gemm against float64, and against the naive kernel.

Needs an NVIDIA GPU and the ops: an installed patched vLLM, or TERNARY_LIBRARY.
"""

import random

import pytest
import torch

from lib.bench.ops import TernaryWeight, load_ops, random_weight

DTYPES = [torch.float16, torch.bfloat16]
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 4e-3}
GUARD = 4096  # bytes of NaN in front of and behind every input


@pytest.fixture(scope="module", autouse=True)
def _ops():
    load_ops()


def generator(seed: int) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


class RawBytes:
    """Device memory by address, for looking behind the end of a tensor."""

    def __init__(self, address: int, size: int):
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def guarded(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A copy of `tensor` between stretches of bytes 0xFF, which read as NaN."""
    if tensor is None:
        return None
    size = tensor.numel() * tensor.element_size()
    buffer = torch.full((size + 2 * GUARD,), 0xFF, dtype=torch.uint8, device="cuda")
    view = buffer[GUARD : GUARD + size].view(tensor.dtype).view(tensor.shape)
    view.copy_(tensor)
    return view


def poison(size: int) -> None:
    """Leave NaN in the block that the next allocation of `size` bytes will get."""
    size = (max(size, 1) + 511) // 512 * 512
    blocks = [
        torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda") for _ in range(3)
    ]
    del blocks


def check_slack(y: torch.Tensor) -> None:
    """The allocator rounds up to 512 bytes: what lies behind y must be untouched."""
    size = y.numel() * y.element_size()
    slack = -size % 512
    if slack:
        tail = torch.as_tensor(RawBytes(y.data_ptr() + size, slack), device="cuda")
        assert bool((tail == 0xFF).all()), "bytes behind the output were written"


def error(y: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error by norm; infinite if anything is not finite."""
    if not bool(torch.isfinite(y).all()):
        return float("inf")
    norm = expected.norm()
    difference = (y.double() - expected).norm()
    return float(difference / norm) if float(norm) else float(difference)


def product(x: torch.Tensor, w: TernaryWeight, bias, op=None, *extra) -> torch.Tensor:
    op = op or torch.ops._C.ternary_gemm
    poison(x.shape[0] * w.size_n * 2)
    y = op(
        x,
        w.weight,
        w.scale,
        w.zero_point,
        bias,
        w.size_n,
        w.size_k,
        w.block_size,
        *extra,
    )
    assert y.shape == (x.shape[0], w.size_n) and y.dtype == x.dtype
    assert y.is_contiguous()
    check_slack(y)
    return y


def strided_input(size_m, size_k, dtype, kind, gen) -> torch.Tensor:
    """X [M, K] as a view of the given kind; what surrounds it is NaN."""
    if kind == "transposed":
        base = torch.full((size_k, size_m + 3), float("nan"), device="cuda").to(dtype)
        view = base.t()[1 : size_m + 1]
    elif kind == "columns":
        base = torch.full((size_m, 3 * size_k), float("nan"), device="cuda").to(dtype)
        view = base[:, 1::3][:, :size_k]
    elif kind == "offset":
        base = torch.full((size_m, size_k + 5), float("nan"), device="cuda").to(dtype)
        view = base[:, 3 : 3 + size_k]
    elif kind == "expanded":
        row = torch.randn((1, size_k), device="cuda", generator=gen).to(dtype)
        return row.expand(size_m, size_k)
    elif kind == "wide":
        width = (size_k + 7) // 8 * 8 + 64
        base = torch.full((size_m, width), float("nan"), device="cuda").to(dtype)
        view = base[:, :size_k]
    else:
        view = guarded(torch.zeros((size_m, size_k), device="cuda", dtype=dtype))
    view.copy_(torch.randn((size_m, size_k), device="cuda", generator=gen))
    return view


KINDS = ["contiguous", "transposed", "columns", "offset", "expanded", "wide"]


def run_case(
    size_m,
    size_n,
    size_k,
    block_size,
    dtype,
    *,
    seed,
    scale_dtype=torch.float16,
    zero_point=False,
    bias=False,
    kind="contiguous",
    op=None,
    extra=(),
) -> None:
    gen = generator(seed)
    w = random_weight(
        size_n,
        size_k,
        block_size,
        scale_dtype=scale_dtype,
        zero_point=zero_point,
        generator=gen,
    )
    w.weight, w.scale = guarded(w.weight), guarded(w.scale)
    w.zero_point = guarded(w.zero_point)
    x = strided_input(size_m, size_k, dtype, kind, gen)
    b = None
    if bias:
        b = guarded(torch.randn(size_n, device="cuda", generator=gen).to(dtype))
    y = product(x, w, b, op, *extra)
    expected = x.double() @ w.dequantize().t()
    if b is not None:
        expected += b.double()
    found = error(y, expected)
    assert found < TOLERANCE[dtype], (
        f"error {found:.2e}: M={size_m} N={size_n} K={size_k} block={block_size} "
        f"{dtype} scale={scale_dtype} zp={zero_point} bias={bias} x={kind}"
    )


def random_case(rng: random.Random) -> dict:
    """A case of any shape, leaning towards the edges of tiles."""
    near = lambda m, top: max(
        1, m * rng.randint(0, top) + rng.choice([-1, 0, 0, 0, 1, 7])
    )
    size_k = near(128, 9) if rng.random() < 0.6 else rng.randint(1, 1500)
    block = rng.choice([32, 64, 128, 128, 128, 256, 512, 1 << 20, 4, 36, 96, 100, 160])
    return dict(
        size_m=rng.choice(
            [rng.randint(1, 70), rng.randint(1, 16), rng.randint(1, 200)]
        ),
        size_n=near(64, 12) if rng.random() < 0.6 else rng.randint(1, 800),
        size_k=size_k,
        block_size=block,
        dtype=rng.choice(DTYPES),
        scale_dtype=rng.choice(
            [torch.float16, torch.float16, torch.bfloat16, torch.float32]
        ),
        zero_point=rng.random() < 0.25,
        bias=rng.random() < 0.4,
        kind=rng.choice(["contiguous", *KINDS]),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size_m", range(1, 71))
def test_every_number_of_tokens(size_m, dtype):
    run_case(size_m, 192 + size_m % 3, 640 + 4 * (size_m % 5), 128, dtype, seed=size_m)


@pytest.mark.parametrize("batch", range(50))
def test_random_cases(batch):
    rng = random.Random(batch)
    for i in range(50):
        run_case(**random_case(rng), seed=1000 * batch + i)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [32, 64, 128, 256, 1 << 20])
@pytest.mark.parametrize("size_m", [1, 8, 16, 32, 64, 128, 300])
def test_real_layer_sizes(size_m, block_size, dtype):
    for i, (size_n, size_k) in enumerate([(6144, 1024), (1024, 3072), (4096, 12288)]):
        run_case(size_m, size_n, size_k, block_size, dtype, seed=size_m + i)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size_m", [1, 7, 16, 31, 64, 70])
@pytest.mark.parametrize("split", [1, 2, 4, 8])
@pytest.mark.parametrize("groups", [1, 3, 50, 132])
def test_every_cut_of_the_work(groups, split, size_m, dtype):
    seed = groups * 100 + split
    for zero_point in (False, True):
        run_case(
            size_m,
            1000,
            1111,
            128,
            dtype,
            seed=seed,
            zero_point=zero_point,
            bias=True,
            op=torch.ops._C.ternary_gemm_tuned,
            extra=(0, groups, split, True),
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(6))
def test_the_naive_kernel_is_right_too(seed, dtype):
    rng = random.Random(seed)
    for i in range(10):
        case = random_case(rng) | {"dtype": dtype}
        op = torch.ops._C.ternary_gemm_reference
        run_case(**case, seed=seed * 77 + i, op=op)


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_rows_are_staged_in_pieces(dtype):
    for size_m, size_k in [(1, 200_000), (40, 60_000), (64, 29_568)]:
        run_case(size_m, 80, size_k, 128, dtype, seed=size_m)


def test_outliers_and_offsets_lose_nothing():
    """Activations with a large common offset: decoding must not cancel."""
    gen = generator(5)
    w = random_weight(512, 4096, generator=gen)
    for dtype in DTYPES:
        x = torch.randn((16, 4096), device="cuda", generator=gen) + 30
        x[:, ::97] *= 50
        x = x.to(dtype)
        y = product(x, w, None)
        assert error(y, x.double() @ w.dequantize().t()) < TOLERANCE[dtype]


def test_nan_and_infinity_come_through():
    gen = generator(6)
    w = random_weight(256, 512, generator=gen)
    x = torch.randn((20, 512), device="cuda", generator=gen, dtype=torch.float16)
    x[3, 100] = float("nan")
    y = product(x, w, None)
    assert bool(torch.isnan(y[3]).all())
    keep = torch.arange(20, device="cuda") != 3
    expected = x[keep].double() @ w.dequantize().t()
    assert error(y[keep], expected) < TOLERANCE[torch.float16]


def test_runs_are_bit_identical():
    gen = generator(7)
    for size_m in (1, 8, 16, 32, 64):
        w = random_weight(2048, 4096, generator=gen)
        x = torch.randn((size_m, 4096), device="cuda", generator=gen).bfloat16()
        first = product(x, w, None)
        for _ in range(20):
            assert torch.equal(first, product(x, w, None))


def test_empty_batch_and_higher_dimensions():
    w = random_weight(96, 260)
    y = product(torch.empty((0, 260), device="cuda", dtype=torch.float16), w, None)
    assert y.shape == (0, 96)
    x = torch.randn((2, 3, 260), device="cuda", dtype=torch.float16)
    flat = product(x.reshape(-1, 260), w, None).view(2, 3, 96)
    assert error(flat, x.double() @ w.dequantize().t()) < TOLERANCE[torch.float16]


def test_graphs_streams_and_back_to_back_launches():
    """Chains of dependent calls, in a graph and on a side stream, stay in order."""
    gen = generator(8)
    up, down = (
        random_weight(3072, 1024, generator=gen),
        random_weight(1024, 3072, generator=gen),
    )
    x = torch.randn((5, 1024), device="cuda", generator=gen).half()

    def chain(h):
        for _ in range(8):
            h = product(product(h, up, None), down, None)
            h = h / h.float().norm().half() * 30
        return h

    expected = chain(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        other = chain(x)
    stream.synchronize()
    assert torch.equal(expected, other)

    def plain(h):
        op = torch.ops._C.ternary_gemm
        for _ in range(8):
            for w in (up, down):
                h = op(h, w.weight, w.scale, None, None, w.size_n, w.size_k, 128)
            h = h / h.float().norm().half() * 30
        return h

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = plain(x)
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(expected, captured)


@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_embedding(dtype, index_dtype, zero_point):
    gen = generator(9)
    for size_n, size_k, block in [
        (1000, 384, 128),
        (77, 130, 32),
        (300, 1024, 1 << 20),
    ]:
        w = random_weight(size_n, size_k, block, zero_point=zero_point, generator=gen)
        indices = torch.randint(0, size_n, (3, 17), device="cuda", generator=gen)
        indices = indices.to(index_dtype)
        args = (w.weight, w.scale, w.zero_point, size_n, size_k, w.block_size, dtype)
        out = torch.ops._C.ternary_embedding(indices, *args)
        assert out.shape == (3, 17, size_k) and out.dtype == dtype
        expected = w.dequantize(torch.float32)[indices.long()].to(dtype)
        torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-6)
        outside = torch.tensor([-1, size_n], device="cuda").to(index_dtype)
        assert not torch.ops._C.ternary_embedding(outside, *args).any()
        assert torch.ops._C.ternary_embedding(indices[:0], *args).shape[0] == 0


@pytest.mark.parametrize(
    "change,message",
    [
        ({"x": (4, 100)}, "x "),
        ({"block": 6}, "block_size"),
        ({"scale": (2, 64)}, "scale"),
        ({"n": 200}, "weight"),
        ({"bias": 3}, "bias"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    w = random_weight(64, 128)
    x = torch.zeros(change.get("x", (4, 128)), device="cuda", dtype=torch.float16)
    scale = w.scale
    if "scale" in change:
        scale = torch.zeros(change["scale"], device="cuda", dtype=torch.float16)
    bias = None
    if "bias" in change:
        bias = torch.zeros(change["bias"], device="cuda", dtype=torch.float16)
    with pytest.raises(RuntimeError, match=message):
        torch.ops._C.ternary_gemm(
            x,
            w.weight,
            scale,
            None,
            bias,
            change.get("n", 64),
            128,
            change.get("block", 128),
        )
