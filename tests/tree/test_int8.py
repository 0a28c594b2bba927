# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""int8 modules of a mixed checkpoint: cut by vLLM, computed by kernels that exist."""

import zlib
from typing import Any

import pytest
import torch

from lib.validate.ranks import LayerSpec, load, tensor_parallel
from vllm.model_executor.layers.quantization.ternary.schemes import Scheme
from vllm.model_executor.layers.quantization.utils import ternary_format as fmt
from vllm.model_executor.layers.quantization.utils.ternary_format import (
    TernaryFormatError,
)

NAME = "model.layers.0.mlp.proj"


def stored(
    seed: int, n: int, k: int, block: fmt.BlockSize
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Tensors of a module, and the weight in float64 that they stand for."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randint(-128, 128, (n, k), dtype=torch.int8, generator=g)
    scale = torch.rand(n, fmt.num_blocks(k, block), generator=g) / 100
    length = fmt.block_length(k, block)
    wide = scale.double().repeat_interleave(length, 1)[:, :k]
    return {"weight": q, "weight_scale": scale}, q.double() * wide


def build(spec: LayerSpec, parts: list[dict[str, Any]], rank: int, tp: int):
    with tensor_parallel(rank, tp):
        layer = spec.build()
        for shard_id, tensors in zip(spec.shard_ids, parts, strict=True):
            load(layer, tensors, shard_id)
        layer.quant_method.process_weights_after_loading(layer)
    return layer


def activation(seed: int, m: int, k: int) -> torch.Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(seed))


def close(found: torch.Tensor, expected: torch.Tensor, limit: float) -> None:
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert error < limit, error


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("block", [32, 60, 128, "row"])
def test_row_parallel(tp: int, block: fmt.BlockSize, dtype: torch.dtype) -> None:
    """Cuts inside a block are exact: the ranks' outputs add up to the whole."""
    n, k = 50, 330  # 165 and 110 inputs a rank
    seed = zlib.crc32(repr((tp, block, dtype)).encode()) % 1000
    tensors, weight = stored(seed, n, k, block)
    torch.set_default_dtype(dtype)
    spec = LayerSpec("row", Scheme(kind="int8", block_size=block), k, (n,))
    x = activation(seed, 5, k).to(dtype)
    out = torch.zeros(5, n, dtype=torch.float64)
    for rank in range(tp):
        layer = build(spec, [tensors], rank, tp)
        part = x[:, rank * k // tp : (rank + 1) * k // tp]
        out += layer.quant_method.apply(layer, part).double()
    limit = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}[dtype]
    close(out, x.double() @ weight.t(), limit)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("block", [64, "row"])
def test_merged_column(tp: int, block: fmt.BlockSize) -> None:
    """Each part's weight and scale land at the same rows; x has three dimensions."""
    sizes, k = (48, 20), 200
    parts = [stored(7 * tp + i, n, k, block) for i, n in enumerate(sizes)]
    spec = LayerSpec(
        "merged",
        Scheme(kind="int8", block_size=block),
        k,
        sizes,
        names=("gate_proj", "up_proj"),
        bias=True,
    )
    x = activation(3, 6, k).view(2, 3, k)
    for rank in range(tp):
        layer = build(spec, [p for p, _ in parts], rank, tp)
        bias = torch.arange(layer.ternary_size_n).float()
        out = layer.quant_method.apply(layer, x, bias)
        rows = [
            weight[rank * n // tp : (rank + 1) * n // tp]
            for n, (_, weight) in zip(sizes, parts, strict=True)
        ]
        close(out, x.double() @ torch.cat(rows).t() + bias, 1e-5)


@pytest.mark.parametrize("n,k", [(64, 320), (50, 330)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_8_bit_activations(n: int, k: int, dtype: torch.dtype) -> None:
    """The W8A8 kernels of vLLM: a token is rounded to 8 bits first."""
    torch.set_default_dtype(dtype)
    tensors, weight = stored(5, n, k, "row")
    scheme = Scheme(kind="int8", block_size="row", activation_bits=8)
    layer = build(LayerSpec("column", scheme, k, (n,)), [tensors], 0, 1)
    x = activation(6, 9, k).to(dtype)
    step = x.double().abs().amax(-1, keepdim=True) / 127
    rounded = (x.double() / step).round() * step
    out = layer.quant_method.apply(layer, x)
    # A value on the edge between two integers may fall to either side.
    close(out, rounded @ weight.t(), 2e-3 if dtype == torch.float32 else 1e-2)


def test_memory() -> None:
    """One byte a weight, and the scales; nothing of 16-bit size."""
    n, k = 64, 512
    tensors, _ = stored(8, n, k, 128)
    scheme = Scheme(kind="int8", block_size=128)
    layer = build(LayerSpec("column", scheme, k, (n,)), [tensors], 0, 1)
    held = {name: p.nbytes for name, p in layer.named_parameters()}
    assert held == {"weight": n * k, "weight_scale": n * 4 * 4}


@pytest.mark.parametrize(
    "name,change,said",
    [
        ("weight", lambda x: x.float(), ["float32", "int8", "module_overrides"]),
        ("weight", lambda x: x[:-1], ["[7, 64]", "[8, 64]"]),
        ("weight_scale", lambda x: x.double(), ["float64"]),
        ("weight_scale", lambda x: x * float("nan"), ["nan"]),
        ("weight_scale", lambda x: x.repeat(1, 2), ["[8, 4]", "[8, 2]"]),
    ],
)
def test_bad_tensor(name: str, change, said: list[str]) -> None:
    tensors, _ = stored(9, 8, 64, 32)
    tensors[name] = change(tensors[name])
    spec = LayerSpec("column", Scheme(kind="int8", block_size=32), 64, (8,))
    with pytest.raises(TernaryFormatError) as raised:
        build(spec, [tensors], 0, 1)
    for text in [f"{NAME}.{name}", *said]:
        assert text in str(raised.value)


@pytest.mark.parametrize(
    "settings,said",
    [
        ({"zero_point": True}, "zero_point"),
        ({"block_size": "tensor"}, "tensor"),
        ({"block_size": 64, "activation_bits": 8}, "W8A8"),
    ],
)
def test_refused(settings: dict[str, Any], said: str) -> None:
    spec = LayerSpec("column", Scheme(kind="int8", **settings), 64, (8,))
    with tensor_parallel(0, 1), pytest.raises(ValueError, match=said) as raised:
        spec.build()
    assert NAME in str(raised.value)


def test_no_int8_embedding() -> None:
    spec = LayerSpec("embedding", Scheme(kind="int8", block_size="row"), 64, (100,))
    with tensor_parallel(0, 1), pytest.raises(ValueError, match="no kernel"):
        spec.build()
