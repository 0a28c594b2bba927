# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Small checkpoints for the engine tests, each with its dequantized twin."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from vllm.model_executor.layers.quantization.utils import ternary_format as fmt

# Sizes that neither 4 nor a block divides, on purpose.
QWEN3_SIZES = dict(
    vocab_size=307,
    hidden_size=268,
    intermediate_size=330,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=256,
)


def write_qwen3_pair(
    folder: Path,
    *,
    seed: int,
    block_size: fmt.BlockSize = 128,
    zero_point: bool = False,
    embeddings: bool = False,
    tied: bool = False,
    **sizes: int,
) -> tuple[Path, Path]:
    """Write a Qwen3 decoder with random ternary weights, and the same dequantized.

    Args:
        folder: an empty directory.
        seed: of the weights.
        block_size: of the scales.
        zero_point: store one, a multiple of 1/4.
        embeddings: make the embedding and the head ternary, too.
        tied: share one tensor between embedding and head.
        sizes: replace values of `QWEN3_SIZES`.

    Returns:
        (ternary, dequantized): model directories, the second float32.

    """
    torch.manual_seed(seed)
    config = Qwen3Config(
        **{**QWEN3_SIZES, **sizes},
        tie_word_embeddings=tied,
        # Large enough for greedy tokens to be told apart well above rounding.
        initializer_range=0.2,
        dtype="float32",
        eos_token_id=None,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config).eval()
    plain, ternary = folder / "dequantized", folder / "ternary"
    model.save_pretrained(plain)
    weights = load_file(plain / "model.safetensors")
    packed: dict[str, torch.Tensor] = {}
    for name, w in list(weights.items()):
        vocabulary = "embed_tokens" in name or "lm_head" in name
        if w.ndim != 2 or (vocabulary and not embeddings):
            packed[name] = w
            continue
        module = name.removesuffix(".weight")
        t = torch.randint(-1, 2, w.shape, dtype=torch.int8)
        shape = fmt.scale_shape((w.shape[0],), w.shape[1], block_size)
        scale = (torch.rand(shape) * 0.1 + 0.05).half()
        packed[f"{module}.packed_ternary_weight"] = fmt.pack(t)
        packed[f"{module}.weight_scale"] = scale
        zero = None
        if zero_point:
            zero = torch.randint(-1, 2, shape).float() / 4
            packed[f"{module}.weight_zero_point"] = zero
        weights[name] = fmt.dequantize(t, scale, zero, block_size)
    save_file(weights, plain / "model.safetensors", metadata={"format": "pt"})
    ternary.mkdir()
    save_file(packed, ternary / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((plain / "config.json").read_text())
    quantization: dict[str, object] = {
        "quant_method": "ternary",
        "block_size": block_size,
        "zero_point": zero_point,
        "modules_to_not_convert": [] if embeddings else ["lm_head"],
    }
    if embeddings:
        quantization["module_overrides"] = {
            name: {"kind": "ternary"} for name in ("model.embed_tokens", "lm_head")
        }
    settings["quantization_config"] = quantization
    (ternary / "config.json").write_text(json.dumps(settings, indent=2))
    for model_folder in (ternary, plain):
        _tokenizer(config.vocab_size).save_pretrained(model_folder)
    return ternary, plain


def dequantized_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All weights of a ternary checkpoint in float32, under their plain names."""
    settings = json.loads((folder / "config.json").read_text())
    block_size = settings["quantization_config"].get("block_size", 128)
    weights: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        weights |= load_file(file)
    for name in [n for n in weights if n.endswith(".packed_ternary_weight")]:
        module = name.removesuffix(".packed_ternary_weight")
        scale = weights.pop(f"{module}.weight_scale")
        zero_point = weights.pop(f"{module}.weight_zero_point", None)
        packed = weights.pop(name)
        # K of a real model is a multiple of 4, so that the bytes tell it.
        t = fmt.unpack(packed, 4 * packed.shape[1])
        weights[f"{module}.weight"] = fmt.dequantize(t, scale, zero_point, block_size)
    return weights


def _tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    words = WordLevel({f"t{i}": i for i in range(vocab_size)}, unk_token="t0")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0")
