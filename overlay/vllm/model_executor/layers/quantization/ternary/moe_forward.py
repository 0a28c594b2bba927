# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The computation of ternary experts: tokens grouped by expert, packed weights.

Four ways lead to the same sum. All compute on the packed weights; nothing is ever
dequantized into memory.

- On CUDA, the grouped kernel: tokens are sorted by expert on the device, and one launch
  for each projection computes all experts. It takes 16-bit activations and block sizes
  that 16 divides.
- On the CPU, and on CUDA outside graphs where an expert has so many tokens that the
  kernel for one matrix is better: the experts that have tokens, each on its own tokens.
  Costs one copy of the routing to the host per layer.
- While a CUDA graph is captured, for what the grouped kernel does not take. The host
  cannot look at the routing then:
    - few tokens: the packed weights of each token's experts are gathered, so that one
      GEMM computes all of them (three times the ideal traffic of packed weights);
    - more tokens: every local expert computes every token, and what is not routed is
      masked (E / top_k times the ideal arithmetic).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from vllm import _custom_ops as ops
from vllm.model_executor.layers.fused_moe.activation import (
    ApplyMoEActivationConfig,
    MoEActivation,
    apply_moe_activation,
)
from vllm.model_executor.layers.fused_moe.config import (
    FUSED_MOE_UNQUANTIZED_CONFIG,
    FusedMoEConfig,
)
from vllm.model_executor.layers.fused_moe.moe_align_block_size import (
    moe_align_block_size,
)
from vllm.utils.torch_utils import direct_register_custom_op

# Routes in a block, as csrc/quantization/ternary/moe_gemm.h has it.
_BLOCK = 16
# Routes per expert from which a product of its own is better.
_ROUTES_FOR_OWN = 128
# Gathering copies a weight once (read and write) and the GEMM reads it again.
_GATHER_TRAFFIC = 3

# vLLM's CPU kernels for these want widths that their vectors divide; experts have any.
CPU_ACTIVATIONS: dict[MoEActivation, Callable[[torch.Tensor], torch.Tensor]] = {
    MoEActivation.SILU: F.silu,
    MoEActivation.GELU: F.gelu,
    MoEActivation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
}


