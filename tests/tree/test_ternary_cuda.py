# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Ternary layers as on a GPU: the CUDA layout, and what its ops demand of arguments.

The ops are stood in for by the conditions of csrc/quantization/ternary/*_bindings.cu
and a product in float64 of what the layout decodes to. What torch.compile knows of the
ops is compared with the ops themselves, on the CPU.
"""

import zlib
from collections.abc import Iterator
from typing import Any

import cuda_ops
import numpy as np
import pytest
import torch
from test_experts import EXPERTS, Experts, make_layer, routing
from test_experts import run as run_experts
from test_sharding import Part, check_outputs, specs_for

from lib.validate.ranks import LayerSpec, load, load_ranks, tensor_parallel
from vllm import _custom_ops as ops
from vllm.model_executor.layers.quantization.ternary import moe_forward
from vllm.model_executor.layers.quantization.ternary.schemes import (
    Scheme,
    SchemeTable,
)
from vllm.model_executor.layers.quantization.utils import (
    ternary_format as fmt,
)
from vllm.model_executor.layers.quantization.utils import (
    ternary_layout,
    ternary_layout_cuda,
)

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
ROUTES = 16  # of a block, as moe_gemm.h has it
_library = torch.library.Library("_C", "FRAGMENT")


def dense(weight, scale, zero_point, size_n: int, size_k: int, block: int):
    """W in float64, after the checks of check_weight in cuda_args.h."""
    n_pad, k_pad = ternary_layout_cuda.padded_shape(size_n, size_k)
    assert size_k >= 1 and block >= 4 and block % 4 == 0
    block = min(block, k_pad)
    assert weight.dtype == torch.int32 and weight.is_contiguous()
    assert weight.numel() == n_pad * k_pad // 16
    for table in (scale, zero_point):
        if table is not None:
            assert table.shape == (-(-size_k // block), n_pad)
            assert table.is_contiguous()
    assert weight.data_ptr() % 16 == scale.data_ptr() % 16 == 0
    assert scale.dtype in FLOATS
    assert zero_point is None or zero_point.dtype == torch.float32
    # Experts that are stacked by rows come with the tiles of all.
    weight = weight.view(n_pad // 16, k_pad // 128, 32, 4)
    packed, scale, zero_point = ternary_layout_cuda.decode(
        weight, scale, zero_point, size_n, size_k, block
    )
    t = fmt.unpack(packed, size_k)
    length = "row" if block >= size_k else block
    return fmt.dequantize(t, scale, zero_point, length, torch.float64)


def checked(x, bias, size_n: int, size_k: int) -> torch.Tensor:
    """X in float64. (float32 stands in for the 16-bit types, to test more closely.)"""
    assert x.dim() == 2 and x.shape[1] == size_k and x.dtype in FLOATS
    assert bias is None or bias.numel() == size_n
    return x.double()


def gemm(x, weight, scale, zero_point, bias, size_n, size_k, block):
    w = dense(weight, scale, zero_point, size_n, size_k, block)
    y = checked(x, bias, size_n, size_k) @ w.t()
    return (y if bias is None else y + bias.double()).to(x.dtype)


def gemm_w2a8(x, weight, scale, bias, norm, ends, eps, size_n, size_k, block):
    w = dense(weight, scale, None, size_n, size_k, block)
    wide = checked(x, bias, size_n, size_k)
    y, parts = torch.empty(x.shape[0], size_n, dtype=torch.float64), [size_n]
    if norm is not None:
        assert norm.shape[1:] == (size_k,) and norm.is_contiguous()
        assert norm.dtype in FLOATS
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        if norm.shape[0] > 1:
            assert ends.dtype == torch.int32 and ends.shape == norm.shape[:1]
            parts = ends.tolist()
    begin = 0
    for part, end in enumerate(parts):
        v = wide if norm is None else wide * norm[part].double()
        step = v.abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
        y[:, begin:end] = (v / step).round() * step @ w[begin:end].t()
        begin = end
    return (y if bias is None else y + bias.double()).to(x.dtype)


def embedding(indices, weight, scale, zero_point, size_n, size_k, block, dtype):
    assert indices.dtype in (torch.int64, torch.int32) and dtype in FLOATS
    w = dense(weight, scale, zero_point, size_n, size_k, block)
    return w[indices.long()].to(dtype)


def moe_gemm(
    x,
    weight,
    scale,
    zero_point,
    bias,
    sorted_routes,
    experts,
    used,
    route_weight,
    top_k,
    routes,
    size_n,
    size_k,
    block,
):
    """Per moe_bindings.cu."""
    assert x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    assert top_k > 0 and routes == x.shape[0] * top_k
    assert min(block, -(-size_k // 128) * 128) % 16 == 0
    for tensor in (sorted_routes, experts, used):
        assert tensor.dtype == torch.int32 and tensor.is_contiguous()
    assert sorted_routes.numel() == experts.numel() * ROUTES
    if route_weight is not None:
        assert route_weight.dtype == torch.float32 and route_weight.is_contiguous()
        assert route_weight.numel() == routes
    assert bias is None or bias.dtype == x.dtype and bias.is_contiguous()
    y = torch.full((routes, size_n), float("nan"), dtype=torch.float64)
    for i, expert in enumerate(experts[: int(used) // ROUTES].tolist()):
        mine = sorted_routes[i * ROUTES : (i + 1) * ROUTES]
        mine = mine[mine < routes].long()
        if expert < 0:
            y[mine] = 0
            continue
        w = dense(
            weight[expert],
            scale[expert],
            None if zero_point is None else zero_point[expert],
            *(size_n, size_k, block),
        )
        out = x[mine // top_k].double() @ w.t()
        if bias is not None:
            out += bias[expert].double()
        y[mine] = out if route_weight is None else out * route_weight[mine, None]
    assert bool(y.isfinite().all()), "a route that no block has"
    return y.to(x.dtype)


def align(ids, block_size, experts, *, pad_sorted_ids):
    """moe_align_block_size: routes by expert, each expert's filled up to blocks."""
    assert ids.dtype == torch.int32 and pad_sorted_ids and block_size == ROUTES
    flat, order, owners = ids.flatten().tolist(), [], []
    for expert in range(experts):
        mine = [route for route, e in enumerate(flat) if e == expert]
        order += mine + [len(flat)] * (-len(mine) % ROUTES)
        owners += [expert] * -(-len(mine) // ROUTES)
    used = len(order)
    order += [len(flat)] * 2 * ROUTES
    owners += [-1] * 2  # not used
    return (torch.tensor(v, dtype=torch.int32) for v in (order, owners, [used]))


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, stand_in in (
        ("ternary_gemm", gemm),
        ("ternary_gemm_w2a8", gemm_w2a8),
        ("ternary_embedding", embedding),
    ):
        monkeypatch.setattr(ops, name, stand_in)
    if not hasattr(torch.ops._C, "ternary_moe_gemm"):
        _library.define(
            "ternary_moe_gemm(Tensor x, Tensor weight, Tensor scale, "
            "Tensor? zero_point, Tensor? bias, Tensor sorted_routes, "
            "Tensor experts, Tensor used, Tensor? route_weight, SymInt top_k, "
            "SymInt routes, SymInt size_n, SymInt size_k, SymInt block_size) -> Tensor"
        )
        _library.impl("ternary_moe_gemm", moe_gemm, "CPU")
    monkeypatch.setattr(moe_forward, "moe_align_block_size", align)
    monkeypatch.setitem(ternary_layout._LAYOUTS, "cpu", ternary_layout_cuda)
    with cuda_ops.cuda(9, 0):
        yield


def rng_of(*case: Any) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(repr(case).encode()))


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize(
    "block,zero_point",
    [(32, True), (100, True), (128, False), ("row", False), ("tensor", True)],
)
@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("kind", ["column", "merged", "qkv", "row", "head"])
def test_linear(kind: str, tp: int, block: fmt.BlockSize, zero_point: bool) -> None:
    """Every way of cutting a layer, with blocks that a rank's inputs begin inside."""
    scheme = Scheme(block_size=block, zero_point=zero_point)
    rng = rng_of(kind, tp, block, zero_point)
    for spec in specs_for(kind, tp, 6 * 47, scheme):
        parts = [Part(rng, n, spec.size_k, scheme, spec.bias) for n in spec.sizes]
        ranks = load_ranks(spec, [part.tensors for part in parts], tp)
        check_outputs(spec, ranks, parts, rng)


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("block", [128, "row", "tensor"])
@pytest.mark.parametrize("norm", [False, True])
def test_8_bit_activations(
    norm: bool, block: fmt.BlockSize, dtype: torch.dtype
) -> None:
    """A fused layer whose parts have norms of their own, in the model's dtype."""
    torch.set_default_dtype(dtype)
    scheme = Scheme(
        block_size=block,
        activation_bits=8,
        scale_dtype="bfloat16",
        input_norm={"name": "norm", "eps": 1e-5} if norm else None,
    )
    names, sizes, size_k = ("gate_proj", "up_proj"), (40, 30), 200
    spec = LayerSpec("merged", scheme, size_k, sizes, names=names)
    rng = rng_of(norm, block, dtype)
    parts = [Part(rng, n, size_k, scheme, False) for n in sizes]
    norms = torch.from_numpy(rng.uniform(0.5, 2, (2, size_k))).to(dtype)
    with tensor_parallel(0, 1):
        layer = spec.build()
        for i, part in enumerate(parts):
            load(layer, part.tensors, i)
            if norm:
                weight = layer.norm.weight
                weight.weight_loader(weight, norms[i], i)
        layer.quant_method.process_weights_after_loading(layer)
        x = torch.from_numpy(rng.standard_normal((3, size_k))).to(dtype)
        found = layer(x)[0].double()
    wide = x.double()
    if norm:
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    expected = []
    for i, part in enumerate(parts):
        v = wide * norms[i].double() if norm else wide
        step = v.abs().amax(-1, keepdim=True) / 127
        expected.append((v / step).round() * step @ torch.from_numpy(part.matrix).t())
    error = (found - torch.cat(expected, 1)).norm() / torch.cat(expected, 1).norm()
    assert error < torch.finfo(dtype).eps


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize("block", [64, "row"])
def test_embedding(block: fmt.BlockSize, zero_point: bool) -> None:
    scheme = Scheme(block_size=block, zero_point=zero_point)
    rng = rng_of("embedding", block, zero_point)
    torch.set_default_dtype(torch.bfloat16)
    part = Part(rng, 75, 130, scheme, False)
    (spec,) = specs_for("embedding", 2, 130, scheme)
    whole = torch.from_numpy(part.matrix).to(torch.bfloat16)
    for rank in load_ranks(spec, [part.tensors], 2):
        with tensor_parallel(rank.rank, 2):
            layer = rank.layer
            layer.quant_method.process_weights_after_loading(layer)
            first = layer.shard_indices.org_vocab_start_index
            last = layer.shard_indices.org_vocab_end_index
            ids = torch.arange(last - first).view(1, -1)
            found = layer.quant_method.embedding(layer, ids)[0]
        assert torch.equal(found, whole[first:last])


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize("compute", ["grouped", "routed", "gathered", "masked"])
@pytest.mark.parametrize("block,zero_point", [(32, True), (128, False), ("row", True)])
def test_experts(
    monkeypatch: pytest.MonkeyPatch,
    block: fmt.BlockSize,
    zero_point: bool,
    compute: str,
) -> None:
    """All ways to compute experts, on two ranks that cut blocks or share experts."""
    scheme = Scheme(block_size=block, zero_point=zero_point)
    way = getattr(moe_forward._Experts, compute)
    monkeypatch.setattr(moe_forward._Experts, "routed", way)
    seed = zlib.crc32(repr((block, zero_point, compute)).encode()) % 1000
    experts = Experts(seed, 154, lambda _: scheme)
    x, weights, ids = routing(6, seed)
    expected = experts.forward(x, weights, ids)
    for split in ("tp", "ep"):
        total = torch.zeros(x.shape, dtype=torch.float64)
        for rank in range(2):
            layer = make_layer(SchemeTable(scheme), 154, **{split: (rank, 2)})
            experts.load(layer)
            total += run_experts(layer, x, weights, ids).double()
        assert (total - expected).abs().max() < 2e-5 * expected.abs().max()
    assert EXPERTS % 2  # ranks with different numbers of experts


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_what_torch_compile_knows(tokens: int) -> None:
    """Schemas and fakes of the ops against the ops: mutations, shapes, strides."""
    g = torch.Generator().manual_seed(tokens)
    size_n, size_k, block = 70, 130, 64
    t = torch.randint(-1, 2, (size_n, size_k), dtype=torch.int8, generator=g)
    scale = torch.rand(size_n, 3, generator=g)
    zero_point = torch.rand(size_n, 3, generator=g)
    x = torch.randn(tokens, size_k, generator=g).bfloat16()
    bias = torch.randn(size_n, generator=g).bfloat16()
    weight, scale, zero_point = ternary_layout.encode_layout(
        fmt.pack(t), scale, zero_point, size_k, block
    )
    sizes = (size_n, size_k, block)
    norms = torch.rand(2, size_k, generator=g).bfloat16()
    ends = torch.tensor([30, size_n], dtype=torch.int32)
    ids = torch.randint(0, size_n, (tokens, 2), generator=g)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (torch.ops._C.ternary_gemm, (x, weight, scale, zero_point, bias, *sizes)),
        (torch.ops._C.ternary_gemm, (x, weight, scale, None, None, *sizes)),
        (
            torch.ops._C.ternary_gemm_w2a8,
            (x, weight, scale, bias, norms, ends, 1e-5, *sizes),
        ),
        (
            torch.ops._C.ternary_embedding,
            (ids, weight, scale, zero_point, *sizes, torch.bfloat16),
        ),
    ]
    for op, arguments in calls:
        checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
        result = torch.library.opcheck(op, arguments, test_utils=checks)
        assert set(result.values()) == {"SUCCESS"}
        # Any device's fakes: those of "meta" are what a CUDA tensor's are, too.
        meta = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in arguments]
        fake, real = op(*meta), op(*arguments)
        assert (fake.shape, fake.stride(), fake.dtype) == (
            real.shape,
            real.stride(),
            real.dtype,
        )
