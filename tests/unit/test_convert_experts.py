# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Checkpoints with all experts of a layer in one tensor: split, or refused."""

import json
from pathlib import Path

import checkpoints as build
import convert_checkpoint
import fused_experts as fused
import pytest
import torch
import validate_quant_weights
from fused_experts import BLOCK, EXPERTS, HIDDEN, INNER, KINDS
from peak_memory import peak_memory
from safetensors.torch import save_file

from lib.convert.codec import format as codec
from lib.convert.codec import quantize, schemes
from lib.convert.errors import ConversionError
from lib.convert.experts import FusedExperts
from lib.convert.model import Plain
from lib.convert.safetensors_io import TensorSpec
from lib.validate import run

SCRIPT = Path(convert_checkpoint.__file__)
LAYER = "model.layers.0.mlp.experts"


def convert(source, dest, *arguments):
    command = [str(source), str(dest), "--block-size", str(BLOCK)]
    return convert_checkpoint.main([*command, *map(str, arguments)])


def scheme_table(folder):
    config = json.loads((folder / "config.json").read_text())
    return schemes.SchemeTable.from_config(config["quantization_config"])


def write(folder, seed, model_type="qwen3_moe", hidden=HIDDEN, inner=INNER, **change):
    """A checkpoint of one layer's experts only, in the order [out, in]; `change` is
    what `config.json` has else. Returns gate and up, and down, of each expert."""
    generator = torch.Generator().manual_seed(seed)
    gate_up = torch.randn(EXPERTS, 2 * inner, hidden, generator=generator)
    down = torch.randn(EXPERTS, hidden, inner, generator=generator)
    folder.mkdir(exist_ok=True)
    save(folder, {f"{LAYER}.gate_up_proj": gate_up, f"{LAYER}.down_proj": down})
    config = {"model_type": model_type, "hidden_size": hidden} | change
    (folder / "config.json").write_text(json.dumps(config))
    return gate_up, down


def save(folder, tensors):
    tensors = {name: x.contiguous() for name, x in tensors.items()}
    save_file(tensors, folder / "model.safetensors")


def transpose(tensors):
    for name in tensors:
        tensors[name] = tensors[name].transpose(1, 2)


@pytest.mark.parametrize("name", KINDS)
def test_lossless(name, tmp_path, capsys):
    """Integers and scales are those put into each expert; the rest is as it was."""
    kind, seed = KINDS[name], sum(map(ord, name))
    model = fused.tiny_model(kind, seed)
    made = fused.make_ternary(kind, model, seed)
    original = fused.write(kind, model, tmp_path / "in")
    tensors_of_experts = {n for n, x in original.items() if n.endswith(kind.files)}
    shape = (HIDDEN, 2 * INNER) if kind.transposed else (2 * INNER, HIDDEN)
    assert (EXPERTS, *shape) in {tuple(original[n].shape) for n in tensors_of_experts}
    capsys.readouterr()
    assert convert(tmp_path / "in", tmp_path / "out", "--verify", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    rows = {row["module"]: row for row in report["modules"]}
    assert report["bytes_before"] == sum(x.nbytes for x in original.values())
    layers = len([m for m in made if ".experts.0." in m]) // (len(kind.parts) + 1)
    assert layers == 2
    tensors, table = build.read(tmp_path / "out"), scheme_table(tmp_path / "out")
    for module, (t, scale) in made.items():
        packed = tensors.pop(f"{module}.packed_ternary_weight")
        assert torch.equal(codec.unpack(packed, t.shape[1], strict=True), t), module
        assert torch.equal(tensors.pop(f"{module}.weight_scale"), scale), module
        assert table.scheme(module) == schemes.Scheme(block_size=BLOCK)
        zeros = 1 - t.count_nonzero().item() / t.numel()
        assert rows[module]["sparsity"] == pytest.approx(zeros)
    rest = original.keys() - tensors_of_experts - {f"{m}.weight" for m in made}
    assert tensors.keys() == rest
    assert all(torch.equal(tensors[n], original[n]) for n in rest)


@pytest.mark.parametrize("hidden,inner", [(128, 64), (96, 96), (64, 96)])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "llama4_text", "qwen3_vl_moe"])
@pytest.mark.parametrize("transposed", [False, True])
def test_order_of_dimensions(model_type, transposed, hidden, inner, tmp_path, capsys):
    """By the type of model, even where H = 2 I or H = I; both for the one that
    transformers does not write as it was published. Quantized like 2-D weights."""
    seed = hidden + inner + 7 * transposed + len(model_type)
    source, dest = tmp_path / "in", tmp_path / "out"
    text = {"model_type": f"{model_type}_text", "hidden_size": hidden}
    nested = {} if model_type != "qwen3_vl_moe" else {"text_config": text}
    gate_up, down = write(source, seed, model_type, hidden, inner, **nested)
    if transposed:
        build.rewrite(source, transpose)
    code = convert(source, dest, "--quantize", "absmean", "--verify")
    if (model_type, transposed) in (("qwen3_moe", True), ("llama4_text", False)):
        assert code == 1
        error = capsys.readouterr().err
        assert f"not what vLLM's class for models of type {model_type} loads" in error
        return
    assert code == 0
    tensors = build.read(dest)
    assert len(tensors) == 2 * 3 * EXPERTS
    for expert in range(EXPERTS):
        gate, up = gate_up[expert, :inner], gate_up[expert, inner:]
        parts = {"gate_proj": gate, "up_proj": up, "down_proj": down[expert]}
        for part, w in parts.items():
            t, scale = quantize.quantize_absmean(w, BLOCK)
            module = f"{LAYER}.{expert}.{part}"
            packed = tensors[f"{module}.packed_ternary_weight"]
            assert torch.equal(codec.unpack(packed, w.shape[1]), t)
            assert torch.equal(tensors[f"{module}.weight_scale"], scale)


