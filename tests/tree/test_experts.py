# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Ternary experts: vLLM's own container and loader, rank by rank, against float64."""

import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lib.validate.ranks import tensor_parallel
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
)
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.quantization.ternary import TernaryConfig, moe_forward
from vllm.model_executor.layers.quantization.ternary.schemes import (
    SCALE_DTYPES,
    Scheme,
    SchemeTable,
    TernaryConfigError,
)
from vllm.model_executor.layers.quantization.utils import ternary_format as fmt
from vllm.model_executor.layers.quantization.utils.ternary_format import (
    TernaryFormatError,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)

EXPERTS, TOP_K, HIDDEN = 5, 2, 132
NAME = "model.layers.0.mlp.experts"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def make_layer(
    schemes: SchemeTable,
    inter: int,
    tp: tuple[int, int] = (0, 1),
    ep: tuple[int, int] | None = None,
    **settings: Any,
) -> RoutedExperts:
    """The experts of rank tp = (rank, size), or those of ep = (rank, size)."""
    parallel = FusedMoEParallelConfig.make_no_parallel()
    parallel.tp_rank, parallel.tp_size = tp
    if ep is not None:
        parallel.ep_rank, parallel.ep_size, parallel.use_ep = *ep, True
    for name in [n for n in settings if hasattr(parallel, n)]:
        setattr(parallel, name, settings.pop(name))
    manager = ExpertMapManager(
        max_num_batched_tokens=64,
        top_k=TOP_K,
        global_num_experts=EXPERTS,
        num_redundant_experts=0,
        num_expert_group=None,
        moe_parallel_config=parallel,
        placement_strategy="linear",
        enable_eplb=False,
    )
    config = FusedMoEConfig(
        **dict(
            num_experts=EXPERTS,
            experts_per_token=TOP_K,
            hidden_dim=HIDDEN,
            intermediate_size=inter,
            num_local_experts=manager.local_num_experts,
            num_logical_experts=EXPERTS,
            activation=MoEActivation.SILU,
            device="cpu",
            routing_method=RoutingMethodType.Renormalize,
            moe_parallel_config=parallel,
            in_dtype=torch.float32,
        )
        | settings
    )
    return RoutedExperts(
        NAME, torch.float32, config, TernaryConfig(schemes), expert_map_manager=manager
    )


