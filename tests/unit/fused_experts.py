# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Small checkpoints that store all experts of a layer in one tensor, as transformers
writes them or as they are published."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import checkpoints as build
import torch
import transformers

EXPERTS, HIDDEN, INNER = 3, 128, 96
BLOCK = 32
PROJECTIONS = (
    *build.BLOCK_LINEARS, "in_proj", "out_proj", "input_linear", "output_linear",
)  # fmt: skip

SIZES: dict[str, Any] = dict(
    vocab_size=96,
    hidden_size=HIDDEN,
    intermediate_size=192,
    moe_intermediate_size=INNER,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=128,
    pad_token_id=0,
    num_experts=EXPERTS,
    num_local_experts=EXPERTS,
    num_experts_per_tok=2,
    initializer_range=0.2,
)


@dataclass(frozen=True)
class Kind:
    """A type of model: its names in transformers, further settings of its config, and
    what is in its files."""

    model: str
    config: str
    gate_up: str = "experts.gate_up_proj"
    down: str = "experts.down_proj"
    transposed: bool = False
    """[E, H, 2 I] and [E, I, H] rather than [E, 2 I, H] and [E, H, I]."""
    settings: dict[str, Any] = field(default_factory=dict)
    parts: tuple[str, ...] = ("gate_proj", "up_proj")
    """What becomes of `gate_up`."""

    @property
    def files(self) -> tuple[str, str]:
        """Ends of the names of tensors with all experts of a layer in the files."""
        return f".{self.gate_up}", f".{self.down}"


_GRANITE: dict[str, Any] = dict(
    gate_up="input_linear.weight", down="output_linear.weight"
)
_HALF = dict(intermediate_size=INNER)
KINDS = {
    "granitemoe": Kind(
        "GraniteMoeForCausalLM", "GraniteMoeConfig", **_GRANITE, settings=_HALF
    ),
    "granitemoehybrid": Kind(
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        **_GRANITE,
        settings=dict(
            **_HALF,
            layer_types=["mamba", "attention"],
            mamba_n_heads=16,
            mamba_d_head=16,
            mamba_d_state=16,
            mamba_n_groups=1,
            mamba_expand=2,
            shared_intermediate_size=64,
        ),
    ),
    "llama4": Kind(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        transposed=True,
        settings=dict(
            **_HALF,
            intermediate_size_mlp=192,
            interleave_moe_layer_step=1,
            num_experts_per_tok=1,
        ),
    ),
    "gemma4": Kind(
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        settings=dict(
            head_dim=None,
            global_head_dim=32,
            enable_moe_block=True,
            top_k_experts=2,
            hidden_size_per_layer_input=0,
            vocab_size_per_layer_input=96,
            num_kv_shared_layers=0,
            layer_types=["sliding_attention", "full_attention"],
        ),
    ),
    "aria": Kind(
        "AriaTextForCausalLM",
        "AriaTextConfig",
        "experts.fc1.weight",
        "experts.fc2.weight",
        transposed=True,
        settings=dict(
            **_HALF, moe_num_experts=EXPERTS, moe_topk=2, moe_num_shared_experts=1
        ),
        parts=("gate_up_proj",),
    ),
    # Of this one transformers writes one tensor for each expert.
    "qwen3": Kind("Qwen3MoeForCausalLM", "Qwen3MoeConfig"),
}


def tiny_model(kind: Kind, seed: int, **settings: Any) -> transformers.PreTrainedModel:
    """A model with random weights in float32."""
    wanted = SIZES | kind.settings | settings
    wanted = {k: v for k, v in wanted.items() if v is not None}
    torch.manual_seed(seed)
    config = getattr(transformers, kind.config)(**wanted)
    return getattr(transformers, kind.model)(config).eval()


def make_ternary(
    kind: Kind, model: transformers.PreTrainedModel, seed: int
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Gives experts and projections random ternary weights in blocks of `BLOCK` inputs,
    in place; returns name of the module, of each expert -> (t, scale)."""
    made = {}
    for name, parameter in model.named_parameters():
        module, _, last = name.rpartition(".")
        if module.endswith(".experts"):
            # Some of transformers' modules have [K, N] for each expert, others [N, K].
            for expert, w in enumerate(parameter.data):
                rows = w.t() if kind.transposed else w
                parts = ("down_proj",) if last == "down_proj" else kind.parts
                for part, view in zip(parts, rows.chunk(len(parts)), strict=True):
                    made[f"{module}.{expert}.{part}"] = _draw(view, len(made), seed)
        elif module.rpartition(".")[2] in PROJECTIONS and last == "weight":
            made[module] = _draw(parameter.data, len(made), seed)
    return made


def _draw(w: torch.Tensor, i: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Fills a weight [N, K]."""
    t, scale = build.random_ternary(1000 * seed + i, *w.shape, BLOCK)
    w.copy_(build.expand(t, scale, BLOCK))
    return t, scale


def write(
    kind: Kind, model: transformers.PreTrainedModel, folder: Path
) -> dict[str, torch.Tensor]:
    """Saves the model, its experts of a layer in one tensor; returns the tensors."""
    build.save(model, folder)

    def fuse(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if n.endswith("experts.0.down_proj.weight")]:
            layer = name.partition("experts.0.")[0]
            for old in [n for n in tensors if re.match(rf"{layer}experts\.\d", n)]:
                del tensors[old]
            for last in (kind.gate_up, kind.down):
                tensors[layer + last] = model.get_parameter(layer + last).detach()

    build.rewrite(folder, fuse)
    return build.read(folder)
