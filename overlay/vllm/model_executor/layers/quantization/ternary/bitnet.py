# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`quant_method: bitnet`: checkpoints of transformers' `BitNetQuantConfig`.

A module's `weight` is converted while it loads, whole and before any cut, into the
packed form of the `ternary` method, whose parameters, loaders and kernels do the rest.
What differs between checkpoints is decided by the config alone (`WeightFormat`).
"""

from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch

from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import (
    LinearBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization import QuantizationMethods
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.utils.ternary_format import (
    TernaryFormatError,
    dtype_name,
    pack,
    packed_width,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

from .checkpoint_files import refuse_load_format
from .config import TernaryConfig, checkpoint_prefix
from .linear import TernaryLinearMethod
from .parameters import (
    PACKED,
    SCALE,
    checkpoint_name,
    is_left_out,
    logical_rows,
    mark_loaded,
)
from .schemes import (
    UNQUANTIZED,
    Scheme,
    SchemeTable,
    TernaryConfigError,
    fused_parts,
    matches_not_convert,
)

logger = init_logger(__name__)

WEIGHT = "weight"  # the name in the checkpoint, packed or not
MIN_SCALE = 1e-5  # of a master's mean magnitude, as in transformers
ROWS_PER_BYTE = 4

_LINEAR_CLASSES = ("bitlinear", "autobitlinear")
_MODES = ("offline", "online")
_KEYS = {
    "quant_method",
    "modules_to_not_convert",
    "linear_class",
    "quantization_mode",
    "use_rms_norm",
    "rms_norm_eps",
    "rms_norm_name",  # not of transformers: what `rms_norm` is called
}


@dataclass(frozen=True)
class WeightFormat:
    """What the tensors of a quantized module hold.

    Attributes:
        masters: `weight` is full precision, to be quantized at load; there is no
            `weight_scale`.
        inverse_scale: `weight_scale` is 1 / s of W = s * t, and not s.

    """

    masters: bool
    inverse_scale: bool

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "WeightFormat":
        """Tell the formats apart by `linear_class` and `quantization_mode`.

        Raises:
            TernaryConfigError: a value that is unknown, or the two contradict.

        """
        # Absent keys mean what they mean to transformers.
        linear_class = config.get("linear_class", "bitlinear")
        mode = config.get("quantization_mode", "offline")
        if linear_class not in _LINEAR_CLASSES:
            raise _bad("linear_class", linear_class, f"one of {_LINEAR_CLASSES}")
        if mode not in _MODES:
            raise _bad("quantization_mode", mode, f"one of {_MODES}")
        masters, inverse = mode == "online", linear_class == "bitlinear"
        if masters and inverse:
            raise _bad(
                "quantization_mode",
                mode,
                '"offline" where linear_class is "bitlinear" (the default), whose '
                "weights are packed with an inverse scale. Set linear_class to "
                '"autobitlinear" if the weights are full-precision masters',
            )
        return cls(masters, inverse)


class BitNetConfig(TernaryConfig):
    """Ternary weights with a scale per tensor, and 8-bit activations.

    Args:
        schemes: the default scheme, and which modules are left alone.
        weight_format: how the weights are stored.
        converts_head: whether an output head that no list names is quantized, too.

    """

    # Embeddings are never quantized, and a head's rows are packed together.
    names_vocabulary = False
    reads_head_rows = False

    def __init__(
        self,
        schemes: SchemeTable | None = None,
        weight_format: WeightFormat | None = None,
        converts_head: bool = False,
    ):
        super().__init__(schemes)
        assert weight_format is not None
        self.weight_format = weight_format
        self.converts_head = converts_head

    @classmethod
    def get_name(cls) -> QuantizationMethods:
        return "bitnet"

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "BitNetConfig":
        """Parse `quantization_config` as transformers writes it.

        Raises:
            TernaryConfigError: for a value that is unknown or that leaves open how
                the weights are stored, by name.

        """
        # Says so where the kernels did not load.
        TernaryConfig.from_config({"quant_method": "ternary"})
        if unknown := sorted(set(config) - _KEYS):
            logger.warning(
                "quantization_config: bitnet has no setting %s; ignored, as by "
                "transformers.",
                ", ".join(map(repr, unknown)),
            )
        weight_format = WeightFormat.from_config(config)
        scheme = Scheme(
            block_size="tensor",
            activation_bits=8,
            scale_dtype="float32",
            input_norm=_input_norm(config),
        )
        # As in transformers: without a list the output head is left alone, and with
        # one, exactly what it names.
        listed = config.get("modules_to_not_convert")
        if listed is not None and not (
            isinstance(listed, list) and all(isinstance(name, str) for name in listed)
        ):
            raise _bad("modules_to_not_convert", listed, "null or a list of names")
        schemes = SchemeTable(scheme, not_convert=list(listed or []))
        return cls(schemes, weight_format, converts_head=listed is not None)

    def get_quant_method(
        self, layer: torch.nn.Module, prefix: str
    ) -> QuantizeMethodBase | None:
        refuse_load_format(self.get_name())
        prefix = checkpoint_prefix(prefix)
        method: QuantizeMethodBase | None = None
        scheme = UNQUANTIZED
        if isinstance(layer, LinearBase):
            scheme = self.linear_scheme(prefix)
            if scheme.kind == "ternary":
                method = BitNetLinearMethod(
                    scheme, self.weight_format, self.packed_modules_mapping
                )
            else:
                method = UnquantizedLinearMethod()
        elif isinstance(layer, RoutedExperts):
            raise TernaryConfigError(
                f"{prefix}: bitnet checkpoints with mixtures of experts are not "
                "served. Convert the model to quant_method ternary."
            )
        elif isinstance(layer, ParallelLMHead) and self._converts(prefix):
            scheme = self.schemes.default
            method = BitNetLinearMethod(scheme, self.weight_format)
        elif not isinstance(layer, VocabParallelEmbedding):
            return None
        self.refuse_requantization(layer, prefix, scheme)
        self.report.add(layer, prefix, scheme.describe())
        return method

    def linear_scheme(self, prefix: str) -> Scheme:
        """The scheme of a linear layer, by the names of the modules that it fuses.

        The name of a fused layer does not count where the checkpoint has none of it:
        "qkv_proj" ends with "v_proj".

        Raises:
            TernaryConfigError: when only some of the parts are quantized.

        """
        parent, _, name = prefix.rpartition(".")
        parts = fused_parts(self.packed_modules_mapping, name) or [name]
        modules = [f"{parent}.{part}".lstrip(".") for part in parts]
        schemes = {module: self.schemes.scheme(module) for module in modules}
        if len(set(schemes.values())) > 1:
            plain = [m for m, s in schemes.items() if s.kind == "unquantized"]
            raise TernaryConfigError(
                f"{prefix} fuses {', '.join(modules)}, of which modules_to_not_convert "
                f"names only {', '.join(plain)}: vLLM computes them as one layer. "
                "Convert the model with none or all of them quantized."
            )
        return next(iter(schemes.values()))

    def _converts(self, head: str) -> bool:
        if not self.converts_head or self.tied_embeddings:
            return False
        return not matches_not_convert(head, self.schemes.not_convert)


@register_weight_loader_v2_supported_method
class BitNetLinearMethod(TernaryLinearMethod):
    """A linear layer, or an output head, of a `bitnet` checkpoint.

    Args:
        scheme: how the layer computes.
        weight_format: how the checkpoint stores it.
        packed_modules: fused layer name -> names of the checkpoint's modules.

    """

    def __init__(
        self,
        scheme: Scheme,
        weight_format: WeightFormat,
        packed_modules: dict[str, list[str]] | None = None,
    ):
        super().__init__(scheme, packed_modules=packed_modules)
        self.weight_format = weight_format

    def create_weights(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        super().create_weights(layer, *args, **kwargs)
        params_dtype = args[4] if len(args) > 4 else kwargs["params_dtype"]
        # Loaders find parameters by the checkpoint's names.
        weight = getattr(layer, PACKED)
        delattr(layer, PACKED)
        layer.register_parameter(WEIGHT, weight)
        layer.ternary_tensors[layer.ternary_tensors.index(PACKED)] = WEIGHT
        weight.ternary_name = WEIGHT
        if self.weight_format.masters:
            layer.ternary_tensors.remove(SCALE)
        layer.bitnet_format = self.weight_format
        layer.bitnet_dtype = params_dtype
        weight.weight_loader = MethodType(_load_weight, layer)
        getattr(layer, SCALE).weight_loader = MethodType(_load_scale, layer)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if is_left_out(layer):
            return
        weight, scale = getattr(layer, WEIGHT), getattr(layer, SCALE)
        delattr(layer, WEIGHT)
        layer.register_parameter(PACKED, weight)
        bias = getattr(layer, "bias", None)
        if bias is not None and self.weight_format == WeightFormat(False, False):
            # transformers' AutoBitLinear computes (x t + bias) * weight_scale.
            bias.data = (bias.data * scale.data[:, 0]).to(bias.dtype)
        super().process_weights_after_loading(layer)


def unpack_rows(packed: torch.Tensor, size_n: int, name: str) -> torch.Tensor:
    """Codes packed along N, as transformers does, to this format's, along K.

    Byte row r holds rows r, r + N / 4, r + 2 N / 4 and r + 3 N / 4 in bits 0-1, 2-3,
    4-5 and 6-7; a code is t + 1.

    Args:
        packed: uint8 [ceil(N / 4), K].
        size_n: N.
        name: of the tensor, for messages.

    Returns:
        uint8 [N, ceil(K / 4)].

    Raises:
        TernaryFormatError: a code of 3, a weight of +2.

    """
    threes = packed & (packed >> 1) & 0b01010101
    if bool(threes.any()):
        row, column = threes.nonzero()[0].tolist()
        raise TernaryFormatError(
            name,
            f"byte [{row}, {column}] is {int(packed[row, column])}, which holds the "
            "code 3, a weight of +2",
            "The checkpoint is damaged or not ternary; download it again",
        )
    quarter, size_k = packed.shape
    out = packed.new_empty(size_n, packed_width(size_k))
    for i in range(ROWS_PER_BYTE):
        rows = out[i * quarter : (i + 1) * quarter]
        codes = packed[: len(rows)] >> 2 * i & 3
        rows.copy_(pack(codes.to(torch.int8) - 1))
    return out


def quantize_master(
    weight: torch.Tensor, dtype: torch.dtype, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a master [N, K] as transformers' `AutoBitLinear` does on each call.

    With r = 1 / max(mean |w|, 1e-5) in float32: t = clamp(round(w * r), -1, 1), and a
    weight is t / r rounded to the dtype that the model computes in, here the scale.

    Returns:
        (packed uint8 [N, ceil(K / 4)], scale float32 [1]).

    Raises:
        TernaryFormatError: NaN or infinity in the weight.

    """
    wide = weight.to(torch.float32, copy=True)
    inverse = 1.0 / wide.abs().mean().clamp_(min=MIN_SCALE)
    if not bool(inverse.isfinite()) or not bool(inverse):
        raise TernaryFormatError(
            name,
            "holds NaN or infinity",
            "The checkpoint is damaged; download it again",
        )
    t = wide.mul_(inverse).round_().clamp_(-1, 1).to(torch.int8)
    return pack(t), (1.0 / inverse).to(dtype).to(torch.float32).view(1)


