# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Floating-point safetensors: lossless, refused, or quantized."""

import json

import checkpoints as build
import convert_checkpoint
import pytest
import torch
import transformers
import validate_quant_weights

from lib.convert import quant_config
from lib.convert.codec import format as codec
from lib.convert.codec import quantize, schemes
from lib.convert.names import fused_group, is_block_linear
from lib.validate import run


def convert(source, dest, *arguments):
    return convert_checkpoint.main([str(source), str(dest), *map(str, arguments)])


def quantization_config(folder):
    config = json.loads((folder / "config.json").read_text())
    return config["quantization_config"]


def decode(folder, module, size_k, dtype=torch.float32):
    """A ternary module's weight, by the settings in config.json."""
    tensors = build.read(folder)
    table = schemes.SchemeTable.from_config(quantization_config(folder))
    block = table.scheme(module).block_size
    packed = tensors[f"{module}.packed_ternary_weight"]
    t = codec.unpack(packed, size_k, strict=True)
    scale = tensors[f"{module}.weight_scale"]
    codec.check_scale(scale, t.shape[:1], size_k, block)
    return codec.dequantize(t, scale, None, block, dtype)


def ternary_source(folder, family="qwen3", seed=0, block=128, dtype=None, **kwargs):
    embeddings = kwargs.pop("embeddings", False)
    model = build.tiny_model(family, seed, **kwargs)
    made = build.make_ternary(model, seed, block, embeddings)
    build.save(model.to(dtype or torch.float16), folder)
    return made


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3", "bert"])
def test_ternary_weights_convert_without_loss(family, dtype, tmp_path):
    source, dest = tmp_path / "in", tmp_path / "out"
    made = ternary_source(source, family, sum(map(ord, family)), dtype=dtype)
    assert convert(source, dest, "--verify") == 0
    original, tensors = build.read(source), build.read(dest)
    assert len(made) >= 12
    for name, (t, scale) in made.items():
        module = name.removesuffix(".weight")
        found = codec.unpack(tensors.pop(f"{module}.packed_ternary_weight"), t.shape[1])
        assert torch.equal(found, t)
        assert torch.equal(tensors.pop(f"{module}.weight_scale"), scale)
        w = decode(dest, module, t.shape[1], dtype)
        assert torch.equal(w, original.pop(name))
    assert tensors.keys() == original.keys()
    assert all(torch.equal(tensors[n], original[n]) for n in tensors)
    assert (dest / "tokenizer.json").read_text() == '{"version": "1.0"}\n'
    config = json.loads((dest / "config.json").read_text())
    config.pop("quantization_config")
    assert config == json.loads((source / "config.json").read_text())
    assert quantization_config(dest)["block_size"] == 128


@pytest.mark.parametrize("method", ["absmean", "mse"])
@pytest.mark.parametrize("block", [64, 128, "row", "tensor"])
def test_quantize(method, block, tmp_path):
    source, dest = tmp_path / "in", tmp_path / "out"
    model = build.tiny_model("bert", 3)
    build.save(model, source)
    arguments = ["--quantize", method, "--block-size", block, "--verify"]
    assert convert(source, dest, *arguments) == 0
    tensors = build.read(dest)
    function = getattr(quantize, f"quantize_{method}")
    for name, w in model.state_dict().items():
        if not build.is_block_linear(name):
            continue
        module = name.removesuffix(".weight")
        t, scale = function(w, block)
        assert torch.equal(tensors[f"{module}.weight_scale"], scale)
        packed = tensors[f"{module}.packed_ternary_weight"]
        assert torch.equal(codec.unpack(packed, w.shape[1]), t)
    assert quantization_config(dest)["block_size"] == block


