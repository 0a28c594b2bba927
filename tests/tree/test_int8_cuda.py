# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""int8 modules as on a GPU: vLLM's choice of kernel, its layouts, its conditions.

The kernels themselves are stood in for by cuda_ops.py; what vLLM and the overlay do
around them is the code that runs on a GPU.
"""

import zlib
from collections.abc import Callable
from typing import Any

import cuda_ops
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lib.validate.ranks import LayerSpec, load, tensor_parallel
from vllm.model_executor.layers.quantization.ternary.schemes import Scheme
from vllm.model_executor.layers.quantization.utils import ternary_format as fmt
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)

DTYPES = [torch.float16, torch.bfloat16]
MACHETE, MARLIN = "MacheteLinearKernel", "MarlinLinearKernel"
CUTLASS = "CutlassInt8ScaledMMLinearKernel"
TRITON = "TritonInt8ScaledMMLinearKernel"


def scheme(block: fmt.BlockSize, bits: int | None = None) -> Scheme:
    return Scheme(kind="int8", block_size=block, activation_bits=bits)


def gate_up(bits: int | None = None) -> LayerSpec:
    names = ("gate_proj", "up_proj")
    return LayerSpec("merged", scheme("row", bits), 268, (330, 330), names=names)


# The int8 modules of the model of tests/engine/test_mixed.py.
MIXED = {
    "layers.0.mlp.down_proj": LayerSpec("row", scheme(64), 330, (268,)),
    "layers.1.mlp.down_proj": LayerSpec("row", scheme("row"), 330, (268,)),
    "layers.1.mlp.gate_up_proj": gate_up(),
}
# The same with 8-bit activations, and sizes that CUTLASS takes.
EIGHT_BITS = {
    "down_proj": LayerSpec("row", scheme("row", 8), 330, (268,)),
    "gate_up_proj": gate_up(8),
    "whole tiles": LayerSpec("row", scheme("row", 8), 320, (272,)),
    "bias": LayerSpec("column", scheme("row", 8), 96, (64,), bias=True),
    "bias, odd": LayerSpec("column", scheme("row", 8), 90, (54,), bias=True),
}


def stored(
    seed: int, n: int, k: int, block: fmt.BlockSize, bias: bool
) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Tensors of a module, and the weight and the bias in float64."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randint(-128, 128, (n, k), dtype=torch.int8, generator=g)
    # Exact in either 16-bit type.
    scale = torch.randint(1, 128, (n, fmt.num_blocks(k, block)), generator=g) / 8192
    wide = scale.double().repeat_interleave(fmt.block_length(k, block), 1)[:, :k]
    tensors = {"weight": q, "weight_scale": scale}
    if bias:
        tensors["bias"] = torch.randint(-64, 64, (n,), generator=g).float() * 8
    return tensors, q.double() * wide, tensors.get("bias", torch.zeros(n)).double()


def check(
    spec: LayerSpec, tp: int, dtype: torch.dtype, capability: tuple[int, int] = (9, 0)
) -> set[str]:
    """Compare what `tp` ranks compute with float64; the kernels that did."""
    seed = zlib.crc32(repr((spec, tp, dtype, capability)).encode()) % 100000
    g = torch.Generator().manual_seed(seed)
    block, size_k, m = spec.scheme.block_size, spec.size_k, 3 + seed % 9
    parts = [
        stored(seed + i, n, size_k, block, spec.bias) for i, n in enumerate(spec.sizes)
    ]
    x = torch.randn(m, size_k, generator=g).to(dtype)
    if spec.scheme.activation_bits == 8:
        # Each rank's part of a token has a largest value of 127: integers stay so.
        x = torch.randint(-127, 128, (m, size_k), generator=g).to(dtype)
        x[:, :: size_k // tp] = 127
    torch.set_default_dtype(dtype)
    found, kernels = [], set()
    for rank in range(tp):
        with tensor_parallel(rank, tp), cuda_ops.cuda(*capability):
            layer = spec.build()
            for shard_id, (tensors, *_) in zip(spec.shard_ids, parts, strict=True):
                load(layer, tensors, shard_id)
            before = None if layer.bias is None else layer.bias.clone()
            layer.quant_method.process_weights_after_loading(layer)
            assert before is None or torch.equal(layer.bias, before)
            share = x.chunk(tp, 1)[rank] if spec.kind == "row" else x
            y = layer.quant_method.apply(layer, share, layer.bias)
            check_traced(layer, share, y)
        found.append(y.double())
        kernels.add(type(layer.quant_method.kernel.kernel).__name__)
    expected = torch.cat([x.double() @ w.t() + bias for _, w, bias in parts], 1)
    if spec.kind == "row":
        out = sum(found, torch.zeros(()))
    else:  # each rank has its share of every part
        shares = [y.split([n // tp for n in spec.sizes], 1) for y in found]
        out = torch.cat([s for part in zip(*shares) for s in part], 1)
    error = (out - expected).abs().max() / expected.abs().max()
    # The outputs of a rank are rounded, and a bias is added to what was.
    assert error < 2 * torch.finfo(dtype).eps, error
    return kernels


def check_traced(layer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    """What torch.compile sees: upstream's fakes, and an output like the real one."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = layer.quant_method.apply(layer, mode.from_tensor(x), layer.bias)
    assert (fake.shape, fake.stride()) == (y.shape, y.stride())
    assert fake.dtype == y.dtype == x.dtype and y.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", MIXED)
