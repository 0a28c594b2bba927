# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Parameters of a ternary layer in the layout of the checkpoint, and their loading.

The packed weight, the scale and the zero point of a layer are cut in step. Cuts
along the output dimension are vLLM's own (rows are never packed together); cuts
along the input dimension are `load_row_parallel_weight` here, because a rank's
first input may lie inside a byte or inside a block.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch

from vllm.logger import init_logger
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.quantization.utils.ternary_format import (
    BlockSize,
    TernaryFormatError,
    check_codes,
    check_packed,
    check_scale,
    check_zero_point,
    dtype_name,
    lead_padding,
    num_blocks,
    packed_width,
    slice_k,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    VocabParallelEmbedding,
)
from vllm.model_executor.parameter import (
    BasevLLMParameter,
    GroupQuantScaleParameter,
    PackedvLLMParameter,
)

from .checkpoint_files import loads_no_tensors
from .schemes import Scheme

logger = init_logger(__name__)

PACKED = "packed_ternary_weight"
SCALE = "weight_scale"
ZERO_POINT = "weight_zero_point"
TENSORS = (PACKED, SCALE, ZERO_POINT)  # of any layer; a scheme may add a norm
BIAS = "bias"

_SHARD_INDEX = {"q": 0, "k": 1, "v": 2}


# Layers whose loaders cut as their sizes say; a model's own class may do otherwise.
_GENERIC_LAYERS = (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)


@dataclass(frozen=True)
class InputCut:
    """Inputs [start, stop) of the K in the checkpoint, those of one rank.

    The rank's first block may begin before `start`: the parameters then hold `lead`
    codes of value 0 in front, and activations are padded by as many zeros. Nothing
    is rescaled or rounded.
    """

    start: int
    stop: int
    size_k: int
    block_size: BlockSize

    @property
    def lead(self) -> int:
        return lead_padding(self.start, self.stop, self.size_k, self.block_size)

    @property
    def local_size_k(self) -> int:
        """Inputs that the parameters hold, `lead` included."""
        return self.lead + self.stop - self.start

    def of_packed(self, packed: torch.Tensor) -> torch.Tensor:
        """This rank's part of a packed weight, uint8 [N, ceil(K / 4)]."""
        # Weight and scale arrive one at a time: an empty partner stands in for the
        # other one, so that a single function decides where both are cut.
        scale = torch.empty(0, num_blocks(self.size_k, self.block_size))
        return self._slice(packed, scale).packed

    def of_scale(self, scale: torch.Tensor) -> torch.Tensor:
        """This rank's part of a scale or zero point [N, blocks]."""
        packed = torch.empty(0, packed_width(self.size_k), dtype=torch.uint8)
        return self._slice(packed, scale).scale

    def reserved_codes(self, packed: torch.Tensor) -> int:
        """Reserved codes of this rank that `of_packed` reads as 0, because it cuts
        inside a byte; others are still there afterwards."""
        if (self.start - self.lead) % 4 == 0:
            return 0
        before, upto = (
            check_codes(packed[..., : packed_width(k)], k)
            for k in (self.start, self.stop)
        )
        return upto - before

    def _slice(self, packed: torch.Tensor, scale: torch.Tensor) -> Any:
        block = "row" if self.block_size == "tensor" else self.block_size
        return slice_k(packed, scale, None, self.size_k, block, self.start, self.stop)


class TernaryWeightParameter(PackedvLLMParameter):
    """Packed weight, uint8 [N, ceil(K / 4)]: four codes along K a byte."""

    def __init__(self, cut: InputCut, **kwargs: Any):
        super().__init__(
            packed_factor=4, packed_dim=1, input_dim=1, output_dim=0, **kwargs
        )
        self.cut = cut

    def load_row_parallel_weight(self, loaded_weight: torch.Tensor) -> None:
        self.data.copy_(self.cut.of_packed(loaded_weight))


class TernaryScaleParameter(GroupQuantScaleParameter):
    """Scale or zero point, [N, blocks], cut in step with the packed weight."""

    def __init__(self, cut: InputCut, **kwargs: Any):
        super().__init__(input_dim=1, output_dim=0, **kwargs)
        self.cut = cut

    def load_row_parallel_weight(self, loaded_weight: torch.Tensor) -> None:
        self.data.copy_(self.cut.of_scale(loaded_weight))


