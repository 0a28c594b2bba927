# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the project's kernel is measured against. Each peer makes a list of calls.

A call computes ``x W^T`` for one copy of the weights; the list rotates through copies
of more than the L2 cache in all. cuBLAS and dequantize + cuBLAS need torch only;
Humming is used where the package ``humming-kernels`` is installed.
"""

import importlib.metadata
from collections.abc import Callable

import torch

from lib.bench.layers import BLOCK_SIZE, Layer
from lib.bench.ops import TernaryWeight, random_weight
from lib.bench.timing import rotation

Call = Callable[[], object]
HUMMING_PACKAGE = "humming-kernels"


class Ours:
    """torch.ops._C.ternary_gemm."""

    name = "ternary"

    def __init__(self, layer: Layer, dtype: torch.dtype):
        self.dtype = dtype
        self.weight = random_weight(layer.size_n, layer.size_k, BLOCK_SIZE)
        copies = rotation(layer.size_n * layer.size_k / 4)
        self.copies = [
            (self.weight.weight.clone(), self.weight.scale.clone())
            for _ in range(copies)
        ]

    def calls(self, x: torch.Tensor) -> list[Call]:
        op, w = torch.ops._C.ternary_gemm, self.weight
        copies = self.copies if x.shape[0] < 1024 else self.copies[:8]

        def call(weight: torch.Tensor, scale: torch.Tensor) -> Call:
            sizes = (w.size_n, w.size_k, w.block_size)
            return lambda: op(x, weight, scale, None, None, *sizes)

        return [call(*copy) for copy in copies]


class OursW2A8:
    """torch.ops._C.ternary_gemm_w2a8, a scale per row; x is quantized in the call."""

    name = "ternary_w2a8"

    def __init__(self, layer: Layer):
        self.weight = random_weight(
            layer.size_n, layer.size_k, layer.size_k, scale_dtype=torch.float32
        )
        copies = rotation(layer.size_n * layer.size_k / 4)
        self.copies = [
            (self.weight.weight.clone(), self.weight.scale.clone())
            for _ in range(copies)
        ]

    def calls(self, x: torch.Tensor) -> list[Call]:
        op, w = torch.ops._C.ternary_gemm_w2a8, self.weight
        copies = self.copies if x.shape[0] < 1024 else self.copies[:8]

        def call(weight: torch.Tensor, scale: torch.Tensor) -> Call:
            sizes = (w.size_n, w.size_k, w.block_size)
            return lambda: op(x, weight, scale, None, None, None, 1e-6, *sizes)

        return [call(*copy) for copy in copies]


class Cublas:
    """torch.mm on the full-precision weight."""

    name = "cublas"

    def __init__(self, layer: Layer, dtype: torch.dtype):
        self.layer, self.dtype = layer, dtype
        first = torch.randn(layer.size_n, layer.size_k, device="cuda", dtype=dtype)
        copies = rotation(first.numel() * 2, maximum=64)
        self.weights = [first, *(first.clone() for _ in range(copies - 1))]

    def calls(self, x: torch.Tensor) -> list[Call]:
        out = torch.empty(
            (x.shape[0], self.layer.size_n), device="cuda", dtype=self.dtype
        )
        repeats = 1 if x.shape[0] >= 1024 else 2

        def call(weight: torch.Tensor) -> Call:
            return lambda: torch.mm(x, weight.t(), out=out)

        return [call(weight) for weight in self.weights] * repeats


class Dequantized:
    """The packed weight decoded into a buffer by every call, then torch.mm."""

    name = "dequantize+cublas"

    def __init__(self, layer: Layer, ours: Ours):
        self.ours = ours
        self.rows = torch.arange(layer.size_n, device="cuda", dtype=torch.int32)

    def calls(self, x: torch.Tensor) -> list[Call]:
        w: TernaryWeight = self.ours.weight
        decode = torch.ops._C.ternary_embedding
        sizes = (w.size_n, w.size_k, w.block_size)

        def call(weight: torch.Tensor, scale: torch.Tensor) -> Call:
            def run() -> torch.Tensor:
                full = decode(self.rows, weight, scale, None, *sizes, x.dtype)
                return torch.mm(x, full.t())

            return run

        return [call(*copy) for copy in self.ours.copies[:8]]


class Humming:
    """Humming's 2-bit kernels with one scale per 128, compiled at first use.

    Args:
        layer: whose sizes.
        dtype: of activations and results.
        int8: quantize the activations to int8, token by token.

    """

    def __init__(self, layer: Layer, dtype: torch.dtype, int8: bool = False):
        from humming.forward import humming_forward
        from humming.layer import HummingLayer

        self.name = "humming_w2a8" if int8 else "humming"
        self.forward = humming_forward
        self.layer = HummingLayer(
            shape_n=layer.size_n,
            shape_k=layer.size_k,
            weight_config={"dtype": "int2", "group_size": BLOCK_SIZE},
            torch_dtype=dtype,
            **({"input_config": {"dtype": "int8"}} if int8 else {}),
        ).cuda()
        full = torch.randn(layer.size_n, layer.size_k, device="cuda", dtype=dtype)
        self.layer.load_from_unquantized(full)
        self.layer.transform()
        copies = rotation(layer.size_n * layer.size_k / 4)
        self.weights = [self.layer.weight.data.clone() for _ in range(copies)]

    def calls(self, x: torch.Tensor) -> list[Call]:
        layer, forward = self.layer, self.forward
        weights = self.weights if x.shape[0] < 1024 else self.weights[:8]

        def call(weight: torch.Tensor) -> Call:
            return lambda: forward(
                layer.humming_config,
                inputs=x,
                weight=weight,
                weight_scale=layer.weight_scale,
                locks=layer.locks,
            )

        return [call(weight) for weight in weights]


def humming_version() -> str | None:
    """The installed version of Humming, or None."""
    try:
        return importlib.metadata.version(HUMMING_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
