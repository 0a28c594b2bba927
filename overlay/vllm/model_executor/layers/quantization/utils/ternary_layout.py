# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Ternary weights between the layout of the checkpoint and that of the kernels.

Each device has its own layout; `ternary_layout_cpu` and `ternary_layout_cuda`
define them, with exact inverses. No vLLM import.
"""

from types import ModuleType

import torch

from . import ternary_layout_cpu, ternary_layout_cuda

_LAYOUTS: dict[str, ModuleType] = {
    "cpu": ternary_layout_cpu,
    "cuda": ternary_layout_cuda,
}

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def encode_layout(
    packed: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    size_k: int,
    block_size: int,
) -> Tensors:
    """Reorder a layer's tensors for the kernels of the device that they are on.

    Args:
        packed: uint8 [N, ceil(size_k / 4)] on the target device.
        scale: float16, bfloat16 or float32 [N, ceil(size_k / block_size)].
        zero_point: float32 of the scale's shape, or None.
        size_k: weights in a row.
        block_size: weights along K that share a scale.

    Raises:
        ValueError: for a device that has no ternary kernels.

    """
    return _layout(packed).encode(packed, scale, zero_point, size_k, block_size)


def decode_layout(
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    size_n: int,
    size_k: int,
    block_size: int,
) -> Tensors:
    """The exact inverse of `encode_layout`, for weights [size_n, size_k]."""
    return _layout(weight).decode(weight, scale, zero_point, size_n, size_k, block_size)


def _layout(tensor: torch.Tensor) -> ModuleType:
    kind = tensor.device.type
    if kind not in _LAYOUTS:
        raise ValueError(
            f"Ternary weights are on a {kind} device; the kernels run on "
            f"{' and '.join(_LAYOUTS)} only."
        )
    return _LAYOUTS[kind]