def register_parameters(
    layer: torch.nn.Module,
    scheme: Scheme,
    size_n: int,
    size_k: int,
    weight_loader: MethodType,
) -> None:
    """Create the parameters of one layer as the checkpoint stores them.

    Registers `packed_ternary_weight` uint8 [N, ceil(K / 4)], `weight_scale`
    [N, blocks] and, with a zero point, `weight_zero_point` float32 [N, blocks], where
    N and K are this rank's. One scale for a whole tensor is loaded as one a row,
    because a fused layer has one for each of its parts. Sets `layer.ternary_cut`, and
    `layer.ternary_tensors`, the names that a checkpoint must have.

    Args:
        layer: a linear layer or a vocabulary embedding.
        scheme: how the checkpoint stores it.
        size_n: rows of this rank.
        size_k: inputs of this rank.
        weight_loader: vLLM's loader of the layer, which decides the cut.

    """
    # Only row-parallel layers hold fewer inputs than the checkpoint has.
    rank = layer.tp_rank if size_k != layer.input_size else 0
    start = rank * size_k
    cut = InputCut(start, start + size_k, layer.input_size, scheme.block_size)
    layer.ternary_cut = cut
    track_loading(layer, weight_loader)
    width = num_blocks(cut.local_size_k, scheme.block_size)
    tensors: dict[str, tuple[Any, torch.dtype, int]] = {
        PACKED: (TernaryWeightParameter, torch.uint8, packed_width(cut.local_size_k)),
        SCALE: (TernaryScaleParameter, getattr(torch, scheme.scale_dtype), width),
    }
    if scheme.zero_point:
        tensors[ZERO_POINT] = (TernaryScaleParameter, torch.float32, width)
    layer.ternary_tensors = list(tensors)
    for name, (cls, dtype, columns) in tensors.items():
        param = cls(
            cut=cut,
            data=torch.empty(size_n, columns, dtype=dtype),
            weight_loader=MethodType(_load_checked, layer),
        )
        param.ternary_name = name
        layer.register_parameter(name, param)


def _load_checked(
    layer: torch.nn.Module,
    param: BasevLLMParameter,
    loaded_weight: torch.Tensor,
    *shard: Any,
    **kwargs: Any,
) -> None:
    """Check a tensor of the checkpoint against the layer, then let vLLM cut it.

    Raises:
        TernaryFormatError: wrong dtype or shape, naming the tensor and the remedy.

    """
    shard_id = shard[0] if shard else kwargs.get("loaded_shard_id")
    block = layer.ternary_scheme.block_size
    kind = loaded_kind(param, checkpoint_name(layer, shard_id))
    tensor = f"{checkpoint_name(layer, shard_id)}.{kind}"
    rows, size_k = logical_rows(layer, shard_id), layer.input_size
    one_for_all = block == "tensor" and kind != PACKED
    if rows is None:  # a scale for all is spread over as many as any shard can need
        rows = layer.output_size if one_for_all else loaded_weight.shape[0]
    loaded_weight = checked_tensor(
        kind,
        loaded_weight,
        (rows, size_k),
        block,
        param.dtype,
        strict=layer.quant_method.strict,
        name=tensor,
    )
    if kind == PACKED:
        cut = layer.ternary_cut
        part = loaded_weight.shape[0] * (cut.stop - cut.start)
        warn_reserved(cut.reserved_codes(loaded_weight), part, tensor)
    layer.ternary_layer_loader(layer, param, loaded_weight, *shard, **kwargs)
    mark_loaded(layer, kind, shard_id)


def loaded_kind(param: torch.nn.Parameter, module: str) -> str:
    """Last name of the checkpoint's tensor that a parameter is for.

    Raises:
        RuntimeError: the parameter is in the layout of the kernels already.

    """
    if not hasattr(param, "ternary_name"):
        raise RuntimeError(
            f"{module} is loaded, in the layout of its kernel, which takes no tensor "
            "of a checkpoint. Give new weights to reload_weights of the workers "
            "(weights_iterator or weights_path), not to load_weights of the model."
        )
    return param.ternary_name


def check_values(
    packed: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    size_k: int,
    block_size: int,
    *,
    strict: bool,
    name: str,
) -> None:
    """Refuse impossible scales and, if strict, reserved codes, of which it warns else.

    Args:
        packed: uint8 [..., N, ceil(K / 4)].
        scale: [..., N, blocks].
        zero_point: the same, or None.
        size_k: K of this rank.
        block_size: weights along K that share a scale.
        strict: refuse reserved codes.
        name: of the module, for messages.

    Raises:
        TernaryFormatError: names the tensor, the row and block, and the value.

    """
    leading, tensor = packed.shape[:-1], f"{name}.{PACKED}"
    reserved = check_codes(packed, size_k, strict=strict, name=tensor)
    warn_reserved(reserved, leading.numel() * size_k, tensor)
    check_scale(scale, leading, size_k, block_size, name=f"{name}.{SCALE}")
    if zero_point is not None:
        check_zero_point(
            zero_point, leading, size_k, block_size, name=f"{name}.{ZERO_POINT}"
        )


