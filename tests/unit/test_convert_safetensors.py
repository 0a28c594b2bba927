# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Floating-point safetensors: lossless, refused, or quantized."""

import json
import os
import subprocess
import sys
from pathlib import Path

import checkpoints as build
import convert_checkpoint
import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open

from lib.convert import run
from lib.convert.codec import format as codec
from lib.convert.codec import quantize, schemes
from lib.convert.names import fused_group, is_block_linear

SCRIPT = Path(convert_checkpoint.__file__)


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


def test_experts_in_one_tensor_are_refused(tmp_path, capsys):
    ternary_source(tmp_path / "in", seed=12)

    def change(tensors):
        tensors["model.layers.0.mlp.experts.down_proj"] = torch.zeros(2, 4, 4)

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


def test_dry_run_writes_nothing(tmp_path, capsys):
    ternary_source(tmp_path / "in", seed=16)
    before = sorted(p.name for p in tmp_path.rglob("*"))
    assert convert_checkpoint.main([str(tmp_path / "in"), "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "dry run: nothing was written" in text
    assert sorted(p.name for p in tmp_path.rglob("*")) == before
    row = next(x for x in text.splitlines() if "layers.1.mlp.up_proj" in x)
    assert row.split()[1:6] == ["512x256", "F16", "ternary", "(lossless)", "128"]
    assert "256.00 KiB" in row and "34.00 KiB" in row


@pytest.mark.parametrize("arguments", [["--dry-run"], []])
def test_json(arguments, tmp_path, capsys):
    source, dest = tmp_path / "in", tmp_path / "out"
    made = ternary_source(source, seed=17)
    assert convert(source, dest, "--json", *arguments) == 0
    data = json.loads(capsys.readouterr().out)
    rows = {row["module"]: row for row in data["modules"]}
    for name, (t, _) in made.items():
        row = rows[name.removesuffix(".weight")]
        assert (row["kind"], row["how"], row["block_size"]) == (
            "ternary",
            "lossless",
            128,
        )
        assert row["sparsity"] == pytest.approx(
            1 - t.count_nonzero().item() / t.numel()
        )
        n, k = t.shape
        assert row["bytes_before"] == 2 * n * k
        assert row["bytes_after"] == n * k // 4 + 2 * n * k // 128
    original = build.read(source).values()
    assert data["bytes_before"] == sum(x.nbytes for x in original)
    if not arguments:
        assert data["bytes_after"] == sum(x.nbytes for x in build.read(dest).values())
        assert data["quantization_config"] == quantization_config(dest)


def test_shards_and_index(tmp_path):
    source, dest = tmp_path / "in", tmp_path / "out"
    model = build.tiny_model("qwen3", 18)
    build.make_ternary(model, 18, 128)
    model.half().save_pretrained(source, max_shard_size="300KB")
    assert len(list(source.glob("*.safetensors"))) > 3
    assert convert(source, dest, "--max-shard-size", "100KB", "--verify") == 0
    index = json.loads((dest / "model.safetensors.index.json").read_text())
    files = sorted(dest.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    seen = {}
    for path in files:
        with safe_open(path, "pt") as handle:
            assert handle.metadata() == {"format": "pt"}
            size = 0
            for name in handle.keys():  # noqa: SIM118
                seen[name] = path.name
                size += handle.get_tensor(name).nbytes
        assert size <= 100_000 or len([n for n in seen.values() if n == path.name]) == 1
    assert index["weight_map"] == seen
    total = sum(x.nbytes for x in build.read(dest).values())
    assert index["metadata"]["total_size"] == total
    # Source files that were one become one again.
    assert convert(source, tmp_path / "one") == 0
    assert [p.name for p in (tmp_path / "one").glob("*model*")] == ["model.safetensors"]
    one, many = build.read(tmp_path / "one"), build.read(dest)
    assert one.keys() == many.keys()
    assert all(torch.equal(one[n], many[n]) for n in one)


def test_files_are_carried_over_but_weights_are_not(tmp_path):
    source, dest = tmp_path / "in", tmp_path / "out"
    ternary_source(source, seed=19)
    names = "1_Pooling/config.json", "2_Dense/model.safetensors", "vocab.txt"
    for name in (*names, "onnx/model.json", "x.bin", "consolidated.safetensors"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(name)
    (source / "real").write_text("linked")
    (source / "link.txt").symlink_to("real")
    assert convert(source, dest) == 0
    assert all((dest / name).read_text() == name for name in names)
    assert not (dest / "consolidated.safetensors").exists()
    assert (dest / "link.txt").read_text() == "linked"
    assert not (dest / "link.txt").is_symlink()
    assert not (dest / "onnx").exists() and not (dest / "x.bin").exists()


def test_dest_is_whole_or_not_there(tmp_path, capsys, monkeypatch):
    source, dest = tmp_path / "in", tmp_path / "out"
    ternary_source(source, seed=20)
    written = []
    write = run.ShardedWriter.write

    def failing(self, name, tensor):
        written.append(name)
        assert not dest.exists()
        if len(written) == 9:
            raise OSError(28, "No space left on device", str(dest))
        write(self, name, tensor)

    monkeypatch.setattr(run.ShardedWriter, "write", failing)
    assert convert(source, dest) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["in"]
    monkeypatch.undo()
    # A killed run's leftovers are removed by the next one, a running one's are not.
    dead, alive = tmp_path / ".out.partial-999999999", tmp_path / ".out.partial-1"
    dead.mkdir()
    alive.mkdir()
    assert convert(source, dest) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == [alive.name, "in", "out"]
    assert convert(source, dest) == 1
    assert "--overwrite" in capsys.readouterr().err
    (dest / "stale.txt").write_text("old")
    assert convert(source, dest, "--overwrite") == 0
    assert not (dest / "stale.txt").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == [alive.name, "in", "out"]
    assert convert(source, source / "inside") == 1
    assert "within SOURCE" in capsys.readouterr().err


def test_interruption_leaves_nothing(tmp_path, monkeypatch, capsys):
    ternary_source(tmp_path / "in", seed=21)

    def interrupted(self, name, tensor):
        raise KeyboardInterrupt

    monkeypatch.setattr(run.ShardedWriter, "write", interrupted)
    assert convert(tmp_path / "in", tmp_path / "out") == 130
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("part", ["packed_ternary_weight", "weight_scale", "norm"])
def test_verification_finds_a_flipped_bit(part, tmp_path, monkeypatch, capsys):
    ternary_source(tmp_path / "in", seed=22)
    write = run.ShardedWriter.write
    flipped = []

    def corrupting(self, name, tensor):
        if part in name and not flipped:
            flipped.append(name)
            tensor = tensor.clone()
            tensor.view(-1).view(torch.uint8)[3] ^= 1
        write(self, name, tensor)

    monkeypatch.setattr(run.ShardedWriter, "write", corrupting)
    assert convert(tmp_path / "in", tmp_path / "out", "--verify") == 1
    error = capsys.readouterr().err
    assert flipped[0] in error and "verification failed" in error
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


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
    for text in ("{", "{}", "[]"):
        (folder / "model.safetensors.index.json").write_text(text)
        refused("model.safetensors.index.json", "damaged")
    index = {"weight_map": {"x": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused("model-00002-of-00002.safetensors", "not there")


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


@pytest.mark.parametrize("method", ["absmean", None])
def test_memory_stays_below_twice_the_largest_tensor(method, tmp_path):
    """Above the process's own, for float32 tensors of 128 MiB."""
    folder = tmp_path / "in"
    folder.mkdir()
    n, k = 8192, 4096
    generator = np.random.default_rng(26)
    t = torch.from_numpy(generator.integers(-1, 2, (n, k), dtype=np.int8))
    tensors = {
        f"model.layers.{i}.mlp.down_proj.weight": t.float().mul_(0.5) for i in range(2)
    }
    if method:
        noise = torch.from_numpy(generator.standard_normal((n, k), dtype=np.float32))
        for w in tensors.values():
            w += noise
    from safetensors.torch import save_file

    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    program = (
        "import re, sys; import convert_checkpoint as c\n"
        "status = lambda key: 1024 * int(re.search(\n"
        "    key + r':\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
        "import torch; torch.set_num_threads(1); torch.rand(9).sort()\n"
        "open('/proc/self/clear_refs', 'w').write('5')  # forgets the peak so far\n"
        "before = status('VmRSS'); code = c.main(sys.argv[1:])\n"
        "print(status('VmHWM') - before, file=sys.stderr); sys.exit(code)"
    )
    arguments = [folder, tmp_path / "out", "--verify"]
    arguments += ["--quantize", method] if method else []
    result = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(SCRIPT.parent)},
    )
    assert result.returncode == 0, result.stderr
    used = int(result.stderr.split()[-1])
    assert used < 2 * 4 * n * k


def test_the_command_itself(tmp_path):
    """Exit status and messages of the real program."""

    def command(*arguments):
        return subprocess.run(
            [sys.executable, SCRIPT, *map(str, arguments)],
            capture_output=True,
            text=True,
        )

    result = command("--help")
    assert result.returncode == 0 and "--modules-to-not-convert" in result.stdout
    result = command(tmp_path / "no", tmp_path / "x")
    assert result.returncode == 1 and result.stderr.startswith("error: ")


def test_usage_errors(tmp_path, capsys):
    def usage_error(*arguments):
        with pytest.raises(SystemExit) as caught:
            convert_checkpoint.main([*map(str, arguments)])
        assert caught.value.code == 2
        return capsys.readouterr().err

    assert "DEST is needed" in usage_error(tmp_path)
    for block in ("6", "0", "-4", "rows"):
        error = usage_error(tmp_path, tmp_path / "x", f"--block-size={block}")
        assert "multiple of 4" in error
    error = usage_error(tmp_path, tmp_path / "x", "--max-shard-size", "many")
    assert "must be like 5GB" in error


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
        ("model.layers.2.input_layernorm", False),
        ("model.embed_tokens", False),
        ("lm_head", False),
        ("score", False),
        ("pooler.dense", False),
        ("embeddings.word_embeddings", False),
        ("vision_tower.vision_model.encoder.layers.0.mlp.fc1", False),
        ("model.visual.blocks.0.attn.qkv", False),
        ("multi_modal_projector.layers.0.linear", False),
        ("encoder.block.layers.0.relative_attention_bias", False),
    ],
)
def test_which_modules_are_linears_of_blocks(module, expected):
    assert is_block_linear(module) is expected


def test_fused_groups():
    q, k = "model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.k_proj"
    assert fused_group(q) == fused_group(k) == "model.layers.1.self_attn.qkv_proj"
    assert fused_group(q) != fused_group("model.layers.2.self_attn.q_proj")
    experts = {
        f"m.layers.0.mlp.experts.{e}.{x}_proj" for e in range(3) for x in ("up", "down")
    }
    assert {fused_group(e) for e in experts} == {"m.layers.0.mlp.experts"}
