# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""MLX 2-bit checkpoints, compared with what mlx itself decodes."""

import json

import checkpoints as build
import convert_checkpoint
import mlx.core as mx
import numpy as np
import pytest
import torch

from lib.convert.codec import format as codec

GROUP = 128
UP = "model.layers.1.mlp.up_proj"


def convert(source, dest, *arguments):
    return convert_checkpoint.main([str(source), str(dest), *map(str, arguments)])


def by_mlx(words, scales, biases, bits=2, group=GROUP) -> torch.Tensor:
    """The weight as mlx decodes it, in float32."""
    arrays = [mx.array(x).astype(mx.float32) for x in (scales, biases)]
    w = mx.dequantize(mx.array(words), *arrays, group_size=group, bits=bits)
    return torch.from_numpy(np.array(w))


def write(folder, change=None, family="qwen3", seed=0, group=GROUP, **sizes):
    """A checkpoint as mlx-lm writes it; ``change(name, q, scales, biases)`` alters one
    weight's codes, scales and biases in place. Returns name -> what mlx decodes."""
    model = build.tiny_model(family, seed, **sizes)
    stored = build.write_mlx(model, folder, seed, group, change)
    return {name: by_mlx(*parts, group=group) for name, parts in stored.items()}


def decode(folder, name) -> torch.Tensor:
    tensors, module = build.read(folder), name.removesuffix("weight")
    packed = tensors[module + "packed_ternary_weight"]
    scale = tensors[module + "weight_scale"]
    zero_point = tensors.get(module + "weight_zero_point")
    size_k = packed.shape[1] * 4
    block = size_k // scale.shape[1]
    t = codec.unpack(packed, size_k, strict=True)
    return codec.dequantize(t, scale, zero_point, block)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("group", [64, 128])
def test_weights_equal_those_mlx_decodes(family, group, tmp_path):
    expected = write(tmp_path / "in", family=family, seed=group, group=group)
    assert convert(tmp_path / "in", tmp_path / "out", "--verify") == 0
    assert "model.embed_tokens.weight" in expected and len(expected) >= 15
    for name, w in expected.items():
        assert torch.equal(decode(tmp_path / "out", name), w), name
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert "quantization" not in config
    assert config["quantization_config"]["block_size"] == group
    assert config["quantization_config"]["zero_point"] is False
    assert "model.embed_tokens" in config["quantization_config"]["module_overrides"]
    names = build.read(tmp_path / "out")
    assert not [n for n in names if n.endswith((".scales", ".biases"))]


def test_mirrored_scales(tmp_path):
    """MLX may store -s with a bias of +s: the integers change sign, no zero point."""

    def change(name, q, scales, biases):
        scales *= -1
        biases *= -1

    expected = write(tmp_path / "in", change, seed=2)
    assert convert(tmp_path / "in", tmp_path / "out", "--verify") == 0
    for name, w in expected.items():
        assert torch.equal(decode(tmp_path / "out", name), w), name
        assert (
            build.read(tmp_path / "out")[name.removesuffix("weight") + "weight_scale"]
            >= 0
        ).all()


def test_other_biases_become_zero_points(tmp_path):
    """Exact ones; the partner in the fused layer gets zero points of 0."""

    def change(name, q, scales, biases):
        if name == UP + ".weight":
            biases[:] = scales * np.float16(0.5)

    expected = write(tmp_path / "in", change, seed=3)
    assert convert(tmp_path / "in", tmp_path / "out", "--verify") == 0
    for name, w in expected.items():
        assert torch.equal(decode(tmp_path / "out", name), w), name
    tensors = build.read(tmp_path / "out")
    zero_points = {n for n in tensors if n.endswith("zero_point")}
    gate = "model.layers.1.mlp.gate_proj"
    assert zero_points == {f"{m}.weight_zero_point" for m in (UP, gate)}
    assert (tensors[UP + ".weight_zero_point"] == -1.5).all()
    assert not tensors[gate + ".weight_zero_point"].any()
    config = json.loads((tmp_path / "out/config.json").read_text())
    overrides = config["quantization_config"]["module_overrides"]
    assert overrides[UP] == overrides[gate] == {"kind": "ternary", "zero_point": True}