def warn_reserved(count: int, weights: int, name: str) -> None:
    """Log that a tensor has reserved codes, if it has."""
    if count:
        logger.warning(
            "%s: %d of %d weights have the reserved code 3; they are read as 0. Set "
            "`strict` in quantization_config to refuse such a checkpoint.",
            name,
            count,
            weights,
        )


def checked_tensor(
    kind: str,
    loaded: torch.Tensor,
    shape: tuple[int, int],
    block_size: BlockSize,
    dtype: torch.dtype,
    *,
    strict: bool,
    name: str,
) -> torch.Tensor:
    """A checked tensor of the checkpoint, with scales for each row of the weight.

    Args:
        kind: one of `TENSORS`.
        loaded: as the checkpoint stores it.
        shape: (N, K) of the whole weight, before any cut.
        block_size: weights along K that share a scale.
        dtype: of the parameter that the tensor is for.
        strict: refuse reserved codes.
        name: of the tensor in the checkpoint.

    Raises:
        TernaryFormatError: wrong dtype, shape or value, naming the tensor.

    """
    rows, size_k = shape
    if kind == PACKED:
        check_packed(loaded, (rows,), size_k, name=name)
        if strict:
            # The whole, because a cut inside a byte reads reserved codes as 0.
            check_codes(loaded, size_k, strict=True, name=name)
        return loaded
    if block_size == "row" and loaded.shape == (rows,):
        loaded = loaded.unsqueeze(1)
    if block_size == "tensor":
        loaded = loaded.reshape(loaded.shape or (1,))
    leading = (rows,)
    options: dict[str, Any] = {"values": False, "name": name}
    if kind == SCALE:
        check_scale(loaded, leading, size_k, block_size, dtype=dtype, **options)
    else:
        check_zero_point(loaded, leading, size_k, block_size, **options)
        check_exact(loaded, dtype, name)
    if block_size == "tensor":
        loaded = loaded.reshape(1, 1).expand(rows, 1)
    return loaded


def check_exact(loaded: torch.Tensor, dtype: torch.dtype, name: str) -> None:
    """Refuse a zero point that the parameter's dtype would round.

    Raises:
        TernaryFormatError: names the tensor and the value.

    """
    if loaded.dtype == dtype:
        return
    changed = loaded.to(dtype).double() != loaded.double()
    if bool(changed.any()):
        raise TernaryFormatError(
            name,
            f"value {loaded[changed][0].item()} is not exact in {dtype_name(dtype)}",
            "Store zero points of at most 2**24 in size, or as float32",
        )


def part_names(layer: torch.nn.Module) -> list[str]:
    """Last names of the checkpoint's modules that the layer fuses, or []."""
    return list(layer.ternary_packed_modules.get(layer.prefix.rpartition(".")[2], ()))


def shard_index(shard_id: Any) -> int | None:
    """Position of a shard among the layer's parts, or None for all of them."""
    index = _SHARD_INDEX.get(shard_id, shard_id)
    return index if isinstance(index, int) else None


def checkpoint_name(layer: torch.nn.Module, shard_id: Any) -> str:
    """Module name in the checkpoint that a shard of the layer comes from."""
    parts = part_names(layer)
    index = shard_index(shard_id)
    if index is not None and index < len(parts):
        return f"{layer.prefix.rpartition('.')[0]}.{parts[index]}".lstrip(".")
    return layer.prefix


def logical_rows(layer: torch.nn.Module, shard_id: Any) -> int | None:
    """Rows that the checkpoint's tensor for this shard must have, before any cut.

    Returns:
        None where only the model's own class knows, as when it replicates a part.

    """
    cutting = next(c for c in type(layer).__mro__ if "weight_loader" in vars(c))
    if cutting not in _GENERIC_LAYERS or hasattr(layer, "ternary_own_rows"):
        return None
    if hasattr(layer, "org_vocab_size"):
        return layer.org_vocab_size
    if hasattr(layer, "total_num_kv_heads"):
        sizes = {
            "q": layer.total_num_heads * layer.head_size,
            "k": layer.total_num_kv_heads * layer.head_size,
            "v": layer.total_num_kv_heads * layer.v_head_size,
        }
        return sum(sizes.values()) if shard_id is None else sizes[shard_id]
    if shard_id is None or not hasattr(layer, "output_sizes"):
        return layer.output_size
    parts = shard_id if isinstance(shard_id, tuple) else (shard_id,)
    return sum(layer.output_sizes[i] for i in parts)


