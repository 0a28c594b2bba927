# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The CUDA weight layout against a NumPy statement of it, element by element."""

import importlib.util
import pathlib

import numpy as np
import pytest
import torch

_MODULE = (
    pathlib.Path(__file__).resolve().parents[2]
    / "overlay/vllm/model_executor/layers/quantization/utils/ternary_layout_cuda.py"
)
_spec = importlib.util.spec_from_file_location("ternary_layout_cuda", _MODULE)
layout = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(layout)

SIZES = [
    (1, 1),
    (3, 4),
    (16, 128),
    (17, 130),
    (64, 256),
    (65, 127),
    (100, 333),
    (128, 1024),
    (200, 517),
]


def _pack(values: np.ndarray) -> np.ndarray:
    """Pack int8 [N, K] in {-1, 0, 1} as the disk format does, written out naively."""
    size_n, size_k = values.shape
    packed = np.zeros((size_n, (size_k + 3) // 4), dtype=np.uint8)
    for k in range(size_k):
        code = np.select([values[:, k] == 1, values[:, k] == -1], [1, 2], 0)
        packed[:, k // 4] |= code.astype(np.uint8) << (2 * (k % 4))
    return packed


def _device_code(words: np.ndarray, row: int, k: int) -> int:
    """Read one code by the formula of the module's docstring."""
    g, half_row = row % 8, (row % 16) // 8
    inner = k % 128
    j, s, half_col = inner // 32, (inner // 16) % 2, (inner // 8) % 2
    t, h = (inner % 8) // 2, inner % 2
    word = int(words[row // 16, k // 128, g * 4 + t, j]) & 0xFFFFFFFF
    return (word >> (2 * (4 * s + half_row + 2 * half_col) + 16 * h)) & 3


def _case(size_n: int, size_k: int, block_size: int, dtype: torch.dtype, seed: int):
    rng = np.random.default_rng(seed)
    values = rng.integers(-1, 2, (size_n, size_k)).astype(np.int8)
    blocks = -(-size_k // block_size)
    real = rng.standard_normal((2, size_n, blocks)).astype(np.float32)
    scale, zero_point = torch.from_numpy(real[0]).to(dtype), torch.from_numpy(real[1])
    return values, torch.from_numpy(_pack(values)), scale, zero_point


@pytest.mark.parametrize("seed,shape", list(enumerate(SIZES)))
def test_every_code_sits_where_the_layout_says(seed, shape):
    size_n, size_k = shape
    values, packed, scale, _ = _case(size_n, size_k, 128, torch.float16, seed)
    weight, _, _ = layout.encode(packed, scale, None, size_k, 128)
    n_pad, k_pad = layout.padded_shape(size_n, size_k)
    assert weight.shape == (n_pad // 16, k_pad // 128, 32, 4)
    words = weight.numpy()
    rng = np.random.default_rng(seed + 1000)
    picks = {(int(rng.integers(n_pad)), int(rng.integers(k_pad))) for _ in range(4000)}
    for row, k in picks:
        expected = values[row, k] + 1 if row < size_n and k < size_k else 1
        assert _device_code(words, row, k) == expected, (row, k)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("block_size", [4, 32, 100, 128, 1 << 20])
@pytest.mark.parametrize("seed,shape", list(enumerate(SIZES, start=50)))
def test_decode_is_the_exact_inverse(seed, shape, block_size, dtype):
    size_n, size_k = shape
    _, packed, scale, zero_point = _case(size_n, size_k, block_size, dtype, seed)
    encoded = layout.encode(packed, scale, zero_point, size_k, block_size)
    assert encoded[1].shape == (scale.shape[1], layout.padded_shape(*shape)[0])
    assert encoded[1].is_contiguous() and encoded[0].is_contiguous()
    back = layout.decode(*encoded, size_n, size_k, block_size)
    assert torch.equal(back[0], packed)
    assert back[1].dtype == dtype and torch.equal(back[1], scale)
    assert torch.equal(back[2], zero_point)


def test_chunks_meet_without_a_seam(monkeypatch):
    _, packed, scale, _ = _case(300, 260, 128, torch.float16, 7)
    whole, _, _ = layout.encode(packed, scale, None, 260, 128)
    monkeypatch.setattr(layout, "CHUNK_BYTES", 64)
    parts, scales, _ = layout.encode(packed, scale, None, 260, 128)
    assert torch.equal(whole, parts)
    assert torch.equal(layout.decode(parts, scales, None, 300, 260, 128)[0], packed)


def test_padding_bits_and_reserved_codes_read_as_zero():
    packed = torch.full((2, 2), 0xFF, dtype=torch.uint8)
    scale = torch.ones((2, 1), dtype=torch.float16)
    weight, scales, _ = layout.encode(packed, scale, None, 5, 128)
    codes = [_device_code(weight.numpy(), row, k) for row in range(2) for k in range(8)]
    assert codes == [1] * 16
    assert not layout.decode(weight, scales, None, 2, 5, 128)[0].any()


def test_integer_zero_points_become_float():
    _, packed, scale, _ = _case(4, 8, 4, torch.float16, 3)
    zero_point = torch.tensor([[1, -2]] * 4, dtype=torch.int32)
    encoded = layout.encode(packed, scale, zero_point, 8, 4)
    assert encoded[2].dtype == torch.float32
    assert torch.equal(encoded[2][:, :4], zero_point.t().float())
    with pytest.raises(ValueError, match="float32 cannot hold"):
        layout.encode(packed, scale, zero_point + (1 << 25), 8, 4)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"packed": torch.zeros((4, 3), dtype=torch.uint8)}, "packed_ternary_weight"),
        ({"packed": torch.zeros((4, 2), dtype=torch.int32)}, "packed_ternary_weight"),
        ({"scale": torch.zeros((4, 1), dtype=torch.float16)}, "weight_scale has shape"),
        ({"scale": torch.zeros((4, 2), dtype=torch.float64)}, "weight_scale is"),
        ({"zero_point": torch.zeros((4, 1))}, "weight_zero_point has shape"),
        ({"zero_point": torch.zeros((4, 2)).long()}, "weight_zero_point is"),
        ({"block_size": 6}, "block_size is 6"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, message):
    arguments = dict(
        packed=torch.zeros((4, 2), dtype=torch.uint8),
        scale=torch.zeros((4, 2), dtype=torch.float16),
        zero_point=None,
        size_k=8,
        block_size=4,
    )
    arguments.update(change)
    with pytest.raises(ValueError, match=message):
        layout.encode(**arguments)


def test_decode_refuses_another_shape():
    _, packed, scale, _ = _case(16, 128, 128, torch.float16, 1)
    weight, scales, _ = layout.encode(packed, scale, None, 128, 128)
    with pytest.raises(ValueError, match="in the CUDA layout"):
        layout.decode(weight, scales, None, 80, 128, 128)
    with pytest.raises(ValueError, match="scale has shape"):
        layout.decode(weight, scales, None, 16, 128, 64)
