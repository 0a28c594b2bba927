# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sources trained as BitNet: Hugging Face ``quant_method: bitnet``, and embedding
models with a norm in front of every projection.

In ``bitnet`` checkpoints a packed weight is uint8 ``[N / 4, K]`` of codes t + 1: byte
row r holds rows r, r + N/4, r + 2N/4 and r + 3N/4, lowest bits first. The stored scale
is the inverse of the weight's for linear class ``bitlinear`` and the scale itself for
``autobitlinear``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from . import names
from .codec import TernaryFormatError, quantize, schemes
from .errors import ConversionError
from .hf_safetensors import full_weight, is_full_weight, plain, read_tensors
from .model import Plain, Source, Ternary, Weight, files_to_carry
from .safetensors_io import NAMES, StoredTensor

MIN_SCALE = 1e-5
"""Lower bound of the mean magnitude of a master, as in transformers."""


@dataclass
class BitNetSource(Source):
    """Hugging Face ``bitnet``: packed weights or masters."""

    label: str = ""

    @property
    def kind(self) -> str:
        return f"Hugging Face bitnet ({self.label})"

    @classmethod
    def open(cls, directory: Path, config: dict[str, Any]) -> "BitNetSource":
        config = dict(config)
        settings = config.pop("quantization_config")
        linear_class = settings.get("linear_class", "bitlinear")
        mode = settings.get("quantization_mode", "offline")
        where = f"{directory}/config.json: quantization_config"
        if linear_class not in ("bitlinear", "autobitlinear"):
            raise ConversionError(
                f"{where}: linear_class is {linear_class!r}; it must be bitlinear or "
                "autobitlinear."
            )
        if mode not in ("offline", "online"):
            raise ConversionError(
                f"{where}: quantization_mode is {mode!r}; it must be offline or online."
            )
        if linear_class == "bitlinear" and mode == "online":
            raise ConversionError(
                f"{where}: linear_class bitlinear (packed weights with an inverse "
                "scale) contradicts quantization_mode online (masters). Set "
                "linear_class to autobitlinear if the weights are masters, or "
                "quantization_mode to offline if they are packed."
            )
        source = cls(
            directory,
            config,
            activation_bits=8,
            not_convert=_not_convert(settings, config),
            label=f"{linear_class}, {mode}",
        )
        if settings.get("use_rms_norm", False):
            # The name is this project's addition to the format: see docs/bitnet.md.
            norm = settings.get("rms_norm_name", "rms_norm")
            eps = settings.get("rms_norm_eps", 1e-6)
            source.input_norm = {"name": norm, "eps": eps}
        tensors = read_tensors(directory)
        if mode == "online":
            source.entries = _masters(tensors, source)
        else:
            source.entries = _packed(
                tensors, linear_class == "bitlinear", source.not_convert, where
            )
        if source.input_norm:
            _check_norms(source, source.input_norm["name"])
        return source

    def files(self) -> list[Path]:
        return files_to_carry(self.path)


@dataclass
class NormedBitNetSource(Source):
    """BitNet embedding models: masters of a plain architecture, with
    ``<projection>.norm.weight`` beside each of them."""

    @property
    def kind(self) -> str:
        return "BitNet masters with a norm in front of each projection"

    @classmethod
    def open(cls, directory: Path, config: dict[str, Any]) -> "NormedBitNetSource":
        source = cls(directory, config, activation_bits=8, not_convert=["lm_head"])
        source.input_norm = {"name": "norm", "eps": 1e-6}
        tensors = read_tensors(directory)
        source.entries = _masters(tensors, source, mean_in_float64=True)
        _check_norms(source, "norm")
        return source

    @staticmethod
    def recognizes(tensors: dict[str, Any]) -> bool:
        """Whether projections of the blocks have norms of their own."""
        return any(
            name.endswith("_proj.norm.weight")
            and name.removesuffix("norm.weight") + "weight" in tensors
            for name in tensors
        )

    def files(self) -> list[Path]:
        return files_to_carry(self.path)


