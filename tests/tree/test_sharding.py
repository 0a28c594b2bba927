# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Every cut of a ternary layer, by vLLM's own layers and loaders, rank by rank.

Put together again, integers, scales and zero points equal the checkpoint's bit for
bit; and the ranks' outputs, concatenated or summed, equal a float64 reference.
"""

import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.validate.ranks import (
    LayerSpec,
    Rank,
    Whole,
    load,
    load_ranks,
    same_bits,
    tensor_parallel,
)
from vllm.model_executor.layers.linear import (
    KimiK3MergedQKVGateLinear,
    MinimaxM3QKVParallelLinearWithIndexer,
)
from vllm.model_executor.layers.quantization.ternary import TernaryConfig
from vllm.model_executor.layers.quantization.ternary.schemes import (
    Scheme,
    SchemeTable,
)
from vllm.model_executor.layers.quantization.utils.ternary_format import (
    TernaryFormatError,
)

RANKS = (1, 2, 3, 4, 8)
BLOCKS = (32, 64, 128, 256, "row", "tensor")
SCALE_DTYPES = ("float16", "bfloat16", "float32")


def pack(t: np.ndarray) -> np.ndarray:
    """The format's definition, in NumPy: [N, K] of -1, 0, 1 to bytes."""
    codes = np.where(t < 0, 2, t).astype(np.uint8)
    codes = np.pad(codes, ((0, 0), (0, -t.shape[1] % 4)))
    return (
        codes[:, 0::4] | codes[:, 1::4] << 2 | codes[:, 2::4] << 4 | codes[:, 3::4] << 6
    )


