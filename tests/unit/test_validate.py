# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The command: what it prints, what it refuses, and how it ends."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import validate_quant_weights
from safetensors.torch import load_file, save_file
from validate_model import FILE, change_config, write_model

from lib.validate import codec, reference, run, spec
from lib.validate.checkpoint import Tensors

SCRIPT = Path(validate_quant_weights.__file__)


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch):
    monkeypatch.setattr(run, "import_shards", lambda: "not in this test")


@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize("block_size", [4, 32, 128, "row", "tensor"])
@pytest.mark.parametrize("embeddings", [False, True])
def test_good_checkpoints(block_size, zero_point, embeddings, tmp_path, capsys):
    settings = dict(block_size=block_size, zero_point=zero_point, embeddings=embeddings)
    ternary, plain = write_model(tmp_path, 1, hidden=143, mlp=265, **settings)
    arguments = [str(ternary), "--reference", str(plain), "--device", "cpu"]
    assert validate_quant_weights.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "CPU_UNPACK: OK"
    assert lines[1].startswith("GPU_LOAD: SKIPPED (--device cpu")
    assert lines[2] == "TP_SHARD: SKIPPED (not in this test)"
    table = "\n".join(lines[3:])
    assert "143 x 265" in table  # K comes from the reference
    assert ("lm_head" in table) and ("float32" in table) is not embeddings


def test_the_line_says_what_was_not_checked(tmp_path, capsys):
    ternary, _ = write_model(tmp_path, 2)
    assert validate_quant_weights.main([str(ternary)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "CPU_UNPACK: OK (round trip and format rules only: no --reference)"
    )
    if not torch.cuda.is_available():
        assert lines[1].startswith("GPU_LOAD: SKIPPED (torch sees no CUDA device")


def test_a_failure_shows_both_sides(tmp_path, capsys):
    ternary, plain = write_model(tmp_path, 3)
    name = "model.layers.0.mlp.up_proj.packed_ternary_weight"
    tensors = load_file(ternary / FILE)
    x = tensors[name]
    x[2, 5] = 0b00_01_10_00  # weights 20 to 23: 0 - + 0
    save_file(tensors, ternary / FILE)
    weights = load_file(plain / FILE)
    right = weights["model.layers.0.mlp.up_proj.weight"][2, 20:24].sign().tolist()
    arguments = [str(ternary), "--reference", str(plain)]
    assert validate_quant_weights.main(arguments) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[0] == "CPU_UNPACK: FAIL"
    assert f"CPU_UNPACK: {name}: differs from the integers" in out
    begin = out.index("expected  ")
    shown = out[begin:].splitlines()
    # Byte 2 * 36 + 5 = 77 is in the second line of bytes 64 to 127.
    assert shown[3].split()[0] == "72"
    column = shown[4].index(shown[4].split()[0]) + 5 * 5
    symbols = "".join("-0+"[int(v) + 1] for v in right)
    assert shown[4][column : column + 4] == symbols
    assert shown[4][column + 42 : column + 46] == "0-+0"
    marks = "".join("^" if a != b else " " for a, b in zip(symbols, "0-+0"))
    assert shown[5][column : column + 4] == marks


def test_settings_of_a_part(tmp_path, capsys):
    """Where a multimodal model has them in its text_config, as vLLM reads them."""
    ternary, plain = write_model(tmp_path, 2)
    file = ternary / "config.json"
    config = json.loads(file.read_text())
    text = {"quantization_config": config.pop("quantization_config")}
    text["quantization_config"]["quant_method"] = "Ternary"  # vLLM ignores case
    file.write_text(json.dumps(config | {"text_config": config | text}))
    arguments = [str(ternary), "--reference", str(plain), "--device", "cpu"]
    assert validate_quant_weights.main(arguments) == 0
    assert capsys.readouterr().out.startswith("CPU_UNPACK: OK\n")
    text["quantization_config"]["quant_method"] = "awq"
    file.write_text(json.dumps(config | {"text_config": text}))
    assert validate_quant_weights.main(arguments) == 2
    said = "quant_method is 'awq' in text_config.quantization_config"
    assert said in capsys.readouterr().err


def run_script(*arguments) -> tuple[int, str]:
    result = subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True
    )
    return result.returncode, result.stderr


def bad_models(tmp_path):
    """(folder, what the message must say)"""
    yield tmp_path / "nowhere", "no such directory"
    (tmp_path / "empty").mkdir()
    yield tmp_path / "empty", "config.json"
    ternary, plain = write_model(tmp_path / "a", 4)
    yield plain, "no quantization_config"
    change_config(ternary, quant_method="bitnet")
    yield ternary, "quant_method is 'bitnet'"
    ternary, _ = write_model(tmp_path / "b", 5)
    change_config(ternary, block_size=6)
    yield ternary, "multiple of 4"
    ternary, _ = write_model(tmp_path / "c", 6)
    (ternary / FILE).unlink()
    yield ternary, "no *.safetensors"
    ternary, _ = write_model(tmp_path / "d", 7)
    data = (ternary / FILE).read_bytes()
    (ternary / FILE).write_bytes(data[:-100])
    yield ternary, "truncated"
    ternary, _ = write_model(tmp_path / "e", 8)
    (ternary / FILE).write_bytes(data[:5])
    yield ternary, "damaged"
    ternary, _ = write_model(tmp_path / "f", 9)
    index = {"weight_map": {"x": "model-00001-of-00002.safetensors"}}
    (ternary / f"{FILE}.index.json").write_text(json.dumps(index))
    yield ternary, "model-00001-of-00002.safetensors: listed in"
    ternary, _ = write_model(tmp_path / "g", 10)
    (ternary / "config.json").write_text("{")
    yield ternary, "cannot be read"


