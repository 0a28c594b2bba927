# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""GGUF files written with the gguf package, converted, and compared: integers and
scales with what was put in, weights with what transformers reads from the file."""

import json
import struct

import checkpoints as build
import convert_checkpoint
import gguf
import numpy as np
import pytest
import torch
import transformers
from checkpoints import GGML

from lib.convert.codec import format as codec

# What each type is encoded with: the gguf package, or NumPy from the layout.
TYPES = {
    "TQ1_0": (GGML.TQ1_0, 256),
    "TQ2_0": (GGML.TQ2_0, 256),
    "Q2_0": (42, 64),
    "Q2_0 of older files": (42, 128),
    "PQ2_0": (142, 128),
}


def encoder(kind):
    """An ``encode`` for projections whose values are ternary in blocks already."""
    type_id, block = TYPES[kind]
    if isinstance(type_id, GGML):
        return build.projections_as(type_id)

    def encode(name, w):
        blocks = w.reshape(w.shape[0], -1, block)
        scale = np.abs(blocks).max(-1)
        t = np.sign(w).astype(np.int8)
        return type_id, build.q2_0_bytes(t, scale, block), w.shape

    return build.projections_as(encode)


@pytest.fixture
def tokenizer_dir(tmp_path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"not this")
    return folder


def convert(source, dest, *arguments):
    return convert_checkpoint.main([str(source), str(dest), *map(str, arguments)])


def decoded(folder) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors, ternary modules decoded to float32."""
    config = json.loads((folder / "config.json").read_text())
    tensors = build.read(folder)
    result = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".packed_ternary_weight")
        if name.endswith("weight_scale"):
            continue
        if module == name:
            result[name] = tensor
            continue
        scale = tensors[module + ".weight_scale"]
        block = config["quantization_config"]["block_size"]
        size_k = tensor.shape[1] * 4
        t = codec.unpack(tensor, size_k, strict=True)
        if scale.shape != codec.scale_shape(t.shape[:1], size_k, block):
            block = size_k // scale.shape[1]
        result[module + ".weight"] = codec.dequantize(t, scale, None, block)
    return result


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3", "bert"])
def test_integers_and_scales(kind, family, tmp_path, tokenizer_dir):
    seed = sum(map(ord, kind + family))
    model = build.tiny_model(family, seed)
    made = build.make_ternary(model, seed, TYPES[kind][1])
    path = build.GgufBuilder(model, encoder(kind)).write(tmp_path / "model.gguf")
    dest = tmp_path / "out"
    assert convert(path, dest, "--tokenizer", tokenizer_dir, "--verify") == 0
    tensors = build.read(dest)
    assert len(made) >= 12
    for name, (t, scale) in made.items():
        module = name.removesuffix(".weight")
        packed = tensors[module + ".packed_ternary_weight"]
        assert torch.equal(codec.unpack(packed, t.shape[1], strict=True), t), name
        assert torch.equal(tensors[module + ".weight_scale"], scale), name
        assert name not in tensors
    config = json.loads((dest / "config.json").read_text())
    assert config["quantization_config"]["block_size"] == TYPES[kind][1]
    assert "module_overrides" not in config["quantization_config"]
    assert (dest / "tokenizer.json").read_text() == "{}"
    # The rest is as in the model that was stored.
    found = decoded(dest)
    for name, parameter in model.state_dict().items():
        tied = name == "lm_head.weight" and model.config.tie_word_embeddings
        if tied or name in made or name.startswith("pooler."):
            continue
        if "norm" in name and family == "gemma3":  # stored as 1 + w
            torch.testing.assert_close(found[name], parameter, rtol=0, atol=1e-6)
        else:
            assert torch.equal(found[name], parameter), name