def test_quantizing_keeps_what_is_ternary_already(tmp_path):
    """Absmean of ternary weights would change their scales."""
    source, dest = tmp_path / "in", tmp_path / "out"
    made = ternary_source(source, seed=4)
    odd = "model.layers.0.mlp.down_proj.weight"
    build.rewrite(source, lambda tensors: tensors[odd].normal_())
    assert convert(source, dest, "--quantize", "absmean", "--verify") == 0
    tensors = build.read(dest)
    for name, (_, scale) in made.items():
        found = tensors[name.removesuffix("weight") + "weight_scale"]
        assert torch.equal(found, scale) is (name != odd)


def test_k_320_with_block_256(tmp_path):
    source, dest = tmp_path / "in", tmp_path / "out"
    sizes = dict(hidden_size=320, intermediate_size=330, head_dim=80)
    made = ternary_source(source, seed=5, block=256, **sizes)
    assert convert(source, dest, "--block-size", 256, "--verify") == 0
    tensors = build.read(dest)
    t, scale = made["model.layers.0.mlp.up_proj.weight"]
    assert scale.shape == (330, 2) and t.shape == (330, 320)
    assert torch.equal(tensors["model.layers.0.mlp.up_proj.weight_scale"], scale)
    # K = 330: 83 bytes, the last with two codes, and a last block of 74.
    packed = tensors["model.layers.0.mlp.down_proj.packed_ternary_weight"]
    assert packed.shape == (320, 83) and codec.count_padding(packed, 330) == 0
    assert int(packed[:, -1].max()) < 16


@pytest.mark.parametrize("quantized", [False, True])
def test_almost_ternary_is_refused_naming_tensor_and_block(quantized, tmp_path, capsys):
    source, dest = tmp_path / "in", tmp_path / "out"
    made = ternary_source(source, seed=6)
    name = "model.layers.1.self_attn.v_proj.weight"
    t, _ = made[name]
    row, column = 7, 128 + int(t[7, 128:].nonzero()[0])

    def change(tensors):
        w = tensors[name]
        w[row, column] = torch.nextafter(w[row, column], torch.tensor(1.0).half())

    build.rewrite(source, change)
    if quantized:
        assert convert(source, dest, "--quantize", "mse", "--verify") == 0
        return
    assert convert(source, dest) == 1
    error = capsys.readouterr().err
    assert f"{name}: block 1 of row 7 (columns 128 to 255) is not ternary" in error
    assert "--quantize" in error and "--modules-to-not-convert" in error
    assert not dest.exists() and not list(tmp_path.glob(".out*"))


def test_other_block_size_is_suggested(tmp_path, capsys):
    ternary_source(tmp_path / "in", seed=7, block=64)
    assert convert(tmp_path / "in", tmp_path / "out") == 1
    assert "It is ternary with --block-size 64." in capsys.readouterr().err
    assert convert(tmp_path / "in", tmp_path / "out", "--block-size", 64) == 0


def test_scales_that_float16_cannot_hold(tmp_path, capsys):
    model = build.tiny_model("llama", 8).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if build.is_block_linear(name):
            parameter.data.copy_(parameter.sign() * 2.0**-30)
    build.save(model, tmp_path / "in")
    assert convert(tmp_path / "in", tmp_path / "out") == 1
    assert "float16 cannot hold exactly" in capsys.readouterr().err
    arguments = ["--scale-dtype", "bfloat16", "--verify"]
    assert convert(tmp_path / "in", tmp_path / "out", *arguments) == 0
    assert quantization_config(tmp_path / "out")["scale_dtype"] == "bfloat16"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("ternary", [True, False])
def test_embedding_and_head(tied, ternary, tmp_path):
    source, dest = tmp_path / "in", tmp_path / "out"
    ternary_source(source, seed=9, embeddings=ternary, tie_word_embeddings=tied)
    assert convert(source, dest, "--verify") == 0
    names = set(build.read(dest))
    overrides = quantization_config(dest).get("module_overrides", {})
    modules = ["model.embed_tokens"] + ([] if tied else ["lm_head"])
    assert ("lm_head.weight" in names) is (not tied and not ternary)
    if ternary:
        assert overrides == {m: {"kind": "ternary"} for m in modules}
        assert quantization_config(dest)["modules_to_not_convert"] == []
    else:
        assert not overrides
        left = quantization_config(dest)["modules_to_not_convert"]
        assert sorted(left) == sorted(modules)
    assert convert(source, tmp_path / "no", "--embeddings", "no") == 0
    assert "model.embed_tokens.weight" in build.read(tmp_path / "no")
    arguments = ["--embeddings", "yes", "--quantize", "mse"]
    assert convert(source, tmp_path / "yes", *arguments) == 0
    assert "model.embed_tokens.weight" not in build.read(tmp_path / "yes")