def _load_weight(
    layer: torch.nn.Module,
    param: torch.nn.Parameter,
    loaded_weight: torch.Tensor,
    *shard: Any,
    **kwargs: Any,
) -> None:
    """Convert a module's weight, whole, and let vLLM cut it."""
    shard_id = shard[0] if shard else kwargs.get("loaded_shard_id")
    name = f"{checkpoint_name(layer, shard_id)}.{WEIGHT}"
    rows, size_k = logical_rows(layer, shard_id), layer.input_size
    if rows is None:  # only the model's own class knows
        packed_rows = loaded_weight.dtype == torch.uint8
        rows = len(loaded_weight) * (ROWS_PER_BYTE if packed_rows else 1)
    weight_format: WeightFormat = layer.bitnet_format
    # Where the layer lives: on a GPU the conversion is a few small kernels.
    weight = loaded_weight.to(param.device)
    if weight_format.masters:
        _check_master(weight, rows, size_k, name)
        packed, scale = quantize_master(weight, layer.bitnet_dtype, name)
        _load_rows(layer, getattr(layer, SCALE), scale, rows, *shard, **kwargs)
    elif weight.dtype != torch.uint8 and not weight_format.inverse_scale:
        packed = _pack_integers(weight, rows, size_k, name)
    else:
        _check_packed(weight, rows, size_k, name)
        packed = unpack_rows(weight, rows, name)
    layer.ternary_layer_loader(layer, param, packed, *shard, **kwargs)
    mark_loaded(layer, WEIGHT, shard_id)


