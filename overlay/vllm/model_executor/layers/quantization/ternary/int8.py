# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Modules that a ternary checkpoint stores as int8, through kernels that exist.

Tensors of such a module: `weight` int8 [N, K] and `weight_scale` [N, 1] (block size
"row") or [N, ceil(K / block)], W = scale * weight. Which kernel computes it:

- `activation_bits` absent, CUDA: vLLM's weight-only kernels (Marlin, Machete).
- `activation_bits` absent, CPU: torch's weight-only kernel, block by block. vLLM's
  CPU build has none for 8 bits.
- `activation_bits` 8, either device, one scale a row: vLLM's W8A8 kernels, which
  quantize the inputs that a rank holds, token by token.

The weight stays int8 in memory in all of them.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F

from vllm.model_executor.kernels.linear import (
    CPUInt8ScaledMMLinearKernel,
    MPLinearLayerConfig,
    TritonInt8ScaledMMLinearKernel,
    choose_mp_linear_kernel,
    init_int8_linear_kernel,
)
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization.utils.ternary_format import (
    SCALE_DTYPES,
    TernaryFormatError,
    block_length,
    check_scale,
    dtype_name,
    num_blocks,
)
from vllm.model_executor.parameter import (
    GroupQuantScaleParameter,
    ModelWeightParameter,
    PackedvLLMParameter,
)
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import current_platform
from vllm.scalar_type import scalar_types
from vllm.utils.torch_utils import set_default_torch_dtype

from .load_report import report_of
from .parameters import (
    SCALE,
    InputCut,
    check_all_loaded,
    checkpoint_name,
    cut_rows_with,
    loaded_kind,
    logical_rows,
    mark_loaded,
    track_loading,
)
from .schemes import Scheme

WEIGHT = "weight"
# torch's CPU kernel reads past the end of shorter rows.
_CPU_K_ALIGN = 32
# What Machete and Marlin both take: 128 rows and 64 inputs, 64 rows and 128 inputs.
_GPU_N_ALIGN, _GPU_K_ALIGN = 128, 128


