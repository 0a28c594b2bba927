# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The CPU weight layout against a statement of it, element by element."""

import cpu_ops
import pytest
import torch
from cpu_ops import layout

# N, K, block size
SIZES = [
    (1, 1, 4),
    (3, 4, 4),
    (64, 128, 128),
    (65, 130, 32),
    (5, 77, 4),
    (100, 300, 100),
    (16, 517, 520),
    (70, 1000, 128),
    (130, 96, 20),
]


def _place(k: int, block_size: int, nblocks: int, block_pad: int) -> int:
    return k if nblocks == 1 else k // block_size * block_pad + k % block_size


@pytest.mark.parametrize(("size_n", "size_k", "block_size"), SIZES)
def test_every_weight_is_where_the_docstring_says(size_n, size_k, block_size):
    w = cpu_ops.random_weight(size_n, size_k, block_size, seed=size_n)
    nblocks, block_pad, k_pad = layout.k_layout(size_k, block_size)
    words = w.weight.numpy().view("uint32")
    assert words.shape == (layout.padded_rows(size_n) // 64, k_pad // 16, 64)
    used = torch.zeros(words.shape + (16,), dtype=torch.bool)
    for n in range(size_n):
        for k in range(size_k):
            at = _place(k, block_size, nblocks, block_pad)
            word = int(words[n // 64, at // 16, n % 64])
            assert (word >> (2 * (at % 16)) & 3) - 1 == w.ternary[n, k]
            used[n // 64, at // 16, n % 64, at % 16] = True
    shifts = torch.arange(16) * 2
    codes = w.weight.unsqueeze(-1).to(torch.int64) >> shifts & 3
    assert (codes[~used] == 1).all(), "padding must read as weight 0"


@pytest.mark.parametrize(("size_n", "size_k", "block_size"), SIZES)
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("zero_point", [None, torch.float32, torch.int32])
def test_decode_is_the_inverse(
    size_n, size_k, block_size, scale_dtype, zero_point, monkeypatch
):
    w = cpu_ops.random_weight(
        size_n,
        size_k,
        block_size,
        seed=size_k,
        scale_dtype=scale_dtype,
        zero_point=zero_point,
    )
    monkeypatch.setattr(layout, "_CHUNK_WEIGHTS", 1)  # one tile at a time
    packed, scale, zero = layout.decode(
        w.weight, w.scale, w.zero_point, size_n, size_k, block_size
    )
    assert packed.dtype == torch.uint8 and torch.equal(packed, w.packed)
    assert scale.dtype == scale_dtype and torch.equal(scale, w.disk_scale)
    if zero_point is None:
        assert zero is None
    else:
        assert zero.dtype == zero_point and torch.equal(zero, w.disk_zero_point)


def test_chunks_do_not_change_the_result(monkeypatch):
    w = cpu_ops.random_weight(300, 260, 64, seed=3)
    monkeypatch.setattr(layout, "_CHUNK_WEIGHTS", 1)
    again = layout.encode(w.packed, w.disk_scale, None, 260, 64)
    assert torch.equal(again[0], w.weight) and torch.equal(again[1], w.scale)


def test_reserved_code_and_unused_bits_read_as_zero():
    packed = torch.tensor([[0b11_10_01_00, 0b11_11_11_01]], dtype=torch.uint8)
    encoded = layout.encode(packed, torch.ones(1, 1), None, 5, 8)
    decoded = layout.decode(*encoded, 1, 5, 8)[0]
    assert decoded.tolist() == [[0b00_10_01_00, 0b00_00_00_01]]


@pytest.mark.parametrize(
    ("packed", "scale", "message"),
    [
        (torch.zeros(4, 9, dtype=torch.uint8), torch.ones(4, 1), "packed is"),
        (torch.zeros(4, 8), torch.ones(4, 1), "packed is"),
        (torch.zeros(4, 8, dtype=torch.uint8), torch.ones(4, 2), "scale is"),
        (torch.zeros(4, 8, dtype=torch.uint8), torch.ones(1, 4), "scale is"),
    ],
)
def test_a_wrong_shape_is_named(packed, scale, message):
    with pytest.raises(ValueError, match=message):
        layout.encode(packed, scale, None, 32, 32)


def test_sizes_are_checked():
    with pytest.raises(ValueError, match="block_size=6"):
        layout.k_layout(32, 6)
    with pytest.raises(ValueError, match="ask for torch.int32"):
        layout.decode(torch.zeros(1, 1, 64), torch.ones(1, 64), None, 64, 32, 32)