def _not_convert(settings: dict[str, Any], config: dict[str, Any]) -> list[str]:
    """As in transformers: the head if there is no list, or if it is tied; with a list,
    exactly what the list names."""
    listed = settings.get("modules_to_not_convert")
    if listed is None or config.get("tie_word_embeddings"):
        return [*(listed or []), "lm_head"]
    return list(listed)


def unpack(packed: torch.Tensor, name: str) -> torch.Tensor:
    """uint8 ``[N / 4, K]`` of codes t + 1 to int8 ``[N, K]``."""
    t = torch.cat([(packed >> shift & 3).to(torch.int8) - 1 for shift in (0, 2, 4, 6)])
    if bool((t == 2).any()):
        row, column = (t == 2).nonzero()[0].tolist()
        raise TernaryFormatError(
            name,
            f"the code at [{row}, {column}] is 3, a weight of +2",
            "It is no ternary weight: check the source checkpoint",
        )
    return t


def quantize_master(w: torch.Tensor, name: str = "weight") -> Ternary:
    """What transformers computes of a master when it runs (``online``), in float32:
    r = 1 / max(mean |w|, 1e-5), t = clamp(round(w * r), -1, 1), and a weight of t / r
    rounded to the master's dtype, which is the scale kept."""
    rows = w.to(torch.float32)
    if not bool(rows.isfinite().all()):
        raise TernaryFormatError(name, "holds NaN or infinity", "Check the source")
    r = 1.0 / rows.abs().mean().clamp_(min=MIN_SCALE)
    t = rows.mul_(r).round_().clamp_(-1, 1).to(torch.int8)
    scale = (1.0 / r).to(w.dtype).to(torch.float32)
    return Ternary(t, scale.view(1), None, "tensor")


def _read_master(tensor: StoredTensor, in_float64: bool) -> Ternary:
    if not in_float64:
        return quantize_master(tensor.read(), tensor.name)
    t, scale = quantize.quantize_absmean(
        tensor.read(), "tensor", torch.float32, min_scale=MIN_SCALE, name=tensor.name
    )
    return Ternary(t, scale, None, "tensor")


def _native(
    tensor: StoredTensor, size_n: int, label: str, read: Callable[[], Ternary], dtype
) -> Weight:
    return Weight(
        module=tensor.name.removesuffix(".weight"),
        size_n=size_n,
        size_k=tensor.shape[1],
        nbytes=tensor.nbytes,
        stored=label,
        dtype=dtype,
        read=read,
        native=True,
        block_size="tensor",
    )


def _masters(
    tensors: dict[str, StoredTensor], source: Source, mean_in_float64: bool = False
) -> list[Plain | Weight]:
    entries: list[Plain | Weight] = []
    for tensor in tensors.values():
        if tensor.dtype == torch.uint8:
            raise ConversionError(
                f"{tensor.path}: {tensor.name} is uint8, but the config says that "
                "weights are masters (quantization_mode online). Set "
                "quantization_mode to offline if they are packed."
            )
        if not is_full_weight(tensor):
            entries.append(plain(tensor))
            continue
        module = tensor.name.removesuffix(".weight")
        linear = names.is_block_linear(module) or module == "lm_head"
        if not linear or schemes.matches_not_convert(module, source.not_convert):
            entries.append(full_weight(tensor))
            continue
        label = f"{NAMES[tensor.dtype]} master"
        read = partial(_read_master, tensor, mean_in_float64)
        entries.append(_native(tensor, tensor.shape[0], label, read, tensor.dtype))
    return entries


