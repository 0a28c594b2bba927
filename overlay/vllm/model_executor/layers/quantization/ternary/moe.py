# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Mixture-of-experts layers with ternary experts: parameters and their loading.

How the experts are computed is in `moe_forward.py`.
"""

from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.fused_moe.activation import (
    apply_moe_activation_supported,
)
from vllm.model_executor.layers.fused_moe.config import (
    FUSED_MOE_UNQUANTIZED_CONFIG,
    FusedMoEConfig,
    FusedMoEQuantConfig,
)
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import (
    FusedMoEMethodBase,
)
from vllm.model_executor.layers.quantization.utils.ternary_format import (
    TernaryFormatError,
    block_length,
    num_blocks,
    packed_width,
)
from vllm.model_executor.layers.quantization.utils.ternary_layout import (
    decode_layout,
    encode_layout,
)
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import current_platform

from .checkpoint_files import loads_no_tensors
from .load_report import report_of
from .moe_forward import CPU_ACTIVATIONS, Projection, ternary_experts
from .parameters import (
    PACKED,
    SCALE,
    TENSORS,
    ZERO_POINT,
    InputCut,
    check_values,
    checked_tensor,
    loaded_kind,
    not_ternary,
    warn_reserved,
)
from .schemes import (
    UNQUANTIZED,
    Scheme,
    SchemeTable,
    TernaryConfigError,
    matches_not_convert,
)

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExperts

PROJECTIONS = ("w13", "w2")


def expert_schemes(
    table: SchemeTable, layer: "RoutedExperts", prefix: str
) -> dict[str, Scheme]:
    """The schemes of the two fused projections of a layer's experts.

    Returns:
        {"w13": scheme, "w2": scheme}; one kind for both.

    Raises:
        TernaryConfigError: experts that one kernel cannot compute together.

    """
    if table.explicit(prefix) is None and matches_not_convert(
        prefix, table.not_convert
    ):
        return dict.fromkeys(PROJECTIONS, UNQUANTIZED)
    schemes = {}
    for projection, names in _checkpoint_modules(layer).items():
        found: dict[Scheme, str] = {}
        for expert in range(layer.moe_config.num_logical_experts):
            for name in names:
                module = f"{prefix}.{expert}.{name}"
                found.setdefault(table.scheme(module), module)
        if len(found) > 1:
            listed = "; ".join(f"{m}: {s.describe()}" for s, m in found.items())
            raise TernaryConfigError(
                f"{prefix} holds experts that are stored differently ({listed}). Give "
                f"{' and '.join(names)} of all experts of a layer one setting in "
                "modules_to_not_convert or module_overrides."
            )
        schemes[projection] = next(iter(found))
    kinds = {projection: s.kind for projection, s in schemes.items()}
    if len(set(kinds.values())) > 1 or "int8" in kinds.values():
        raise TernaryConfigError(
            f"{prefix}: the experts' projections are {kinds}; they must all be ternary "
            "or all be unquantized. vLLM's int8 experts are not wired to this method."
        )
    return schemes


def _checkpoint_modules(layer: "RoutedExperts") -> dict[str, list[str]]:
    """Names in the checkpoint of the modules that each projection fuses."""
    gate_up = [layer.ckpt_gate_proj_name]
    if layer.ckpt_up_proj_name is not None:
        gate_up.append(layer.ckpt_up_proj_name)
    return {"w13": gate_up, "w2": [layer.ckpt_down_proj_name]}


class TernaryMoEMethod(FusedMoEMethodBase):
    """Experts with weights in {-1, 0, +1}, kept two bits a weight.

    `w13` (gate and up, [E, 2 I, H]) is cut along its rows by tensor parallelism and
    `w2` (down, [E, H, I]) along its inputs, on any element; expert parallelism
    distributes whole experts.

    Args:
        moe: vLLM's description of the layer.
        schemes: how the checkpoint stores "w13" and "w2".
        strict: refuse the reserved code 3 instead of reading it as 0.

    Raises:
        ValueError: a feature that ternary experts do not have, and why.

    """

    def __init__(
        self, moe: FusedMoEConfig, schemes: dict[str, Scheme], strict: bool = False
    ):
        super().__init__(moe)
        self.schemes = schemes
        self.strict = strict
        _refuse_unsupported(moe, schemes)

    def create_weights(
        self,
        layer: "RoutedExperts",
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        if hidden_size != self.moe.hidden_dim_unpadded:
            raise ValueError(
                f"{layer.layer_name}: the communication backend pads the hidden size "
                f"{self.moe.hidden_dim_unpadded} to {hidden_size}, which ternary "
                "experts do not support. Choose another all2all_backend."
            )
        shards = self.moe.w13_num_shards
        rank, local = self.moe.tp_rank, intermediate_size_per_partition
        full = local * self.moe.tp_size
        block = {name: self.schemes[name].block_size for name in PROJECTIONS}
        layer.ternary_cuts = {
            "w13": InputCut(0, hidden_size, hidden_size, block["w13"]),
            "w2": InputCut(rank * local, (rank + 1) * local, full, block["w2"]),
        }
        # (rows on this rank, rows and inputs of one module in the checkpoint)
        layer.ternary_sizes = {
            "w13": (shards * local, full, hidden_size),
            "w2": (hidden_size, hidden_size, full),
        }
        layer.ternary_schemes = self.schemes
        layer.ternary_loaded = set()
        for projection in PROJECTIONS:
            self._create_projection(layer, projection, num_experts)
            setattr(layer, f"{projection}_weight", _UnquantizedWeight(layer))
        if self.moe.has_bias:
            rows = {"w13": shards * local, "w2": hidden_size}
            for projection in PROJECTIONS:
                bias = torch.nn.Parameter(
                    torch.zeros(num_experts, rows[projection], dtype=params_dtype),
                    requires_grad=False,
                )
                bias.weight_loader = extra_weight_attrs["weight_loader"]
                layer.register_parameter(f"{projection}_bias", bias)

    def _create_projection(
        self, layer: "RoutedExperts", projection: str, num_experts: int
    ) -> None:
        scheme = self.schemes[projection]
        size_k = layer.ternary_cuts[projection].local_size_k
        rows = layer.ternary_sizes[projection][0]
        width = num_blocks(size_k, scheme.block_size)
        tensors = {
            PACKED: (torch.uint8, packed_width(size_k)),
            SCALE: (getattr(torch, scheme.scale_dtype), width),
        }
        if scheme.zero_point:
            tensors[ZERO_POINT] = (torch.float32, width)
        for name, (dtype, columns) in tensors.items():
            param = torch.nn.Parameter(
                torch.empty(num_experts, rows, columns, dtype=dtype),
                requires_grad=False,
            )
            param.weight_loader = MethodType(_load_expert, layer)
            param.ternary_name = name
            # What vLLM's loader calls a scale per group of inputs.
            param.quant_method = "group"
            layer.register_parameter(f"{projection}_{name}", param)

    def get_fused_moe_quant_config(
        self, layer: "RoutedExperts"
    ) -> FusedMoEQuantConfig | None:
        return FUSED_MOE_UNQUANTIZED_CONFIG

    def process_weights_after_loading(self, layer: "RoutedExperts") -> None:
        report_of(layer)
        loaded = _check_all_loaded(layer)
        layer.ternary_device = layer.w13_packed_ternary_weight.device
        for projection in PROJECTIONS:
            tensors: list[Any] = [
                p.data if (p := _tensor(layer, projection, name)) is not None else None
                for name in TENSORS
            ]
            size_k = layer.ternary_cuts[projection].local_size_k
            block = block_length(size_k, self.schemes[projection].block_size)
            if loaded:
                name = f"{layer.layer_name}.{projection}"
                packed, scale, zero_point = tensors
                check_values(
                    packed,
                    scale,
                    zero_point,
                    size_k,
                    block,
                    strict=self.strict,
                    name=name,
                )
            else:
                tensors[1].abs_()
            bits = self.schemes[projection].activation_bits
            if bits == 8 and tensors[1].dtype == torch.bfloat16:
                # Exact; the integer kernels have no bfloat16 scale.
                tensors[1] = tensors[1].float()
            for name, tensor in zip(
                TENSORS, _encode_experts(tensors, size_k, block), strict=True
            ):
                if tensor is not None:
                    replace_parameter(layer, f"{projection}_{name}", tensor)
        if self.moe.has_bias and self.moe.tp_rank:
            # The ranks' outputs are added up: one of them brings the bias.
            layer.w2_bias.data.zero_()

    def apply(
        self,
        layer: "RoutedExperts",
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: "SharedExperts | None",
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """X [M, H] and its routing [M, T] -> the weighted sum of the experts [M, H]."""
        return ternary_experts(
            x,
            topk_weights,
            topk_ids,
            layer.expert_map,
            self.projection(layer, "w13"),
            self.projection(layer, "w2"),
            self.moe,
            layer.apply_router_weight_on_input,
        )

    def projection(self, layer: "RoutedExperts", name: str) -> Projection:
        """One of the layer's projections, as the computation takes it."""
        cut, scheme = layer.ternary_cuts[name], self.schemes[name]
        return Projection(
            weight=_tensor(layer, name, PACKED),
            scale=_tensor(layer, name, SCALE),
            zero_point=_tensor(layer, name, ZERO_POINT),
            bias=getattr(layer, f"{name}_bias", None),
            size_n=layer.ternary_sizes[name][0],
            size_k=cut.local_size_k,
            block_size=block_length(cut.local_size_k, scheme.block_size),
            activation_bits=scheme.activation_bits or 16,
            lead=cut.lead,
        )

    def unpacked_weight(
        self, layer: "RoutedExperts", projection: str
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The tensors of "w13" or "w2" back in the checkpoint's layout, bit for bit.

        Returns:
            (packed uint8 [E, N, ceil(K / 4)], scale [E, N, blocks], zero point or
            None) of this rank.

        """
        p = self.projection(layer, projection)
        experts = [
            decode_layout(
                p.weight.data[e],
                p.scale.data[e],
                None if p.zero_point is None else p.zero_point.data[e],
                p.size_n,
                p.size_k,
                p.block_size,
            )
            for e in range(p.weight.shape[0])
        ]
        packed, scale, zero_point = zip(*experts, strict=True)
        return (
            torch.stack(packed),
            torch.stack(scale).to(getattr(torch, self.schemes[projection].scale_dtype)),
            None if p.zero_point is None else torch.stack(zero_point),
        )


def _tensor(layer: torch.nn.Module, projection: str, name: str) -> Any:
    return getattr(layer, f"{projection}_{name}", None)


def _encode_experts(
    tensors: list[Any], size_k: int, block: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Every expert in the layout of the kernels, [E, ...]; one expert at a time, so
    that the temporaries stay small."""
    out: list[Any] = [None, None, None]
    for e in range(tensors[0].shape[0]):
        packed, scale, zero_point = (None if t is None else t[e] for t in tensors)
        encoded = encode_layout(packed, scale, zero_point, size_k, block)
        for i, tensor in enumerate(encoded):
            if tensor is not None:
                if out[i] is None:
                    out[i] = tensor.new_empty(tensors[0].shape[0], *tensor.shape)
                out[i][e] = tensor
    return out[0], out[1], out[2]


def _load_expert(
    layer: "RoutedExperts",
    param: torch.nn.Parameter,
    loaded_weight: torch.Tensor,
    weight_name: str,
    shard_id: str,
    expert_id: int,
    return_success: bool = False,
) -> bool | None:
    """Load one tensor of one expert: checked, then cut to this rank's part.

    vLLM's own loader cuts w13 by rows; inputs of w2 are cut by `InputCut`, in step
    for packed weight and scale.

    Raises:
        TernaryFormatError: wrong dtype or shape, naming the tensor and the remedy.

    """
    local = layer._map_global_expert_id_to_local_expert_id(expert_id)
    if local == -1:
        return False if return_success else None
    projection = "w2" if shard_id == "w2" else "w13"
    kind = loaded_kind(param, layer.layer_name)
    _, rows, size_k = layer.ternary_sizes[projection]
    module = {
        "w1": layer.ckpt_gate_proj_name,
        "w2": layer.ckpt_down_proj_name,
        "w3": layer.ckpt_up_proj_name,
    }[shard_id]
    tensor = f"{layer.layer_name}.{expert_id}.{module}.{kind}"
    block = layer.ternary_schemes[projection].block_size
    loaded_weight = checked_tensor(
        kind,
        loaded_weight,
        (rows, size_k),
        block,
        param.dtype,
        strict=layer.quant_method.strict,
        name=tensor,
    )
    layer.ternary_loaded.add((local, shard_id, kind))
    if projection == "w13":
        return type(layer).weight_loader(
            layer,
            param,
            loaded_weight,
            weight_name,
            shard_id,
            expert_id,
            return_success,
        )
    cut = layer.ternary_cuts["w2"]
    # A reload counts the elements that are copied, to know when a layer is complete:
    # the copies inside the cut are none of the parameter's.
    with _disable_current_modes():
        if kind == PACKED:
            part = rows * (cut.stop - cut.start)
            warn_reserved(cut.reserved_codes(loaded_weight), part, tensor)
        slice_inputs = cut.of_packed if kind == PACKED else cut.of_scale
        part = slice_inputs(loaded_weight)
    param.data[local].copy_(part)
    return True if return_success else None


_load_expert.supports_moe_loading = True  # type: ignore[attr-defined]


class _UnquantizedWeight:
    """Where vLLM looks for the parameter of an expert that is not ternary."""

    def __init__(self, layer: "RoutedExperts"):
        self._name = layer.layer_name

    def weight_loader(
        self, param: Any, loaded_weight: torch.Tensor, **kwargs: Any
    ) -> bool:
        """Raises TernaryFormatError, naming the expert."""
        raise not_ternary(
            f"{self._name}, expert {kwargs['expert_id']}, {kwargs['shard_id']}",
            loaded_weight,
            "convert the model to one module for each expert",
        )


def _check_all_loaded(layer: "RoutedExperts") -> bool:
    """Whether the experts came from a checkpoint (else a loader that has none).

    Raises:
        TernaryFormatError: the checkpoint lacks tensors, by name.

    """
    loaded, layer.ternary_loaded = layer.ternary_loaded, set()
    if not loaded and loads_no_tensors():
        return False
    names = {"w1": layer.ckpt_gate_proj_name, "w2": layer.ckpt_down_proj_name}
    if layer.ckpt_up_proj_name is not None:
        names["w3"] = layer.ckpt_up_proj_name
    missing = [
        f"{layer.layer_name}.<local expert {expert}>.{module}.{kind}"
        for expert in range(layer.local_num_experts)
        for shard, module in names.items()
        for kind in TENSORS
        if _tensor(layer, "w2" if shard == "w2" else "w13", kind) is not None
        and (expert, shard, kind) not in loaded
    ]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise TernaryFormatError(
            ", ".join(missing[:3]) + more,
            "missing from the checkpoint",
            "Convert the model again, or name the experts in modules_to_not_convert if "
            "they are stored unquantized",
        )
    return True


def _refuse_unsupported(moe: FusedMoEConfig, schemes: dict[str, Scheme]) -> None:
    """Raises ValueError for what ternary experts cannot do, saying why."""
    if any(scheme.input_norm for scheme in schemes.values()):
        raise ValueError(
            "quantization_config: input_norm is not supported for the experts of a "
            "mixture-of-experts layer."
        )
    if schemes["w2"].activation_bits and moe.tp_size > 1:
        raise ValueError(
            f"tensor_parallel_size is {moe.tp_size}: experts with activation_bits 8 "
            "quantize a token over all inputs of the down projection, which tensor "
            "parallelism would cut. Add --enable-expert-parallel."
        )
    if moe.dp_size > 1:
        raise ValueError(
            f"data_parallel_size is {moe.dp_size}: ternary experts run under tensor, "
            "expert and pipeline parallelism only, because the data-parallel exchange "
            "of tokens needs a modular MoE kernel. Set data_parallel_size to 1."
        )
    cpu = current_platform.is_cpu()
    if cpu and (moe.activation not in CPU_ACTIVATIONS or moe.swiglu_limit is not None):
        raise ValueError(
            f"Ternary experts on the CPU do not compute the activation "
            f"{moe.activation.value!r}"
            + (" with a limit" if moe.swiglu_limit is not None else "")
            + f", only {[a.value for a in CPU_ACTIVATIONS]}."
        )
    if not cpu and not apply_moe_activation_supported(moe.activation):
        raise ValueError(
            f"vLLM does not compute the activation {moe.activation.value!r} outside a "
            "fused kernel, so ternary experts cannot use it."
        )
    config = get_current_vllm_config_or_none()
    lora = None if config is None else config.lora_config
    if moe.is_lora_enabled and lora is not None:
        targets = lora.target_modules
        if targets is None or any("expert" in t or "gate_up" in t for t in targets):
            raise ValueError(
                "LoRA on ternary experts is not supported: vLLM's MoE adapters need a "
                "modular MoE kernel. Name the modules that adapters may change in "
                "--lora-target-modules, such as qkv_proj and o_proj."
            )