def test_other_weights_are_refused_naming_the_expert(tmp_path, capsys):
    write(tmp_path / "in", 1)
    assert convert(tmp_path / "in", tmp_path / "out") == 1
    error = capsys.readouterr().err
    assert f"{LAYER}.0.down_proj.weight: block 0 of row 0" in error
    assert not (tmp_path / "out").exists()


def test_shards(tmp_path):
    """Experts of one tensor may go to several files."""
    write(tmp_path / "in", 2)
    arguments = ["--quantize", "mse", "--max-shard-size", "8KB", "--verify"]
    assert convert(tmp_path / "in", tmp_path / "out", *arguments) == 0
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    assert index["weight_map"].keys() == build.read(tmp_path / "out").keys()


@pytest.mark.parametrize(
    "model_type,change,said",
    [
        (
            "gpt_oss",
            {},
            "in models of type gpt_oss vLLM's class wants gate and up interleaved",
        ),
        ("step3_text", {}, "vLLM's class takes them in no other form"),
        ("jetmoe", {}, "in models of type jetmoe is not known"),
        ("qwen3_moe", {"hidden_size": None}, "hidden_size in config.json is None"),
        ("qwen3_moe", {"hidden_size": 64}, "[3, 192, 128] and hidden_size 64"),
    ],
)
def test_refused(model_type, change, said, tmp_path, capsys):
    """Unless they are left as they are."""
    source, dest = tmp_path / "in", tmp_path / "out"
    gate_up, down = write(source, 3, model_type, **change)
    assert convert(source, dest, "--quantize", "absmean") == 1
    error = capsys.readouterr().err
    assert said in error
    assert f"{LAYER}.down_proj: holds all experts in one tensor [3, 128, 96]" in error
    assert error.endswith("--modules-to-not-convert mlp.experts\n")
    separable = model_type in ("qwen3_moe", "jetmoe")
    assert ("one tensor per expert" in error) is separable

    query = "model.layers.0.self_attn.q_proj.weight"
    build.rewrite(source, lambda x: x.update({query: torch.randn(128, 128)}))
    arguments = ["--quantize", "absmean", "--modules-to-not-convert", LAYER, "--verify"]
    assert convert(source, dest, *arguments) == 0
    tensors = build.read(dest)
    assert torch.equal(tensors[f"{LAYER}.gate_up_proj"], gate_up)
    assert torch.equal(tensors[f"{LAYER}.down_proj"], down)
    assert scheme_table(dest).scheme(LAYER).kind == "unquantized"


def test_projections_of_step_3(tmp_path, capsys):
    """Three tensors a layer, of a module that vLLM calls moe.experts."""
    source, dest = tmp_path / "in", tmp_path / "out"
    write(source, 5, "step3_text")
    layer = "model.layers.4"
    parts = [f"{layer}.moe.{p}_proj.weight" for p in ("gate", "up", "down")]
    tensors = {name: torch.randn(EXPERTS, 64, 64) for name in parts}
    save(source, tensors | {f"{layer}.self_attn.q_proj.weight": torch.randn(64, 64)})
    assert convert(source, dest, "--quantize", "absmean") == 1
    error = capsys.readouterr().err
    assert parts[2] in error and "--modules-to-not-convert moe.experts" in error
    left = ["--modules-to-not-convert", "moe.experts"]
    assert convert(source, dest, "--quantize", "absmean", *left) == 0
    assert set(parts) < build.read(dest).keys()
    scheme = scheme_table(dest).scheme(f"{layer}.moe.experts")
    assert scheme.kind == "unquantized"


def test_a_part_that_is_missing_or_packed(tmp_path, capsys):
    source, dest = tmp_path / "in", tmp_path / "out"
    gate_up, down = write(source, 4)
    save(source, {f"{LAYER}.gate_up_proj": gate_up})
    assert convert(source, dest, "--quantize", "absmean") == 1
    assert f"there is no {LAYER}.down_proj" in capsys.readouterr().err
    names = f"{LAYER}.gate_up_proj", f"{LAYER}.down_proj"
    save(source, dict(zip(names, (gate_up.to(torch.float8_e4m3fn), down))))
    assert convert(source, dest, "--quantize", "absmean") == 1
    assert "its dtype is F8_E4M3" in capsys.readouterr().err