@pytest.mark.parametrize("kind", ["TQ1_0", "TQ2_0"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_weights_and_config_equal_those_transformers_reads(
    kind, family, tmp_path, tokenizer_dir
):
    """Full-precision weights, quantized by the gguf package: its rounding, its
    scales, and a reader of the same file that knows nothing of this project."""
    seed = 7 + sum(map(ord, kind + family))
    model = build.tiny_model(family, seed)
    path = build.GgufBuilder(model, encoder(kind)).write(tmp_path / "model.gguf")
    dest = tmp_path / "out"
    assert convert(path, dest, "--tokenizer", tokenizer_dir) == 0
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32
    )
    found = decoded(dest)
    compared = 0
    for name, parameter in reference.state_dict().items():
        if name == "lm_head.weight" and reference.config.tie_word_embeddings:
            continue
        torch.testing.assert_close(
            found[name].float(), parameter, rtol=0, atol=0, msg=name
        )
        compared += build.is_block_linear(name)
    assert compared == 14
    # The config makes the same model as the original one.
    config = transformers.AutoConfig.from_pretrained(dest)
    original = model.config
    for key in (
        "model_type", "vocab_size", "hidden_size", "head_dim",
        "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "max_position_embeddings", "rms_norm_eps",
        "rope_parameters", "tie_word_embeddings", "sliding_window", "layer_types",
        "query_pre_attn_scalar", "attention_bias", "hidden_act", "hidden_activation",
    ):  # fmt: skip
        if hasattr(original, key) and (family, key) != ("qwen2", "sliding_window"):
            assert getattr(config, key) == getattr(original, key), key
    config.quantization_config = None
    ours = model.__class__(config).eval()
    missing, unexpected = ours.load_state_dict(
        {k: v.float() for k, v in found.items()}, strict=False
    )
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    ours.tie_weights()
    # The original model with the weights as transformers read them. (Its reading of
    # the config knows no head_dim for Qwen3 and no query_pre_attn_scalar.)
    model.load_state_dict(reference.state_dict())
    ids = torch.randint(0, 96, (2, 9), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, model(ids).logits)


def test_names_are_those_of_the_gguf_package():
    from lib.convert.gguf_names import hf_name

    for family, arch in build._GGUF_ARCHITECTURES.items():
        family = family.removesuffix("_text")
        model = build.tiny_model(family, 0)
        names = gguf.get_tensor_name_map(arch, 2)
        for name in model.state_dict():
            ours = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if ours is not None and not name.startswith("pooler."):
                assert hf_name(ours, family) == name
        assert hf_name("blk.0.ssm_a.weight", family) is None


def test_llama_rope_order_is_undone(tmp_path, tokenizer_dir):
    """Without it the shapes are right and the answers nonsense."""
    model = build.tiny_model("llama", 21, num_hidden_layers=1)
    made = build.make_ternary(model, 21, 256)
    path = build.GgufBuilder(model, encoder("TQ2_0")).write(tmp_path / "m.gguf")
    q = model.state_dict()["model.layers.0.self_attn.q_proj.weight"].numpy()
    stored = gguf.GGUFReader(path).get_tensor(
        [t.name for t in gguf.GGUFReader(path).tensors].index("blk.0.attn_q.weight")
    )
    in_file = gguf.quants.dequantize(stored.data, GGML.TQ2_0)
    assert not np.array_equal(in_file, q)
    assert np.array_equal(in_file, build.permute_rope(q, 4))
    convert(path, tmp_path / "out", "--tokenizer", tokenizer_dir)
    assert np.array_equal(
        decoded(tmp_path / "out")["model.layers.0.self_attn.q_proj.weight"].numpy(), q
    )
    assert len(made) == 7


def write_id_42(tmp_path, block, plus_two=False, **sizes):
    model = build.tiny_model("qwen3", 5, **sizes)
    build.make_ternary(model, 5, block)

    def encode(name, w):
        t = np.sign(w).astype(np.int8)
        if plus_two and "layers.1.mlp.up_proj" in name:
            t[7, 200] = 2
        scale = np.abs(w.reshape(w.shape[0], -1, block)).max(-1)
        return 42, build.q2_0_bytes(t, scale, block), w.shape

    builder = build.GgufBuilder(model, build.projections_as(encode))
    return builder.write(tmp_path / "model.gguf")


def test_plus_two_is_refused(tmp_path, tokenizer_dir, capsys):
    path = write_id_42(tmp_path, 64, plus_two=True)
    dest = tmp_path / "out"
    assert convert(path, dest, "--tokenizer", tokenizer_dir) == 1
    error = capsys.readouterr().err
    assert "blk.1.ffn_up.weight: block 3 of row 7 (columns 192 to 255)" in error
    assert "+2" in error and "--quantize" in error and not dest.exists()


def test_id_42_that_fits_neither_layout_is_refused(tmp_path, tokenizer_dir, capsys):
    path = write_id_42(tmp_path, 64)
    # A file cut in its last tensor (or with bytes behind it) fits nothing.
    with open(path, "ab") as file:
        file.write(bytes(64))
    dest = tmp_path / "out"
    content = bytearray(path.read_bytes())
    name = b"blk.0.attn_q.weight"
    at = content.index(struct.pack("<Q", len(name)) + name) + 8 + len(name) + 4
    (rows,) = struct.unpack_from("<Q", content, at + 8)
    struct.pack_into("<Q", content, at + 8, rows - 64)
    path.write_bytes(content)
    assert convert(path, dest, "--tokenizer", tokenizer_dir) == 1
    assert "neither fits" in capsys.readouterr().err and not dest.exists()


def test_id_42_that_fits_both_layouts_is_refused(tmp_path, capsys):
    """128 weights take 36 bytes or 34, both padded to 64."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "qwen3")
    for name in ("blk.0.attn_q.weight", "blk.0.attn_k.weight"):
        writer.add_tensor(name, np.zeros((1, 36), dtype=np.int8))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    content = bytearray(path.read_bytes())
    for name in (b"blk.0.attn_q.weight", b"blk.0.attn_k.weight"):
        at = content.index(struct.pack("<Q", len(name)) + name) + 8 + len(name) + 4
        struct.pack_into("<QQI", content, at, 128, 1, 42)
    path.write_bytes(content)
    assert convert(path, tmp_path / "out") == 1
    assert "both fit" in capsys.readouterr().err


def test_ptq1_0_is_refused_with_the_reason(tmp_path, tokenizer_dir, capsys):
    model = build.tiny_model("qwen3", 1)

    def encode(name, w):
        return 143, np.zeros((w.shape[0], w.shape[1] // 128 * 28), np.uint8), w.shape

    builder = build.GgufBuilder(model, build.projections_as(encode))
    path = builder.write(tmp_path / "model.gguf")
    assert convert(path, tmp_path / "out", "--tokenizer", tokenizer_dir) == 1
    error = capsys.readouterr().err
    assert "PTQ1_0" in error and "Hadamard-rotated" in error and "PQ2_0" in error


@pytest.mark.parametrize("equal", ["everywhere", "but for one"])
def test_blocks_of_64_merge_only_where_scales_are_equal(equal, tmp_path, tokenizer_dir):
    model = build.tiny_model("qwen3", 31)
    made = build.make_ternary(model, 31, 128)
    odd = "model.layers.1.mlp.up_proj.weight"

    def encode(name, w):
        t, scale = np.sign(w).astype(np.int8), np.abs(w.reshape(w.shape[0], -1, 64))
        scale = scale.max(-1)
        if equal == "but for one" and name == odd:
            scale[3, 1] = np.nextafter(np.float16(scale[3, 1]), np.float16(1))
        return 42, build.q2_0_bytes(t, scale, 64), w.shape

    builder = build.GgufBuilder(model, build.projections_as(encode))
    path = builder.write(tmp_path / "model.gguf")
    dest = tmp_path / "out"
    assert convert(path, dest, "--tokenizer", tokenizer_dir, "--verify") == 0
    tensors = build.read(dest)
    config = json.loads((dest / "config.json").read_text())["quantization_config"]
    assert config["block_size"] == 128
    kept = set()
    for name, (t, scale) in made.items():
        found = tensors[name.removesuffix("weight") + "weight_scale"]
        if found.shape == scale.shape:
            assert torch.equal(found, scale)
        else:
            kept.add(name)
            assert found.shape[1] == 2 * scale.shape[1]
    if equal == "everywhere":
        assert not kept and "module_overrides" not in config
    else:  # and its partner in the fused layer
        gate = "model.layers.1.mlp.gate_proj"
        assert kept == {odd, gate + ".weight"}
        assert config["module_overrides"] == {
            m: {"kind": "ternary", "block_size": 64}
            for m in (gate, odd.removesuffix(".weight"))
        }


def test_embedding_of_another_type(tmp_path, tokenizer_dir):
    """llama.cpp keeps embedding and head in more bits; they are decoded."""
    model = build.tiny_model("qwen3", 41, tie_word_embeddings=False)
    build.make_ternary(model, 41, 256)
    encode = build.projections_as(GGML.TQ2_0, GGML.Q8_0)
    path = build.GgufBuilder(model, encode).write(tmp_path / "model.gguf")
    dest = tmp_path / "out"
    assert convert(path, dest, "--tokenizer", tokenizer_dir, "--verify") == 0
    w = model.state_dict()["lm_head.weight"].numpy()
    q8_0 = gguf.quants.dequantize(gguf.quants.quantize(w, GGML.Q8_0), GGML.Q8_0)
    assert np.array_equal(build.read(dest)["lm_head.weight"].numpy(), q8_0)
    config = json.loads((dest / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert config["quantization_config"]["modules_to_not_convert"] == [
        "model.embed_tokens",
        "lm_head",
    ]


@pytest.mark.parametrize("tied", [True, False])
def test_ternary_embedding_tied_or_not(tied, tmp_path, tokenizer_dir):
    model = build.tiny_model("qwen3", 43, tie_word_embeddings=tied)
    made = build.make_ternary(model, 43, 256, embeddings=True)
    path = build.GgufBuilder(model, lambda name, w: GGML.TQ2_0).write(
        tmp_path / "model.gguf"
    )
    dest = tmp_path / "out"
    assert convert(path, dest, "--tokenizer", tokenizer_dir, "--verify") == 0
    tensors = build.read(dest)
    t, scale = made["model.embed_tokens.weight"]
    packed = tensors["model.embed_tokens.packed_ternary_weight"]
    assert torch.equal(codec.unpack(packed, 256), t)
    assert torch.equal(tensors["model.embed_tokens.weight_scale"], scale)
    config = json.loads((dest / "config.json").read_text())
    assert config["tie_word_embeddings"] is tied
    overrides = config["quantization_config"]["module_overrides"]
    assert overrides.pop("model.embed_tokens") == {"kind": "ternary"}
    assert ("lm_head.packed_ternary_weight" in tensors) is not tied
    assert overrides == ({} if tied else {"lm_head": {"kind": "ternary"}})


def test_tokenizer_from_the_metadata(tmp_path):
    model = build.tiny_model("qwen2", 3, vocab_size=120)
    build.make_ternary(model, 3, 64)
    path = build.GgufBuilder(model, encoder("Q2_0")).write(
        tmp_path / "model.gguf", build.byte_level_tokenizer
    )
    assert convert(path, tmp_path / "out") == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer("hello hell")["input_ids"]
    assert tokenizer.decode(ids) == "hello hell"
    assert tokenizer.convert_ids_to_tokens(ids)[0] == "hell"
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert tokenizer.eos_token_id == config["eos_token_id"]


def test_wordpiece_tokenizer_from_the_metadata(tmp_path):
    """Spelled as llama.cpp's converter does, read back as BERT's."""
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "hello",
        "wor",
        "##ld",
        "##s",
    ]
    words += [f"x{i}" for i in range(96 - len(words))]

    def tokenizer(writer):
        def spell(word):
            if word.startswith("["):
                return word
            return word[2:] if word.startswith("##") else "\u2581" + word

        writer.add_tokenizer_model("bert")
        writer.add_token_list([spell(word) for word in words])

    model = build.tiny_model("bert", 3)
    path = build.GgufBuilder(model, encoder("TQ2_0")).write(
        tmp_path / "model.gguf", tokenizer
    )
    assert convert(path, tmp_path / "out") == 0
    found = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    expected = transformers.BertTokenizerFast.from_pretrained(tmp_path)
    for text in ("Hello world", "hello, worlds x1 unknown"):
        assert found(text)["input_ids"] == expected(text)["input_ids"]
    assert found("Hello worlds")["input_ids"] == [2, 5, 6, 7, 8, 3]
    assert found.model_max_length == 128


def test_no_tokenizer_anywhere(tmp_path, capsys):
    model = build.tiny_model("qwen3", 2)
    build.make_ternary(model, 2, 256)
    path = build.GgufBuilder(model, encoder("TQ2_0")).write(tmp_path / "model.gguf")
    assert convert(path, tmp_path / "out") == 1
    assert "--tokenizer" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["model.gguf"]


def test_bert_pooling_is_described(tmp_path, tokenizer_dir):
    model = build.tiny_model("bert", 8)
    path = build.GgufBuilder(model, encoder("TQ2_0")).write(tmp_path / "model.gguf")
    assert convert(path, tmp_path / "out", "--tokenizer", tokenizer_dir) == 0
    pooling = json.loads((tmp_path / "out/1_Pooling/config.json").read_text())
    assert pooling["pooling_mode_mean_tokens"] is True
    assert pooling["pooling_mode_cls_token"] is False
    assert pooling["word_embedding_dimension"] == 256


def damage(path, kind):
    content = bytearray(path.read_bytes())
    if kind == "truncated":
        content = content[:-4000]
    elif kind == "header only":
        content = content[:200]
    elif kind == "no GGUF":
        content[:4] = b"GGML"
    elif kind == "version":
        content[4:8] = struct.pack(">I", 3)
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("truncated", "the file has"),
        ("header only", "header is damaged"),
        ("no GGUF", "is no GGUF file"),
        ("version", "big-endian"),
    ],
)
def test_damaged_files(kind, message, tmp_path, tokenizer_dir, capsys):
    model = build.tiny_model("qwen3", 2)
    path = build.GgufBuilder(model, encoder("TQ2_0")).write(tmp_path / "model.gguf")
    damage(path, kind)
    assert convert(path, tmp_path / "out", "--tokenizer", tokenizer_dir) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_unknown_type_architecture_and_scaling(tmp_path, tokenizer_dir, capsys):
    arguments = (tmp_path / "out", "--tokenizer", tokenizer_dir)
    model = build.tiny_model("qwen3", 2)

    def encode(name, w):
        return 36, np.zeros((w.shape[0], 64), np.uint8), w.shape

    builder = build.GgufBuilder(model, build.projections_as(encode))
    assert convert(builder.write(tmp_path / "a.gguf"), *arguments) == 1
    assert "type 36, which is not known" in capsys.readouterr().err
    builder = build.GgufBuilder(model, encoder("TQ2_0"))
    builder.name = "mamba"
    assert convert(builder.write(tmp_path / "b.gguf"), *arguments) == 1
    assert "architecture 'mamba' is not known" in capsys.readouterr().err
    builder = build.GgufBuilder(model, encoder("TQ2_0"))
    builder.metadata = {"qwen3.rope.scaling.type": "longrope"}
    path = builder.write(tmp_path / "c.gguf")
    assert convert(path, *arguments) == 1
    assert "--config" in capsys.readouterr().err
    given = tmp_path / "config.json"
    given.write_text(model.config.to_json_string())
    assert convert(path, *arguments, "--config", given) == 0
    made = json.loads((tmp_path / "out/config.json").read_text())
    assert made["hidden_size"] == 256


def test_yarn_scaling_is_carried_over(tmp_path, tokenizer_dir):
    model = build.tiny_model("qwen3", 2)
    builder = build.GgufBuilder(model, encoder("TQ2_0"))
    builder.metadata = {
        "qwen3.rope.scaling.type": "yarn",
        "qwen3.rope.scaling.factor": 4.0,
        "qwen3.rope.scaling.original_context_length": 32.0,
    }
    path = builder.write(tmp_path / "c.gguf")
    assert convert(path, tmp_path / "out", "--tokenizer", tokenizer_dir) == 0
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert config.rope_parameters["rope_type"] == "yarn"
    assert config.rope_parameters["factor"] == 4.0
