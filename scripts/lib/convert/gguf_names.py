# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What GGUF calls the tensors and settings of a model, in Hugging Face's words."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .errors import ConversionError

_DECODER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_DECODER_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA3_BLOCK = _DECODER_BLOCK | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_BERT = {
    "token_embd": "embeddings.word_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
}
_BERT_BLOCK = {
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
_NAMES = {
    "llama": (_DECODER, "model.layers", _DECODER_BLOCK),
    "qwen2": (_DECODER, "model.layers", _DECODER_BLOCK),
    "qwen3": (_DECODER, "model.layers", _DECODER_BLOCK),
    "gemma3": (_DECODER, "model.layers", _GEMMA3_BLOCK),
    "bert": (_BERT, "encoder.layer", _BERT_BLOCK),
}
_MODEL_TYPES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "bert": ("bert", "BertModel"),
}


def check_architecture(architecture: str) -> None:
    """Raises ConversionError for a model whose names are not known."""
    if architecture not in _NAMES:
        raise ConversionError(
            f"GGUF architecture {architecture!r} is not known ({', '.join(_NAMES)} "
            "are). Convert the model from its safetensors."
        )


def hf_name(name: str, architecture: str) -> str | None:
    """The tensor's name in a Hugging Face checkpoint, or None if it has none.
    ``name`` ends in ``.weight`` or ``.bias``."""
    top, blocks, in_block = _NAMES[architecture]
    stem, _, kind = name.rpartition(".")
    match = re.fullmatch(r"blk\.(\d+)\.(.+)", stem)
    if match:
        last = in_block.get(match[2])
        return last and f"{blocks}.{match[1]}.{last}.{kind}"
    mapped = top.get(stem)
    return mapped and f"{mapped}.{kind}"


def row_transform(
    name: str, architecture: str, metadata: Mapping[str, Any]
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What undoes llama.cpp's changes to a tensor along its rows.

    Llama's q and k are stored for the other pairing of rotary dimensions: rows of a
    head as [2, half] there, [half, 2] here.
    """
    match = re.fullmatch(r"blk\.\d+\.attn_([qk])\.(weight|bias)", name)
    if architecture != "llama" or not match:
        return None
    heads = metadata["llama.attention.head_count"]
    if match[1] == "k":
        heads = metadata.get("llama.attention.head_count_kv", heads)

    def unpermute(x: torch.Tensor) -> torch.Tensor:
        half = x.shape[0] // heads // 2
        pairs = x.reshape(heads, half, 2, *x.shape[1:])
        return pairs.transpose(1, 2).reshape(x.shape).contiguous()

    return unpermute


def value_transform(
    name: str, architecture: str
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What undoes llama.cpp's changes to values: Gemma's norms are stored as 1 + w."""
    if architecture == "gemma3" and name.endswith("norm.weight"):
        return lambda x: (x.to(torch.float32) - 1.0).to(x.dtype)
    return None


def hf_config(
    architecture: str,
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, Any]:
    """config.json made of the metadata and the tensors' shapes. Raises
    ConversionError where they do not suffice."""

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{architecture}.{key}", default)
        if value is None:
            raise ConversionError(
                f"GGUF metadata has no {architecture}.{key}. Pass the model's "
                "config.json with --config."
            )
        return value

    check_architecture(architecture)
    model_type, model_class = _MODEL_TYPES[architecture]
    heads = get("attention.head_count")
    config: dict[str, Any] = {
        "architectures": [model_class],
        "model_type": model_type,
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "max_position_embeddings": get("context_length"),
        "vocab_size": shapes["token_embd.weight"][0],
    }
    for key, token in (
        ("bos_token_id", "bos"),
        ("eos_token_id", "eos"),
        ("pad_token_id", "padding"),
    ):
        value = metadata.get(f"tokenizer.ggml.{token}_token_id")
        if value is not None:
            config[key] = value
    if architecture == "bert":
        config |= {
            "hidden_act": "gelu",
            "layer_norm_eps": get("attention.layer_norm_epsilon"),
            "type_vocab_size": shapes["token_types.weight"][0],
        }
        config.setdefault("pad_token_id", 0)
        return config
    head_dim = get("attention.key_length", config["hidden_size"] // heads)
    config |= {
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_theta": get("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in shapes,
    }
    if architecture != "qwen2":
        config["attention_bias"] = "blk.0.attn_q.bias" in shapes
    if architecture == "gemma3":
        config |= _gemma3(get, config)
    else:
        config["hidden_act"] = "silu"
        config |= _rope_scaling(get, architecture, metadata, shapes)
    return config


def _gemma3(get: Callable[..., Any], config: dict[str, Any]) -> dict[str, Any]:
    # Only the 27B model, known by its 62 layers, scales by another number than the
    # head's size; llama.cpp does not store it either.
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    scalar = config["hidden_size"] // heads if layers == 62 else config["head_dim"]
    factor = get("rope.scaling.factor", 0)
    scaling = {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": get("attention.sliding_window"),
        "sliding_window_pattern": 6,
        "rope_theta": get("rope.freq_base", 1000000.0),
        "rope_local_base_freq": get("rope.freq_base_swa", 10000.0),
        "query_pre_attn_scalar": scalar,
        **(scaling if factor else {}),
    }


def _rope_scaling(
    get: Callable[..., Any],
    architecture: str,
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, Any]:
    if "rope_freqs.weight" in shapes:
        raise ConversionError(
            "The GGUF file holds rope_freqs.weight, frequencies of a scaled rotary "
            "embedding whose settings are not in its metadata. Pass the model's "
            "config.json with --config."
        )
    kind = metadata.get(f"{architecture}.rope.scaling.type", "none")
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn"):
        raise ConversionError(
            f"GGUF metadata has {architecture}.rope.scaling.type {kind!r}, which is "
            "not known. Pass the model's config.json with --config."
        )
    scaling = {"rope_type": kind, "factor": get("rope.scaling.factor")}
    if kind == "yarn":
        original = get("rope.scaling.original_context_length")
        scaling["original_max_position_embeddings"] = original
    return {"rope_scaling": scaling}
