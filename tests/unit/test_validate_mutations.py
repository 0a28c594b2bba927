# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Each classic mistake, made on purpose, turns the right line to FAIL and is named."""

import json
import zlib

import numpy as np
import pytest
import torch
import validate_quant_weights
from validate_model import change, change_config, pack, write_model

from lib.validate import codec, run

NAME = "model.layers.0.mlp.down_proj"
PACKED, SCALE = f"{NAME}.packed_ternary_weight", f"{NAME}.weight_scale"
N, K, BLOCK = 144, 264, 32


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch):
    """Sharding is in tests/tree; these tests do without vLLM."""
    monkeypatch.setattr(run, "import_shards", lambda: "not in this test")


@pytest.fixture
def model(tmp_path, request):
    return write_model(tmp_path, zlib.crc32(request.node.name.encode()))


def validate(capsys, *arguments) -> tuple[int, dict]:
    """Exit status and report of the command."""
    status = validate_quant_weights.main([*map(str, arguments), "--json"])
    return status, json.loads(capsys.readouterr().out)


def expect_failure(capsys, model, tensor, cause, *, reference=True) -> dict:
    """The one failure there must be: of CPU_UNPACK, in `tensor`, for this cause."""
    ternary, plain = model
    extra = ["--reference", plain] if reference else []
    status, report = validate(capsys, ternary, *extra, "--device", "cpu")
    checks = report["checks"]
    assert status == 1 and report["failed"]
    assert checks["CPU_UNPACK"]["status"] == "FAIL"
    (failure,) = checks["CPU_UNPACK"]["failures"]
    assert failure["tensor"] == tensor
    assert cause in failure["cause"], failure
    return failure


def integers(tensors) -> np.ndarray:
    codes = (tensors[PACKED].numpy()[..., None] >> np.array([0, 2, 4, 6])) & 3
    return np.where(codes == 2, -1, codes).astype(np.int8).reshape(N, -1)[:, :K]


def coded(t: np.ndarray, codes: tuple[int, int, int]) -> torch.Tensor:
    """Packed with other codes of -1, 0 and +1 than the format's."""
    c = np.array(codes, dtype=np.uint8)[t + 1]
    return torch.from_numpy(sum(c[:, i::4] << 2 * i for i in range(4)).astype("u1"))


def bit_order(x: torch.Tensor) -> torch.Tensor:
    return (x & 3) << 6 | (x & 12) << 2 | (x & 48) >> 2 | x >> 6


