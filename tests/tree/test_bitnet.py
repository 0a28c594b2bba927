# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Layers of `bitnet` checkpoints against transformers' own modules, at any cut."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from thread_ranks import run_ranks
from transformers import BitNetQuantConfig
from transformers.integrations.bitnet import (
    BitLinear,
    WeightQuant,
    pack_weights,
    replace_with_bitnet_linear,
)
from transformers.models.bitnet.modeling_bitnet import BitNetRMSNorm
from transformers.quantizers.quantizers_utils import should_convert_module

from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.ternary.bitnet import (
    BitNetConfig,
    BitNetLinearMethod,
    quantize_master,
    unpack_rows,
)
from vllm.model_executor.layers.quantization.utils import ternary_format as fmt
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.bitnet import SubNorm

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate", "up"]}
FORMATS = {
    "bitlinear": dict(linear_class="bitlinear", quantization_mode="offline"),
    "autobitlinear": dict(linear_class="autobitlinear", quantization_mode="offline"),
    "online": dict(linear_class="autobitlinear", quantization_mode="online"),
}
# Far from 1, so that a scale taken for its inverse is off by orders of magnitude.
MAGNITUDE = 0.05


@pytest.fixture(autouse=True)
def eager_transformers() -> Iterator[None]:
    """Transformers compiles its BitNet functions; that needs no compiler here."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def settings_of(name: str, norm: bool = False, **more: object) -> dict:
    """A `quantization_config` as transformers writes it."""
    config = BitNetQuantConfig(
        **FORMATS[name], use_rms_norm=norm, rms_norm_eps=1e-5, **more
    )
    return config.to_dict()


class Module:
    """A module of a checkpoint: transformers', and the tensors that it is read from."""

    def __init__(
        self, gen: torch.Generator, size_n: int, size_k: int, config: dict, bias: bool
    ):
        keys = {k: v for k, v in config.items() if k != "quant_method"}
        holder = torch.nn.ModuleDict({"proj": torch.nn.Linear(size_k, size_n, bias)})
        replace_with_bitnet_linear(holder, [], BitNetQuantConfig(**keys))
        self.module = holder["proj"]
        master = torch.randn(size_n, size_k, generator=gen) * MAGNITUDE
        scale = master.abs().mean()
        self.t = (master / scale).round().clamp(-1, 1)
        packed = pack_weights(self.t.clone())
        self.tensors = {"weight": master}
        if config["quantization_mode"] == "offline":
            inverse = config["linear_class"] == "bitlinear"
            stored = 1 / scale if inverse else scale
            self.tensors = {"weight": packed, "weight_scale": stored.view(1)}
        if bias:
            self.tensors["bias"] = torch.randn(size_n, generator=gen)
        if config["use_rms_norm"]:
            weight = torch.rand(size_k, generator=gen) + 0.5
            self.tensors["rms_norm.weight"] = weight
        # Copied: transformers' hook replaces entries of the dictionary.
        self.module.load_state_dict(dict(self.tensors), assign=True)
        # transformers sets the dtype that BitLinear computes in from the model's.
        self.module.dtype = torch.float32

    @torch.no_grad()
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


@dataclass
class Layer:
    """A layer of vLLM, the modules that it holds, and how it is made."""

    kind: str
    size_k: int
    sizes: list[int]
    heads: tuple[int, int, int] | None = None

    def build(self, config: BitNetConfig, bias: bool) -> torch.nn.Module:
        config.packed_modules_mapping = FUSED
        common = dict(bias=bias, quant_config=config)
        if self.kind == "qkv":
            return QKVParallelLinear(
                self.size_k,
                self.heads[2],
                self.heads[0],
                self.heads[1],
                prefix="model.layers.0.self_attn.qkv_proj",
                **common,
            )
        if self.kind == "merged":
            return MergedColumnParallelLinear(
                self.size_k,
                self.sizes,
                prefix="model.layers.0.mlp.gate_up_proj",
                **common,
            )
        cls = dict(
            replicated=ReplicatedLinear,
            column=ColumnParallelLinear,
            row=RowParallelLinear,
        )[self.kind]
        if self.kind == "column":
            common["gather_output"] = True
        if self.kind == "row":
            common["input_is_parallel"] = False
        return cls(
            self.size_k, self.sizes[0], prefix="model.layers.0.mlp.down_proj", **common
        )

    @property
    def shards(self) -> list:
        return {"qkv": ["q", "k", "v"], "merged": [0, 1]}.get(self.kind, [None])


def load(layer: torch.nn.Module, tensors: dict, shard: object = None) -> None:
    parameters = dict(layer.named_parameters())
    for name, tensor in tensors.items():
        parameter = parameters[name]
        arguments = () if shard is None else (shard,)
        parameter.weight_loader(parameter, tensor, *arguments)


