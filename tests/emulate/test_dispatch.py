# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""From sizes to kernels on whole emulated devices: the dispatch, the plans and the
launches that they name."""

import harness
import numpy as np
import pytest
import torch
from harness import (
    A100,
    BFLOAT16,
    FLOAT,
    H200,
    HALF,
    HOPPER_3,
    HOPPER_8,
    L40S,
    ROW,
    TOLERANCE,
    some,
)

DEVICES = [(900, H200), (900, HOPPER_3), (900, HOPPER_8), (800, A100), (800, L40S)]
NAMES = ["h200", "hopper-3", "hopper-8", "a100", "l40s"]


@pytest.mark.parametrize("arch, device", DEVICES, ids=NAMES)
def test_16_bits(emulators, arch, device):
    sizes = [(1, 500, 1111), (2, 64, 2048), (6, 700, 260), (13, 500, 1024)]
    sizes += [(30, 320, 1500), (64, 192, 900), (100, 448, 700), (150, 900, 384)]
    scales = [(128, HALF), (ROW, HALF), (32, HALF), (256, FLOAT), (20, BFLOAT16)]
    for i, (m, n, k) in some(sizes, device, 1):
        rng = np.random.default_rng(i)
        dtype = (HALF, BFLOAT16)[(i + device) % 2]
        w = harness.make_weight(rng, n, k, *scales[(i + device) % 5])
        x = harness.tokens(rng, m, k, dtype)
        y = harness.gemm(
            emulators[arch], "dispatch_gemm", [], x, w, device=device, seed=i
        )
        assert harness.error(y, harness.expected_gemm(x, w)) < TOLERANCE[dtype]


@pytest.mark.parametrize("arch, device", DEVICES, ids=NAMES)
def test_w2a8(emulators, arch, device):
    """Quantization and product, for a layer of two parts."""
    emulator = emulators[arch]
    sizes = [(1, 500, 1111), (9, 700, 260), (16, 64, 2048), (30, 320, 1500)]
    sizes += [(64, 192, 900), (100, 448, 700)]
    scales = [(128, HALF), (ROW, HALF), (ROW, FLOAT), (256, FLOAT), (20, BFLOAT16)]
    for i, (m, n, k) in some(sizes, device, 1):
        rng = np.random.default_rng(i)
        dtype = (HALF, BFLOAT16)[(i + device) % 2]
        w = harness.make_weight(rng, n, k, *scales[(i + device) % 5])
        x = harness.tokens(rng, m, k, dtype)
        norm = torch.from_numpy(rng.uniform(0.5, 1.5, (2, k))).to(dtype)
        if i % 3 == 0:
            norm = None
        ends = [n // 3, n]
        tiles = w.num_blocks > 1
        q = harness.quantize_arguments(emulator, x, norm, 2, w.k_pad, device, tiles)
        a = harness.w2a8_arguments(emulator, w, None, ends, m, dtype, device)
        a.xq, a.xs, a.xsum, a.xsum_tiles = q.xq, q.xs, q.xsum, q.xsum_tiles
        emulator.call("dispatch_w2a8", q, a, seed=i, device=device)
        y = emulator.get(a.y)
        emulator.free()
        expected, begin = [], 0
        for part, end in enumerate(ends):
            v = x.float()
            if norm is not None:
                inverse = 1.0 / torch.sqrt(v.pow(2).mean(-1, keepdim=True) + 1e-6)
                v = ((v * inverse).to(dtype).float() * norm[part].float()).to(dtype)
            expected.append(harness.expected_int8(v, w.dense()[begin:end]))
            begin = end
        # A value on the edge between two integers may round either way.
        assert harness.error(y, torch.cat(expected, 1)) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("arch, device", DEVICES, ids=NAMES)
def test_w2a8_of_one_part(emulators, arch, device):
    """What the direct kernels take and what they leave: K above 4096, odd K, blocks."""
    emulator = emulators[arch]
    sizes = [(1, 200, 2080), (3, 70, 4096), (8, 40, 4128), (5, 90, 1111), (2, 300, 640)]
    for i, (m, n, k) in some(sizes, device, 1):
        rng = np.random.default_rng(i)
        dtype = (HALF, BFLOAT16)[(i + device) % 2]
        w = harness.make_weight(rng, n, k, (ROW, 64)[i == 4], (FLOAT, HALF)[i % 2])
        x = harness.tokens(rng, m, k, dtype)
        q = harness.quantize_arguments(
            emulator, x, None, 1, w.k_pad, device, w.num_blocks > 1
        )
        a = harness.w2a8_arguments(emulator, w, None, [n], m, dtype, device)
        a.xq, a.xs, a.xsum, a.xsum_tiles = q.xq, q.xs, q.xsum, q.xsum_tiles
        emulator.call("dispatch_w2a8", q, a, seed=i, device=device)
        y = emulator.get(a.y)
        emulator.free()
        expected = harness.expected_int8(x, w.dense())
        assert harness.error(y, expected) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [HALF, BFLOAT16])
def test_two_launches_of_one_product(emulators, dtype):
    emulator = emulators[900]
    rng = np.random.default_rng(5)
    w = harness.make_weight(rng, 570, 900, 128)
    x = harness.tokens(rng, 70, 900, dtype)
    bias = torch.from_numpy(rng.standard_normal(570)).to(dtype)
    a = harness.gemm_arguments(emulator, x, w, bias)
    emulator.withhold(a.x, a.y)
    first = [2, 2, 64, 1, 1, 0, 0, 256, 1, 1]
    plans = [first, [2, 1, 64, 4, 1, 0, 256, w.n_pad, 2, 1]]
    for seed, plan in enumerate(plans):
        emulator.call("sm90_many", a, plan, 3, seed=seed)
    y = emulator.get(a.y)
    emulator.free()
    assert harness.error(y, harness.expected_gemm(x, w, bias)) < TOLERANCE[dtype]


@pytest.mark.parametrize("arch, device", DEVICES, ids=NAMES)
def test_the_smallest_products(emulators, arch, device):
    emulator = emulators[arch]
    rng = np.random.default_rng(device)
    for m, n, k in ((1, 1, 1), (20, 1, 3), (70, 5, 2)):
        for block in (128, ROW):
            w = harness.make_weight(rng, n, k, block)
            w.t[:] = 1  # no token of zeros
            w.packed = harness.pack(w.t, w.n_pad, w.k_pad)
            x = harness.tokens(rng, m, k, HALF).abs() + 1
            y = harness.gemm(emulator, "dispatch_gemm", [], x, w, device=device, seed=m)
            assert harness.error(y, harness.expected_gemm(x, w)) < TOLERANCE[HALF]
            a = harness.quantize_arguments(
                emulator, x, None, 1, w.k_pad, device, w.num_blocks > 1
            )
            b = harness.w2a8_arguments(emulator, w, None, [n], m, HALF, device)
            b.xq, b.xs, b.xsum, b.xsum_tiles = a.xq, a.xs, a.xsum, a.xsum_tiles
            emulator.call("dispatch_w2a8", a, b, seed=m, device=device)
            y = emulator.get(b.y)
            emulator.free()
            assert harness.error(y, harness.expected_gemm(x, w)) < 1e-2
