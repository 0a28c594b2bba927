# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Every tile and cut of the Hopper kernels against float64, also those that no size
would choose. Needs what test_prefill.py needs, and a C++ compiler."""

import random

import pytest
import torch

from lib.bench.ops import load_ops, random_weight
from lib.bench.sm90_costs import KERNELS, Model
from lib.bench.tune_sm90 import caller, device_clusters

HALF, BFLOAT16, FLOAT = torch.float16, torch.bfloat16, torch.float32
TOLERANCE = {HALF: 1e-3, BFLOAT16: 4e-3}
MODEL = Model()
TILES = [
    pytest.param(kernel, tile, id=f"{kernel}-{'x'.join(map(str, shape))}")
    for kernel in KERNELS
    for tile, shape in enumerate(MODEL.shapes[kernel])
]


@pytest.fixture(scope="module")
def clusters() -> dict[tuple[int, int], int]:
    load_ops()
    return device_clusters()


def quantized(x: torch.Tensor) -> torch.Tensor:
    """What the tokens of W2A8 stand for: AutoBitLinear's rounding, in float64."""
    peak = x.float().abs().amax(1, keepdim=True).clamp(min=1e-5)
    inverse = 127 * (1 / peak)
    return (x.float() * inverse).round().double() / inverse.double()


@pytest.mark.parametrize("dtype", [HALF, BFLOAT16])
@pytest.mark.parametrize("kernel, tile", TILES)
def test_every_cut(clusters, kernel, tile, dtype):
    rng = random.Random(f"{kernel}-{tile}-{dtype}")
    shape = MODEL.shapes[kernel][tile]
    tokens = shape[2]
    rows = shape[0] * (1 if kernel == "few" else shape[1]) * 64
    int8 = kernel in ("rows", "blocks")
    for case in range(6):
        most = tokens if kernel == "few" and tokens < 64 else 3 * tokens
        least = {16: 9, 32: 17, 64: 33}.get(tokens, 1) if kernel == "few" else 1
        size_m = rng.randint(least, most)
        size_n = rng.randint(1, 4 * rows)
        # Two sets need two steps along K, of 128 or 256.
        size_k = rng.randint(257 if kernel != "few" and shape[3] == 2 else 1, 5000)
        block = 1 << 20 if kernel == "rows" else rng.choice([128, 256, 384])
        if kernel in ("many", "few") and case == 5:
            block = 1 << 20
        scale_dtype = HALF
        if kernel != "many" or dtype == BFLOAT16:
            scale_dtype = rng.choice([HALF, BFLOAT16, FLOAT])
        if kernel == "few" and dtype == HALF and scale_dtype != HALF:
            # Float16 tokens under scales of other types: one tile of them.
            size_m = min(size_m, 64)
        gen = torch.Generator("cuda").manual_seed(rng.randint(0, 1 << 30))
        w = random_weight(size_n, size_k, block, scale_dtype=scale_dtype, generator=gen)
        x = torch.randn((size_m, size_k), device="cuda", generator=gen).to(dtype)
        expected = (quantized(x) if int8 else x.double()) @ w.dequantize().t()
        padded = size_m, w.scale.shape[1], w.weight.shape[1] * 128
        cuts = [
            cut for cut, *_ in MODEL.cuts(kernel, clusters, padded) if cut.tile == tile
        ]
        assert cuts
        for cut in cuts:
            shape_y = size_m, size_n
            del_me = torch.full(shape_y, float("nan"), device="cuda", dtype=dtype)
            del del_me  # y may get its memory: every element must be written
            product = caller(kernel, shape, cut.split, (size_n, size_k, w.block_size))
            y = product(x, w.weight, w.scale)
            again = product(x, w.weight, w.scale)
            norm = float(expected.norm()) or 1.0
            error = float((y.double() - expected).norm()) / norm
            assert error < TOLERANCE[dtype], (cut, padded, block, scale_dtype)
            assert torch.equal(y, again), (cut, padded)