def ready(layer: torch.nn.Module) -> torch.nn.Module:
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def ready_alone(layer: torch.nn.Module) -> torch.nn.Module:
    """The same for a layer that no rank is making."""
    return run_ranks(1, lambda rank: ready(layer))[0]


def close(have: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal up to float32 rounding; a quantized activation that fell on the other side
    of a tie would be off by more than a thousandth."""
    return torch.allclose(have, want, rtol=1e-5, atol=2e-5 * want.abs().max().item())


def layers_for(tp: int) -> list[Layer]:
    return [
        Layer("replicated", 52, [24]),
        Layer("column", 52, [12 * tp]),
        # Cut inside a byte of the packed form along K.
        Layer("row", 27 * tp, [20]),
        Layer("merged", 52, [8 * tp, 8 * tp]),
        # As many key heads as half the ranks, where there is a half.
        Layer(
            "qkv",
            52,
            [tp * 2 * 8, max(1, tp // 2) * 8, max(1, tp // 2) * 8],
            (tp * 2, max(1, tp // 2), 8),
        ),
    ]


def seeded(request: pytest.FixtureRequest) -> torch.Generator:
    seed = zlib.crc32(request.node.name.encode())
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("norm", [False, True], ids=["no-norm", "norm"])
@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_outputs_equal_those_of_transformers(tp, name, norm, bias, request):
    gen = seeded(request)
    config = settings_of(name, norm)
    for layer in layers_for(tp):
        modules = [Module(gen, n, layer.size_k, config, bias) for n in layer.sizes]
        x = torch.randn(3, 5, layer.size_k, generator=gen)
        want = [module(x) for module in modules]

        def work(rank: int) -> torch.Tensor:
            built = layer.build(BitNetConfig.from_config(config), bias)  # noqa: B023
            assert isinstance(built.quant_method, BitNetLinearMethod)
            for shard, module in zip(layer.shards, modules):  # noqa: B023
                load(built, module.tensors, shard)
            return ready(built)(x)[0]  # noqa: B023

        results = run_ranks(tp, work)
        if layer.kind not in ("merged", "qkv"):
            for result in results:
                assert close(result, want[0])
            continue
        # Each part is cut by itself; key and value heads may have copies.
        copies, widths = [1, 1, 1], [n // tp for n in layer.sizes]
        if layer.heads is not None:
            heads, kv_heads, size = layer.heads
            kv = max(1, kv_heads // tp) * size
            widths = [heads // tp * size, kv, kv]
            copies[1:] = [max(1, tp // kv_heads)] * 2
        split = [r.split(widths, dim=-1) for r in results]
        for i, part in enumerate(want):
            for copy in range(copies[i]):
                have = torch.cat([s[i] for s in split[copy :: copies[i]]], -1)
                assert close(have, part)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", list(FORMATS))
def test_fused_in_the_checkpoint(name, tp, request):
    """One tensor on disk for query, key and value, packed and scaled as one."""
    config = settings_of(name)
    layer = Layer("qkv", 52, [32, 16, 16], (4, 2, 8))
    module = Module(seeded(request), 64, 52, config, True)
    x = torch.randn(7, 52, generator=torch.Generator().manual_seed(tp))

    def work(rank: int) -> torch.Tensor:
        built = layer.build(BitNetConfig.from_config(config), True)
        load(built, module.tensors)
        return ready(built)(x)[0]

    results = [r.split([32 // tp, 16 // tp, 16 // tp], -1) for r in run_ranks(tp, work)]
    have = torch.cat([torch.cat(part, -1) for part in zip(*results)], -1)
    assert close(have, module(x))


def one_layer(
    config: dict, size_n: int, size_k: int, bias: bool = False
) -> torch.nn.Module:
    layer = Layer("replicated", size_k, [size_n])
    built = []
    run_ranks(
        1,
        lambda rank: built.append(layer.build(BitNetConfig.from_config(config), bias)),
    )
    return built[0]


def test_the_two_scale_conventions_are_told_apart(request):
    """The same tensors under the two conventions: each answers as its own class of
    transformers, and the answers differ by the scale's square."""
    gen = seeded(request)
    modules = {n: Module(gen, 16, 24, settings_of(n), False) for n in FORMATS}
    stored = modules["bitlinear"].tensors
    assert stored["weight_scale"].item() > 10
    x = torch.randn(4, 24, generator=gen)
    answers = {}
    for name in ("bitlinear", "autobitlinear"):
        module = modules[name].module
        module.load_state_dict(dict(stored), assign=True)
        layer = one_layer(settings_of(name), 16, 24)
        load(layer, stored)
        answers[name] = ready_alone(layer)(x)[0]
        with torch.no_grad():
            assert close(answers[name], module(x))
    ratio = stored["weight_scale"].item() ** 2
    assert close(answers["autobitlinear"], answers["bitlinear"] * ratio)


def test_weights_that_transformers_saved_unpacked(request):
    """Saving an AutoBitLinear writes t itself, in the model's dtype."""
    module = Module(seeded(request), 16, 24, settings_of("autobitlinear"), False)
    tensors = {k: v.bfloat16() for k, v in module.module.state_dict().items()}
    tensors["weight_scale"] = module.tensors["weight_scale"]
    assert tensors["weight"].shape == (16, 24)
    layer = one_layer(settings_of("autobitlinear"), 16, 24)
    load(layer, tensors)
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(1))
    assert close(ready_alone(layer)(x)[0], module(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_masters_quantize_to_the_integers_of_transformers(dtype, request):
    """Integers exactly, also for masters on a tie, and the scale bit for bit."""
    gen = seeded(request)
    for k in (1, 7, 64, 130):
        w = torch.randn(33, k, generator=gen) * MAGNITUDE
        w[::3] = w.abs().mean() / 2
        w = w.to(dtype)
        packed, scale = quantize_master(w, dtype, "w")
        want = WeightQuant.apply(w)
        have = fmt.unpack(packed, k).to(torch.float32) * scale
        assert torch.equal(have.to(dtype), want)
    # Below the clamp, and nothing at all.
    for w in (torch.full((4, 4), 1e-9), torch.zeros(4, 4)):
        packed, scale = quantize_master(w.to(dtype), dtype, "w")
        assert not packed.any() and scale.item() == pytest.approx(1e-5, rel=1e-2)


def test_rows_that_four_does_not_divide(request):
    module = Module(seeded(request), 16, 24, settings_of("bitlinear"), False)
    for n in (1, 2, 3, 5, 13, 16):
        t = module.t[:n]
        unpacked = fmt.unpack(unpack_rows(pack_weights(t.clone()), n, "w"), 24)
        assert torch.equal(unpacked.float(), t)


def test_nothing_of_the_original_size_is_left(request):
    for name in FORMATS:
        module = Module(seeded(request), 128, 256, settings_of(name), False)
        layer = one_layer(settings_of(name), 128, 256)
        load(layer, module.tensors)
        ready_alone(layer)
        tensors = dict(layer.named_parameters()) | dict(layer.named_buffers())
        assert set(tensors) == {"packed_ternary_weight", "weight_scale"}
        held = sum(t.numel() * t.element_size() for t in tensors.values())
        assert held == 128 * 256 // 4 + 128 * 4
        assert not any(isinstance(v, torch.Tensor) for v in vars(layer).values())


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(linear_class="bitlinear", quantization_mode="online"), "autobitlinear"),
        (dict(quantization_mode="online"), "autobitlinear"),
        (dict(linear_class="autobitlinear", quantization_mode="later"), "offline"),
        (dict(linear_class="BitLinear"), "autobitlinear"),
        (dict(linear_class=None), "autobitlinear"),
        (dict(use_rms_norm="yes"), "true or false"),
        (dict(use_rms_norm=True, rms_norm_eps=None), "not negative"),
        (dict(use_rms_norm=True, rms_norm_name="a.b"), "last name"),
        (dict(rms_norm_name="norm"), "use_rms_norm is false"),
        (dict(modules_to_not_convert="lm_head"), "list of names"),
    ],
)
def test_configs_that_leave_the_format_open_are_refused(change, message):
    with pytest.raises(ValueError, match=message) as error:
        BitNetConfig.from_config({"quant_method": "bitnet", **change})
    key = list(change)[-1]
    assert "quantization_config" in str(error.value) and key in str(error.value)


