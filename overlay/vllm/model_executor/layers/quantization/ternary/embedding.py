# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Vocabulary embeddings and output heads with ternary weights."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vllm import _custom_ops as ops
from vllm.model_executor.layers.quantization.utils.ternary_format import (
    dequantize,
    unpack,
)

from .linear import TernaryLinearMethod
from .parameters import PACKED, SCALE, TENSORS, ZERO_POINT, TernaryWeightParameter


class NoWeight:
    """What an embedding or head has in place of the unquantized `weight`.

    vLLM asks for it to find out whether a draft model's tensor is the target's: it is
    not, so the draft keeps its own. Any other use is refused by name.
    """

    is_cuda = False

    def __init__(self, layer: torch.nn.Module, prefix: str):
        self._layer, self._prefix = weakref.ref(layer), prefix
        self.dtype = layer.ternary_dtype

    @property
    def device(self) -> torch.device:
        layer = self._layer()
        assert layer is not None
        return getattr(_table(layer), PACKED).device

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{self.__dict__.get('_prefix')} is ternary: it has no weight, and what "
            f"this feature or model needs of it ({name}) does not exist. Store the "
            "module unquantized, in modules_to_not_convert or module_overrides."
        )

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.equal:
            return False
        used = next(x for x in args if isinstance(x, cls))
        return getattr(used, func.__name__)  # raises


class TernaryEmbeddingMethod(TernaryLinearMethod):
    """A ternary table [vocabulary, hidden]: rows decoded as they are asked for.

    The same packed tensors serve the lookup of an embedding and the product of an
    output head, tied or not. Rows that pad the vocabulary are loaded as zeros.
    """

    def create_weights(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        super().create_weights(layer, *args, **kwargs)
        layer.ternary_dtype = kwargs["params_dtype"]
        layer.weight = NoWeight(layer, layer.prefix)

    def embedding(self, layer: torch.nn.Module, input_: torch.Tensor) -> torch.Tensor:
        """Token ids [...] (int64) -> rows [..., hidden] in the model's dtype."""
        table = _table(layer)
        return ops.ternary_embedding(
            input_,
            getattr(table, PACKED),
            getattr(table, SCALE),
            getattr(table, ZERO_POINT, None),
            table.ternary_size_n,
            table.ternary_size_k,
            table.ternary_block_size,
            layer.ternary_dtype,
        )

    def rows(self, layer: torch.nn.Module, indices: Sequence[int]) -> torch.Tensor:
        """Rows of this rank's table in float32, at load or afterwards: [n, hidden]."""
        table = _table(layer)
        at = torch.tensor(indices, device=getattr(table, PACKED).device)
        if not isinstance(getattr(table, PACKED), TernaryWeightParameter):
            return self.embedding(layer, at).float()
        # Not yet in the layout of the kernels.
        packed, scale, zero_point = (
            None if (x := getattr(table, name, None)) is None else x.data[at]
            for name in TENSORS
        )
        block = self.scheme.block_size
        t = unpack(packed, table.ternary_size_k)
        block = "row" if block == "tensor" else block
        return dequantize(t, scale, zero_point, block)

    def apply(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return super().apply(_table(layer), x, bias)

    def tie_weights(
        self, layer: torch.nn.Module, embed_tokens: torch.nn.Module
    ) -> torch.nn.Module:
        """Make the head read the table of the embedding; its own is dropped."""
        for name in TENSORS:
            if hasattr(layer, name):
                delattr(layer, name)
        # Neither a submodule nor a strong reference: the embedding owns the table.
        layer.ternary_tied_to = weakref.ref(embed_tokens)
        return layer

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if hasattr(layer, "ternary_tied_to"):
            layer.ternary_device = getattr(_table(layer), PACKED).device
        else:
            super().process_weights_after_loading(layer)


def _table(layer: torch.nn.Module) -> torch.nn.Module:
    tied_to = getattr(layer, "ternary_tied_to", None)
    return layer if tied_to is None else tied_to()
