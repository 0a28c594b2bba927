# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Vocabulary embeddings and output heads with ternary weights."""

import weakref
from typing import Any

import torch

from vllm import _custom_ops as ops

from .linear import TernaryLinearMethod
from .parameters import PACKED, SCALE, TENSORS, ZERO_POINT


class TernaryEmbeddingMethod(TernaryLinearMethod):
    """A ternary table [vocabulary, hidden]: rows decoded as they are asked for.

    The same packed tensors serve the lookup of an embedding and the product of an
    output head, tied or not. Rows that pad the vocabulary are loaded as zeros.
    """

    def create_weights(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        super().create_weights(layer, *args, **kwargs)
        layer.ternary_dtype = kwargs["params_dtype"]

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