class Experts:
    """Tensors of a checkpoint, and the weights that they stand for."""

    def __init__(self, seed: int, inter: int, scheme: Callable[[str], Scheme]):
        g = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, torch.Tensor] = {}
        self.weights: dict[tuple[int, str], torch.Tensor] = {}
        for expert in range(EXPERTS):
            for name in PROJECTIONS:
                s = scheme(name)
                n, k = (HIDDEN, inter) if name == "down_proj" else (inter, HIDDEN)
                t = torch.randint(-1, 2, (n, k), dtype=torch.int8, generator=g)
                shape = fmt.scale_shape((n,), k, s.block_size)
                scale = torch.rand(shape, generator=g) + 0.1
                scale = scale.to(getattr(torch, s.scale_dtype))
                found = {"packed_ternary_weight": fmt.pack(t), "weight_scale": scale}
                zero = None
                if s.zero_point:
                    zero = torch.randint(-2, 3, shape, generator=g).float() / 4
                    found["weight_zero_point"] = zero
                self.tensors |= {f"{expert}.{name}.{x}": y for x, y in found.items()}
                self.weights[expert, name] = fmt.dequantize(
                    t, scale, zero, s.block_size, torch.float64
                )

    def load(self, layer: RoutedExperts) -> RoutedExperts:
        moe = layer.moe_config
        with tensor_parallel(moe.tp_rank, moe.tp_size):
            list(layer.load_weights(self.tensors.items()))
            layer.quant_method.process_weights_after_loading(layer)
        return layer

    def forward(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        out = torch.zeros(x.shape, dtype=torch.float64)
        for m in range(x.shape[0]):
            for weight, e in zip(weights[m].double(), ids[m].tolist(), strict=True):
                gate, up, down = (self.weights[e, name] for name in PROJECTIONS)
                row = x[m].double()
                out[m] += weight * (down @ (F.silu(gate @ row) * (up @ row)))
        return out


def routing(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=g)
    logits = torch.randn(tokens, EXPERTS, generator=g)
    weights, ids = logits.softmax(-1).topk(TOP_K)
    return x, weights, ids


def run(layer: RoutedExperts, x, weights, ids) -> torch.Tensor:
    return layer.quant_method.apply(layer, x, weights, ids, None, None)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert error < 2e-5, error


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize("block", [32, 128, "row", "tensor"])
def test_tensor_parallel(tp: int, zero_point: bool, block: fmt.BlockSize) -> None:
    """The ranks' outputs add up to the whole, wherever w2's inputs are cut."""
    scheme = Scheme(block_size=block, zero_point=zero_point)
    inter = 234  # 117 and 78 inputs a rank: inside bytes and blocks
    seed = zlib.crc32(repr((tp, zero_point, block)).encode()) % 1000
    experts = Experts(seed, inter, lambda _: scheme)
    x, weights, ids = routing(7, seed)
    layers = [
        experts.load(make_layer(SchemeTable(scheme), inter, tp=(rank, tp)))
        for rank in range(tp)
    ]
    close(
        sum(run(layer, x, weights, ids) for layer in layers),
        experts.forward(x, weights, ids),
    )


@pytest.mark.parametrize("ep", [2, 3])
def test_expert_parallel(ep: int) -> None:
    """Every expert on one rank; a rank may have none of a token's experts."""
    down, other = Scheme(block_size=64), Scheme(block_size=128)
    table = SchemeTable(other, overrides={"re:.*down_proj": down})
    experts = Experts(ep, 100, lambda name: down if name == "down_proj" else other)
    x, weights, ids = routing(9, ep)
    layers = [experts.load(make_layer(table, 100, ep=(rank, ep))) for rank in range(ep)]
    assert sum(layer.local_num_experts for layer in layers) == EXPERTS
    close(
        sum(run(layer, x, weights, ids) for layer in layers),
        experts.forward(x, weights, ids),
    )


@pytest.mark.parametrize("compute", ["gathered", "masked"])
@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize("tokens", [1, 4])
def test_paths_of_cuda_graphs(
    monkeypatch: pytest.MonkeyPatch, compute: str, zero_point: bool, tokens: int
) -> None:
    """The two paths that never look at the routing from the host."""
    scheme = Scheme(zero_point=zero_point)
    seed = tokens + 10 * zero_point
    experts = Experts(seed, 150, lambda _: scheme)
    x, weights, ids = routing(tokens, seed)
    way = getattr(moe_forward._Experts, compute)
    monkeypatch.setattr(moe_forward._Experts, "routed", way)
    parts = []
    for rank in range(2):  # expert parallel, so that some routes lead elsewhere
        layer = make_layer(SchemeTable(scheme), 150, ep=(rank, 2))
        parts.append(run(experts.load(layer), x, weights, ids))
    close(parts[0] + parts[1], experts.forward(x, weights, ids))


def test_masked_path_ignores_overflow() -> None:
    """What an expert makes of tokens that are not its own does not count."""
    scheme = Scheme()
    experts = Experts(41, 64, lambda _: scheme)
    layer = experts.load(make_layer(SchemeTable(scheme), 64))
    x, weights, ids = routing(3, 41)
    x[0, 0] = float("inf")
    ids[:, :] = torch.tensor([[0, 1], [2, 3], [3, 4]])
    method = layer.quant_method
    found = moe_forward._Experts(
        method.projection(layer, "w13"),
        method.projection(layer, "w2"),
        moe_forward._Activation(MoEActivation.SILU, None),
    ).masked(x, weights, ids)
    assert not found[0].isfinite().all()
    close(found[1:], experts.forward(x[1:], weights[1:], ids[1:]))


@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
def test_8_bit_activations(scale_dtype: str) -> None:
    """Both projections quantize each row to int8 first, as BitNet does."""
    scheme = Scheme(block_size="tensor", activation_bits=8, scale_dtype=scale_dtype)
    experts = Experts(42, 96, lambda _: scheme)
    layer = experts.load(make_layer(SchemeTable(scheme), 96))
    x, weights, ids = routing(6, 42)

    def quantized(row: torch.Tensor) -> torch.Tensor:
        step = 127 / row.abs().max().clamp(min=1e-5)
        return (row * step).round().clamp(-128, 127) / step

    expected = torch.zeros(x.shape, dtype=torch.float64)
    for m in range(x.shape[0]):
        for weight, e in zip(weights[m], ids[m].tolist(), strict=True):
            gate, up, down = (experts.weights[e, name].float() for name in PROJECTIONS)
            row = quantized(x[m])
            hidden = F.silu(gate @ row) * (up @ row)
            expected[m] += weight * (down @ quantized(hidden))
    found = run(layer, x, weights, ids).double()
    # A hidden value on the edge between two integers may fall to either side.
    assert (found - expected).abs().max() / expected.abs().max() < 5e-3
    _, scale, _ = layer.quant_method.unpacked_weight(layer, "w2")
    stored = experts.tensors["3.down_proj.weight_scale"]
    assert torch.equal(scale[3], stored.expand(HIDDEN, 1))
    assert scale.dtype == stored.dtype


def test_zero_point_that_would_be_rounded() -> None:
    scheme = Scheme(block_size=32, zero_point=True)
    experts = Experts(43, 64, lambda _: scheme)
    name = "1.up_proj.weight_zero_point"
    whole = torch.full_like(experts.tensors[name], 2**24 + 1, dtype=torch.int32)
    experts.tensors[name] = whole
    with pytest.raises(TernaryFormatError, match="16777217 is not exact in float32"):
        experts.load(make_layer(SchemeTable(scheme), 64))


@pytest.mark.parametrize("tp", [1, 2])
def test_memory_and_round_trip(tp: int) -> None:
    """Packed in memory, and bit for bit what the checkpoint held."""
    scheme = Scheme(block_size=64, zero_point=True)
    experts = Experts(50 + tp, 128, lambda _: scheme)
    for rank in range(tp):
        layer = experts.load(make_layer(SchemeTable(scheme), 128, tp=(rank, tp)))
        for name, param in layer.named_parameters():
            wide = EXPERTS * (2 * 128 // tp if "w13" in name else 128 // tp) * HIDDEN
            assert param.nbytes < wide, (name, param.shape)
        packed, scale, zero = layer.quant_method.unpacked_weight(layer, "w2")
        share = slice(rank * 128 // tp // 4, (rank + 1) * 128 // tp // 4)
        blocks = slice(rank * 2 // tp, (rank + 1) * 2 // tp)
        for e in range(EXPERTS):
            stored = experts.tensors
            whole = stored[f"{e}.down_proj.packed_ternary_weight"]
            assert torch.equal(packed[e], whole[:, share])
            assert torch.equal(
                scale[e], stored[f"{e}.down_proj.weight_scale"][:, blocks]
            )
            assert torch.equal(
                zero[e], stored[f"{e}.down_proj.weight_zero_point"][:, blocks]
            )


@pytest.mark.parametrize(
    "name,change,said",
    [
        ("2.up_proj.weight_scale", lambda x: x.float(), ["float32", "float16"]),
        ("1.down_proj.packed_ternary_weight", lambda x: x.half(), ["uint8"]),
        ("0.gate_proj.packed_ternary_weight", lambda x: x[:, 1:], ["[64, 32]"]),
    ],
)
def test_bad_tensor(name: str, change, said: list[str]) -> None:
    experts = Experts(60, 64, lambda _: Scheme())
    experts.tensors[name] = change(experts.tensors[name])
    with pytest.raises(TernaryFormatError) as raised:
        experts.load(make_layer(SchemeTable(), 64))
    for text in [f"{NAME}.{name}", *said]:
        assert text in str(raised.value)


def test_missing_expert() -> None:
    experts = Experts(61, 64, lambda _: Scheme())
    for name in [n for n in experts.tensors if n.startswith("3.")]:
        del experts.tensors[name]
    with pytest.raises(TernaryFormatError, match="missing .*<local expert 3>|<local"):
        experts.load(make_layer(SchemeTable(), 64))


def test_experts_stored_differently() -> None:
    table = SchemeTable(overrides={f"{NAME}.1": Scheme(block_size=32)})
    with pytest.raises(TernaryConfigError, match="stored differently"):
        make_layer(table, 64)
    table = SchemeTable(overrides={"re:.*down_proj": Scheme(kind="int8")})
    with pytest.raises(TernaryConfigError, match="all be ternary"):
        make_layer(table, 64)


@pytest.mark.parametrize(
    "settings,said",
    [
        ({"dp_size": 2}, "data_parallel_size"),
        ({"activation": MoEActivation.SITU}, "situ"),
        ({"swiglu_limit": 7.0}, "limit"),
    ],
)
def test_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make_layer(SchemeTable(), 64, **settings)


def test_8_bit_activations_need_whole_rows() -> None:
    with pytest.raises(ValueError, match="enable-expert-parallel"):
        make_layer(SchemeTable(Scheme(activation_bits=8)), 64, tp=(0, 2))


def test_unquantized_experts_stay_so() -> None:
    layer = make_layer(SchemeTable(not_convert=["experts"]), 64, hidden_dim=128)
    assert type(layer.quant_method).__name__ == "UnquantizedFusedMoEMethod"


def test_tensors_for_experts_that_are_loaded() -> None:
    """Not copied into the layout of the kernels, whatever its shape is."""
    scheme = Scheme(block_size=32)
    experts = Experts(69, 128, lambda _: scheme)
    layer = experts.load(make_layer(SchemeTable(scheme), 128))
    with pytest.raises(RuntimeError, match=f"{NAME} is loaded.*reload_weights"):
        list(layer.load_weights(experts.tensors.items()))
    x, weights, ids = routing(3, 69)
    close(run(layer, x, weights, ids), experts.forward(x, weights, ids))


@pytest.mark.parametrize("tp", [1, 2])
def test_reload_in_place(tp: int) -> None:
    """The machinery of vLLM that reloads weights counts exactly what a layer needs."""
    scheme = Scheme(block_size=32, zero_point=True)
    old, new = (Experts(70 + i, 90, lambda _: scheme) for i in range(2))
    x, weights, ids = routing(5, 70)
    total = torch.zeros(x.shape, dtype=torch.float64)
    for rank in range(tp):
        model = torch.nn.Sequential(make_layer(SchemeTable(scheme), 90, tp=(rank, tp)))
        layer: RoutedExperts = model[0]  # type: ignore[assignment]
        record_metadata_for_reloading(model)
        old.load(layer)
        addresses = {name: p.data_ptr() for name, p in layer.named_parameters()}
        with tensor_parallel(rank, tp):
            initialize_layerwise_reload(model)
            list(layer.load_weights(new.tensors.items()))
            finalize_layerwise_reload(model, None)
        assert addresses == {n: p.data_ptr() for n, p in layer.named_parameters()}
        total += run(layer, x, weights, ids)
    close(total, new.forward(x, weights, ids))


def test_strict() -> None:
    """The reserved code is refused by name, wherever the rank cuts."""
    experts = Experts(80, 64, lambda _: Scheme())
    experts.tensors["4.down_proj.packed_ternary_weight"][3, -1] = 0xFF
    layer = make_layer(SchemeTable(strict=True), 64, tp=(0, 2))
    with pytest.raises(TernaryFormatError, match="4.down_proj.packed_ternary_weight"):
        experts.load(layer)
