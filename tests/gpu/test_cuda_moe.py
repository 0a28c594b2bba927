# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The grouped product of ternary experts on CUDA, against float64.

Needs an NVIDIA GPU and the ops: an installed patched vLLM, or TERNARY_LIBRARY.
"""

import zlib

import pytest
import torch

from lib.bench.ops import TernaryWeight, load_ops, random_weight

BLOCK = 16  # routes, as moe_gemm.h has it
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 4e-3}


@pytest.fixture(scope="module", autouse=True)
def _ops() -> None:
    load_ops()


def stack(experts: list[TernaryWeight], name: str) -> torch.Tensor | None:
    tensors = [getattr(w, name) for w in experts]
    return None if tensors[0] is None else torch.stack(tensors)


def align(
    ids: torch.Tensor, experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Routes by expert in whole blocks, with entries beyond the used ones poisoned."""
    flat, order, owners = ids.flatten().tolist(), [], []
    for expert in range(-1, experts):
        mine = [r for r, e in enumerate(flat) if e == expert]
        mine += [len(flat)] * (-len(mine) % BLOCK)
        order += mine
        owners += [expert] * (len(mine) // BLOCK)
    used = len(order)
    order += [-7] * (3 * BLOCK)
    owners += [12345] * 3

    def on_device(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    return on_device(order), on_device(owners), on_device([used])


def check(
    tokens: int,
    top_k: int,
    experts: int,
    size_n: int,
    size_k: int,
    block_size: int,
    dtype: torch.dtype,
    zero_point: bool = False,
    bias: bool = False,
    weighted: bool = False,
    absent: bool = False,
) -> None:
    seed = zlib.crc32(repr((tokens, size_n, size_k, block_size)).encode())
    g = torch.Generator("cuda").manual_seed(seed)
    weights = [
        random_weight(size_n, size_k, block_size, zero_point=zero_point, generator=g)
        for _ in range(experts)
    ]
    width = (size_k + 7) // 8 * 8
    # What lies between the rows of x must not be read.
    base = torch.full((tokens, width), float("nan"), device="cuda", dtype=dtype)
    x = base[:, :size_k]
    x.copy_(torch.randn(tokens, size_k, device="cuda", generator=g))
    scores = torch.rand(tokens, experts, device="cuda", generator=g)
    ids = scores.topk(top_k).indices
    if absent:
        ids = torch.where(ids == 0, -1, ids)
    routes = tokens * top_k
    b = torch.randn(experts, size_n, device="cuda", generator=g).to(dtype)
    route_weight = torch.rand(routes, device="cuda", generator=g)
    arguments = (
        x,
        stack(weights, "weight"),
        stack(weights, "scale"),
        stack(weights, "zero_point"),
        b if bias else None,
        *align(ids, experts),
        route_weight if weighted else None,
        top_k,
        routes,
        size_n,
        size_k,
        block_size,
    )
    # What the memory of y holds before: every element must be written.
    torch.full((routes, size_n), float("nan"), device="cuda", dtype=dtype)
    y = torch.ops._C.ternary_moe_gemm(*arguments)
    assert y.shape == (routes, size_n) and y.dtype == dtype
    dense = [w.dequantize() for w in weights]
    expected = torch.zeros(routes, size_n, dtype=torch.float64, device="cuda")
    for route, expert in enumerate(ids.flatten().tolist()):
        if expert < 0:
            continue
        value = dense[expert] @ x[route // top_k].double()
        if bias:
            value = value + b[expert].double()
        if weighted:
            value = value * route_weight[route].double()
        expected[route] = value
    assert y.isfinite().all()
    error = (y.double() - expected).norm() / expected.norm()
    assert error < TOLERANCE[dtype], error


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize(
    "size_n,size_k,block_size",
    [
        (64, 128, 128),
        (200, 330, 128),
        (96, 1000, 64),
        (70, 165, 32),
        (33, 77, 80),
        (128, 512, 512),
        (17, 2064, 48),
    ],
)
def test_sizes(size_n, size_k, block_size, zero_point, dtype) -> None:
    check(9, 2, 5, size_n, size_k, block_size, dtype, zero_point)


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 64, 200])
def test_tokens(tokens: int) -> None:
    """Blocks that are full, filled up, and experts without tokens."""
    check(tokens, 4, 32, 128, 256, 128, torch.float16)


def test_everything_at_once() -> None:
    """Bias, route weights, zero points, and experts of other ranks, which give 0."""
    check(40, 3, 6, 150, 270, 96, torch.bfloat16, True, True, True, absent=True)


def test_more_blocks_than_a_launch_takes() -> None:
    routes = (65535 + 2) * BLOCK
    w = random_weight(64, 128)
    x = torch.randn(routes, 128, device="cuda", dtype=torch.float16)
    order = torch.arange(routes, device="cuda", dtype=torch.int32)
    owners = torch.zeros(routes // BLOCK, device="cuda", dtype=torch.int32)
    used = torch.tensor([routes], device="cuda", dtype=torch.int32)
    torch.full((routes, 64), float("nan"), device="cuda", dtype=x.dtype)
    y = torch.ops._C.ternary_moe_gemm(
        x, w.weight[None], w.scale[None], None, None, order, owners, used, None,
        1, routes, 64, 128, 128,
    )  # fmt: skip
    assert y.isfinite().all()
    for part in (slice(0, 64), slice(-64, None)):
        expected = x[part].double() @ w.dequantize().t()
        error = (y[part].double() - expected).norm() / expected.norm()
        assert error < TOLERANCE[torch.float16]


def test_cuda_graph() -> None:
    """The routing may change between replays of a captured graph."""
    experts, size_n, size_k, top_k = 4, 64, 256, 2
    weights = [random_weight(size_n, size_k) for _ in range(experts)]
    packed, scale = stack(weights, "weight"), stack(weights, "scale")
    x = torch.zeros(3, size_k, device="cuda", dtype=torch.float16)
    routings = [
        torch.tensor(ids, device="cuda")
        for ids in ([[0, 1], [1, 2], [0, 3]], [[3, 2], [3, 2], [3, 1]])
    ]
    length = max(align(ids, experts)[0].numel() for ids in routings)
    order = torch.full((length,), 99, dtype=torch.int32, device="cuda")
    owners = torch.zeros(length // BLOCK, dtype=torch.int32, device="cuda")
    used = torch.zeros(1, dtype=torch.int32, device="cuda")

    def run() -> torch.Tensor:
        return torch.ops._C.ternary_moe_gemm(
            x, packed, scale, None, None, order, owners, used, None,
            top_k, 6, size_n, size_k, 128,
        )  # fmt: skip

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    for ids in routings:
        for target, source in zip(
            (order, owners, used), align(ids, experts), strict=True
        ):
            target[: source.numel()].copy_(source)
        x.normal_()
        graph.replay()
        for route, expert in enumerate(ids.flatten().tolist()):
            expected = weights[expert].dequantize() @ x[route // top_k].double()
            error = (y[route].double() - expected).norm() / expected.norm()
            assert error < TOLERANCE[torch.float16]


@pytest.mark.parametrize(
    "change,said",
    [
        ({"block_size": 24}, "multiple of 16"),
        ({"routes": 5}, "routes=5"),
        ({"size_n": 100}, "weight"),
    ],
)
def test_refused(change: dict[str, int], said: str) -> None:
    w = random_weight(64, 128)
    x = torch.zeros(2, 128, device="cuda", dtype=torch.float16)
    sizes = {"routes": 2, "size_n": 64, "size_k": 128, "block_size": 128} | change
    with pytest.raises(RuntimeError, match=said):
        torch.ops._C.ternary_moe_gemm(
            x,
            w.weight[None],
            w.scale[None],
            None,
            None,
            *align(torch.zeros(2, 1, dtype=torch.int64), 1),
            None,
            1,
            *sizes.values(),
        )