@register_weight_loader_v2_supported_method
class TernaryInt8LinearMethod(LinearMethodBase):
    """`y = x W^T + bias` with W = scale * w and w int8.

    Args:
        scheme: how the checkpoint stores the layer; its kind is "int8".
        prefix: name of the layer, for messages.
        packed_modules: fused layer name -> names of the checkpoint's modules.

    Raises:
        ValueError: a setting that no kernel computes, and why.

    """

    def __init__(
        self,
        scheme: Scheme,
        prefix: str,
        packed_modules: Mapping[str, list[str]] | None = None,
    ):
        _refuse_unsupported(scheme, prefix)
        self.scheme = scheme
        self.packed_modules = packed_modules or {}
        self.kernel: _Kernel
        if scheme.activation_bits == 8:
            self.kernel = _W8A8Kernel(prefix)
        elif current_platform.is_cpu():
            self.kernel = _CpuWeightOnlyKernel()
        else:
            self.kernel = _GpuWeightOnlyKernel()

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
        rank = layer.tp_rank if input_size_per_partition != input_size else 0
        start = rank * input_size_per_partition
        cut = InputCut(
            start, start + input_size_per_partition, input_size, self.scheme.block_size
        )
        layer.ternary_cut = cut
        layer.ternary_scheme = self.scheme
        layer.ternary_packed_modules = self.packed_modules
        track_loading(layer, extra_weight_attrs["weight_loader"])
        layer.ternary_tensors = [WEIGHT, SCALE]
        layer.logical_widths = output_partition_sizes
        size_n, size_k = sum(output_partition_sizes), cut.local_size_k
        weight = _Int8Parameter(
            cut=cut,
            data=torch.empty(size_n, size_k, dtype=torch.int8),
            weight_loader=MethodType(_load_checked, layer),
        )
        # Whatever the checkpoint's dtype, float32 holds the same value.
        scale = _Int8ScaleParameter(
            cut=cut,
            data=torch.empty(
                size_n, num_blocks(size_k, self.scheme.block_size), dtype=torch.float32
            ),
            weight_loader=MethodType(_load_checked, layer),
        )
        weight.ternary_name, scale.ternary_name = WEIGHT, SCALE
        layer.register_parameter(WEIGHT, weight)
        layer.register_parameter(SCALE, scale)
        layer.ternary_act_dtype = params_dtype
        layer.ternary_size_n, layer.ternary_size_k = size_n, size_k
        layer.ternary_block_size = block_length(size_k, self.scheme.block_size)

    cut_rows_with = staticmethod(cut_rows_with)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        report_of(layer)
        scale = getattr(layer, SCALE).data
        layer.ternary_device = scale.device
        if check_all_loaded(layer):
            check_scale(
                scale,
                (scale.shape[0],),
                layer.ternary_size_k,
                layer.ternary_block_size,
                name=f"{layer.prefix}.{SCALE}",
            )
        else:
            scale.abs_()
        self.kernel.prepare(layer)

    def apply(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute x [..., K] of any strides: [..., N] in the dtype of x."""
        rows = x.reshape(-1, x.size(-1))
        if layer.ternary_cut.lead:
            rows = F.pad(rows, (layer.ternary_cut.lead, 0))
        out = self.kernel.apply(layer, rows.contiguous(), bias)
        return out.view(*x.shape[:-1], layer.ternary_size_n)


class _Int8Parameter(ModelWeightParameter):
    """int8 [N, K of this rank], with zeros in front where a block is cut."""

    def __init__(self, cut: InputCut, **kwargs: Any):
        super().__init__(input_dim=1, output_dim=0, **kwargs)
        self.cut = cut

    def load_row_parallel_weight(self, loaded_weight: torch.Tensor) -> None:
        part = loaded_weight[:, self.cut.start : self.cut.stop]
        self.data.copy_(F.pad(part, (self.cut.lead, 0)))


class _Int8ScaleParameter(GroupQuantScaleParameter):
    """float32 [N, blocks], cut in step with the weight."""

    def __init__(self, cut: InputCut, **kwargs: Any):
        super().__init__(input_dim=1, output_dim=0, **kwargs)
        self.cut = cut

    def load_row_parallel_weight(self, loaded_weight: torch.Tensor) -> None:
        self.data.copy_(self.cut.of_scale(loaded_weight))


def _load_checked(
    layer: torch.nn.Module,
    param: torch.nn.Parameter,
    loaded_weight: torch.Tensor,
    *shard: Any,
    **kwargs: Any,
) -> None:
    """Check a tensor of the checkpoint against the layer, then let vLLM cut it.

    Raises:
        TernaryFormatError: wrong dtype or shape, naming the tensor and the remedy.

    """
    shard_id = shard[0] if shard else kwargs.get("loaded_shard_id")
    module, block = checkpoint_name(layer, shard_id), layer.ternary_scheme.block_size
    kind = loaded_kind(param, module)
    name = f"{module}.{kind}"
    rows, size_k = logical_rows(layer, shard_id), layer.input_size
    if rows is None and loaded_weight.ndim:
        rows = loaded_weight.shape[0]
    rows = rows or 1
    if kind == WEIGHT:
        if loaded_weight.dtype != torch.int8 or loaded_weight.shape != (rows, size_k):
            raise TernaryFormatError(
                name,
                f"is {dtype_name(loaded_weight.dtype)} {list(loaded_weight.shape)}, "
                f"expected int8 {[rows, size_k]}",
                "Make module_overrides in quantization_config say how it is stored",
            )
    else:
        if block == "row" and loaded_weight.shape == (rows,):
            loaded_weight = loaded_weight.unsqueeze(1)
        if loaded_weight.dtype in SCALE_DTYPES:
            loaded_weight = loaded_weight.float()
        check_scale(loaded_weight, (rows,), size_k, block, values=False, name=name)
    layer.ternary_layer_loader(layer, param, loaded_weight, *shard, **kwargs)
    mark_loaded(layer, kind, shard_id)


class _Kernel(ABC):
    """How one layer is computed, once it is loaded."""

    @abstractmethod
    def prepare(self, layer: torch.nn.Module) -> None:
        """Bring the layer's int8 weight and scale into the kernel's layout."""

    @abstractmethod
    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Compute x [M, K]: [M, N]."""


class _CpuWeightOnlyKernel(_Kernel):
    """torch's int8 weight-only product, one call for each block along K."""

    def prepare(self, layer: torch.nn.Module) -> None:
        weight, scale = getattr(layer, WEIGHT).data, getattr(layer, SCALE).data
        size_k, blocks = layer.ternary_size_k, scale.shape[1]
        block = layer.ternary_block_size if blocks > 1 else size_k
        padded = -(-block // _CPU_K_ALIGN) * _CPU_K_ALIGN
        # [blocks, N, padded]: each block is a matrix of its own.
        out = weight.new_zeros(blocks, weight.shape[0], padded)
        for i in range(blocks):
            part = weight[:, i * block : (i + 1) * block]
            out[i, :, : part.shape[1]] = part
        replace_parameter(layer, WEIGHT, out)
        replace_parameter(layer, SCALE, scale.t().contiguous())
        layer.ternary_int8_block = block

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        weight, scale = getattr(layer, WEIGHT), getattr(layer, SCALE)
        blocks, _, padded = weight.shape
        block = layer.ternary_int8_block
        x = F.pad(x, (0, blocks * block - x.shape[1])).view(-1, blocks, block)
        x = F.pad(x, (0, padded - block))
        out = torch.zeros(x.shape[0], weight.shape[1], dtype=torch.float32)
        for i in range(blocks):
            # A scale in bfloat16 would lose bits; those of the sum matter less.
            unit = x.dtype == torch.bfloat16
            factor = torch.ones_like(scale[i]) if unit else scale[i]
            part = torch.ops.aten._weight_int8pack_mm(
                x[:, i].contiguous(), weight[i], factor.to(x.dtype)
            ).float()
            out += part * scale[i] if unit else part
        if bias is not None:
            out += bias
        return out.to(x.dtype)


class _GpuWeightOnlyKernel(_Kernel):
    """vLLM's mixed-precision kernels, in the layout of compressed-tensors.

    They take whole tiles and blocks of 32, 64 or 128: zeros make up the rest, and
    larger blocks are several of these.
    """

    def prepare(self, layer: torch.nn.Module) -> None:
        weight, scale = getattr(layer, WEIGHT).data, getattr(layer, SCALE).data
        size_n, size_k = weight.shape
        padding, pad_n = -size_k % _GPU_K_ALIGN, -size_n % _GPU_N_ALIGN
        group, blocks = -1, 1
        if scale.shape[1] > 1:
            block = layer.ternary_block_size
            group = math.gcd(block, _GPU_K_ALIGN)
            if group < 32:
                raise ValueError(
                    f"{layer.prefix}: no int8 kernel of vLLM takes block size {block}. "
                    'Multiples of 32 and "row" are what a GPU computes.'
                )
            blocks = (size_k + padding) // group
            scale = scale.repeat_interleave(block // group, 1)
        # The last block may reach past what the padding reaches.
        scale = F.pad(scale, (0, blocks - scale.shape[1], 0, pad_n))
        shape = (size_k + padding, size_n + pad_n)
        config = MPLinearLayerConfig(
            full_weight_shape=shape,
            partition_weight_shape=shape,
            weight_type=scalar_types.uint8b128,
            act_type=layer.ternary_act_dtype,
            group_size=group,
            zero_points=False,
        )
        try:
            kernel_type = choose_mp_linear_kernel(config)
        except ValueError as e:
            raise ValueError(
                f"{layer.prefix}: no int8 kernel of vLLM takes it. {e}"
            ) from None
        # Four weights, offset by 128, little-endian in an int32.
        packed = F.pad(weight, (0, padding, 0, pad_n)).view(torch.uint8) ^ 0x80
        packed = packed.contiguous().view(torch.int32)
        delattr(layer, WEIGHT)
        loader: dict[str, Any] = {"weight_loader": _never_loads}
        layer.register_parameter(
            "weight_packed",
            PackedvLLMParameter(
                data=packed,
                input_dim=1,
                output_dim=0,
                packed_dim=1,
                packed_factor=4,
                **loader,
            ),
        )
        layer.register_parameter(
            SCALE,
            GroupQuantScaleParameter(
                data=scale.to(layer.ternary_act_dtype),
                input_dim=1,
                output_dim=0,
                **loader,
            ),
        )
        layer.ternary_int8_padding = padding
        self.kernel = kernel_type(
            config, w_q_param_name="weight_packed", w_s_param_name=SCALE
        )
        # Marlin would permute the layer's own bias, whose length need not fit.
        bias, layer.bias = getattr(layer, "bias", None), None
        self.kernel.process_weights_after_loading(layer)
        layer.bias = bias

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if layer.ternary_int8_padding:
            x = F.pad(x, (0, layer.ternary_int8_padding))
        y = self.kernel.apply_weights(layer, x, None)[:, : layer.ternary_size_n]
        return y.contiguous() if bias is None else y + bias


class _W8A8Kernel(_Kernel):
    """vLLM's int8 kernels with activations quantized per token (one scale a row)."""

    def __init__(self, prefix: str):
        self.kernel = init_int8_linear_kernel(
            is_channelwise=True,
            is_static_input_scheme=False,
            input_symmetric=True,
            module_name="TernaryInt8LinearMethod",
        )
        if current_platform.is_cuda() and current_platform.has_device_capability(100):
            # vLLM chooses CUTLASS there, too, which has no int8 product for it.
            self.kernel = TritonInt8ScaledMMLinearKernel(
                self.kernel.config, self.kernel.layer_param_names
            )

    def prepare(self, layer: torch.nn.Module) -> None:
        for name in ("input_scale", "input_zero_point"):
            layer.register_parameter(name, None)
        if not hasattr(layer, "azp_adj"):
            layer.register_parameter("azp_adj", None)
        kernel, dtype = self.kernel, layer.ternary_act_dtype
        # oneDNN's output has the default dtype.
        with set_default_torch_dtype(dtype):
            if (
                isinstance(kernel, CPUInt8ScaledMMLinearKernel)
                and dtype == torch.float32
            ):
                # The AMX kernel, which it would choose, takes 16-bit activations only.
                kernel.linear_method = kernel._apply_weights_onednn
                kernel.process_weights_for_onednn(layer)
            else:
                kernel.process_weights_after_loading(layer)

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return self.kernel.apply_weights(layer, x, bias)


def _never_loads(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("a tensor in the layout of a kernel cannot be loaded")


def _refuse_unsupported(scheme: Scheme, prefix: str) -> None:
    """Raises ValueError for an int8 scheme that no kernel computes, saying why."""
    where = f"quantization_config: {prefix} is int8 with"
    if scheme.zero_point:
        raise ValueError(
            f"{where} zero_point, which the int8 kernels do not take. Give it "
            '"zero_point": false in module_overrides.'
        )
    if scheme.input_norm is not None:
        raise ValueError(f"{where} input_norm, which only ternary modules have.")
    if scheme.block_size == "tensor":
        raise ValueError(
            f'{where} block_size "tensor"; store the scale once a row and set "row".'
        )
    if scheme.activation_bits == 8 and scheme.block_size != "row":
        raise ValueError(
            f"{where} block_size {scheme.block_size} and activation_bits 8: vLLM's "
            'W8A8 kernels take one scale a row. Set "block_size": "row", or leave '
            "activation_bits out for this module."
        )