def _load_scale(
    layer: torch.nn.Module,
    param: torch.nn.Parameter,
    loaded_weight: torch.Tensor,
    *shard: Any,
    **kwargs: Any,
) -> None:
    """Give every row of the module its scale, in the sense W = scale * t."""
    shard_id = shard[0] if shard else kwargs.get("loaded_shard_id")
    name = f"{checkpoint_name(layer, shard_id)}.{SCALE}"
    weight_format: WeightFormat = layer.bitnet_format
    if weight_format.masters:
        raise TernaryFormatError(
            name,
            "is stored, but quantization_config says that weights are masters without "
            "a scale (quantization_mode online)",
            "Set quantization_mode to offline if the weights are packed",
        )
    if loaded_weight.numel() != 1 or not loaded_weight.is_floating_point():
        raise TernaryFormatError(
            name,
            f"is {dtype_name(loaded_weight.dtype)} {list(loaded_weight.shape)}; one "
            "floating-point value for the whole tensor is expected",
            "Check that the checkpoint and config.json belong to the same model",
        )
    scale = loaded_weight.to(torch.float32).view(1)
    if not bool(scale.isfinite()) or scale.item() <= 0:
        raise TernaryFormatError(
            name,
            f"is {scale.item()}; a scale is finite and positive",
            "The checkpoint is damaged; download it again",
        )
    if weight_format.inverse_scale:
        scale = 1.0 / scale
    rows = logical_rows(layer, shard_id)
    if rows is None:  # as many as any shard can need
        rows = layer.output_size
    _load_rows(layer, param, scale, rows, *shard, **kwargs)
    mark_loaded(layer, SCALE, shard_id)


