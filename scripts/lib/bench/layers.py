# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The layers that the kernels are measured on, and what they cost at least."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Layer:
    """A linear layer: `size_n` outputs, `size_k` inputs."""

    name: str
    size_n: int
    size_k: int


LAYERS = (
    Layer("0.6B gate_up", 6144, 1024),
    Layer("0.6B down", 1024, 3072),
    Layer("8B qkv", 6144, 4096),
    Layer("8B gate_up", 24576, 4096),
    Layer("8B down", 4096, 12288),
    Layer("27B gate_up", 34816, 5120),
)
TOKENS = (1, 8, 16, 32, 64, 128, 256, 1024, 4096)
BLOCK_SIZE = 128
WEIGHT_BITS = 2 + 16 / BLOCK_SIZE  # with the float16 scale
MATRIX_RATE = 790e12  # FLOP/s, bf16 products of random data on an H200

# What ours must reach: best peer / ours, geometric mean over LAYERS.
TARGETS = {
    1: 1.8,
    8: 1.8,
    16: 1.6,
    32: 1.4,
    64: 1.25,
    128: 1.1,
    256: 1.05,
    1024: 1.0,
    4096: 1.0,
}


def floor_memory(layer: Layer, size_m: int, bandwidth: float) -> float:
    """Microseconds to move each byte once: packed weight, scales, x and y (16 bit)."""
    weight = layer.size_n * layer.size_k * WEIGHT_BITS / 8
    activations = size_m * (layer.size_n + layer.size_k) * 2
    return (weight + activations) / bandwidth * 1e6


def floor_matrix(layer: Layer, size_m: int) -> float:
    """Microseconds of 16-bit matrix work at :data:`MATRIX_RATE`."""
    return 2 * size_m * layer.size_n * layer.size_k / MATRIX_RATE * 1e6
