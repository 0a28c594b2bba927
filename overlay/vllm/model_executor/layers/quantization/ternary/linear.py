# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Linear layers with ternary weights."""

from collections.abc import Mapping
from itertools import accumulate
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F

from vllm import _custom_ops as ops
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization.utils.ternary_layout import (
    decode_layout,
    encode_layout,
)
from vllm.model_executor.utils import replace_parameter

from .activations import apply_int8_activations, register_input_norm
from .load_report import report_of
from .parameters import (
    PACKED,
    SCALE,
    ZERO_POINT,
    check_all_loaded,
    check_values,
    checkpoint_name,
    cut_rows_with,
    is_left_out,
    part_names,
    register_parameters,
)
from .schemes import Scheme


@register_weight_loader_v2_supported_method
class TernaryLinearMethod(LinearMethodBase):
    """`y = x W^T + bias` with W = scale * (t - zero_point), kept two bits a weight.

    Args:
        scheme: how the checkpoint stores the layer.
        strict: refuse the reserved code 3 instead of reading it as 0.
        packed_modules: fused layer name -> names of the checkpoint's modules.

    """

    def __init__(
        self,
        scheme: Scheme,
        strict: bool = False,
        packed_modules: Mapping[str, list[str]] | None = None,
    ):
        self.scheme = scheme
        self.strict = strict
        self.packed_modules = packed_modules or {}

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        weight_loader: MethodType = extra_weight_attrs["weight_loader"]
        layer.ternary_scheme = self.scheme
        layer.ternary_packed_modules = self.packed_modules
        register_parameters(
            layer,
            self.scheme,
            sum(output_partition_sizes),
            input_size_per_partition,
            weight_loader,
        )
        layer.ternary_part_sizes = output_partition_sizes
        layer.ternary_size_n = sum(output_partition_sizes)
        layer.ternary_size_k = layer.ternary_cut.local_size_k
        layer.ternary_lead = layer.ternary_cut.lead
        block = self.scheme.block_size
        # For the kernels one scale a row is a block that covers the row.
        layer.ternary_block_size = (
            -(-layer.ternary_size_k // 4) * 4 if isinstance(block, str) else block
        )
        if self.scheme.input_norm is not None:
            register_input_norm(layer, output_partition_sizes, params_dtype)

    cut_rows_with = staticmethod(cut_rows_with)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        report_of(layer)
        if is_left_out(layer):
            return
        packed, scale = getattr(layer, PACKED).data, getattr(layer, SCALE).data
        layer.ternary_device = packed.device
        zero_point = getattr(layer, ZERO_POINT, None)
        zero_point = None if zero_point is None else zero_point.data
        if check_all_loaded(layer):
            self._check_values(layer, packed, scale, zero_point)
        else:
            scale.abs_()
        if self.scheme.activation_bits == 8 and scale.dtype == torch.bfloat16:
            scale = scale.float()  # exact; the integer kernels have no bfloat16 scale
        tensors = encode_layout(
            packed, scale, zero_point, layer.ternary_size_k, layer.ternary_block_size
        )
        for name, tensor in zip((PACKED, SCALE, ZERO_POINT), tensors):
            if tensor is not None:
                replace_parameter(layer, name, tensor)

    def apply(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """X [..., K] of any strides -> [..., N] in the dtype of x."""
        rows = x.reshape(-1, x.size(-1))
        if self.scheme.activation_bits == 8:
            out = apply_int8_activations(layer, rows, bias, getattr(layer, PACKED))
        else:
            if layer.ternary_lead:
                rows = F.pad(rows, (layer.ternary_lead, 0))
            out = ops.ternary_gemm(
                rows,
                getattr(layer, PACKED),
                getattr(layer, SCALE),
                getattr(layer, ZERO_POINT, None),
                bias,
                layer.ternary_size_n,
                layer.ternary_size_k,
                layer.ternary_block_size,
            )
        return out.view(*x.shape[:-1], layer.ternary_size_n)

    def unpacked_weight(
        self, layer: torch.nn.Module
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The layer's tensors back in the layout of the checkpoint, bit for bit.

        Returns:
            (packed uint8 [N, ceil(K / 4)], scale [N, blocks], zero point or None) of
            this rank.

        """
        zero_point = getattr(layer, ZERO_POINT, None)
        packed, scale, zero_point = decode_layout(
            getattr(layer, PACKED).data,
            getattr(layer, SCALE).data,
            None if zero_point is None else zero_point.data,
            layer.ternary_size_n,
            layer.ternary_size_k,
            layer.ternary_block_size,
        )
        return packed, scale.to(getattr(torch, self.scheme.scale_dtype)), zero_point

    def _check_values(
        self,
        layer: torch.nn.Module,
        packed: torch.Tensor,
        scale: torch.Tensor,
        zero_point: torch.Tensor | None,
    ) -> None:
        """Check the values of each part, under its name in the checkpoint."""
        names = part_names(layer)
        sizes = layer.ternary_part_sizes
        if len(names) != len(sizes):
            sizes = [packed.shape[0]]
        for index, rows in enumerate(_row_ranges(sizes)):
            check_values(
                packed[rows],
                scale[rows],
                None if zero_point is None else zero_point[rows],
                layer.ternary_size_k,
                layer.ternary_block_size,
                strict=self.strict,
                name=checkpoint_name(layer, index),
            )


def _row_ranges(sizes: list[int]) -> list[slice]:
    ends = list(accumulate(sizes))
    return [slice(end - size, end) for end, size in zip(ends, sizes)]