def track_loading(layer: torch.nn.Module, weight_loader: MethodType) -> None:
    """Prepare a layer for `mark_loaded` and `check_all_loaded`.

    Args:
        layer: whose parameters are about to be created.
        weight_loader: vLLM's loader of the layer, kept as `ternary_layer_loader`.

    """
    layer.ternary_loaded = {}
    layer.ternary_layer_loader = weight_loader.__func__
    # A bias, which vLLM creates later, takes its loader from here.
    layer.weight_loader = MethodType(_load_bias, layer)


def cut_rows_with(layer: torch.nn.Module, loader: Callable[..., None]) -> None:
    """Let a model's own `loader(param, tensor)` cut the rows of a loaded tensor.

    For models that replace the weight loader of a layer's parameters, as Mamba2 does to
    repeat its groups on every rank: tensors are still checked first.
    """
    layer.ternary_layer_loader = lambda _, param, tensor: loader(param, tensor)
    layer.ternary_own_rows = True


def _load_bias(
    layer: torch.nn.Module,
    param: torch.nn.Parameter,
    loaded_weight: torch.Tensor,
    *shard: Any,
    **kwargs: Any,
) -> None:
    """Let vLLM load a bias, noting which parts of a fused one came.

    Raises:
        TernaryFormatError: a tensor for which vLLM found no parameter in the layer.

    """
    shard_id = shard[0] if shard else kwargs.get("loaded_shard_id")
    if param is layer:
        raise not_ternary(checkpoint_name(layer, shard_id), loaded_weight)
    type(layer).weight_loader(layer, param, loaded_weight, *shard, **kwargs)
    mark_loaded(layer, BIAS, shard_id)


def not_ternary(
    module: str, tensor: torch.Tensor, convert: str = "convert the model again"
) -> TernaryFormatError:
    """The error of a module that is ternary by the settings only."""
    return TernaryFormatError(
        module,
        f"a tensor {dtype_name(tensor.dtype)} {list(tensor.shape)} is stored, which a "
        "module that quantization_config says is ternary does not have",
        "If it is the unquantized weight, name the module in modules_to_not_convert "
        f"or {convert}",
    )


def mark_loaded(layer: torch.nn.Module, tensor: str, shard_id: Any) -> None:
    """Note that the checkpoint has a tensor of the layer, or of some of its parts."""
    parts = shard_id if isinstance(shard_id, tuple) else (shard_id,)
    layer.ternary_loaded.setdefault(tensor, set()).update(parts)


def is_left_out(layer: torch.nn.Module) -> bool:
    """Whether vLLM made the layer but leaves it out, as poolers do with a head."""
    # It imports the layers.
    from vllm.model_executor.models.utils import StageMissingLayer

    return isinstance(layer, StageMissingLayer)


def check_all_loaded(layer: torch.nn.Module) -> bool:
    """Whether the layer's tensors came from a checkpoint.

    Returns:
        False where none came through a weight loader, as with `load_format=dummy`.

    Raises:
        TernaryFormatError: the checkpoint lacks one of them, by name.

    """
    loaded, layer.ternary_loaded = layer.ternary_loaded, {}
    if not loaded and loads_no_tensors():
        return False
    if hasattr(layer, "total_num_kv_heads"):
        every: set[Any] = {"q", "k", "v"}
    elif hasattr(layer, "output_sizes"):
        every = set(range(len(layer.output_sizes)))
    else:
        every = {None}
    # A bias that is missing as a whole is found by vLLM, where it tracks loading.
    tensors = [*layer.ternary_tensors, *({BIAS} & loaded.keys())]
    missing = [
        f"{checkpoint_name(layer, part)}.{name}"
        for name in tensors
        if None not in loaded.get(name, ())
        for part in sorted(every - loaded.get(name, set()), key=str)
    ]
    if missing:
        raise TernaryFormatError(
            ", ".join(missing),
            "missing from the checkpoint",
            "Convert the model again, or name the module in modules_to_not_convert if "
            "it is stored unquantized",
        )
    return True