@dataclass(frozen=True)
class Projection:
    """One projection of all local experts, in the layout of the kernels.

    Attributes:
        weight, scale, zero_point: [E, ...], per expert what `ternary_gemm` takes.
        bias: [E, N] or None.
        size_n, size_k: rows and inputs of one expert on this rank.
        block_size: weights along K that share a scale.
        activation_bits: 16, or 8 for int8 per token.
        lead: zeros to put in front of the activation, see `InputCut`.

    """

    weight: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    bias: torch.Tensor | None
    size_n: int
    size_k: int
    block_size: int
    activation_bits: int
    lead: int

    def matmul(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        """X [M, K] times the transposed weight of one expert: [M, N]."""
        zero_point = self.zero_point
        return self._gemm(
            x,
            self.weight[expert],
            self.scale[expert],
            None if zero_point is None else zero_point[expert],
            None if self.bias is None else self.bias[expert],
            self.size_n,
        )

    @property
    def grouped(self) -> bool:
        """Whether the grouped kernel computes it."""
        whole_row = self.block_size >= self.size_k
        return self.activation_bits == 16 and (whole_row or self.block_size % 16 == 0)

    def matmul_grouped(
        self,
        x: torch.Tensor,
        blocks: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        top_k: int,
        route_weights: torch.Tensor | None,
    ) -> torch.Tensor:
        """Multiply x [R / top_k, K] by the weight of each route's expert: [R, N].

        Args:
            x: one row for each top_k routes.
            blocks: what `moe_align_block_size` returns; a negative expert gives 0.
            top_k: routes of a row of x.
            route_weights: float32 [R], or None for 1.

        """
        # Rows of whole 16 bytes.
        width = self.lead + x.shape[1]
        padding = -width % 8
        if self.lead or padding:
            x = F.pad(x, (self.lead, padding))[:, :width]
        block_size = self.block_size
        return torch.ops._C.ternary_moe_gemm(
            x,
            self.weight,
            self.scale,
            self.zero_point,
            self.bias,
            *blocks,
            route_weights,
            top_k,
            x.shape[0] * top_k,
            self.size_n,
            self.size_k,
            -(-block_size // 16) * 16 if block_size >= self.size_k else block_size,
        )

    def matmul_gathered(self, x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """X [1 or T, K] times the weights of the experts [T]: [1 or T, T, N]."""
        count = experts.shape[0]
        weight = self.weight.index_select(0, experts).flatten(0, 1)
        scale = _side_by_side(self.scale.index_select(0, experts))
        zero_point = self.zero_point
        if zero_point is not None:
            zero_point = _side_by_side(zero_point.index_select(0, experts))
        # Rows that pad an expert have scale 0 and are cut off again here.
        padded = scale.shape[1] // count
        out = self._gemm(x, weight, scale, zero_point, None, count * padded)
        out = out.view(x.shape[0], count, padded)[..., : self.size_n]
        return out if self.bias is None else out + self.bias.index_select(0, experts)

    def _gemm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor,
        zero_point: torch.Tensor | None,
        bias: torch.Tensor | None,
        size_n: int,
    ) -> torch.Tensor:
        if self.lead:
            x = F.pad(x, (self.lead, 0))
        size = (size_n, self.size_k, self.block_size)
        if self.activation_bits == 8:
            return ops.ternary_gemm_w2a8(x, weight, scale, bias, None, None, 0.0, *size)
        return ops.ternary_gemm(x, weight, scale, zero_point, bias, *size)


def _side_by_side(scale: torch.Tensor) -> torch.Tensor:
    """[T, blocks, N] -> [blocks, T * N]: the scales of experts stacked by rows."""
    return scale.transpose(0, 1).reshape(scale.shape[1], -1)


def ternary_experts(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    w13: Projection,
    w2: Projection,
    moe: FusedMoEConfig,
    weight_on_input: bool,
) -> torch.Tensor:
    """The weighted sum of the routed experts' outputs, those of this rank only.

    Args:
        x: [M, H] activations.
        topk_weights: [M, T] weights of the experts.
        topk_ids: [M, T] global numbers of the experts.
        expert_map: global number -> local number or -1, or None if all are local.
        w13: gate and up projection.
        w2: down projection.
        moe: vLLM's description of the layer.
        weight_on_input: scale the input instead of the output; top 1 only.

    Returns:
        [M, H] in the dtype of x.

    """
    if expert_map is not None:
        topk_ids = expert_map[topk_ids.long()]
    if weight_on_input:
        x = x * topk_weights.to(x.dtype)
        topk_weights = torch.ones_like(topk_weights)
    config = ApplyMoEActivationConfig.from_configs(moe, FUSED_MOE_UNQUANTIZED_CONFIG)
    return torch.ops.vllm.ternary_experts(
        x,
        topk_weights,
        topk_ids,
        *(w13.weight, w13.scale, w13.zero_point, w13.bias),
        [w13.size_n, w13.size_k, w13.block_size, w13.activation_bits, w13.lead],
        *(w2.weight, w2.scale, w2.zero_point, w2.bias),
        [w2.size_n, w2.size_k, w2.block_size, w2.activation_bits, w2.lead],
        moe.activation.value,
        config.clamp_limit,
        config.alpha,
        config.beta,
        config.activation_situ_beta,
        config.activation_situ_linear_beta,
    )


def _ternary_experts(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w13_zero_point: torch.Tensor | None,
    w13_bias: torch.Tensor | None,
    w13_sizes: list[int],
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    w2_zero_point: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    w2_sizes: list[int],
    activation: str,
    clamp_limit: float | None,
    alpha: float,
    beta: float,
    situ_beta: float | None,
    situ_linear_beta: float | None,
) -> torch.Tensor:
    activation_config = ApplyMoEActivationConfig(
        clamp_limit, alpha, beta, situ_beta, situ_linear_beta
    )
    local = _Experts(
        Projection(w13, w13_scale, w13_zero_point, w13_bias, *w13_sizes),
        Projection(w2, w2_scale, w2_zero_point, w2_bias, *w2_sizes),
        _Activation(MoEActivation(activation), activation_config),
    )
    capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
    crowded = topk_ids.numel() >= _ROUTES_FOR_OWN * w13.shape[0]
    grouped = local.up.grouped and local.down.grouped
    if x.is_cuda and (capturing or not crowded) and grouped:
        compute = local.grouped
    elif not capturing:
        compute = local.routed
    elif _GATHER_TRAFFIC * topk_ids.numel() <= w13.shape[0]:
        compute = local.gathered
    else:
        compute = local.masked
    return compute(x, topk_weights.float(), topk_ids.long()).to(x.dtype)


def _ternary_experts_fake(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, *args
) -> torch.Tensor:
    return torch.empty_like(x)


direct_register_custom_op(
    op_name="ternary_experts",
    op_func=_ternary_experts,
    fake_impl=_ternary_experts_fake,
)


@dataclass(frozen=True)
class _Activation:
    kind: MoEActivation
    config: ApplyMoEActivationConfig

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[M, 2 I] (or [M, I] for one that does not gate) -> [M, I]."""
        if not x.is_cuda:
            gate, up = x.chunk(2, dim=-1)
            return CPU_ACTIVATIONS[self.kind](gate) * up
        width = x.shape[-1] // 2 if self.kind.is_gated else x.shape[-1]
        out = x.new_empty(x.shape[0], width)
        return apply_moe_activation(
            self.kind, out, x.contiguous(), activation_config=self.config
        )


@dataclass(frozen=True)
class _Experts:
    """The local experts, and the four ways to compute their part of the sum.

    All take x [M, H], the routes' weights float32 [M, T], and their experts int64
    [M, T] by local number, -1 for those of other ranks.
    """

    up: Projection
    down: Projection
    act: _Activation

    def routed(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        """The experts that have tokens, each on its tokens; float32 [M, H]."""
        top_k = experts.shape[1]
        flat = experts.flatten()
        order = flat.argsort(stable=True)
        # Slot 0 counts the routes to experts of other ranks, numbered -1.
        slots = self.up.weight.shape[0] + 1
        counts = torch.bincount(flat + 1, minlength=slots).tolist()
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        weights = weights.flatten()
        start = counts[0]
        for expert, count in enumerate(counts[1:]):
            if count == 0:
                continue
            routes = order[start : start + count]
            start += count
            tokens = routes // top_k
            y = self.down.matmul(self.act(self.up.matmul(x[tokens], expert)), expert)
            out.index_add_(0, tokens, y.float() * weights[routes].unsqueeze(1))
        return out

    def grouped(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        """All experts in one launch for each projection; float32 [M, H]."""
        local, top_k = self.up.weight.shape[0], experts.shape[1]
        # Routes to experts of other ranks, numbered -1, are sorted as one more expert.
        order, owners, used = moe_align_block_size(
            torch.where(experts < 0, local, experts).int(),
            _BLOCK,
            local + 1,
            pad_sorted_ids=True,
        )
        blocks = (order, torch.where(owners >= local, -1, owners), used)
        hidden = self.act(self.up.matmul_grouped(x, blocks, top_k, None))
        y = self.down.matmul_grouped(hidden, blocks, 1, weights.flatten())
        return y.view(*experts.shape, -1).float().sum(1)

    def gathered(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        """Token by token, all its experts in one GEMM; float32 [M, H]."""
        weights = weights.masked_fill(experts < 0, 0.0)
        experts = experts.clamp(min=0)
        rows = []
        for token in range(x.shape[0]):
            chosen = experts[token]
            hidden = self.act(self.up.matmul_gathered(x[token : token + 1], chosen)[0])
            # Expert t is asked for its own hidden row only: the diagonal of [T, T, N].
            y = self.down.matmul_gathered(hidden, chosen).diagonal(dim1=0, dim2=1).t()
            kept = weights[token].unsqueeze(1)
            rows.append(torch.where(kept == 0, 0.0, y.float() * kept).sum(0))
        return torch.stack(rows)

    def masked(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        """Every local expert on every token, masked by the routing; float32 [M, H]."""
        local = self.up.weight.shape[0]
        # Column 0 takes the routes to experts of other ranks, numbered -1.
        dense = torch.zeros(x.shape[0], local + 1, dtype=torch.float32, device=x.device)
        dense.scatter_add_(1, experts + 1, weights)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in range(local):
            y = self.down.matmul(self.act(self.up.matmul(x, expert)), expert)
            kept = dense[:, expert + 1 : expert + 2]
            # An expert may overflow on tokens that are not its own: no 0 * inf.
            out += torch.where(kept == 0, 0.0, y.float() * kept)
        return out
