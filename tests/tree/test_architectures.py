# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Model classes of vLLM that make their layers in different ways, all ternary.

What is converted must be what the class can load: embeddings and heads to which it
hands no quantization config or no name, fused layers, experts, latent attention.
"""

from pathlib import Path
from typing import Any

import convert_checkpoint
import pytest
import torch
import transformers
from load_models import load_all

from vllm.model_executor.models.whisper import _create_fake_bias_for_k_proj

SIZES = dict(
    vocab_size=128,
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=0,
)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
LATENT = dict(
    num_key_value_heads=4,
    q_lora_rank=64,
    kv_lora_rank=64,
    qk_rope_head_dim=32,
    qk_nope_head_dim=32,
    v_head_dim=32,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    first_k_dense_replace=1,
    n_shared_experts=1,
    topk_method="greedy",
)
MODELS: dict[str, dict[str, Any]] = {
    "Bloom": dict(n_layer=2, n_head=4),
    "Cohere": {},  # tied, no config for the embedding
    "DeepseekV2": LATENT,
    # vLLM's Transformers backend, where the router has two names.
    "Dots1": dict(
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        first_k_dense_replace=1,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
    ),
    "Falcon": {},
    "Gemma2": dict(head_dim=32),
    "Glm4Moe": dict(
        head_dim=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        first_k_dense_replace=1,
    ),
    # A classifier that keeps the head of its base class, which no checkpoint has.
    "JambaForSequenceClassification": dict(
        num_experts=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_d_state=16,
    ),
    "Llama": {},  # the embedding has no name
    "Mamba2": dict(
        intermediate_size=256, num_heads=16, head_dim=16, state_size=16, n_groups=1
    ),
    "Mixtral": dict(num_local_experts=4),
    "Nemotron": {},
    "OPT": dict(ffn_dim=192, word_embed_proj_dim=128),
    "Phi3": {},  # fused on disk
    # The router is renamed, by a rule for the name of its weight.
    "Phimoe": dict(num_local_experts=4),
    "Qwen3Next": dict(
        **EXPERTS,
        head_dim=32,
        shared_expert_intermediate_size=64,
        layer_types=["linear_attention", "full_attention"],
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
    ),
    "StableLm": {},  # the head is called .lm_head
    "Starcoder2": {},  # vLLM's Transformers backend
    # k_proj has no bias, q_proj and v_proj have: vLLM makes one of zeros. And the
    # embedding, which the head is, cannot be ternary.
    "WhisperForConditionalGeneration": dict(
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=192,
        decoder_ffn_dim=192,
        num_mel_bins=16,
        max_source_positions=50,
        max_target_positions=64,
        decoder_start_token_id=3,
        suppress_tokens=[],
        begin_suppress_tokens=[],
    ),
}
CUT = ["WhisperForConditionalGeneration"]
"""Loaded as one of two ranks, too."""


def save(folder: Path, name: str, settings: dict[str, Any], seed: int) -> Any:
    """A random model of transformers' class `name`, which is also saved."""
    family = name.partition("For")[0].removesuffix("Model")
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **settings})
    torch.manual_seed(seed)
    model = getattr(transformers, name)(config).eval()
    model.save_pretrained(folder)
    return model


def test_every_architecture_loads(tmp_path: Path) -> None:
    """Embeddings and heads included: tensors that no layer wants are refused."""
    jobs: dict[str, dict[str, Any]] = {}
    for seed, (name, settings) in enumerate(MODELS.items()):
        source, dest = tmp_path / name, tmp_path / f"{name}-ternary"
        save(source, name if "For" in name else f"{name}ForCausalLM", settings, seed)
        arguments = [str(source), str(dest), "--quantize", "absmean"]
        arguments += ["--embeddings", "yes", "--block-size", "32"]
        assert convert_checkpoint.main(arguments) == 0, name
        # vLLM's latent attention has no float32 on a CPU.
        args = {"dtype": "bfloat16"} if "kv_lora_rank" in settings else {}
        jobs[name] = {"model": str(dest), "args": args}
    jobs |= {f"{name}, cut": jobs[name] | {"rank": [1, 2]} for name in CUT}
    found = dict(zip(jobs, load_all(list(jobs.values())), strict=True))
    assert found == dict.fromkeys(jobs)


# Of the classes below, two do not say what they fuse, and BERT's self-attention has
# another name in vLLM than in a checkpoint.
LEFT_ALONE: dict[str, dict[str, Any]] = {
    "BertModel": {},
    "FalconForCausalLM": {},
    "GPTJForCausalLM": dict(
        n_embd=128, n_inner=192, n_layer=2, n_head=4, rotary_dim=16
    ),
    "LlamaForCausalLM": {},
    "OPTForCausalLM": MODELS["OPT"],
    "Phi3ForCausalLM": {},
    "StableLmForCausalLM": {},
}


def test_a_layer_may_stay_as_it_is(tmp_path: Path) -> None:
    """By the names that its modules have in the checkpoint, one by one."""
    jobs = {}
    for seed, (name, settings) in enumerate(LEFT_ALONE.items()):
        source, dest = tmp_path / name, tmp_path / f"{name}-ternary"
        first = [
            module
            for module, layer in save(source, name, settings, seed).named_modules()
            if isinstance(layer, torch.nn.Linear) and ".0." in module
        ]
        assert len(first) > 3
        arguments = [str(source), str(dest), "--quantize", "absmean"]
        arguments += ["--block-size", "32", "--modules-to-not-convert", *first]
        assert convert_checkpoint.main(arguments) == 0, name
        args = {"runner": "pooling"} if name == "BertModel" else {}
        jobs[name] = {"model": str(dest), "args": args}
    found = dict(zip(jobs, load_all(list(jobs.values())), strict=True))
    assert found == dict.fromkeys(jobs)


@pytest.mark.parametrize("projection", ["self_attn.k_proj", "attention.wk"])
@pytest.mark.parametrize("tensor", ["weight", "packed_ternary_weight"])
def test_bias_of_zeros(projection: str, tensor: str) -> None:
    """Whisper's and Voxtral's k_proj: a bias for each row, where there is none."""
    rows = {"layers.0.": 6, "layers.1.": 9}
    weights = {f"{x}{projection}.{tensor}": torch.ones(n, 4) for x, n in rows.items()}
    real = torch.ones(9)
    weights[f"layers.1.{projection}.bias"] = real
    key = f".{projection.rpartition('.')[2]}.weight"
    made = dict(_create_fake_bias_for_k_proj(iter(weights.items()), key))
    assert made.keys() == {*weights, f"layers.0.{projection}.bias"}
    assert torch.equal(made[f"layers.0.{projection}.bias"], torch.zeros(6))
    assert made[f"layers.1.{projection}.bias"] is real