def test_what_cannot_be_validated(tmp_path, capsys):
    for folder, said in bad_models(tmp_path):
        assert validate_quant_weights.main([str(folder)]) == 2, folder
        out, err = capsys.readouterr()
        message = err.splitlines()[-1]
        assert message.startswith("error: ") and str(folder) in message
        assert said in message
        assert not out


def test_a_reference_of_another_model(tmp_path, capsys):
    ternary, _ = write_model(tmp_path / "a", 1)
    other = tmp_path / "other"
    other.mkdir()
    save_file({"something.weight": torch.ones(3, 4)}, other / FILE)
    assert validate_quant_weights.main([str(ternary), "--reference", str(other)]) == 2
    assert "converted from" in capsys.readouterr().err
    _, plain = write_model(tmp_path / "b", 1, mlp=260)
    assert validate_quant_weights.main([str(ternary), "--reference", str(plain)]) == 1
    assert "in the reference" in capsys.readouterr().out


def test_a_packed_reference(tmp_path, capsys):
    """The source of a conversion holds no weights to rebuild from."""
    model, plain = write_model(tmp_path, 7)
    tensors = load_file(plain / FILE)
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            tensors[name] = torch.zeros(len(tensor) // 4, 1, dtype=torch.uint8)
    save_file(tensors, plain / FILE)
    assert validate_quant_weights.main([str(model), "--reference", str(plain)]) == 2
    assert "is packed (torch.uint8)" in capsys.readouterr().err


def test_a_checkpoint_with_nothing_packed(tmp_path, capsys):
    ternary, plain = write_model(tmp_path, 1)
    save_file(load_file(plain / FILE), ternary / FILE)
    assert validate_quant_weights.main([str(ternary)]) == 1
    assert "no packed_ternary_weight" in capsys.readouterr().out


def test_as_a_program():
    status, err = run_script("nowhere", "--tp", "2,0")
    assert status == 2 and "'2,0' is not a list of positive numbers" in err
    status, err = run_script("nowhere")
    assert status == 2 and err.startswith("error: nowhere: no such directory")
    assert "Traceback" not in err


def block_length(block_size, k):
    return codec.format.block_length(k, block_size)


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("block_size", [8, 32, 128, "row", "tensor"])
@pytest.mark.parametrize("recipe", ["absmean", "least squared error"])
def test_recipes_agree_with_the_quantizers(recipe, block_size, scale_dtype):
    g = torch.Generator().manual_seed(len(str(block_size)))
    w = torch.randn(24, 150, generator=g).to(torch.bfloat16)
    quantizer = codec.quantize.quantize_absmean
    if recipe != "absmean":
        quantizer = codec.quantize.quantize_mse
    t, scale = quantizer(w, block_size, scale_dtype)
    wide = w.double().numpy()
    whole = None
    if block_size == "tensor":
        whole = reference.Whole(np.abs(wide).max(), np.abs(wide).sum(), wide.size)
    block = block_length(block_size, 150)
    rebuilt = reference.RECIPES[recipe](wide, block, scale_dtype, whole)
    assert np.array_equal(rebuilt.t, t.numpy())
    assert torch.equal(rebuilt.scale, scale)


@pytest.mark.parametrize("recipe", ["quantize_absmean", "quantize_mse"])
@pytest.mark.parametrize("block_size", [32, "row", "tensor"])
def test_quantized_checkpoints(recipe, block_size, tmp_path, capsys):
    ternary, plain = write_model(tmp_path, 4, block_size=block_size)
    tensors, weights = load_file(ternary / FILE), load_file(plain / FILE)
    g = torch.Generator().manual_seed(5)
    for name in [n for n in tensors if n.endswith("packed_ternary_weight")]:
        module = name.rpartition(".")[0]
        w = torch.randn(weights[f"{module}.weight"].shape, generator=g)
        t, scale = getattr(codec.quantize, recipe)(w, block_size)
        tensors[name] = torch.from_numpy(spec.encode(t.numpy()))
        tensors[f"{module}.weight_scale"] = scale
        weights[f"{module}.weight"] = w
    save_file(tensors, ternary / FILE)
    save_file(weights, plain / FILE)
    arguments = [str(ternary), "--reference", str(plain), "--json"]
    assert validate_quant_weights.main(arguments) == 0
    modules = json.loads(capsys.readouterr().out)["modules"]
    notes = {n for m in modules for n in m["notes"]}
    assert notes == {
        "rebuilt: absmean" if "absmean" in recipe else "rebuilt: least squared error"
    }


def test_large_tensors_are_read_in_pieces(tmp_path, monkeypatch):
    ternary, plain = write_model(tmp_path, 6, layers=2, hidden=512, mlp=2048)
    monkeypatch.setattr(
        "lib.validate.check_unpack.row_ranges",
        lambda rows, row_bytes, limit=0: (
            range(i, min(i + 100, rows)) for i in range(0, rows, 100)
        ),
    )
    largest = 0
    read = Tensors.read

    def watch(self, tensor, begin=0, end=None):
        nonlocal largest
        x = read(self, tensor, begin, end)
        if x.ndim == 2 and "scale" not in tensor.name:
            largest = max(largest, len(x))
        return x

    monkeypatch.setattr(Tensors, "read", watch)
    monkeypatch.setattr(run, "_load", lambda *a: run.Result("GPU_LOAD"))
    report = run.validate(ternary, plain, [1], "cpu")
    assert not report.failed and largest == 100