def test_three_upper_levels_are_ternary(tmp_path):
    """Codes 1, 2, 3 with biases = -2 scales are -s, 0, +s."""

    def change(name, q, scales, biases):
        q += 1
        biases *= 2

    expected = write(tmp_path / "in", change, seed=4)
    assert convert(tmp_path / "in", tmp_path / "out", "--verify") == 0
    assert not [n for n in build.read(tmp_path / "out") if "zero_point" in n]
    for name, w in expected.items():
        assert torch.equal(decode(tmp_path / "out", name), w), name


def test_constant_groups(tmp_path):
    """One level throughout, at any value, or a scale of 0."""

    def change(name, q, scales, biases):
        if name == UP + ".weight":
            q[0, :128], biases[0, 0] = 3, 0.1
            q[1, :128], biases[1, 0], scales[1, 0] = 2, -0.3, 0.0
            q[2, :128], biases[2, 0], scales[2, 0] = 0, 0.0, 0.0

    expected = write(tmp_path / "in", change, seed=5)
    assert convert(tmp_path / "in", tmp_path / "out", "--verify") == 1
    # 3 s + 0.1 is not one float16; without it the rest is exact.
    expected = write(
        tmp_path / "in2",
        lambda name, q, s, b: (change(name, q, s, b), s[0].fill(0), b[0].fill(0.25)),
        seed=5,
    )
    assert convert(tmp_path / "in2", tmp_path / "out", "--verify") == 0
    for name, w in expected.items():
        assert torch.equal(decode(tmp_path / "out", name), w), name


def refused(folder, capsys, *words):
    assert convert(folder, folder.parent / "out") == 1
    error = capsys.readouterr().err
    for word in words:
        assert word in error
    assert not (folder.parent / "out").exists()


def test_a_general_2_bit_model_is_refused(tmp_path, capsys):
    """What mx.quantize makes of ordinary weights uses all four levels."""
    write(tmp_path / "in", seed=6)
    w = mx.random.normal((512, 256), key=mx.random.key(1))
    words, scales, biases = mx.quantize(w, group_size=GROUP, bits=2)

    def change(tensors):
        tensors[UP + ".weight"] = torch.from_numpy(np.array(words))
        tensors[UP + ".scales"] = torch.from_numpy(np.array(scales)).half()
        tensors[UP + ".biases"] = torch.from_numpy(np.array(biases)).half()

    build.rewrite(tmp_path / "in", change)
    refused(
        tmp_path / "in", capsys, UP, "group 0 of row 0", "four levels", "--quantize"
    )


def test_inexact_zero_points_are_refused(tmp_path, capsys):
    def change(name, q, scales, biases):
        if name == UP + ".weight":
            scales[3, 1], biases[3, 1] = 0.3, 0.1

    write(tmp_path / "in", change, seed=7)
    refused(tmp_path / "in", capsys, UP, "group 1 of row 3", "not exact")


def test_wrong_shapes_and_modes_are_refused(tmp_path, capsys):
    folder = tmp_path / "in"
    write(folder, seed=8)
    build.set_config(folder, quantization={"group_size": 64, "bits": 2})
    refused(folder, capsys, "groups of 64", "scales and biases of shape")
    build.set_config(
        folder, quantization={"group_size": 32, "bits": 4, "mode": "mxfp4"}
    )
    refused(folder, capsys, "mode 'mxfp4'")


def test_embedding_in_four_bits_is_decoded(tmp_path):
    """mlx-lm can give modules bits of their own."""
    folder = tmp_path / "in"
    write(folder, seed=9)
    w = mx.random.normal((96, 256), key=mx.random.key(2)).astype(mx.float16)
    words, scales, biases = mx.quantize(w, group_size=64, bits=4)

    def change(tensors):
        name = "model.embed_tokens."
        tensors[name + "weight"] = torch.from_numpy(np.array(words))
        tensors[name + "scales"] = torch.from_numpy(np.array(scales))
        tensors[name + "biases"] = torch.from_numpy(np.array(biases))

    build.rewrite(folder, change)
    own = {"model.embed_tokens": {"group_size": 64, "bits": 4}}
    build.set_config(folder, quantization={"group_size": GROUP, "bits": 2} | own)
    assert convert(folder, tmp_path / "out", "--verify") == 0
    found = build.read(tmp_path / "out")["model.embed_tokens.weight"]
    expected = by_mlx(np.array(words), np.array(scales), np.array(biases), 4, 64)
    assert torch.equal(found, expected)