def test_the_oldest_config_means_what_it_means_to_transformers():
    config = BitNetConfig.from_config({"quant_method": "bitnet"})
    assert config.weight_format.inverse_scale and not config.weight_format.masters
    assert get_quantization_config("bitnet") is BitNetConfig


def test_tensors_that_the_config_does_not_describe_are_refused(request):
    gen = seeded(request)
    masters = Module(gen, 16, 24, settings_of("online"), False).tensors
    packed = Module(gen, 16, 24, settings_of("bitlinear"), False).tensors
    three = packed["weight"].clone()
    three[2, 5] |= 0b1100
    bad = [
        ("bitlinear", masters, "online"),
        ("autobitlinear", masters, "online"),
        ("online", packed, "offline"),
        ("online", {"weight_scale": packed["weight_scale"]}, "offline"),
        ("bitlinear", {"weight": packed["weight"][:, :20]}, r"\[4, 20\]"),
        ("bitlinear", {"weight": three}, "byte .2, 5. .*code 3"),
        ("bitlinear", {"weight_scale": torch.ones(16)}, "one floating-point value"),
        ("bitlinear", {"weight_scale": torch.zeros(1)}, "positive"),
        ("bitlinear", {"weight_scale": torch.tensor([torch.nan])}, "finite"),
        ("online", {"weight": masters["weight"] / 0}, "NaN"),
    ]
    for name, tensors, message in bad:
        layer = one_layer(settings_of(name), 16, 24)
        with pytest.raises(ValueError, match=message) as error:
            load(layer, tensors)
        assert "model.layers.0.mlp.down_proj.weight" in str(error.value)
    for name in ("weight", "weight_scale", "rms_norm.weight"):
        config = settings_of("bitlinear", norm=True)
        tensors = Module(gen, 16, 24, config, False).tensors
        del tensors[name]
        layer = one_layer(config, 16, 24)
        load(layer, tensors)
        with pytest.raises(ValueError, match=f"down_proj.{name}: missing"):
            ready_alone(layer)


