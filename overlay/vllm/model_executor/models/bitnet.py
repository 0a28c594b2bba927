# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""BitNet decoders (BitNet-b1.58-2B-4T): Llama with a squared-ReLU MLP and a norm in
front of the two projections that leave a block."""

from typing import Any

import torch
from torch import nn
from transformers import BitNetConfig

from vllm.config import VllmConfig
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.activation import ReLUSquaredActivation
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.model_executor.utils import set_weight_attrs

from .llama import LlamaAttention, LlamaForCausalLM


class SubNorm(nn.Module):
    """RMSNorm over features that are spread across the tensor-parallel ranks.

    Args:
        size: features of all ranks.
        eps: added to the mean square.

    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.size, self.eps = size, eps
        local = size // get_tensor_model_parallel_world_size()
        self.start = get_tensor_model_parallel_rank() * local
        self.weight = nn.Parameter(torch.ones(local))
        set_weight_attrs(self.weight, {"weight_loader": self._load})

    def _load(self, param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
        if loaded_weight.shape != (self.size,):
            raise ValueError(
                f"The weight of a sub-norm has shape {list(loaded_weight.shape)}, "
                f"expected [{self.size}]; check that the checkpoint and config.json "
                "belong to the same model."
            )
        param.data.copy_(loaded_weight[self.start : self.start + len(param)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """X [..., features of this rank] -> the same shape and dtype."""
        wide = x.float()
        square = wide.square().sum(-1, keepdim=True)
        square = tensor_model_parallel_all_reduce(square)
        wide = wide * torch.rsqrt(square / self.size + self.eps)
        return self.weight * wide.to(x.dtype)


class BitNetMLP(nn.Module):
    """`down(norm(relu(gate(x))^2 * up(x)))`."""

    def __init__(
        self,
        config: BitNetConfig,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        if config.hidden_act != "relu2":
            raise ValueError(
                f"BitNet with hidden_act {config.hidden_act!r} is not supported; only "
                '"relu2" is.'
            )
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size,
            [config.intermediate_size] * 2,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.gate_up_proj",
        )
        self.act_fn = ReLUSquaredActivation()
        self.ffn_sub_norm = SubNorm(config.intermediate_size, config.rms_norm_eps)
        self.down_proj = RowParallelLinear(
            config.intermediate_size,
            config.hidden_size,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.down_proj",
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate_up, _ = self.gate_up_proj(x)
        gate, up = gate_up.chunk(2, dim=-1)
        x = self.act_fn(gate.contiguous()) * up
        x, _ = self.down_proj(self.ffn_sub_norm(x))
        return x


class BitNetAttention(LlamaAttention):
    """Llama's attention with a norm in front of the output projection."""

    def __init__(self, config: BitNetConfig, **kwargs: Any) -> None:
        super().__init__(config=config, **kwargs)
        self.attn_sub_norm = SubNorm(
            self.total_num_heads * self.head_dim, config.rms_norm_eps
        )

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor
    ) -> torch.Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q, k = self.rotary_emb(positions, q, k)
        output, _ = self.o_proj(self.attn_sub_norm(self.attn(q, k, v)))
        return output


class BitNetDecoderLayer(nn.Module):
    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.self_attn = BitNetAttention(
            config,
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            max_position_embeddings=config.max_position_embeddings,
            quant_config=vllm_config.quant_config,
            bias=config.attention_bias,
            bias_o_proj=config.attention_bias,
            cache_config=vllm_config.cache_config,
            prefix=f"{prefix}.self_attn",
        )
        self.mlp = BitNetMLP(config, vllm_config.quant_config, f"{prefix}.mlp")
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(
            config.hidden_size, eps=config.rms_norm_eps
        )

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions, hidden_states)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class BitNetForCausalLM(LlamaForCausalLM):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(
            vllm_config=vllm_config, prefix=prefix, layer_type=BitNetDecoderLayer
        )
