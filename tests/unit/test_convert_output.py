# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the converter writes, and that it is whole or not there: table, shards, files,
verification, memory, exit status."""

import json
import subprocess
import sys
from pathlib import Path

import checkpoints as build
import convert_checkpoint
import numpy as np
import pytest
import torch
from peak_memory import peak_memory
from safetensors import safe_open
from safetensors.torch import save_file

from lib.convert import run

SCRIPT = Path(convert_checkpoint.__file__)


def convert(source, dest, *arguments):
    return convert_checkpoint.main([str(source), str(dest), *map(str, arguments)])


def quantization_config(folder):
    config = json.loads((folder / "config.json").read_text())
    return config["quantization_config"]


def ternary_source(folder, family="qwen3", seed=0, block=128, dtype=None, **kwargs):
    embeddings = kwargs.pop("embeddings", False)
    model = build.tiny_model(family, seed, **kwargs)
    made = build.make_ternary(model, seed, block, embeddings)
    build.save(model.to(dtype or torch.float16), folder)
    return made


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


def test_dest_does_not_take_the_source_with_it(tmp_path, capsys):
    """Replacing a directory that holds what is read would delete it."""
    around = tmp_path / "around"
    ternary_source(around / "in", seed=22)
    assert convert(around / "in", around, "--overwrite") == 1
    assert "holds" in capsys.readouterr().err
    ternary_source(tmp_path / "in", seed=22)
    tokenizer = "--tokenizer", around / "in"
    assert convert(tmp_path / "in", around, "--overwrite", *tokenizer) == 1
    assert "holds" in capsys.readouterr().err
    assert (around / "in" / "model.safetensors").exists()


@pytest.mark.parametrize("exists", [True, False])
def test_dest_is_a_link(exists, tmp_path):
    """The directory that it names is replaced or made; the link stays."""
    ternary_source(tmp_path / "in", seed=23)
    real, link = tmp_path / "disk" / "real", tmp_path / "link"
    real.parent.mkdir()
    link.symlink_to(real)
    if exists:
        real.mkdir()
        (real / "stale.txt").write_text("old")
    assert convert(tmp_path / "in", link, "--overwrite") == 0
    assert link.is_symlink() and (real / "model.safetensors").is_file()
    assert not (real / "stale.txt").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["disk", "in", "link"]
    assert [p.name for p in real.parent.iterdir()] == ["real"]


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
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    arguments = [folder, tmp_path / "out", "--verify"]
    arguments += ["--quantize", method] if method else []
    assert peak_memory(SCRIPT, *arguments) < 2 * 4 * n * k


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
