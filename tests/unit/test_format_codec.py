# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The codec against references written from docs/quant_format.md alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.convert.codec import TernaryFormatError
from lib.convert.codec import format as codec

BLOCKS = [4, 12, 32, 64, 128, 256, "row", "tensor"]
SIZES = [1, 2, 3, 4, 5, 7, 63, 127, 128, 129, 130, 256, 320, 515]
VALUE_OF_CODE = {0b00: 0, 0b01: 1, 0b10: -1, 0b11: 0}

shapes = st.tuples(st.integers(1, 9), st.integers(1, 400))
blocks = st.one_of(st.integers(1, 80).map(lambda x: 4 * x), st.sampled_from(["row"]))
seeds = st.integers(0, 2**32 - 1)


def pack_reference(t: np.ndarray) -> np.ndarray:
    """One weight at a time."""
    code_of_value = {0: 0b00, 1: 0b01, -1: 0b10}
    n, k = t.shape
    out = np.zeros((n, (k + 3) // 4), dtype=np.uint8)
    for row in range(n):
        for column in range(k):
            code = code_of_value[int(t[row, column])]
            out[row, column // 4] |= code << (2 * (column % 4))
    return out


def dequantize_reference(t, scale, zero_point, block) -> np.ndarray:
    """float64 [N, K], one weight at a time."""
    n, k = t.shape
    out = np.zeros((n, k))
    for row in range(n):
        for column in range(k):
            if block == "tensor":
                at = (0,)
            elif block == "row":
                at = (row, 0)
            else:
                at = (row, column // block)
            zero = 0.0 if zero_point is None else float(zero_point[at])
            out[row, column] = float(scale[at]) * (float(t[row, column]) - zero)
    return out


def random_ternary(seed: int, n: int, k: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, (n, k), generator=generator, dtype=torch.int8)


def random_scale(seed: int, n: int, k: int, block, dtype=torch.float16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 1)
    shape = codec.scale_shape((n,), k, block)
    return (torch.rand(shape, generator=generator) + 2**-6).to(dtype)


@pytest.mark.parametrize("k", SIZES)
def test_pack_and_unpack_equal_the_reference(k):
    t = random_ternary(k, 5, k)
    packed = codec.pack(t)
    assert packed.dtype == torch.uint8
    np.testing.assert_array_equal(packed.numpy(), pack_reference(t.numpy()))
    assert torch.equal(codec.unpack(packed, k), t)


@given(shapes, seeds)
def test_pack_and_unpack_any_shape(shape, seed):
    t = random_ternary(seed, *shape)
    packed = codec.pack(t)
    np.testing.assert_array_equal(packed.numpy(), pack_reference(t.numpy()))
    assert torch.equal(codec.unpack(packed, shape[1]), t)
    assert codec.count_padding(packed, shape[1]) == 0


def test_every_byte_unpacks_to_its_four_codes():
    every = torch.arange(256, dtype=torch.uint8).view(256, 1)
    expected = [
        [VALUE_OF_CODE[(byte >> shift) & 3] for shift in (0, 2, 4, 6)]
        for byte in range(256)
    ]
    assert codec.unpack(every, 4).tolist() == expected
    for k in (1, 2, 3):
        assert codec.unpack(every, k).tolist() == [row[:k] for row in expected]
        reserved = sum((b >> 2 * i) & 3 == 3 for b in range(256) for i in range(k))
        assert codec.count_reserved(every, k) == reserved
        padding = sum((b >> 2 * i) & 3 != 0 for b in range(256) for i in range(k, 4))
        assert codec.count_padding(every, k) == padding
        cleared = codec.clear_padding(every, k)
        assert codec.count_padding(cleared, k) == 0
        assert torch.equal(codec.unpack(cleared, k), codec.unpack(every, k))
        assert torch.equal(every, torch.arange(256, dtype=torch.uint8).view(256, 1))


def test_more_dimensions_and_strides():
    t = random_ternary(3, 6 * 10, 22).view(6, 10, 22)
    packed = codec.pack(t)
    assert packed.shape == (6, 10, 6)
    assert torch.equal(packed[4], codec.pack(t[4]))
    across = t.transpose(0, 1)
    assert torch.equal(codec.pack(across), packed.transpose(0, 1))
    assert torch.equal(codec.unpack(packed.transpose(0, 1), 22), across)
    assert torch.equal(codec.pack(t[..., 3::2]), codec.pack(t[..., 3::2].contiguous()))


def test_work_is_done_in_chunks(monkeypatch):
    t, scale = random_ternary(4, 50, 70), random_scale(4, 50, 70, 32)
    whole = codec.pack(t), codec.dequantize(t, scale, None, 32)
    packed = whole[0].clone()
    packed[49, 0] |= 3
    monkeypatch.setattr(codec, "CHUNK_BYTES", 1000)
    assert len(list(codec.row_chunks(50, 4 * 70))) == 17
    assert torch.equal(codec.pack(t), whole[0])
    assert torch.equal(codec.unpack(whole[0], 70), t)
    assert torch.equal(codec.dequantize(t, scale, None, 32), whole[1])
    assert codec.count_reserved(packed, 70) == 1


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("zero_dtype", [None, torch.float32, torch.int32])
@pytest.mark.parametrize("k", [5, 128, 130, 320])
def test_dequantize_equals_the_reference(block, zero_dtype, k):
    t, scale = random_ternary(k, 3, k), random_scale(k, 3, k, block)
    zero_point = None
    if zero_dtype is not None:
        generator = torch.Generator().manual_seed(k)
        shape = scale.shape
        zero_point = torch.randint(-8, 8, shape, generator=generator).to(zero_dtype)
    expected = dequantize_reference(t, scale, zero_point, block)
    for dtype in (torch.float32, torch.float64):
        # Small integers times 11 bits are exact in float32 as in float64.
        w = codec.dequantize(t, scale, zero_point, block, dtype)
        np.testing.assert_array_equal(w.numpy(), expected.astype(w.numpy().dtype))
    half = codec.dequantize(t, scale, zero_point, block, torch.float16)
    np.testing.assert_array_equal(half.numpy(), expected.astype(np.float16))


def test_dequantize_fractional_zero_point():
    t = torch.tensor([[-1, 0, 1, 1]], dtype=torch.int8)
    scale, zero = torch.tensor([[0.3]]), torch.tensor([[0.1]])
    expected = np.float32(0.3) * (
        np.array([[-1, 0, 1, 1]], np.float32) - np.float32(0.1)
    )
    w = codec.dequantize(t, scale, zero, 4)
    np.testing.assert_array_equal(w.numpy(), expected)


@given(shapes, blocks, seeds, st.data())
@settings(deadline=None)
def test_slice_k_any_cut(shape, block, seed, data):
    n, k = shape
    start = data.draw(st.integers(0, k - 1))
    stop = data.draw(st.integers(start + 1, k))
    t, scale = random_ternary(seed, n, k), random_scale(seed, n, k, block)
    zero_point = torch.arange(scale.numel(), dtype=torch.float32).view_as(scale)
    w = codec.dequantize(t, scale, zero_point, block)
    part = codec.slice_k(codec.pack(t), scale, zero_point, k, block, start, stop)
    assert part.size_k == part.lead + stop - start
    assert part.lead == codec.lead_padding(start, stop, k, block)
    codec.check_packed(part.packed, (n,), part.size_k)
    codec.check_codes(part.packed, part.size_k, strict=True)
    local = codec.unpack(part.packed, part.size_k)
    assert not local[:, : part.lead].any()
    got = codec.dequantize(local, part.scale, part.zero_point, block)
    assert torch.equal(got[:, part.lead :], w[:, start:stop])


@given(shapes, blocks, seeds, st.integers(1, 8))
@settings(deadline=None)
def test_slices_together_are_the_whole(shape, block, seed, ranks):
    n, k = shape[0], shape[1] * ranks
    t, scale = random_ternary(seed, n, k), random_scale(seed, n, k, block)
    packed, width = codec.pack(t), k // ranks
    parts = [
        codec.slice_k(packed, scale, None, k, block, r * width, (r + 1) * width)
        for r in range(ranks)
    ]
    integers = [codec.unpack(p.packed, p.size_k)[:, p.lead :] for p in parts]
    assert torch.equal(torch.cat(integers, dim=1), t)
    length = codec.block_length(k, block)
    for r, part in enumerate(parts):
        first, last = r * width // length, ((r + 1) * width - 1) // length
        assert torch.equal(part.scale, scale[:, first : last + 1])


def test_slice_k_returns_copies():
    t, scale = random_ternary(9, 2, 256), random_scale(9, 2, 256, 128)
    packed = codec.pack(t)
    part = codec.slice_k(packed, scale, None, 256, 128, 128, 256)
    part.packed.zero_()
    part.scale.zero_()
    assert torch.equal(codec.pack(t), packed) and scale.all()


def test_slice_k_tensor_scale_is_kept():
    t, scale = random_ternary(8, 2, 30), torch.tensor([0.5], dtype=torch.float16)
    part = codec.slice_k(codec.pack(t), scale, None, 30, "tensor", 7, 30)
    assert part.lead == 0 and torch.equal(part.scale, scale)
    assert torch.equal(codec.unpack(part.packed, 23), t[:, 7:])


@pytest.mark.parametrize(
    ("k", "old", "new"), [(256, 128, 64), (300, 128, 32), (5, 8, 4)]
)
def test_split_then_merge_blocks(k, old, new):
    scale = random_scale(k, 3, k, old)
    fine = codec.split_blocks(scale, k, old, new)
    t = random_ternary(k, 3, k)
    assert torch.equal(
        codec.dequantize(t, scale, None, old), codec.dequantize(t, fine, None, new)
    )
    assert torch.equal(codec.merge_blocks(fine, k, new, old), scale)


def test_blocks_merge_only_where_equal():
    fine = torch.tensor([[1.0, 1.0, 2.0, 2.0, 3.0]])
    assert codec.merge_blocks(fine, 300, 64, 128).tolist() == [[1.0, 2.0, 3.0]]
    assert codec.merge_blocks(fine, 300, 64, "row") is None
    fine[0, 3] = torch.nextafter(fine[0, 3], torch.tensor(3.0))
    assert codec.merge_blocks(fine, 300, 64, 128) is None
    same = torch.full((2, 5), 0.25)
    assert codec.merge_blocks(same, 300, 64, "row").tolist() == [[0.25], [0.25]]
    assert codec.merge_blocks(same, 300, 64, "tensor").tolist() == [0.25]
    for function in (codec.merge_blocks, codec.split_blocks):
        with pytest.raises(TernaryFormatError, match="do not"):
            function(fine, 300, 64, 96)


@pytest.mark.parametrize("bad", [0, -4, 3, 6, 130, True, 1.0, "rows", None])
def test_impossible_block_sizes(bad):
    with pytest.raises(TernaryFormatError, match="block size"):
        codec.check_block_size(bad)


@pytest.mark.parametrize("good", [4, 64, 128, "row", "tensor"])
def test_possible_block_sizes(good):
    assert codec.check_block_size(good) == good


def test_pack_refuses_other_values_and_dtypes():
    for bad in (2, -2, 127, -128):
        with pytest.raises(TernaryFormatError, match=f"q_proj: value {bad} "):
            codec.pack(torch.tensor([[0, bad]], dtype=torch.int8), name="q_proj")
    with pytest.raises(TernaryFormatError, match="float32, not int8"):
        codec.pack(torch.zeros(1, 4))


def refused(problem: str, remedy: str, function, *args, **kwargs) -> None:
    """The error names the tensor, says what is wrong and what to do."""
    with pytest.raises(TernaryFormatError) as caught:
        function(*args, name="layers.3.up_proj", **kwargs)
    assert caught.value.name == "layers.3.up_proj"
    assert problem in caught.value.problem and remedy in caught.value.remedy
    assert str(caught.value).startswith("layers.3.up_proj: ")


def test_check_packed():
    good = torch.zeros(3, 25, dtype=torch.uint8)
    assert codec.check_packed(good, (3,), 100) is good
    for k in (96, 101):
        refused("expected [3,", "config.json", codec.check_packed, good, (3,), k)
    refused("expected [4, 25]", "config", codec.check_packed, good, (4,), 100)
    refused("is missing", "modules_to_not", codec.check_packed, None, (3,), 100)
    as_float = good.to(torch.float16)
    refused("float16 where", "uint8", codec.check_packed, as_float, (3,), 100)
    refused("int8", "uint8", codec.check_packed, good.to(torch.int8), (3,), 100)


def test_check_codes():
    packed = codec.pack(random_ternary(1, 3, 10))
    assert codec.check_codes(packed, 10, strict=True) == 0
    packed[1, 0] = 0b11000011
    assert codec.check_codes(packed, 10) == 2
    refused("2 weights", "read as 0", codec.check_codes, packed, 10, strict=True)
    assert codec.unpack(packed, 10)[1, :4].tolist() == [0, 0, 0, 0]
    packed = codec.pack(random_ternary(1, 3, 10))
    packed[2, 2] |= 0b01000000
    assert codec.check_codes(packed, 10) == 0
    refused("1 padding", "ignored", codec.check_codes, packed, 10, strict=True)


@pytest.mark.parametrize(
    ("block", "shape"), [(128, (3, 3)), (64, (3, 5)), ("row", (3, 1)), ("tensor", (1,))]
)
def test_check_scale_shape(block, shape):
    good = torch.ones(shape, dtype=torch.float16)
    assert codec.check_scale(good, (3,), 320, block) is good
    for wrong in ((3, 2), (3, 4), (4, 3), (3,), (2, 1), (5, 3)):
        bad = torch.ones(wrong, dtype=torch.float16)
        refused("expected [", "block_size", codec.check_scale, bad, (3,), 320, block)


def test_check_scale_values():
    check = codec.check_scale
    for bad in (float("nan"), float("inf"), -1.0, -(2.0**-14)):
        scale = torch.ones(3, 3, dtype=torch.float16)
        scale[2, 1] = bad
        refused(f"value {bad} at [2, 1]", "finite", check, scale, (3,), 320, 128)
    zero = torch.zeros(3, 3, dtype=torch.float16)
    assert check(zero, (3,), 320, 128) is zero
    refused("is missing", "convert", check, None, (3,), 320, 128)
    for dtype in (torch.float64, torch.uint8, torch.int32):
        refused("dtype is", "agree", check, zero.to(dtype), (3,), 320, 128)
    wide = zero.to(torch.float32)
    assert check(wide, (3,), 320, 128) is wide
    kwargs = {"dtype": torch.float16}
    refused("float32, expected float16", "agree", check, wide, (3,), 320, 128, **kwargs)


def test_check_zero_point():
    check = codec.check_zero_point
    for dtype in (torch.float32, torch.int32):
        good = torch.full((3, 3), -7, dtype=dtype)
        assert check(good, (3,), 320, 128) is good
    bad = torch.full((3, 3), float("-inf"))
    refused("value -inf at [0, 0] (9 such", "finite", check, bad, (3,), 320, 128)
    half = bad.to(torch.float16)
    refused("expected float32 or int32", "agree", check, half, (3,), 320, 128)
    refused("expected [3, 3]", "block_size", check, good[:2], (3,), 320, 128)