def test_stored_copy_of_a_tied_head_is_dropped(tmp_path, capsys):
    ternary_source(tmp_path / "in", seed=10, tie_word_embeddings=True)

    def change(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    build.rewrite(tmp_path / "in", change)
    assert convert(tmp_path / "in", tmp_path / "out", "--verify") == 0
    assert "lm_head.weight" not in build.read(tmp_path / "out")
    assert "lm_head.weight dropped" in capsys.readouterr().out


def test_gpt2_is_turned_around(tmp_path, monkeypatch):
    """Its weights are [inputs, outputs], and stay so where they are not converted."""
    source, dest = tmp_path / "in", tmp_path / "out"
    config = transformers.GPT2Config(vocab_size=96, n_embd=64, n_layer=2, n_head=4)
    torch.manual_seed(24)
    build.save(transformers.GPT2LMHeadModel(config), source)
    left = r".*h\.1\.mlp.c_proj"
    arguments = ["--quantize", "absmean", "--modules-to-not-convert", left, "--verify"]
    assert convert(source, dest, *arguments) == 0
    original, tensors = build.read(source), build.read(dest)
    turned = [n for n in original if "c_" in n and n.endswith(".weight")]
    assert len(turned) == 8
    kept = 0
    for name in turned:
        if name in tensors:
            kept += 1
            assert torch.equal(tensors[name], original[name])
            continue
        t, scale = quantize.quantize_absmean(original[name].t().contiguous(), 128)
        module = name.removesuffix("weight")
        packed = tensors[f"{module}packed_ternary_weight"]
        assert torch.equal(codec.unpack(packed, t.shape[1]), t)
        assert torch.equal(tensors[f"{module}weight_scale"], scale)
    assert kept == 1
    monkeypatch.setattr(run, "import_shards", lambda: "not in this test")
    arguments = [str(dest), "--reference", str(source), "--tp", "1"]
    assert validate_quant_weights.main([*arguments, "--device", "cpu"]) == 0


def test_other_transposed_weights_are_refused(tmp_path, capsys):
    sizes = dict(vocab_size=96, n_positions=32, n_embd=64, n_layer=1, n_head=4)
    config = transformers.OpenAIGPTConfig(**sizes)
    build.save(transformers.OpenAIGPTLMHeadModel(config), tmp_path / "in")
    arguments = ["--quantize", "absmean"]
    assert convert(tmp_path / "in", tmp_path / "out", *arguments) == 1
    error = capsys.readouterr().err
    assert "type openai-gpt store their weights [inputs, outputs]" in error


def test_mamba_mixers_are_left_alone(tmp_path):
    """The first kind, which vLLM does not quantize; the second it does."""
    for name, kept in (("Mamba", True), ("Mamba2", False)):
        sizes = {} if kept else {"num_heads": 8, "head_dim": 16}
        config = getattr(transformers, f"{name}Config")(
            vocab_size=96, hidden_size=64, num_hidden_layers=1, state_size=16, **sizes
        )
        torch.manual_seed(14)
        model = getattr(transformers, f"{name}ForCausalLM")(config)
        source, dest = tmp_path / name, tmp_path / f"{name}-out"
        build.save(model, source)
        arguments = ["--quantize", "absmean", "--embeddings", "yes"]
        # Nothing else is there to convert in the first kind.
        assert convert(source, dest, *arguments) == (1 if kept else 0)
        if not kept:
            module = "backbone.layers.0.mixer.in_proj"
            assert f"{module}.packed_ternary_weight" in build.read(dest)


def test_experts_are_converted_and_routers_are_not(tmp_path):
    """One tensor per expert, as published checkpoints have them."""
    source, dest = tmp_path / "in", tmp_path / "out"
    model = build.tiny_model("qwen3_moe", 11)
    build.save(model, source)
    assert "model.layers.0.mlp.experts.3.down_proj.weight" in build.read(source)
    assert convert(source, dest, "--quantize", "absmean", "--verify") == 0
    names = set(build.read(dest))
    for expert in range(4):
        module = f"model.layers.1.mlp.experts.{expert}.gate_proj"
        assert f"{module}.packed_ternary_weight" in names
    assert "model.layers.1.mlp.gate.weight" in names
    table = schemes.SchemeTable.from_config(quantization_config(dest))
    assert table.scheme("model.layers.1.mlp.gate").kind == "unquantized"
    assert table.scheme("model.layers.1.mlp.experts.1.gate_proj").kind == "ternary"


@pytest.mark.parametrize(
    "name",
    ["mlp.experts.down_proj", "mlp.experts.w2.weight", "mlp.output_linear.weight"],
)
def test_experts_in_one_tensor_are_refused(name, tmp_path, capsys):
    ternary_source(tmp_path / "in", seed=12)

    def change(tensors):
        tensors[f"model.layers.0.{name}"] = torch.zeros(2, 4, 4)

    build.rewrite(tmp_path / "in", change)
    assert convert(tmp_path / "in", tmp_path / "out") == 1
    assert "holds all experts in one tensor [2, 4, 4]" in capsys.readouterr().err
    arguments = ["--modules-to-not-convert", "mlp.experts"]
    assert convert(tmp_path / "in", tmp_path / "out", *arguments) == 0
    config = quantization_config(tmp_path / "out")
    assert "mlp.experts" in config["modules_to_not_convert"]


def test_modules_to_not_convert(tmp_path, capsys):
    source, dest = tmp_path / "in", tmp_path / "out"
    ternary_source(source, seed=13)
    arguments = ["--modules-to-not-convert", "down_proj", "model.layers.1.self_attn"]
    assert convert(source, dest, *arguments, "--verify") == 0
    table = schemes.SchemeTable.from_config(quantization_config(dest))
    names = set(build.read(dest))
    for name in build.read(source):
        if not build.is_block_linear(name):
            continue
        module = name.removesuffix(".weight")
        left = module.endswith("down_proj") or "layers.1.self_attn" in module
        assert (name in names) is left
        assert (table.scheme(module).kind == "unquantized") is left
    assert convert(source, tmp_path / "x", "--modules-to-not-convert", "down") == 1
    assert "no module has such a name" in capsys.readouterr().err


def test_a_name_that_begins_like_another_is_not_left_out_with_it(tmp_path):
    """`model.layers.1` is the beginning of `model.layers.10`, too."""
    source, dest = tmp_path / "in", tmp_path / "out"
    ternary_source(source, seed=14, num_hidden_layers=11)
    arguments = ["--modules-to-not-convert", r"model\.layers\.1\."]
    assert convert(source, dest, *arguments) == 0
    table = schemes.SchemeTable.from_config(quantization_config(dest))
    assert table.scheme("model.layers.1.mlp.up_proj").kind == "unquantized"
    assert table.scheme("model.layers.10.mlp.up_proj").kind == "ternary"


def test_parts_of_one_layer_must_be_alike(tmp_path, capsys):
    ternary_source(tmp_path / "in", seed=15)
    arguments = ["--modules-to-not-convert", "up_proj"]
    assert convert(tmp_path / "in", tmp_path / "out", *arguments) == 1
    error = capsys.readouterr().err
    assert "gate_proj" in error and "up_proj" in error and "one layer" in error


def test_damaged_and_foreign_sources(tmp_path, capsys):
    folder = tmp_path / "in"

    def refused(*words):
        assert convert(folder, tmp_path / "out") == 1
        error = capsys.readouterr().err
        assert error.startswith("error: ") and "Traceback" not in error
        assert all(word in error for word in words), error
        assert not (tmp_path / "out").exists()

    refused("does not exist")
    folder.mkdir()
    refused("config.json is not there")
    (folder / "config.json").write_text("{")
    refused("config.json: no valid JSON")
    (folder / "config.json").write_text("[]")
    refused("config.json: is no JSON object")
    (folder / "config.json").write_text("{}")
    refused("config.json: has no model_type and no architectures")
    (folder / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    refused("config.json: has no model_type: ")
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    refused("no *.safetensors file")
    (folder / "pytorch_model.bin").write_text("")
    refused("pytorch_model.bin", "save_pretrained")
    ternary_source(folder, seed=23)
    capsys.readouterr()  # transformers' progress
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    refused("model.safetensors", "truncated", "download it again")
    path.write_bytes(whole[:5])
    refused("damaged")
    path.write_bytes(b"\xff" * 100)
    refused("truncated or no safetensors")
    path.write_bytes(whole)
    build.set_config(folder, quantization_config={"quant_method": "awq"})
    refused("'awq'", "full-precision")
    build.set_config(folder, quantization_config={"quant_method": "ternary"})
    refused("ternary checkpoint already")
    build.set_config(folder, quantization_config=None)
    awq = {"quant_method": "awq"}
    build.set_config(folder, text_config={"quantization_config": awq})
    refused("text_config.quantization_config says quant_method 'awq'")
    build.set_config(folder, text_config=None)
    (folder / "hf_quant_config.json").write_text('{"producer": {"name": "modelopt"}}')
    refused("hf_quant_config.json says quant_method None")
    (folder / "hf_quant_config.json").unlink()
    for text in ("{", "{}", "[]", '{"weight_map": {"x": 1}}'):
        (folder / "model.safetensors.index.json").write_text(text)
        refused("model.safetensors.index.json", "damaged")
    index = {"weight_map": {"x": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused("model-00002-of-00002.safetensors", "not there")


def test_an_index_that_its_shards_contradict(tmp_path, capsys):
    """A tensor that none of them holds is missing. One that another of them holds, or
    that the index does not name, is read, as transformers and vLLM do."""
    folder = tmp_path / "in"
    model = build.tiny_model("qwen3", 27)
    made = build.make_ternary(model, 27, 128)
    model.half().save_pretrained(folder, max_shard_size="1MB")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    listed, files = index["weight_map"], sorted(set(index["weight_map"].values()))
    assert len(files) > 1
    moved, unnamed = "model.layers.0.mlp.up_proj.weight", "model.norm.weight"
    listed[moved] = next(x for x in files if x != listed[moved])
    del listed[unnamed]
    path.write_text(json.dumps(index))
    loaded = type(model).from_pretrained(folder).state_dict()
    assert torch.equal(loaded[moved], model.state_dict()[moved])
    assert convert(folder, tmp_path / "out", "--verify") == 0
    tensors = build.read(tmp_path / "out")
    assert torch.equal(tensors[unnamed], loaded[unnamed])
    t, scale = made[moved]
    name = moved.removesuffix("weight")
    found = codec.unpack(tensors[f"{name}packed_ternary_weight"], t.shape[1])
    assert torch.equal(found, t)
    assert torch.equal(tensors[f"{name}weight_scale"], scale)

    capsys.readouterr()
    listed |= {"model.extra.weight": files[1], "model.extra.bias": files[0]}
    path.write_text(json.dumps(index))
    assert convert(folder, tmp_path / "none") == 1
    error = capsys.readouterr().err
    assert f"{path}: names tensor model.extra.weight in {files[1]}, which" in error
    assert f"(2 of {len(listed)} tensors" in error
    assert not (tmp_path / "none").exists()


def test_nan_in_a_weight_is_refused(tmp_path, capsys):
    ternary_source(tmp_path / "in", seed=24)
    name = "model.layers.0.mlp.down_proj.weight"

    def change(tensors):
        tensors[name][1, 300] = float("nan")

    build.rewrite(tmp_path / "in", change)
    for arguments in ([], ["--quantize", "mse"]):
        assert convert(tmp_path / "in", tmp_path / "out", *arguments) == 1
        error = capsys.readouterr().err
        assert f"{name}: block 2 of row 1 (columns 256 to 383) holds nan" in error


def test_transformers_reads_the_config_and_the_rest(tmp_path):
    """Everything but the ternary modules is a normal checkpoint."""
    made = ternary_source(tmp_path / "in", seed=25)
    assert convert(tmp_path / "in", tmp_path / "out") == 0
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert config.quantization_config["quant_method"] == "ternary"
    config.quantization_config = None
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float16)
    tensors = build.read(tmp_path / "out")
    state = {
        n: x for n, x in tensors.items() if "ternary" not in n and "_scale" not in n
    }
    for name, (t, _) in made.items():
        module = name.removesuffix(".weight")
        state[name] = decode(tmp_path / "out", module, t.shape[1], torch.float16)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("model.layers.0.self_attn.q_proj", True),
        ("model.language_model.layers.11.mlp.down_proj", True),
        ("encoder.layer.3.attention.self.query", True),
        ("encoder.layer.3.output.dense", True),
        ("transformer.h.0.mlp.c_fc", True),
        ("model.layers.2.mlp.experts.7.up_proj", True),
        ("model.layers.2.block_sparse_moe.experts.7.w1", True),
        ("model.layers.2.mlp.gate", False),
        ("model.layers.2.mlp.shared_expert_gate", False),
        ("model.layers.2.block_sparse_moe.router.layer", False),
        ("model.layers.2.input_layernorm", False),
        ("model.embed_tokens", False),
        ("lm_head", False),
        ("score", False),
        ("pooler.dense", False),
        ("embeddings.word_embeddings", False),
        ("vision_tower.vision_model.encoder.layers.0.mlp.fc1", False),
        ("model.visual.blocks.0.attn.qkv", False),
        ("qformer.encoder.layer.0.attention.attention.query", False),
        ("multi_modal_projector.layers.0.linear", False),
        ("encoder.block.layers.0.relative_attention_bias", False),
    ],
)
def test_which_modules_are_linears_of_blocks(module, expected):
    assert is_block_linear(module) is expected


def test_a_tower_has_apart_what_the_blocks_have_fused():
    """Its names do not end as those by which vLLM asks for a fused layer's parts."""
    ternary = dict(kind="ternary", block_size=32, zero_point=False)
    plain, mlp = {"kind": "unquantized"}, "language_model.layers.0.mlp"
    config = quant_config.build(
        {
            "visual.blocks.0.mlp.gate_proj": plain,
            "visual.blocks.0.mlp.up_proj": plain,
            f"{mlp}.gate_up_proj": {**ternary, "scale_dtype": "float16"},
        }
    )
    table = schemes.SchemeTable.from_config(config)
    parts = [f"{mlp}.gate_proj", f"{mlp}.up_proj"]
    assert table.fused_scheme(f"{mlp}.gate_up_proj", parts).kind == "ternary"
    for name in ("gate_proj", "gate_up_proj"):  # as stored, and as vLLM may fuse them
        assert table.scheme(f"visual.blocks.0.mlp.{name}").kind == "unquantized"


def test_fused_groups():
    q, k = "model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.k_proj"
    assert fused_group(q) == fused_group(k) == "model.layers.1.self_attn.qkv_proj"
    assert fused_group(q) != fused_group("model.layers.2.self_attn.q_proj")
    experts = {
        f"m.layers.0.mlp.experts.{e}.{x}_proj" for e in range(3) for x in ("up", "down")
    }
    assert {fused_group(e) for e in experts} == {"m.layers.0.mlp.experts"}