def test_mixed_model(name: str, tp: int, dtype: torch.dtype) -> None:
    assert check(MIXED[name], tp, dtype) == {MACHETE}
    assert check(MIXED[name], tp, dtype, (8, 0)) == {MARLIN}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", EIGHT_BITS)
def test_8_bit_activations(name: str, tp: int, dtype: torch.dtype) -> None:
    """CUTLASS, or where a size is no multiple of 16, Triton in its place; CUTLASS has
    no int8 from compute capability 10.0 on."""
    assert check(EIGHT_BITS[name], tp, dtype) == {CUTLASS}
    assert check(EIGHT_BITS[name], tp, dtype, (10, 0)) == {TRITON}
    assert check(EIGHT_BITS[name], tp, dtype, (12, 0)) == {TRITON}


@pytest.mark.parametrize("capability", [(8, 6), (9, 0), (10, 0)], ids=str)
@pytest.mark.parametrize("n", [32, 54, 96, 128])
@pytest.mark.parametrize("block", [32, 64, 96, 128, 256, "row"])
def test_sizes(block: fmt.BlockSize, n: int, capability: tuple[int, int]) -> None:
    """Blocks of any multiple of 32, and a bias however many rows there are."""
    k = 300 + n
    kernels = check(
        LayerSpec("column", scheme(block), k, (n,), bias=True),
        1,
        DTYPES[n % 4 // 2],
        capability,
    )
    hopper = capability == (9, 0) and block not in (32, 96)
    assert kernels == {MACHETE if hopper else MARLIN}


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("block", [32, 64, 128, 160])
def test_cut_blocks(block: int, tp: int) -> None:
    """Row-parallel ranks whose first input lies inside a block."""
    check(LayerSpec("row", scheme(block), 330, (50,)), tp, torch.float16)


def test_no_kernel() -> None:
    """Blocks that no kernel takes are refused by name, with what is taken."""
    with pytest.raises(ValueError, match=r"proj: .*block size 48\. Multiples of 32"):
        check(LayerSpec("column", scheme(48), 96, (64,)), 1, torch.float16)


@pytest.mark.parametrize("block", [32, 128])
def test_one_graph(block: int) -> None:
    """Nothing breaks the graph, and any number of tokens has the same one."""
    spec = LayerSpec("column", scheme(block), 200, (100,), bias=True)
    torch.set_default_dtype(torch.bfloat16)
    tensors, *_ = stored(block, 100, 200, block, True)
    graphs = 0

    def count(graph: Any, inputs: Any) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return graph.forward

    with tensor_parallel(0, 1), cuda_ops.cuda(9, 0):
        layer = spec.build()
        load(layer, tensors)
        layer.quant_method.process_weights_after_loading(layer)
        compiled = torch.compile(
            lambda x: layer.quant_method.apply(layer, x, layer.bias),
            backend=count,
            fullgraph=True,
            dynamic=True,
        )
        for m in (5, 17, 64):
            x = torch.randn(m, 200)
            assert torch.equal(
                compiled(x), layer.quant_method.apply(layer, x, layer.bias)
            )
    assert graphs == 1


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=str)
@pytest.mark.parametrize("bits", [None, 8])
def test_reload_in_place(bits: int | None, capability: tuple[int, int]) -> None:
    """Addresses stay, so that a CUDA graph does, and the weights are the new ones."""
    spec = LayerSpec("column", scheme("row", bits), 96, (48,), bias=True)
    torch.set_default_dtype(torch.float16)
    old, new = (stored(90 + i, 48, 96, "row", True)[0] for i in range(2))
    x = torch.randn(4, 96)

    def apply(layer: torch.nn.Module) -> torch.Tensor:
        return layer.quant_method.apply(layer, x, layer.bias)

    with tensor_parallel(0, 1), cuda_ops.cuda(*capability):
        layer, fresh = spec.build(), spec.build()
        for module, tensors in ((layer, old), (fresh, new)):
            record_metadata_for_reloading(torch.nn.Sequential(module))
            load(module, tensors)
            module.quant_method.process_weights_after_loading(module)
        assert not torch.equal(apply(layer), apply(fresh))
        addresses = {name: p.data_ptr() for name, p in layer.named_parameters()}
        model = torch.nn.Sequential(layer)
        initialize_layerwise_reload(model)
        load(layer, new)
        finalize_layerwise_reload(model, None)
        assert addresses == {n: p.data_ptr() for n, p in layer.named_parameters()}
        assert torch.equal(apply(layer), apply(fresh))