def _load_rows(
    layer: torch.nn.Module,
    param: torch.nn.Parameter,
    scale: torch.Tensor,
    rows: int,
    *shard: Any,
    **kwargs: Any,
) -> None:
    """Load one scale [1] as one for each row, which vLLM's loaders can cut."""
    layer.ternary_layer_loader(
        layer, param, scale.view(1, 1).expand(rows, 1), *shard, **kwargs
    )


def _check_packed(weight: torch.Tensor, rows: int, size_k: int, name: str) -> None:
    expected = (-(-rows // ROWS_PER_BYTE), size_k)
    if weight.dtype != torch.uint8 or weight.shape != expected:
        raise TernaryFormatError(
            name,
            f"is {dtype_name(weight.dtype)} {list(weight.shape)}, but packed weights, "
            f"uint8 {list(expected)}, are what quantization_config says",
            "If the weights are full-precision masters, set linear_class to "
            "autobitlinear and quantization_mode to online; if the module is not "
            "quantized, name it in modules_to_not_convert",
        )


def _check_master(weight: torch.Tensor, rows: int, size_k: int, name: str) -> None:
    if not weight.is_floating_point() or weight.shape != (rows, size_k):
        raise TernaryFormatError(
            name,
            f"is {dtype_name(weight.dtype)} {list(weight.shape)}, but masters, "
            f"floating point {[rows, size_k]}, are what quantization_config says",
            "If the weights are packed, set quantization_mode to offline",
        )


def _pack_integers(
    weight: torch.Tensor, rows: int, size_k: int, name: str
) -> torch.Tensor:
    """Pack a weight that stores t itself, as transformers saves `AutoBitLinear`."""
    if weight.shape != (rows, size_k):
        _check_packed(weight, rows, size_k, name)
    t = weight.to(torch.int8)
    if not bool((t == weight).all()) or bool((t.abs() > 1).any()):
        raise TernaryFormatError(
            name,
            "holds values other than -1, 0 and 1, but quantization_config says that "
            "it is quantized (quantization_mode offline)",
            "If the weights are full-precision masters, set quantization_mode to "
            "online",
        )
    return pack(t)


def _input_norm(config: dict[str, Any]) -> dict[str, Any] | None:
    use = config.get("use_rms_norm", False)
    name = config.get("rms_norm_name", "rms_norm")
    if not isinstance(use, bool):
        raise _bad("use_rms_norm", use, "true or false")
    if not use:
        if "rms_norm_name" in config:
            raise _bad("rms_norm_name", name, "left out where use_rms_norm is false")
        return None
    eps = config.get("rms_norm_eps", 1e-6)
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not eps >= 0:
        raise _bad("rms_norm_eps", eps, "a number that is not negative")
    if not isinstance(name, str) or not name.isidentifier():
        raise _bad("rms_norm_name", name, "the last name of the norm's module")
    return {"name": name, "eps": float(eps)}


def _bad(key: str, value: Any, remedy: str) -> TernaryConfigError:
    return TernaryConfigError(
        f"quantization_config: {key} is {value!r}; it must be {remedy}."
    )
