# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Hugging Face bitnet checkpoints made and run by transformers, converted, and
compared: integers, scales, and the output of each layer."""

import json

import checkpoints as build
import convert_checkpoint
import pytest
import torch
from transformers.integrations import bitnet

from lib.convert.codec import format as codec
from lib.convert.codec import schemes

NORM_EPS = 1e-5


def convert(source, dest, *arguments):
    return convert_checkpoint.main([str(source), str(dest), *map(str, arguments)])


def settings_of(kind):
    """``quantization_config`` of each kind of bitnet checkpoint."""
    config = {"quant_method": "bitnet"}
    if kind == "autobitlinear":
        config |= {"linear_class": kind, "quantization_mode": "offline"}
    if kind == "online":
        config |= {"linear_class": "autobitlinear", "quantization_mode": "online"}
    return config


def write(
    folder, kind, family="llama", use_rms_norm=False, seed=0, dtype=torch.bfloat16
):
    """A bitnet checkpoint; returns name of the weight -> (t, weight as transformers
    computes with it, float32)."""
    model = build.tiny_model(family, seed, tie_word_embeddings=False).to(dtype)
    build.save(model, folder)
    made = {}
    generator = torch.Generator().manual_seed(seed)

    def change(tensors):
        for name in [n for n in tensors if build.is_block_linear(n)]:
            module = name.removesuffix(".weight")
            n, k = tensors[name].shape
            if use_rms_norm:
                norm = torch.rand(k, generator=generator) + 0.5
                tensors[f"{module}.rms_norm.weight"] = norm.to(dtype)
            if kind == "online":
                w = bitnet.WeightQuant.apply(tensors[name])
                made[name] = w.float().sign().to(torch.int8), w.float()
                continue
            t = build.random_ternary(seed + len(made), n, k, 256)[0]
            scale = (torch.rand(1, generator=generator) + 0.3).to(dtype)
            tensors[name] = bitnet.pack_weights(t.clone())
            tensors[f"{module}.weight_scale"] = scale
            factor = scale.float() if kind == "autobitlinear" else 1 / scale.float()
            made[name] = t, t * factor

    build.rewrite(folder, change)
    config = settings_of(kind)
    if use_rms_norm:
        config |= {"use_rms_norm": True, "rms_norm_eps": NORM_EPS}
    build.set_config(folder, quantization_config=config)
    return made


KINDS = ["bitlinear", "autobitlinear", "online"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("use_rms_norm", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_integers_scales_and_config(kind, use_rms_norm, family, tmp_path):
    seed = 10 * KINDS.index(kind) + use_rms_norm
    made = write(tmp_path / "in", kind, family, use_rms_norm, seed)
    source = build.read(tmp_path / "in")
    assert convert(tmp_path / "in", tmp_path / "out", "--verify") == 0
    tensors = build.read(tmp_path / "out")
    assert len(made) == 14
    for name, (t, w) in made.items():
        module = name.removesuffix(".weight")
        packed = tensors.pop(module + ".packed_ternary_weight")
        scale = tensors.pop(module + ".weight_scale")
        found = codec.unpack(packed, t.shape[1], strict=True)
        assert torch.equal(found, t), name
        assert scale.dtype == torch.float32 and scale.shape == (1,)
        # bitlinear divides by its scale: 1 / scale, rounded once.
        assert torch.equal(codec.dequantize(found, scale, None, "tensor"), w), name
    # Norms, embedding and head are carried over.
    for name, tensor in tensors.items():
        assert torch.equal(tensor, source[name]), name
    norms = [n for n in tensors if n.endswith("rms_norm.weight")]
    assert len(norms) == (14 if use_rms_norm else 0)
    config = json.loads((tmp_path / "out/config.json").read_text())
    scheme = schemes.SchemeTable.from_config(config["quantization_config"]).scheme(
        "model.layers.1.mlp.down_proj"
    )
    assert scheme.block_size == "tensor" and scheme.scale_dtype == "float32"
    assert scheme.activation_bits == 8
    expected = {"name": "rms_norm", "eps": NORM_EPS} if use_rms_norm else None
    assert scheme.input_norm == expected


def reference_linear(x, t, scale, norm=None):
    """docs/quant_format.md, `activation_bits` and `input_norm`, in float64."""
    x = x.double()
    if norm is not None:
        x = x / (x.square().mean(-1, keepdim=True) + NORM_EPS).sqrt() * norm.double()
    a = x.abs().amax(-1, keepdim=True).clamp(min=1e-5)
    xq = (x * (127 / a)).round().clamp(-128, 127)
    return (a / 127) * scale.double() * (xq @ t.double().T)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("use_rms_norm", [False, True])
def test_layers_answer_as_in_transformers(kind, use_rms_norm, tmp_path):
    """The layer classes of transformers on the source, the format's formula on the
    result: an inverse scale taken for a scale, or a lost norm, would show."""
    write(tmp_path / "in", kind, "llama", use_rms_norm, 77, torch.float32)
    source = build.read(tmp_path / "in")
    assert convert(tmp_path / "in", tmp_path / "out") == 0
    result = build.read(tmp_path / "out")
    module = "model.layers.0.mlp.up_proj"
    arguments = dict(use_rms_norm=use_rms_norm, rms_norm_eps=NORM_EPS)
    if kind == "bitlinear":
        layer = bitnet.BitLinear(256, 512, False, dtype=torch.float32, **arguments)
    else:
        layer = bitnet.AutoBitLinear(
            256, 512, False, online_quant=kind == "online", **arguments
        )
    prefix = module + "."
    state = {k[len(prefix) :]: v for k, v in source.items() if k.startswith(prefix)}
    layer.load_state_dict(state)
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        expected = layer(x)
    t = codec.unpack(result[prefix + "packed_ternary_weight"], 256)
    norm = result.get(prefix + "rms_norm.weight")
    y = reference_linear(x, t, result[prefix + "weight_scale"], norm)
    # float32 rounding may move an activation by one step of 1 / 127.
    torch.testing.assert_close(
        y.float(), expected, rtol=1e-3, atol=2e-2 * float(y.abs().max())
    )
    assert (y - expected).abs().mean() < 2e-4 * y.abs().mean()


@pytest.mark.parametrize("kind", ["bitlinear", "autobitlinear"])
def test_bias(kind, tmp_path):
    """AutoBitLinear adds it before it multiplies by the scale, BitLinear after."""
    write(tmp_path / "in", kind, "qwen2", seed=31, dtype=torch.float32)
    source = build.read(tmp_path / "in")
    assert convert(tmp_path / "in", tmp_path / "out", "--verify") == 0
    result = build.read(tmp_path / "out")
    prefix = "model.layers.1.self_attn.k_proj."
    layer_class = {"bitlinear": bitnet.BitLinear, "autobitlinear": bitnet.AutoBitLinear}
    layer = layer_class[kind](256, 128, bias=True, dtype=torch.float32)
    state = {k[len(prefix) :]: v for k, v in source.items() if k.startswith(prefix)}
    layer.load_state_dict(state)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(8))
    with torch.no_grad():
        expected = layer(x)
    t = codec.unpack(result[prefix + "packed_ternary_weight"], 256)
    y = reference_linear(x, t, result[prefix + "weight_scale"])
    y = y + result[prefix + "bias"].double()
    off = (y - expected).abs()
    assert off.max() < 2e-2 * y.abs().max() and off.mean() < 2e-4 * y.abs().mean()


def test_integers_in_floating_point(tmp_path, capsys):
    """What AutoBitLinear (offline) saves again after it has unpacked."""
    made = write(tmp_path / "in", "autobitlinear", seed=32)

    def change(tensors):
        for name, (t, _) in made.items():
            tensors[name] = t.to(torch.bfloat16)

    build.rewrite(tmp_path / "in", change)
    assert convert(tmp_path / "in", tmp_path / "out", "--verify") == 0
    tensors = build.read(tmp_path / "out")
    for name, (t, w) in made.items():
        module = name.removesuffix("weight")
        found = codec.unpack(tensors[module + "packed_ternary_weight"], t.shape[1])
        scale = tensors[module + "weight_scale"]
        assert torch.equal(codec.dequantize(found, scale, None, "tensor"), w)
    build.rewrite(tmp_path / "in", lambda tensors: tensors[name].mul_(0.5))
    assert convert(tmp_path / "in", tmp_path / "out2") == 1
    assert "other values than -1, 0 and +1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("listed", "tied", "converted"),
    [
        (None, False, False),
        ([], False, True),
        (["lm_head"], False, False),
        ([], True, False),
    ],
)
def test_head(listed, tied, converted, tmp_path):
    """Left alone without a list, as in transformers; else as the list says."""
    write(tmp_path / "in", "online", seed=33)

    def change(tensors):
        if tied:
            tensors.pop("lm_head.weight")

    build.rewrite(tmp_path / "in", change)
    config = settings_of("online") | {"modules_to_not_convert": listed}
    build.set_config(
        tmp_path / "in", quantization_config=config, tie_word_embeddings=tied
    )
    assert convert(tmp_path / "in", tmp_path / "out") == 0
    assert (
        "lm_head.packed_ternary_weight" in build.read(tmp_path / "out")
    ) is converted
    if converted:
        config = json.loads((tmp_path / "out/config.json").read_text())
        table = schemes.SchemeTable.from_config(config["quantization_config"])
        assert table.explicit("lm_head").activation_bits == 8


def test_packed_along_n_not_k(tmp_path):
    """Byte row r holds rows r, r + N/4, r + N/2 and r + 3N/4."""
    write(tmp_path / "in", "bitlinear", seed=3)
    name = "model.layers.0.self_attn.k_proj.weight"

    def change(tensors):
        n = tensors[name].shape[0]
        assert n == 32
        packed = torch.full((n, 256), 0b01010101, dtype=torch.uint8)
        packed[5, 9] = 0b10_00_01_10
        tensors[name] = packed

    build.rewrite(tmp_path / "in", change)
    assert convert(tmp_path / "in", tmp_path / "out") == 0
    packed = build.read(tmp_path / "out")[
        "model.layers.0.self_attn.k_proj.packed_ternary_weight"
    ]
    t = codec.unpack(packed, 256)
    assert t.shape == (128, 256)
    assert t[[5, 37, 69, 101], 9].tolist() == [1, 0, -1, 1]
    assert int(t.count_nonzero()) == 3


def test_modules_left_out_stay(tmp_path):
    made = write(tmp_path / "in", "bitlinear", seed=4)

    def change(tensors):
        for name in ("k_proj", "q_proj", "v_proj"):
            name = f"model.layers.1.self_attn.{name}"
            t, w = made.pop(name + ".weight")
            tensors[name + ".weight"] = w.to(torch.bfloat16)
            del tensors[name + ".weight_scale"]

    build.rewrite(tmp_path / "in", change)
    config = settings_of("bitlinear")
    assert convert(tmp_path / "in", tmp_path / "out") == 1
    config["modules_to_not_convert"] = [
        f"model.layers.1.self_attn.{x}_proj" for x in "qkv"
    ]
    build.set_config(tmp_path / "in", quantization_config=config)
    assert convert(tmp_path / "in", tmp_path / "out", "--verify") == 0
    tensors = build.read(tmp_path / "out")
    for x in "qkv":
        module = f"model.layers.1.self_attn.{x}_proj"
        assert tensors[module + ".weight"].dtype == torch.bfloat16
        assert module + ".packed_ternary_weight" not in tensors


def refused(folder, capsys, *words):
    assert convert(folder, folder.parent / "out") == 1
    error = capsys.readouterr().err
    for word in words:
        assert word in error
    assert not (folder.parent / "out").exists()


def test_configs_that_do_not_decide_are_refused(tmp_path, capsys):
    folder = tmp_path / "in"
    write(folder, "bitlinear", seed=5)

    def configured(**changes):
        build.set_config(
            folder, quantization_config={"quant_method": "bitnet"} | changes
        )

    configured(quantization_mode="online")
    refused(folder, capsys, "contradicts", "autobitlinear")
    configured(linear_class="autobitlinear", quantization_mode="online")
    refused(folder, capsys, "uint8", "offline")
    configured(linear_class="bit")
    refused(folder, capsys, "linear_class is 'bit'")
    configured(quantization_mode="later")
    refused(folder, capsys, "quantization_mode is 'later'")
    configured(use_rms_norm=True)
    refused(folder, capsys, "_proj.rms_norm.weight", "is missing")


def test_masters_with_a_config_for_packed_weights_are_refused(tmp_path, capsys):
    write(tmp_path / "in", "online", seed=6)
    build.set_config(tmp_path / "in", quantization_config={"quant_method": "bitnet"})
    refused(tmp_path / "in", capsys, "without weight_scale", "online")


@pytest.mark.parametrize(
    ("value", "word"), [(0.0, "is 0.0"), (float("nan"), "is nan"), (None, "is missing")]
)
def test_impossible_scales_are_refused(value, word, tmp_path, capsys):
    write(tmp_path / "in", "bitlinear", seed=8)
    name = "model.layers.0.mlp.gate_proj.weight_scale"

    def change(tensors):
        tensors[name].fill_(value or 0.0)
        if value is None:
            del tensors[name]

    build.rewrite(tmp_path / "in", change)
    refused(tmp_path / "in", capsys, name, word)


def test_code_3_is_refused(tmp_path, capsys):
    write(tmp_path / "in", "bitlinear", seed=9)
    name = "model.layers.0.mlp.gate_proj.weight"

    def change(tensors):
        tensors[name][2, 1] |= 0b00001100

    build.rewrite(tmp_path / "in", change)
    refused(tmp_path / "in", capsys, name, "+2", "[130, 1]")


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_embedding_models_with_a_norm_per_projection(family, tmp_path):
    """Masters in bf16, scale mean |w| of the tensor, `<proj>.norm.weight` kept."""
    folder = tmp_path / "in"
    model = build.tiny_model(family, 12).to(torch.bfloat16)
    build.save(model, folder)
    masters = {}

    def change(tensors):
        for name in [n for n in tensors if build.is_block_linear(n)]:
            masters[name] = tensors[name].clone()
            norm = torch.rand(tensors[name].shape[1]) + 0.5
            tensors[name.removesuffix("weight") + "norm.weight"] = norm.bfloat16()

    build.rewrite(folder, change)
    assert convert(folder, tmp_path / "out", "--verify") == 0
    tensors = build.read(tmp_path / "out")
    for name, w in masters.items():
        module = name.removesuffix(".weight")
        scale = tensors[module + ".weight_scale"]
        s = w.double().abs().mean()
        torch.testing.assert_close(scale.double(), s.view(1), rtol=2**-24, atol=0)
        t = (w.double() / scale.double()).round().clamp(-1, 1)
        packed = tensors[module + ".packed_ternary_weight"]
        assert torch.equal(codec.unpack(packed, w.shape[1]), t.to(torch.int8))
        assert module + ".norm.weight" in tensors
    config = json.loads((tmp_path / "out/config.json").read_text())
    quantization = config["quantization_config"]
    assert quantization["input_norm"] == {"name": "norm", "eps": 1e-6}
    assert quantization["activation_bits"] == 8
    assert quantization["block_size"] == "tensor"
    assert quantization["scale_dtype"] == "float32"
    # The same said in the words of `bitnet`.
    config = settings_of("online") | {"use_rms_norm": True, "rms_norm_name": "norm"}
    build.set_config(folder, quantization_config=config)
    assert convert(folder, tmp_path / "said", "--verify") == 0
    said = build.read(tmp_path / "said")
    assert said.keys() == tensors.keys()
    assert all(
        torch.equal(said[n], tensors[n]) for n in said if not n.endswith("weight_scale")
    )
    config = json.loads((tmp_path / "said/config.json").read_text())
    assert config["quantization_config"] == quantization
