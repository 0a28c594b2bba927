# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Small checkpoints in which every module may be stored in its own way."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from models import QWEN3_SIZES
from safetensors.torch import load_file, save_file
from transformers import (
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from vllm.model_executor.layers.quantization.utils import ternary_format as fmt

# The CPU's unquantized experts, the reference, want a hidden size that 32 divides; the
# intermediate size cuts a byte and a block under tensor parallelism of 2.
QWEN3_MOE_SIZES = dict(
    vocab_size=307,
    hidden_size=256,
    intermediate_size=330,
    moe_intermediate_size=330,
    num_experts=6,
    num_experts_per_tok=2,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=256,
)

_COMMON: dict[str, Any] = dict(
    tie_word_embeddings=False,
    # Large enough for greedy tokens to be told apart well above rounding.
    initializer_range=0.2,
    dtype="float32",
    eos_token_id=None,
    bos_token_id=None,
)

# (tensors of the checkpoint by suffix, weight that they stand for)
Stored = tuple[dict[str, torch.Tensor], torch.Tensor]


def store_ternary(
    w: torch.Tensor, block_size: fmt.BlockSize = 128, zero_point: bool = False
) -> Stored:
    """Random ternary weights of the shape of w [N, K]."""
    t = torch.randint(-1, 2, w.shape, dtype=torch.int8)
    shape = fmt.scale_shape((w.shape[0],), w.shape[1], block_size)
    scale = (torch.rand(shape) * 0.1 + 0.05).half()
    tensors = {"packed_ternary_weight": fmt.pack(t), "weight_scale": scale}
    zero = None
    if zero_point:
        zero = tensors["weight_zero_point"] = torch.randint(-1, 2, shape).float() / 4
    return tensors, fmt.dequantize(t, scale, zero, block_size)


def store_int8(w: torch.Tensor, block_size: fmt.BlockSize = "row") -> Stored:
    """The w [N, K] rounded to int8 with a scale per row or block."""
    block = fmt.block_length(w.shape[1], block_size)
    blocks = torch.nn.functional.pad(w, (0, -w.shape[1] % block)).unflatten(
        1, (-1, block)
    )
    scale = (blocks.abs().amax(-1) / 127).half().float()
    q = (blocks / scale.unsqueeze(-1)).round().clamp(-128, 127)
    kept = (q * scale.unsqueeze(-1)).flatten(1)[:, : w.shape[1]]
    q = q.flatten(1)[:, : w.shape[1]].to(torch.int8)
    return {"weight": q.contiguous(), "weight_scale": scale}, kept.contiguous()


def write_pair(
    folder: Path,
    model: PreTrainedModel,
    store: Callable[[str, torch.Tensor], Stored | None],
    quantization: Mapping[str, Any],
) -> tuple[Path, Path]:
    """Write a model in a mixed format, and the same dequantized.

    Args:
        folder: an empty directory.
        model: whose unstored weights, names and config are used.
        store: module name and weight [N, K] -> how the module is stored, or None to
            leave it as it is.
        quantization: further keys of `quantization_config`.

    Returns:
        (mixed, dequantized): model directories, the second float32.

    """
    plain, mixed = folder / "dequantized", folder / "mixed"
    model.eval().save_pretrained(plain)
    weights = load_file(plain / "model.safetensors")
    tensors: dict[str, torch.Tensor] = {}
    for name, w in list(weights.items()):
        module = name.removesuffix(".weight")
        stored = store(module, w) if w.ndim == 2 else None
        if stored is None:
            tensors[name] = w
            continue
        tensors |= {f"{module}.{suffix}": t for suffix, t in stored[0].items()}
        weights[name] = stored[1]
    save_file(weights, plain / "model.safetensors", metadata={"format": "pt"})
    mixed.mkdir()
    save_file(tensors, mixed / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((plain / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "ternary", **quantization}
    (mixed / "config.json").write_text(json.dumps(settings, indent=2))
    return mixed, plain


def qwen3(seed: int, **sizes: int) -> Qwen3ForCausalLM:
    """A random dense model of odd sizes."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**{**QWEN3_SIZES, **sizes}, **_COMMON))


def qwen3_moe(seed: int, **sizes: Any) -> Qwen3MoeForCausalLM:
    """A random mixture-of-experts model."""
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**{**QWEN3_MOE_SIZES, **sizes}, **_COMMON)
    )