def _packed(
    tensors: dict[str, StoredTensor], inverse: bool, not_convert: list[str], where: str
) -> list[Plain | Weight]:
    entries: list[Plain | Weight] = []
    for tensor in tensors.values():
        module, _, last = tensor.name.rpartition(".")
        scale = tensors.get(f"{module}.weight_scale")
        if last == "weight_scale" and f"{module}.weight" in tensors:
            continue
        if last == "weight" and (scale or tensor.dtype == torch.uint8):
            entries.append(_packed_weight(tensor, scale, inverse))
        elif last == "bias" and scale is not None and not inverse:
            entries.append(_scaled_bias(tensor, scale))
        elif is_full_weight(tensor):
            listed = schemes.matches_not_convert(module, not_convert)
            if names.is_block_linear(module) and not listed:
                raise ConversionError(
                    f"{tensor.path}: {tensor.name} is {NAMES[tensor.dtype]} without "
                    f"weight_scale, but {where} says that weights are packed. Set "
                    "linear_class to autobitlinear and quantization_mode to online if "
                    "they are masters, or list the module in modules_to_not_convert."
                )
            entries.append(full_weight(tensor))
        else:
            entries.append(plain(tensor))
    return entries


def _packed_weight(
    tensor: StoredTensor, scale: StoredTensor | None, inverse: bool
) -> Weight:
    module = tensor.name.removesuffix(".weight")
    if scale is None:
        raise ConversionError(
            f"{tensor.path}: {module}.weight_scale is missing beside the packed "
            f"{tensor.name}. Download the checkpoint again."
        )
    packed = tensor.dtype == torch.uint8
    # autobitlinear also takes the integers themselves, in floating point.
    good = packed or (tensor.dtype.is_floating_point and not inverse)
    if not good or len(tensor.shape) != 2 or scale.shape not in ((), (1,)):
        raise ConversionError(
            f"{tensor.path}: {tensor.name} is {NAMES[tensor.dtype]} "
            f"{list(tensor.shape)} with a scale of shape {list(scale.shape)}; uint8 "
            "[N / 4, K] with one scale was expected."
        )

    def read() -> Ternary:
        value = scale.read().to(torch.float64).view(1)
        if not bool(value.isfinite().all()) or value.item() <= 0:
            raise TernaryFormatError(
                scale.name,
                f"is {value.item()}; a scale is finite and positive",
                "Download the checkpoint again",
            )
        value = quantize.round_to(1.0 / value if inverse else value, torch.float32)
        stored = tensor.read()
        if packed:
            return Ternary(unpack(stored, tensor.name), value, None, "tensor")
        t = stored.to(torch.int8)
        if not bool((t == stored).all()):
            raise TernaryFormatError(
                tensor.name,
                "holds other values than -1, 0 and +1 beside a weight_scale",
                "If the weights are masters, set quantization_mode to online",
            )
        return Ternary(t, value, None, "tensor")

    label = "bitlinear" if inverse else "autobitlinear"
    size_n = tensor.shape[0] * (4 if packed else 1)
    return _native(tensor, size_n, label, read, scale.dtype)


def _scaled_bias(tensor: StoredTensor, scale: StoredTensor) -> Plain:
    """AutoBitLinear computes (x t + bias) * weight_scale."""

    def read() -> torch.Tensor:
        bias = tensor.read().to(torch.float32) * scale.read().to(torch.float32)
        return bias.to(tensor.dtype)

    return Plain(tensor.spec, read, NAMES[tensor.dtype], tensor.nbytes)


def _check_norms(source: Source, norm: str) -> None:
    by_name = {e.name: e for e in source.entries}
    for entry in source.entries:
        if not isinstance(entry, Weight) or not entry.native:
            continue
        name = f"{entry.module}.{norm}.weight"
        weight = by_name.get(name)
        if not isinstance(weight, Plain) or weight.spec.shape != (entry.size_k,):
            found = "is missing" if weight is None else "has another shape"
            raise ConversionError(
                f"{source.path}: {name}, the norm of {entry.size_k} inputs of "
                f"{entry.module}, {found}. Check that config and weights belong "
                "together."
            )
