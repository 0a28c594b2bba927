# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""BitNet embedding models in plain float32 PyTorch, from the facts of their format.

A Qwen3 or Gemma 3 text decoder in which each of the seven projections of a layer has
an RMSNorm of its own on its input, followed by 8-bit activations and ternary weights
that are computed from masters. The embedding of a text is the last token's hidden
state, of length 1.
"""

from typing import Any

import torch
import torch.nn.functional as F

Weights = dict[str, torch.Tensor]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def bit_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Ternary weights of a master, 8 bits per token of the activation."""
    s = weight.abs().mean().clamp(min=1e-5)
    t = (weight / s).round().clamp(-1, 1)
    step = x.abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
    return ((x / step).round().clamp(-128, 127) @ t.T) * s * step


class PlainDecoder:
    """One text at a time, without a cache.

    Args:
        config: settings of transformers' `Qwen3Config` or `Gemma3TextConfig`.
        weights: of the checkpoint, named from "layers.0" on.
        quantized: False leaves out the projections' norms and rounds nothing, which
            is the plain architecture.
        dtype: to which the results of projections and norms are rounded.

    """

    def __init__(
        self,
        config: Any,
        weights: Weights,
        quantized: bool = True,
        dtype: torch.dtype = torch.float32,
    ):
        self.config, self.quantized, self.dtype = config, quantized, dtype
        self.weights = {name: w.float() for name, w in weights.items()}
        self.gemma = config.model_type == "gemma3_text"

    def embed(self, tokens: list[int]) -> torch.Tensor:
        return F.normalize(self.hidden(tokens)[-1], dim=0)

    @torch.no_grad()
    def hidden(self, tokens: list[int]) -> torch.Tensor:
        """Final hidden states [tokens, hidden size]."""
        x = self.weights["embed_tokens.weight"][torch.tensor(tokens)]
        if self.gemma:
            x = x * self.config.hidden_size**0.5
        for index in range(self.config.num_hidden_layers):
            x = self._layer(f"layers.{index}", x, index)
        return self._norm("norm", x)

    def _layer(self, name: str, x: torch.Tensor, index: int) -> torch.Tensor:
        h = self._attention(
            f"{name}.self_attn", self._norm(f"{name}.input_layernorm", x), index
        )
        if self.gemma:
            x = x + self._norm(f"{name}.post_attention_layernorm", h)
            h = self._mlp(
                f"{name}.mlp", self._norm(f"{name}.pre_feedforward_layernorm", x)
            )
            return x + self._norm(f"{name}.post_feedforward_layernorm", h)
        x = x + h
        return x + self._mlp(
            f"{name}.mlp", self._norm(f"{name}.post_attention_layernorm", x)
        )

    def _mlp(self, name: str, x: torch.Tensor) -> torch.Tensor:
        gate = self._project(f"{name}.gate_proj", x)
        gate = F.gelu(gate, approximate="tanh") if self.gemma else F.silu(gate)
        up = self._project(f"{name}.up_proj", x)
        return self._project(f"{name}.down_proj", gate * up)

    def _attention(self, name: str, x: torch.Tensor, index: int) -> torch.Tensor:
        config = self.config
        sliding = config.layer_types[index] == "sliding_attention"

        def heads(which: str) -> torch.Tensor:
            y = self._project(f"{name}.{which}_proj", x)
            return y.view(len(x), -1, config.head_dim).transpose(0, 1)

        q = self._rotate(self._norm(f"{name}.q_norm", heads("q")), index)
        k = self._rotate(self._norm(f"{name}.k_norm", heads("k")), index)
        groups = config.num_attention_heads // config.num_key_value_heads
        k = k.repeat_interleave(groups, 0)
        v = heads("v").repeat_interleave(groups, 0)
        scale = config.query_pre_attn_scalar if self.gemma else config.head_dim
        scores = q @ k.transpose(1, 2) * scale**-0.5
        at = torch.arange(len(x))
        distance = at[:, None] - at
        masked = distance < 0
        if sliding:
            masked |= distance >= config.sliding_window
        scores = scores.masked_fill(masked, -torch.inf).softmax(-1)
        return self._project(
            f"{name}.o_proj", (scores @ v).transpose(0, 1).reshape(len(x), -1)
        )

    def _rotate(self, x: torch.Tensor, index: int) -> torch.Tensor:
        parameters = self.config.rope_parameters
        if self.gemma:
            parameters = parameters[self.config.layer_types[index]]
        size = x.shape[-1]
        powers = torch.arange(0, size, 2) / size
        angles = torch.arange(x.shape[1])[:, None] / parameters["rope_theta"] ** powers
        cos, sin = angles.cos(), angles.sin()
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def _project(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = self.weights[f"{name}.weight"]
        if not self.quantized:
            return x @ weight.T
        x = self._round(rms_norm(x, self.weights[f"{name}.norm.weight"], 1e-6))
        return self._round(bit_linear(x, weight))

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = self.weights[f"{name}.weight"]
        weight = weight + 1 if self.gemma else weight
        return self._round(rms_norm(x, weight, self.config.rms_norm_eps))

    def _round(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.dtype).float()