def test_memory_is_that_of_an_expert(tmp_path):
    """Not of all of them: 2 MiB and 48 MiB."""
    source, inner, hidden = tmp_path / "in", 512, 512
    source.mkdir()
    experts = torch.zeros(24, hidden, 2 * inner)
    experts[:, ::3, ::7] = 0.5
    down = torch.zeros(24, inner, hidden)
    save(source, {f"{LAYER}.gate_up_proj": experts, f"{LAYER}.down_proj": down})
    config = {"model_type": "llama4", "hidden_size": hidden}
    (source / "config.json").write_text(json.dumps(config))
    found = peak_memory(SCRIPT, source, tmp_path / "out", "--verify")
    assert found < experts.nbytes // 2


def test_other_formats_are_not_split():
    name = f"{LAYER}.gate_up_proj"
    entry = Plain(TensorSpec(name, torch.float16, (2, 8, 4)), lambda: torch.zeros(0))
    with pytest.raises(ConversionError, match="in floating-point safetensors only"):
        FusedExperts.of(entry).split(LAYER)


@pytest.mark.parametrize("model_type, transposed", [("qwen3_moe", 0), ("llama4", 1)])
def test_the_validator_finds_them_in_the_source(
    model_type, transposed, tmp_path, capsys, monkeypatch
):
    """Experts rebuilt from the source equal the converted ones; two experts of the
    source that change places are found."""
    monkeypatch.setattr(run, "import_shards", lambda: "not in this test")

    def status():
        arguments = [str(tmp_path / "out"), "--reference", str(tmp_path / "in")]
        code = validate_quant_weights.main([*arguments, "--tp", "1", "--json"])
        checks = json.loads(capsys.readouterr().out)["checks"]
        return code, checks["CPU_UNPACK"]

    turn = transpose if transposed else None
    seed = 53 + transposed
    tensors = write_tensors(tmp_path / "in", seed, turn, model_type=model_type)
    assert convert(tmp_path / "in", tmp_path / "out", "--quantize", "absmean") == 0
    capsys.readouterr()
    code, check = status()
    assert (code, check["status"]) == (0, "OK")
    down = tensors[f"{LAYER}.down_proj"]
    down[[0, 1]] = down[[1, 0]]
    save(tmp_path / "in", tensors)
    code, check = status()
    assert (code, check["status"]) == (1, "FAIL")
    named = {f["tensor"].rpartition(".")[0] for f in check["failures"]}
    assert named == {f"{LAYER}.{expert}.down_proj" for expert in (0, 1)}


def write_tensors(folder, seed, turn, **kwargs):
    """As `write`, turned by `turn`; returns the tensors."""
    gate_up, down = write(folder, seed, **kwargs)
    tensors = {f"{LAYER}.gate_up_proj": gate_up, f"{LAYER}.down_proj": down}
    if turn:
        turn(tensors)
        save(folder, tensors)
    return tensors


def _one_expert_twice(tensors):
    tensors[f"{LAYER}.0.gate_proj.weight"] = torch.ones(INNER, HIDDEN)


def _biases(tensors):
    tensors[f"{LAYER}.gate_up_proj_bias"] = torch.ones(EXPERTS, 2 * INNER)


def _no_experts(tensors):
    for name in tensors:
        tensors[name] = tensors[name][:0]


def _four_dimensions(tensors):
    for name in tensors:
        tensors[name] = tensors[name][None]


@pytest.mark.parametrize(
    "turn, arguments, said",
    [
        (_one_expert_twice, [], "0.gate_proj.weight: is there on its own and in one"),
        (_biases, [], "it has a bias, model.layers.0.mlp.experts.gate_up_proj_bias"),
        (_no_experts, [], "that is not what vLLM's class"),
        (_four_dimensions, [], "that is not what vLLM's class"),
        (
            None,
            ["--modules-to-not-convert", "down_proj"],
            "Leave all experts as they are with --modules-to-not-convert mlp.experts",
        ),
    ],
    ids=["twice", "bias", "none", "4-D", "down_proj"],
)
def test_what_cannot_be_split(turn, arguments, said, tmp_path, capsys):
    write_tensors(tmp_path / "in", 55, turn)
    arguments = ["--quantize", "absmean", *arguments]
    assert convert(tmp_path / "in", tmp_path / "out", *arguments) == 1
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "change, status", [({"text_config": "x"}, 0), ({"model_type": ["x"]}, 1)]
)
def test_a_config_that_makes_no_sense(change, status, tmp_path, capsys):
    write(tmp_path / "in", 56, **change)
    arguments = ["--quantize", "absmean"]
    assert convert(tmp_path / "in", tmp_path / "out", *arguments) == status