NAMES = [
    "model.layers.0.self_attn.o_proj",
    "model.layers.1.self_attn.o_proj",
    "model.layers.11.mlp.down_proj",
    "model.layers.1.mlp.down_proj",
]


@pytest.mark.parametrize(
    "listed",
    [
        [],
        ["lm_head"],
        ["o_proj"],
        ["model.layers.1"],
        ["model.layers.1."],
        ["layers.1"],
        ["model.layers.*.o_proj"],
        ["model.layers.1.mlp.down_proj"],
    ],
)
def test_modules_to_not_convert_as_transformers_reads_it(listed):
    config = BitNetConfig.from_config(
        settings_of("bitlinear", modules_to_not_convert=listed)
    )
    for name in NAMES:

        def work(rank: int, name: str = name) -> None:
            layer = ReplicatedLinear(8, 8, quant_config=config, prefix=name)
            plain = isinstance(layer.quant_method, UnquantizedLinearMethod)
            assert plain is not should_convert_module(name, listed)

        run_ranks(1, work)


def test_fused_layers_are_quantized_by_the_names_of_their_parts():
    """A name such as v_proj is the end of qkv_proj, too, but not all of it."""
    layer = Layer("qkv", 52, [32, 16, 16], (4, 2, 8))

    def build(listed: list[str]) -> type:
        config = settings_of("bitlinear", modules_to_not_convert=listed)
        built = layer.build(BitNetConfig.from_config(config), False)
        return type(built.quant_method)

    every = ["q_proj", "k_proj", "v_proj"]
    assert run_ranks(1, lambda r: build(every)) == [UnquantizedLinearMethod]
    assert run_ranks(1, lambda r: build(["o_proj"])) == [BitNetLinearMethod]
    with pytest.raises(ValueError, match="names only .*v_proj"):
        run_ranks(1, lambda r: build(["v_proj"]))


def test_head_is_quantized_where_transformers_does(request):
    """Without a list the head is left alone; a list says all that is left alone."""
    module = Module(seeded(request), 72, 24, settings_of("bitlinear"), False)
    assert isinstance(module.module, BitLinear)
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(2))

    def head(listed: list[str] | None) -> ParallelLMHead:
        config = settings_of("bitlinear", modules_to_not_convert=listed)
        return ParallelLMHead(
            72, 24, quant_config=BitNetConfig.from_config(config), prefix="lm_head"
        )

    for listed in (None, ["lm_head"]):
        (layer,) = run_ranks(1, lambda r, listed=listed: head(listed))
        assert not isinstance(layer.quant_method, BitNetLinearMethod)

    def logits(rank: int) -> torch.Tensor:
        layer = head(["model.embed_tokens"])
        load(layer, module.tensors)
        return ready(layer).quant_method.apply(layer, x)

    for tp in (1, 2):
        have = torch.cat(run_ranks(tp, logits), -1)[:, :72]
        assert close(have, module(x))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_sub_norm_spans_all_ranks(tp, request):
    gen = seeded(request)
    want = BitNetRMSNorm(24, eps=1e-5)
    weight = torch.rand(24, generator=gen) + 0.5
    want.weight.data.copy_(weight)
    x = torch.randn(3, 24, generator=gen)

    def work(rank: int) -> torch.Tensor:
        norm = SubNorm(24, 1e-5)
        norm.weight.weight_loader(norm.weight, weight)
        with pytest.raises(ValueError, match=r"expected \[24\]"):
            norm.weight.weight_loader(norm.weight, weight[:6])
        return norm(x.chunk(tp, -1)[rank])

    assert close(torch.cat(run_ranks(tp, work), -1), want(x))
