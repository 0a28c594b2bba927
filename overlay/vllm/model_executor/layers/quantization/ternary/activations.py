# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Layers whose activations are quantized to 8 bits per token, as BitNet trains them.

For each token: x_q = clamp(round(x * 127 / a), -128, 127) with a = max |x| over all
inputs of the layer, at least 1e-5 (transformers' `BitLinear` and `AutoBitLinear`).
An RMSNorm may come first, with a weight for each module that the layer fuses.
"""

from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F

from vllm import _custom_ops as ops
from vllm.distributed import (
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.quantization.utils.ternary_format import (
    TernaryFormatError,
)
from vllm.model_executor.utils import set_weight_attrs

from .parameters import SCALE, checkpoint_name, mark_loaded, shard_index

INT8_MAX = 127
MIN_ABS_MAX = 1e-5
FRACTION = 128


class InputNorm(torch.nn.Module):
    """Holds the weights [parts, K of this rank] of the norms in front of a layer.

    A child module of the layer, so that the parameter's name is the checkpoint's:
    `<module>.<norm name>.weight`.
    """

    def __init__(self, layer: torch.nn.Module, parts: int, dtype: torch.dtype):
        super().__init__()
        cut = layer.ternary_cut
        self.weight = torch.nn.Parameter(
            torch.empty(parts, cut.stop - cut.start, dtype=dtype), requires_grad=False
        )
        set_weight_attrs(
            self.weight,
            {
                "weight_loader": partial(_load_norm_weight, layer),
                "ternary_name": "weight",
            },
        )


def _load_norm_weight(
    layer: torch.nn.Module,
    param: torch.nn.Parameter,
    loaded_weight: torch.Tensor,
    shard_id: Any = None,
) -> None:
    """Copy a norm weight [K of the checkpoint] into the rows of its parts."""
    name = f"{layer.ternary_scheme.input_norm['name']}.weight"
    if loaded_weight.shape != (layer.input_size,):
        raise TernaryFormatError(
            f"{checkpoint_name(layer, shard_id)}.{name}",
            f"shape is {list(loaded_weight.shape)}, expected [{layer.input_size}], one "
            "weight for each input",
            "Check that the checkpoint and config.json belong to the same model",
        )
    index = shard_index(shard_id)
    rows = slice(None) if index is None else slice(index, index + 1)
    cut = layer.ternary_cut
    param.data[rows].copy_(loaded_weight[cut.start : cut.stop])
    mark_loaded(layer, name, shard_id)


def register_input_norm(
    layer: torch.nn.Module, part_sizes: list[int], dtype: torch.dtype
) -> None:
    """Create the norms that the layer's scheme asks for, one for each of its parts.

    Args:
        layer: a linear layer whose ternary parameters are registered.
        part_sizes: rows of each fused module on this rank.
        dtype: of the norm weights.

    """
    norm = layer.ternary_scheme.input_norm
    layer.add_module(norm["name"], InputNorm(layer, len(part_sizes), dtype))
    layer.ternary_tensors.append(f"{norm['name']}.weight")
    ends = torch.tensor(list(accumulate(part_sizes)), dtype=torch.int32)
    layer.register_buffer("ternary_part_ends", ends, persistent=False)


def apply_int8_activations(
    layer: torch.nn.Module,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    packed: torch.Tensor,
) -> torch.Tensor:
    """X [M, K] -> [M, N], with x quantized per token over all inputs of the layer."""
    norm = layer.ternary_scheme.input_norm
    norm_weight = None if norm is None else getattr(layer, norm["name"]).weight
    if x.size(1) != layer.input_size:
        return _apply_sharded(layer, x, bias, packed, norm_weight)
    return ops.ternary_gemm_w2a8(
        x,
        packed,
        getattr(layer, SCALE),
        bias,
        norm_weight,
        None if norm is None else layer.ternary_part_ends,
        0.0 if norm is None else norm["eps"],
        layer.ternary_size_n,
        layer.ternary_size_k,
        layer.ternary_block_size,
    )


def _apply_sharded(
    layer: torch.nn.Module,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    packed: torch.Tensor,
    norm_weight: torch.Tensor | None,
) -> torch.Tensor:
    """The same for one rank's inputs of a row-parallel layer.

    A token's statistics span all ranks, so they are reduced first. The quantized
    values are integers up to 128, exact in every activation dtype, and their sums are
    exact in float32: the 16-bit kernel computes the integer product. It gets them
    divided by 128, a change of exponents only, because float16 would not hold the
    sums.
    """
    wide = x.float()
    if norm_weight is not None:
        square = tensor_model_parallel_all_reduce(wide.square().sum(-1, keepdim=True))
        eps = layer.ternary_scheme.input_norm["eps"]
        wide = wide * torch.rsqrt(square / layer.input_size + eps)
        wide = (wide.to(x.dtype) * norm_weight[0]).float()
    abs_max = wide.abs().amax(-1, keepdim=True)
    abs_max = tensor_model_parallel_all_gather(abs_max).amax(-1, keepdim=True)
    abs_max = abs_max.clamp(min=MIN_ABS_MAX)
    quantized = (wide * (INT8_MAX / abs_max)).round().clamp(-INT8_MAX - 1, INT8_MAX)
    out = ops.ternary_gemm(
        F.pad((quantized / FRACTION).to(x.dtype), (layer.ternary_lead, 0)),
        packed,
        getattr(layer, SCALE),
        None,
        None,
        layer.ternary_size_n,
        layer.ternary_size_k,
        layer.ternary_block_size,
    )
    out = (out.float() * (abs_max * (FRACTION / INT8_MAX))).to(x.dtype)
    return out if bias is None else out + bias
