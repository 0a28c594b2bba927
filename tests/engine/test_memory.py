# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Memory by tensor of a model of the 0.6B shape, embedding and tied head included."""

import json
from pathlib import Path

from drive_engine import drive

HIDDEN, MLP, LAYERS, VOCABULARY = 1024, 3072, 28, 151936
QUERIES, KEYS = 16 * 128, 8 * 128
LINEARS = {
    "self_attn.qkv_proj": (QUERIES + 2 * KEYS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, QUERIES),
    "mlp.gate_up_proj": (2 * MLP, HIDDEN),
    "mlp.down_proj": (HIDDEN, MLP),
}


def test_0_6b_shape(tmp_path: Path) -> None:
    """Each weight holds its bits and scales; the total is within 3% of the format's."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "quantization_config": {
            "quant_method": "ternary",
            "block_size": 128,
            "module_overrides": {"model.embed_tokens": {"kind": "ternary"}},
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    job = {
        "model": str(tmp_path),
        "args": {"load_format": "dummy", "dtype": "bfloat16"},
        "steps": [["tensors"]],
    }
    ((ranks,),) = drive([job], tmp_path / "log")
    assert "error" not in ranks, ranks
    (tensors,) = ranks

    held: dict[str, int] = {}
    for tensor in tensors:
        if tensor["name"] == "kv_cache":
            continue
        held[tensor["module"]] = held.get(tensor["module"], 0) + tensor["bytes"]
    expected = {"model.embed_tokens": (VOCABULARY, HIDDEN)} | {
        f"model.layers.{i}.{name}": shape
        for i in range(LAYERS)
        for name, shape in LINEARS.items()
    }
    for module, (n, k) in expected.items():
        assert held[module] == n * k // 4 + n * k // 128 * 2, module
    # The head is the embedding's table, not a second one.
    assert held.get("lm_head", 0) == 0
    total = sum(n * k for n, k in expected.values()) * 2.125 / 8
    # The rotary table is not a weight.
    weights = sum(size for module, size in held.items() if "rotary" not in module)
    assert total <= weights <= 1.03 * total, (weights, total)