class Part:
    """A module of the checkpoint with random weights, and its float64 matrix."""

    def __init__(self, rng, rows: int, size_k: int, scheme: Scheme, bias: bool):
        block = scheme.block_size
        self.t = rng.integers(-1, 2, (rows, size_k)).astype(np.int8)
        blocks = 1 if isinstance(block, str) else -(-size_k // block)
        shape = (1,) if block == "tensor" else (rows, blocks)
        dtype = getattr(torch, scheme.scale_dtype)
        scale = torch.from_numpy(rng.uniform(0.01, 2, shape)).to(dtype)
        self.tensors = {
            "packed_ternary_weight": torch.from_numpy(pack(self.t)),
            "weight_scale": scale,
        }
        self.zero_point = None
        if scheme.zero_point:
            self.zero_point = torch.from_numpy(rng.uniform(-1, 1, shape)).float()
            self.tensors["weight_zero_point"] = self.zero_point
        self.bias = None
        if bias:
            self.bias = torch.from_numpy(rng.standard_normal(rows)).float()
            self.tensors["bias"] = self.bias
        length = size_k if isinstance(block, str) else block

        def columns(x: torch.Tensor) -> np.ndarray:
            x = x.double().numpy().reshape(-1, blocks)
            return np.repeat(x, length, axis=1)[:, :size_k]

        zero = 0 if self.zero_point is None else columns(self.zero_point)
        self.matrix = columns(scale) * (self.t - zero)

    def expanded(self, name: str) -> torch.Tensor:
        """The scale or zero point with one row for each row of the weight."""
        x = self.tensors[name]
        return x.expand(self.t.shape[0], 1) if x.ndim == 1 else x


def fuse(parts: list[Part]) -> dict[str, torch.Tensor]:
    """One module that holds the rows of several, as some checkpoints store them."""
    tensors = {}
    for name, first in parts[0].tensors.items():
        # One scale for the tensor: that of the first part serves all.
        whole = first.shape == (1,)
        tensors[name] = first if whole else torch.cat([p.tensors[name] for p in parts])
    return tensors


def check_reassembly(spec: LayerSpec, ranks: list[Rank], parts: list[Part]) -> None:
    """The ranks' tensors, put together, equal the parts bit for bit."""
    whole = Whole(spec, ranks)
    for index, part in enumerate(parts):
        for pieces in whole.pieces(index):
            rows = whole.rows(pieces, 0, part.t.shape[0])
            assert np.array_equal(rows.t.numpy(), part.t)
            assert same_bits(rows.scale, part.expanded("weight_scale"))
            if part.zero_point is not None:
                assert same_bits(rows.zero_point, part.expanded("weight_zero_point"))
            if part.bias is not None:
                for piece in pieces:
                    mine = piece.rank.bias[piece.offset : piece.offset + piece.rows]
                    share = part.bias[piece.first : piece.first + piece.rows]
                    assert same_bits(mine, share)
    for tensor in whole.padding():
        assert not tensor.any()


def outputs(spec: LayerSpec, ranks: list[Rank], x: torch.Tensor) -> list[torch.Tensor]:
    """Each rank's output, from vLLM's forward and the CPU kernels."""
    results = []
    for rank in ranks:
        with tensor_parallel(rank.rank, len(ranks)):
            layer = rank.layer
            layer.quant_method.process_weights_after_loading(layer)
            share = x
            if spec.kind == "row":  # a view, not contiguous for two ranks and more
                width = spec.size_k // len(ranks)
                share = x[..., rank.rank * width : (rank.rank + 1) * width]
            if spec.kind == "head":
                results.append(layer.quant_method.apply(layer, share, layer.bias))
            else:
                results.append(layer(share)[0])
    return results


def check_outputs(spec: LayerSpec, ranks: list[Rank], parts: list[Part], rng) -> None:
    """The ranks' outputs, put together, equal the float64 product."""
    x = torch.from_numpy(rng.standard_normal((2, 3, spec.size_k))).float()
    results = outputs(spec, ranks, x)
    whole = Whole(spec, ranks)
    for index, part in enumerate(parts):
        want = x.double().numpy() @ part.matrix.T
        if part.bias is not None:
            want = want + part.bias.double().numpy()
        # The sum of |x| |w| bounds what rounding in float32 can do.
        error = 1e-5 * (np.abs(x.double().numpy()) @ np.abs(part.matrix.T)) + 1e-5
        for pieces in whole.pieces(index):
            if spec.kind == "row":
                have = sum(r.double() for r in results)
            else:
                have = torch.cat(
                    [
                        results[p.rank.rank][..., p.offset : p.offset + p.rows]
                        for p in pieces
                    ],
                    dim=-1,
                )
            assert have.shape == want.shape
            assert (np.abs(have.double().numpy() - want) <= error).all()


def specs_for(kind: str, tp: int, size_k: int, scheme: Scheme) -> list[LayerSpec]:
    """Layers of a kind that vLLM can make for `tp` ranks."""
    if kind == "merged":
        return [
            LayerSpec("merged", scheme, size_k, sizes, bias=True)
            for sizes in ((5 * tp, 5 * tp), (3 * tp, 7 * tp, tp))
        ]
    if kind == "qkv":
        kv = {tp * 2, 1, tp}
        kv |= {tp // 2} if tp % 2 == 0 else set()
        return [
            LayerSpec(
                "qkv",
                scheme,
                size_k,
                (tp * 4 * 6, k * 6, k * v),
                heads=(tp * 4, k, 6, v),
                bias=True,
                names=("q_proj", "k_proj", "v_proj"),
                prefix="model.layers.0.self_attn.qkv_proj",
            )
            for k, v in zip(sorted(kv), (6, 10, 6, 6))
        ]
    rows = 7 if kind in ("row", "replicated") else 7 * tp
    padding = 48 if tp == 3 else 64
    if kind in ("embedding", "head"):
        rows = 75
    return [
        LayerSpec(
            kind,
            scheme,
            size_k,
            (rows,),
            bias=kind != "embedding",
            prefix="lm_head" if kind == "head" else "model.layers.0.x",
            padding_size=padding,
        )
    ]


def width(kind: str, tp: int, block, aligned: bool) -> int:
    """K of a test: for row-parallel layers such that every cut is on a block's
    begin, or that most are inside a block and inside a byte."""
    length = 64 if isinstance(block, str) else block
    if kind == "row":
        return tp * 2 * length if aligned else tp * (length + 23)
    return 2 * length if aligned else 2 * length + 39


@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
@pytest.mark.parametrize("zero_point", [False, True], ids=["no-zp", "zp"])
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("tp", RANKS)
@pytest.mark.parametrize(
    "kind", ["column", "merged", "qkv", "row", "replicated", "embedding", "head"]
)
def test_matrix(kind, tp, block, aligned, zero_point, scale_dtype, request):
    rng = np.random.default_rng(zlib.crc32(request.node.name.encode()))
    scheme = Scheme(block_size=block, zero_point=zero_point, scale_dtype=scale_dtype)
    for spec in specs_for(kind, tp, width(kind, tp, block, aligned), scheme):
        assert spec.fits(tp)
        parts = [Part(rng, n, spec.size_k, scheme, spec.bias) for n in spec.sizes]
        ranks = load_ranks(spec, [p.tensors for p in parts], tp)
        check_reassembly(spec, ranks, parts)
        if kind != "embedding":
            check_outputs(spec, ranks, parts, rng)


@pytest.mark.parametrize("block", [64, "row", "tensor"])
@pytest.mark.parametrize("tp", RANKS)
@pytest.mark.parametrize("kind", ["merged", "qkv"])
def test_fused_in_the_checkpoint(kind, tp, block):
    rng = np.random.default_rng([tp, len(kind)])
    scheme = Scheme(block_size=block, zero_point=True)
    for spec in specs_for(kind, tp, 167, scheme):
        parts = [Part(rng, n, spec.size_k, scheme, spec.bias) for n in spec.sizes]
        if block == "tensor":  # one module has one scale
            for part in parts:
                part.tensors["weight_scale"] = parts[0].tensors["weight_scale"]
                part.tensors["weight_zero_point"] = parts[0].zero_point
        ranks = load_ranks(spec, [fuse(parts)], tp, fused=True)
        check_reassembly(spec, ranks, parts)


def test_two_of_three_parts_fused_in_the_checkpoint():
    rng = np.random.default_rng(7)
    scheme = Scheme(block_size=32)
    spec = LayerSpec("merged", scheme, 70, (6, 10, 4))
    parts = [Part(rng, n, 70, scheme, False) for n in spec.sizes]
    ranks = []
    for rank in range(2):
        with tensor_parallel(rank, 2):
            layer = spec.build()
            load(layer, fuse(parts[:2]), (0, 1))
            load(layer, parts[2].tensors, 2)
            ranks.append(Rank.of(rank, layer))
    check_reassembly(spec, ranks, parts)


@st.composite
def layers(draw):
    """A layer that vLLM can make in FP16, of any shape, and a number of ranks."""
    tp = draw(st.sampled_from(RANKS))
    scheme = Scheme(
        block_size=draw(
            st.one_of(
                st.sampled_from(["row", "tensor"]),
                st.integers(1, 40).map(lambda n: 4 * n),
            )
        ),
        zero_point=draw(st.booleans()),
        scale_dtype=draw(st.sampled_from(SCALE_DTYPES)),
    )
    kind = draw(st.sampled_from(["column", "merged", "qkv", "row", "embedding"]))
    size_k = draw(st.integers(1, 90 if kind == "row" else 300))
    size = st.integers(1, 9)
    if kind == "row":
        return tp, LayerSpec("row", scheme, tp * size_k, (draw(size),), bias=True)
    if kind == "embedding":
        padding = tp * draw(size)
        rows = draw(st.integers(1, 80))
        return tp, LayerSpec(kind, scheme, size_k, (rows,), padding_size=padding)
    if kind == "qkv":
        kv = draw(st.sampled_from([d for d in RANKS if tp % d == 0] + [2 * tp]))
        heads = tp * draw(size)
        head, v_head = draw(size), draw(size)
        sizes = (heads * head, kv * head, kv * v_head)
        return tp, LayerSpec(
            kind, scheme, size_k, sizes, heads=(heads, kv, head, v_head), bias=True
        )
    count = 1 if kind == "column" else draw(st.integers(2, 4))
    sizes = tuple(tp * draw(size) for _ in range(count))
    return tp, LayerSpec(kind, scheme, size_k, sizes, bias=True)


@settings(max_examples=300, deadline=None)
@given(layer=layers(), seed=st.integers(0, 2**32 - 1))
def test_any_shape(layer, seed):
    tp, spec = layer
    rng = np.random.default_rng(seed)
    parts = [Part(rng, n, spec.size_k, spec.scheme, spec.bias) for n in spec.sizes]
    ranks = load_ranks(spec, [p.tensors for p in parts], tp)
    check_reassembly(spec, ranks, parts)
    if spec.kind != "embedding":
        check_outputs(spec, ranks, parts, rng)


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_lookup_of_a_sharded_embedding(tp):
    rng = np.random.default_rng(tp)
    scheme = Scheme(block_size=32, zero_point=True)
    spec = LayerSpec("embedding", scheme, 70, (75,), padding_size=48)
    part = Part(rng, 75, 70, scheme, False)
    ranks = load_ranks(spec, [part.tensors], tp)
    ids = torch.from_numpy(rng.integers(0, 75, (4, 9)))
    total = torch.zeros(4, 9, 70, dtype=torch.float64)
    for rank in ranks:
        with tensor_parallel(rank.rank, tp):
            layer = rank.layer
            layer.quant_method.process_weights_after_loading(layer)
            total += layer(ids).double()
    want = part.matrix[ids.numpy()]
    assert (np.abs(total.numpy() - want) <= 1e-6 * np.abs(want) + 1e-7).all()


@pytest.mark.parametrize("kind", ["column", "merged", "row"])
def test_disable_tp_keeps_the_whole(kind):
    rng = np.random.default_rng(3)
    scheme = Scheme(block_size=32)
    spec = LayerSpec(kind, scheme, 70, (6, 4) if kind == "merged" else (6,))
    parts = [Part(rng, n, 70, scheme, False) for n in spec.sizes]
    with tensor_parallel(1, 2):
        layer = spec.build(disable_tp=True)
        for shard_id, part in zip(spec.shard_ids, parts):
            load(layer, part.tensors, shard_id)
    check_reassembly(spec, [Rank.of(0, layer)], parts)


class KimiLayer:
    """The checkpoint of a layer that keeps two of its parts whole on each rank."""

    sizes = (6, 5, 8)

    def __init__(self, rng, scheme: Scheme):
        self.parts = [Part(rng, n, 70, scheme, False) for n in self.sizes]

    def layer(self, scheme: Scheme) -> torch.nn.Module:
        return KimiK3MergedQKVGateLinear(
            hidden_size=70,
            q_lora_rank=6,
            kv_lora_rank=3,
            qk_rope_head_dim=2,
            total_num_heads=4,
            v_head_dim=2,
            quant_config=TernaryConfig(SchemeTable(scheme)),
            prefix="model.layers.0.self_attn.proj",
        )


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("block", [32, "row", "tensor"])
def test_layer_of_a_model_that_replicates_parts(tp, block):
    rng = np.random.default_rng(tp)
    scheme = Scheme(block_size=block, zero_point=True)
    model = KimiLayer(rng, scheme)
    for rank in range(tp):
        with tensor_parallel(rank, tp):
            layer = model.layer(scheme)
            for shard_id, part in enumerate(model.parts):
                load(layer, part.tensors, shard_id)
        mine = Rank.of(rank, layer)
        share = 8 // tp
        gate = slice(rank * share, (rank + 1) * share)
        for name, have in (
            ("packed_ternary_weight", mine.packed),
            ("weight_scale", mine.scale),
            ("weight_zero_point", mine.zero_point),
        ):
            q, kv, g = (
                p.tensors[name] if name.startswith("packed") else p.expanded(name)
                for p in model.parts
            )
            assert same_bits(have, torch.cat([q, kv, g[gate]]))


@pytest.mark.parametrize("tp", [1, 2])
def test_layer_of_a_model_with_more_than_q_k_v(tp):
    rng = np.random.default_rng(tp)
    scheme = Scheme(block_size=32)
    config = TernaryConfig(SchemeTable(scheme))
    # q, k, v, index_q (as many heads as k) and index_k (one, replicated)
    sizes = {"q": 4 * 6, "k": 2 * 6, "v": 2 * 6, "index_q": 2 * 6, "index_k": 6}
    parts = {name: Part(rng, n, 70, scheme, False) for name, n in sizes.items()}
    for rank in range(tp):
        with tensor_parallel(rank, tp):
            layer = MinimaxM3QKVParallelLinearWithIndexer(
                hidden_size=70,
                head_size=6,
                total_num_heads=4,
                total_num_kv_heads=2,
                total_num_index_heads=2,
                index_head_size=6,
                quant_config=config,
                prefix="model.layers.0.self_attn.qkv_proj",
            )
            for shard_id, part in parts.items():
                load(layer, part.tensors, shard_id)
        expected = []
        for name, part in parts.items():
            share = sizes[name] // (1 if name == "index_k" else tp)
            first = 0 if name == "index_k" else rank * share
            expected.append(part.tensors["packed_ternary_weight"][first:][:share])
        assert same_bits(Rank.of(rank, layer).packed, torch.cat(expected))


def reserved_layer(kind: str, strict: bool) -> None:
    """Load a weight with one reserved code, as both ranks of two."""
    rng = np.random.default_rng(1)
    scheme = Scheme(block_size=32)
    spec = LayerSpec(kind, scheme, 2 * 37, (4,))
    part = Part(rng, 4, spec.size_k, scheme, False)
    part.tensors["packed_ternary_weight"][2, 12] |= 0b11
    for rank in range(2):
        with tensor_parallel(rank, 2):
            layer = spec.build(strict=strict)
            load(layer, part.tensors)
            layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize("kind", ["column", "row"])
def test_strict_sees_reserved_codes_where_a_cut_is_inside_a_byte(kind):
    reserved_layer(kind, strict=False)
    with pytest.raises(TernaryFormatError, match="reserved code 3"):
        reserved_layer(kind, strict=True)


def test_integer_zero_points():
    rng = np.random.default_rng(5)
    scheme = Scheme(block_size=32, zero_point=True)
    spec = LayerSpec("row", scheme, 74, (4,))
    part = Part(rng, 4, 74, scheme, False)
    part.zero_point = torch.from_numpy(rng.integers(-9, 9, (4, 3))).int()
    part.tensors["weight_zero_point"] = part.zero_point
    ranks = load_ranks(spec, [part.tensors], 2)
    part.tensors["weight_zero_point"] = part.zero_point = part.zero_point.float()
    check_reassembly(spec, ranks, [part])
    wrong = torch.full((4, 3), 2**24 + 1, dtype=torch.int32)
    with pytest.raises(TernaryFormatError, match="16777217 is not exact in float32"):
        load_ranks(spec, [part.tensors | {"weight_zero_point": wrong}], 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_sums_of_8_bit_activations_fit_into_float16(dtype):
    """127 times 600 inputs is more than float16 holds; the output is not."""
    torch.set_default_dtype(dtype)
    scheme = Scheme(block_size="tensor", activation_bits=8)
    spec = LayerSpec("row", scheme, 1200, (4,))
    tensors = {
        "packed_ternary_weight": torch.from_numpy(pack(np.ones((4, 1200), np.int8))),
        "weight_scale": torch.ones(1, dtype=torch.float16),
    }
    x = torch.ones(2, 1200, dtype=dtype)
    for y in outputs(spec, load_ranks(spec, [tensors], 2), x):
        assert y.dtype == dtype and ((y.float() - 600).abs() < 4).all()