def four_rows(t: np.ndarray) -> torch.Tensor:
    """A byte holds rows 4n to 4n + 3 of a column."""
    return pack(np.ascontiguousarray(t.T)).T.contiguous().view(N, K // 4)


def bitnet_rows(t: np.ndarray) -> torch.Tensor:
    c = (t + 1).astype(np.uint8).reshape(4, N // 4, K)
    packed = c[0] | c[1] << 2 | c[2] << 4 | c[3] << 6
    return torch.from_numpy(packed).view(N, K // 4)


def memory(x: torch.Tensor) -> torch.Tensor:
    """As many bytes of a tensor's memory as the packed weight has."""
    return x.contiguous().view(-1).view(torch.uint8)[: N * K // 4].view(N, K // 4)


OF_PACKED = {
    "bit order": ("bit order", lambda x, t: bit_order(x)),
    "16-bit words": ("16-bit word", lambda x, t: x.view(N, -1, 2).flip(-1).view(N, -1)),
    "column first": ("column-first", lambda x, t: pack(t.T.copy()).view(N, K // 4)),
    "four rows": ("column-first", lambda x, t: four_rows(t)),
    "bitnet rows": ("column-first", lambda x, t: bitnet_rows(t)),
    "swapped": ("01 and 10 swapped", lambda x, t: pack(-t)),
    "11 for -1": ("11 mapped to -1", lambda x, t: coded(t, (3, 0, 1))),
    "t + 1": ("codes are t + 1", lambda x, t: coded(t, (0, 1, 2))),
    "byte as half": ("a byte was read as a float", lambda x, t: memory(x.half())),
    "byte as float": ("a byte was read as a float", lambda x, t: memory(x.float())),
    "not packed": (
        "not packed",
        lambda x, t: memory(torch.from_numpy(t)),
    ),
    "shifted": ("rows begin 1 weights late", lambda x, t: pack(np.roll(t, 1, axis=1))),
}


@pytest.mark.parametrize("mistake", OF_PACKED)
def test_mistakes_in_packed_weights(mistake, model, capsys):
    cause, make = OF_PACKED[mistake]

    def plant(tensors):
        tensors[PACKED] = make(tensors[PACKED], integers(tensors))

    change(model[0], plant)
    failure = expect_failure(capsys, model, PACKED, cause)
    assert failure["position"] and len(failure["dump"]) > 8
    assert any("^" in line for line in failure["dump"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_float_weight_where_packed_bytes_are_due(dtype, model, capsys):
    w = torch.randn(N, K, generator=torch.Generator().manual_seed(3))

    def plant(tensors):
        tensors[PACKED] = memory(w.to(dtype))

    change(model[0], plant)
    expect_failure(capsys, model, PACKED, "as when a float is read as bytes")


OF_SCALE = {
    "reversed": ("block order", lambda s: s.flip(-1)),
    "block-major": ("block order", lambda s: s.t().contiguous().view(s.shape)),
    "shifted": ("block order", lambda s: s.roll(1, -1)),
    "shuffled": ("block order", lambda s: s[:, [3, 0, 8, 1, 2, 4, 5, 7, 6]]),
    "big-endian": (
        "byte order",
        lambda s: s.view(torch.uint8).view(N, -1, 2).flip(-1).contiguous()
        .view(torch.float16).view(s.shape),
    ),
    "as bytes": (
        "a float was read as a byte",
        lambda s: s.to(torch.uint8).half(),
    ),
    "bytes as numbers": (
        "a float was read as a byte",
        lambda s: s.view(torch.uint8).view(-1)[: s.numel()].half().view(s.shape),
    ),
    "bfloat16": ("dtype", lambda s: s.bfloat16().view(torch.float16)),
    "inverse": ("inverse", lambda s: (1 / s.float()).half()),
}  # fmt: skip


@pytest.mark.parametrize("mistake", OF_SCALE)
def test_mistakes_in_scales(mistake, model, capsys):
    cause, make = OF_SCALE[mistake]

    def plant(tensors):
        tensors[SCALE] = make(tensors[SCALE])

    change(model[0], plant)
    failure = expect_failure(capsys, model, SCALE, cause)
    if "not allowed" not in failure["problem"]:
        assert failure["position"].startswith("row 0, element")
        assert any("^" in line for line in failure["dump"])


def test_one_weight_is_enough(model, capsys):
    def plant(tensors):
        tensors[PACKED][100, 40] ^= 0b11 << 4 if tensors[PACKED][100, 40] & 48 else 16

    change(model[0], plant)
    failure = expect_failure(capsys, model, PACKED, "")
    assert failure["position"].startswith("row 100, byte 40 (weight 162)")
    assert "in 1 of" in failure["problem"] or "reserved" in failure["problem"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
def test_packed_weights_of_another_dtype(dtype, model, capsys):
    change(model[0], lambda t: t.update({PACKED: t[PACKED].to(dtype)}))
    expect_failure(capsys, model, PACKED, "a byte was read as", reference=False)


def test_without_reference_reserved_codes_are_seen(model, capsys):
    def plant(tensors):
        tensors[PACKED] = coded(integers(tensors), (3, 0, 1))

    change(model[0], plant)
    expect_failure(capsys, model, PACKED, "11 mapped to -1", reference=False)


RULES = {
    "no scale": (SCALE, "is missing", lambda t: t.pop(SCALE)),
    "NaN": (SCALE, "nan", lambda t: t[SCALE][3].fill_(torch.nan)),
    "negative": (SCALE, "not negative", lambda t: t[SCALE][3].mul_(-1)),
    "scale dtype": (
        SCALE,
        "float32, expected float16",
        lambda t: t.update({SCALE: t[SCALE].float()}),
    ),
    "scale uncut": (
        SCALE,
        "expected [144, 9]",
        lambda t: t.update({SCALE: torch.cat([t[SCALE]] * 2)}),
    ),
    "zero point": (
        f"{NAME}.weight_zero_point",
        "zero_point is false",
        lambda t: t.update({f"{NAME}.weight_zero_point": t[SCALE].float()}),
    ),
    "not converted": (
        f"{NAME}.weight",
        "config.json says packed_ternary_weight",
        lambda t: (
            t.update({f"{NAME}.weight": torch.zeros(N, K), PACKED: t[PACKED]})
            or t.pop(PACKED)
        ),
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_rules_of_the_format(rule, model, capsys):
    tensor, said, mistake = RULES[rule]
    change(model[0], mistake)
    status, report = validate(capsys, model[0], "--device", "cpu")
    assert status == 1
    (failure,) = report["checks"]["CPU_UNPACK"]["failures"]
    assert failure["tensor"] == tensor
    assert said in failure["problem"]


def test_config_of_another_checkpoint(model, capsys):
    change_config(model[0], block_size=64)
    status, report = validate(capsys, model[0])
    assert status == 1
    check = report["checks"]["CPU_UNPACK"]
    assert check["failure_count"] == 7
    assert "block_size" in check["failures"][0]["problem"]


def test_padding_that_counts(tmp_path, capsys):
    model = write_model(tmp_path, 11, hidden=146)  # two codes of padding
    name = "model.layers.0.mlp.up_proj.packed_ternary_weight"
    change(model[0], lambda t: t[name][5, -1:].bitwise_or_(1 << 6))
    status, report = validate(capsys, model[0])
    (failure,) = report["checks"]["CPU_UNPACK"]["failures"]
    assert failure["tensor"] == name
    assert failure["problem"] == "codes beyond K = 146 are not 0"
    assert failure["position"].startswith("row 5")


def test_zero_points_and_scales_give_back_the_weights(tmp_path, capsys):
    model = write_model(tmp_path, 12, zero_point=True)
    zero = f"{NAME}.weight_zero_point"
    status, report = validate(capsys, model[0], "--reference", model[1])
    assert status == 0
    change(model[0], lambda t: t.update({zero: t[zero].roll(1, -1)}))
    status, report = validate(capsys, model[0], "--reference", model[1])
    assert status == 1
    assert report["checks"]["CPU_UNPACK"]["failures"][0]["tensor"].startswith(NAME)


def test_a_decoder_with_the_wrong_bit_order(model, capsys, monkeypatch):
    right = codec.format.unpack
    monkeypatch.setattr(
        codec.format,
        "unpack",
        lambda packed, k, **settings: right(bit_order(packed), k, **settings),
    )
    status, report = validate(capsys, model[0], "--device", "cpu")
    assert status == 1
    failure = report["checks"]["CPU_UNPACK"]["failures"][0]
    assert "codec reads other integers" in failure["problem"]
    assert failure["cause"].startswith("bit order")


LAYOUTS = {
    "swapped": (0, "01 and 10 swapped", lambda x: (x & 0x55) << 1 | (x & 0xAA) >> 1),
    "blocks": (1, "block order", lambda x: x.flip(-1)),
    "rounded": (1, "", lambda x: (x.float() * 1.001).to(x.dtype)),
}


@pytest.mark.parametrize("mistake", LAYOUTS)
def test_mistakes_of_the_device_layout(mistake, model, capsys, monkeypatch):
    index, cause, make = LAYOUTS[mistake]
    right = codec.layout.decode_layout

    def wrong(*arguments):
        tensors = list(right(*arguments))
        tensors[index] = make(tensors[index])
        return tensors

    monkeypatch.setattr(codec.layout, "decode_layout", wrong)
    status, report = validate(capsys, model[0], "--device", "cpu")
    checks = report["checks"]
    assert status == 1
    assert checks["CPU_UNPACK"]["status"] == "OK"
    assert checks["GPU_LOAD"]["status"] == "FAIL"
    assert cause in checks["GPU_LOAD"]["failures"][0]["cause"]
