# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""TP_SHARD of the validator: right with vLLM's loaders, FAIL with loaders that are not.

Each mistake is made in a class or function that really loads, and nothing else.
"""

import json
import zlib
from pathlib import Path

import pytest
import torch
import validate_quant_weights
from peak_memory import peak_memory
from validate_model import change, write_model

from lib.validate import check_shards
from lib.validate.ranks import Whole
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.model_executor.layers.quantization.ternary import parameters
from vllm.model_executor.layers.quantization.ternary.parameters import (
    InputCut,
    TernaryScaleParameter,
    TernaryWeightParameter,
)

DOWN, GATE, K_PROJ = (
    f"model.layers.0.{name}"
    for name in ("mlp.down_proj", "mlp.gate_proj", "self_attn.k_proj")
)


@pytest.fixture
def model(tmp_path, request):
    # Inputs of down_proj: 4 ranks cut 262 inside a byte and a block.
    seed = zlib.crc32(request.node.name.encode())
    return write_model(tmp_path, seed, hidden=144, mlp=264)[0]


def validate(capsys, *arguments) -> tuple[int, dict]:
    status = validate_quant_weights.main([*map(str, arguments), "--json"])
    return status, json.loads(capsys.readouterr().out)


def failures_of(capsys, model, tp) -> dict[str, dict]:
    """TP_SHARD's first failure for each tensor; the other checks must have none."""
    status, report = validate(capsys, model, "--tp", tp, "--device", "cpu")
    checks = report["checks"]
    assert status == 1
    assert checks["CPU_UNPACK"]["status"] == "OK"
    assert checks["GPU_LOAD"]["status"] == "SKIPPED"
    assert checks["TP_SHARD"]["status"] == "FAIL"
    first: dict[str, dict] = {}
    for failure in checks["TP_SHARD"]["failures"]:
        first.setdefault(failure["tensor"], failure)
    return first


@pytest.mark.parametrize("block_size", [32, 128, "row", "tensor"])
@pytest.mark.parametrize("zero_point", [False, True])
def test_right_loaders(block_size, zero_point, tmp_path, capsys):
    ternary, plain = write_model(
        tmp_path,
        1,
        block_size=block_size,
        zero_point=zero_point,
        embeddings=True,
        mlp=3 * 4 * 2 * 11,
    )
    status, report = validate(
        capsys, ternary, "--reference", plain, "--tp", "1,2,3,4,8"
    )
    assert status == 0
    assert report["checks"]["TP_SHARD"] == {
        "status": "OK",
        "reason": "",
        "failure_count": 0,
        "failures": [],
    }


def test_fused_in_the_checkpoint(tmp_path, capsys):
    ternary, _ = write_model(tmp_path, 2)

    def fuse(tensors):
        for parts, whole in (
            (("q_proj", "k_proj", "v_proj"), "self_attn.qkv_proj"),
            (("gate_proj", "up_proj"), "mlp.gate_up_proj"),
        ):
            parent = f"model.layers.0.{whole.split('.')[0]}"
            for name in ("packed_ternary_weight", "weight_scale"):
                rows = [tensors.pop(f"{parent}.{part}.{name}") for part in parts]
                tensors[f"model.layers.0.{whole}.{name}"] = torch.cat(rows)

    change(ternary, fuse)
    kinds = set()
    checked = check_shards.check_layer

    def watch(checkpoint, layer, tp):
        kinds.add((layer.spec.kind, layer.fused))
        return checked(checkpoint, layer, tp)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check_shards, "check_layer", watch)
        status, _ = validate(capsys, ternary, "--tp", "2,4,8")
    assert status == 0
    assert {("qkv", True), ("merged", True), ("row", False)} <= kinds


def scale_uncut_along_inputs(patch):
    def load(self, loaded_weight):
        self.data.copy_(loaded_weight[:, : self.data.shape[1]])

    patch.setattr(TernaryScaleParameter, "load_row_parallel_weight", load)


def scale_uncut_along_rows(patch):
    def load(self, loaded_weight):
        self.data.copy_(loaded_weight[: self.data.shape[0]])

    patch.setattr(TernaryScaleParameter, "load_column_parallel_weight", load)


def scale_of_fused_layers_uncut(patch):
    def load(self, loaded_weight, *, shard_offset, shard_size, **_):
        rows = self.data[shard_offset : shard_offset + shard_size]
        rows.copy_(loaded_weight[:shard_size])

    patch.setattr(TernaryScaleParameter, "load_merged_column_weight", load)
    patch.setattr(TernaryScaleParameter, "load_qkv_weight", load)


def scale_at_another_offset(patch):
    right = TernaryScaleParameter.load_merged_column_weight

    def load(self, loaded_weight, **kwargs):
        kwargs["shard_offset"] = self.data.shape[0] - kwargs["shard_offset"]
        kwargs["shard_offset"] -= kwargs["shard_size"]
        right(self, loaded_weight, **kwargs)

    patch.setattr(TernaryScaleParameter, "load_merged_column_weight", load)


def weight_cut_at_the_bytes_begin(patch):
    def of_packed(self, packed):
        start = self.start // 4 * 4
        cut = InputCut(
            start, start + self.stop - self.start, self.size_k, self.block_size
        )
        wanted = InputCut(self.start, self.stop, self.size_k, self.block_size)
        shift = wanted.lead - cut.lead
        part = right(cut, packed)
        t = parameters.unpack(part, cut.local_size_k)
        t = torch.nn.functional.pad(t, (shift, 0))
        return parameters.pack(t)

    right = InputCut.of_packed
    patch.setattr(parameters, "unpack", check_shards.fmt.unpack, raising=False)
    patch.setattr(parameters, "pack", check_shards.fmt.pack, raising=False)
    patch.setattr(InputCut, "of_packed", of_packed)


def weight_uncut_along_inputs(patch):
    right = InputCut.of_packed

    def of_packed(self, packed):
        part = right(InputCut(0, self.stop - self.start, self.size_k, "row"), packed)
        t = check_shards.fmt.unpack(part, self.stop - self.start)
        t = torch.nn.functional.pad(t, (self.lead, 0))
        return check_shards.fmt.pack(t)

    patch.setattr(InputCut, "of_packed", of_packed)


def scales_from_the_block_after(patch):
    right = InputCut.of_scale

    def of_scale(self, scale):
        if not self.start:
            return right(self, scale)
        width = right(self, scale).shape[1]
        first = min(self.start // self.block_size + 1, scale.shape[1] - width)
        return scale[:, first : first + width]

    patch.setattr(InputCut, "of_scale", of_scale)


def key_heads_not_replicated(patch):
    right = TernaryWeightParameter.load_qkv_weight

    def load(self, loaded_weight, *, num_heads, **kwargs):
        rows = loaded_weight
        if num_heads > 1:  # as if every rank had a head of its own
            rows = torch.cat([loaded_weight, loaded_weight])
        right(self, rows, num_heads=1, **kwargs)

    patch.setattr(TernaryWeightParameter, "load_qkv_weight", load)


def ranks_in_reverse(patch):
    right = TernaryWeightParameter.load_column_parallel_weight

    def load(self, loaded_weight):
        self.tp_rank = self.tp_size - 1 - self.tp_rank
        right(self, loaded_weight)
        self.tp_rank = self.tp_size - 1 - self.tp_rank

    patch.setattr(TernaryWeightParameter, "load_column_parallel_weight", load)


MISTAKES = {
    scale_uncut_along_inputs: (
        2,
        f"{DOWN}.weight_scale",
        "scale not cut with the weight",
    ),
    scale_uncut_along_rows: (
        2,
        f"{DOWN}.weight_scale",
        "scale not cut with the weight",
    ),
    scale_of_fused_layers_uncut: (
        2,
        f"{K_PROJ}.weight_scale",
        "scale not cut with the weight",
    ),
    scale_at_another_offset: (2, f"{GATE}.weight_scale", ""),
    weight_cut_at_the_bytes_begin: (
        4,
        f"{DOWN}.packed_ternary_weight",
        "a shard cut inside a byte",
    ),
    weight_uncut_along_inputs: (
        2,
        f"{DOWN}.packed_ternary_weight",
        "weight not cut",
    ),
    scales_from_the_block_after: (
        4,
        f"{DOWN}.weight_scale",
        "a shard cut across a block",
    ),
    key_heads_not_replicated: (
        8,
        f"{K_PROJ}.packed_ternary_weight",
        "rows of another rank",
    ),
    ranks_in_reverse: (2, f"{DOWN}.packed_ternary_weight", "rows of another rank"),
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.__name__)
def test_mistakes_of_loaders(mistake, model, capsys, monkeypatch):
    tp, tensor, cause = MISTAKES[mistake]
    mistake(monkeypatch)
    first = failures_of(capsys, model, tp)
    assert tensor in first
    failure = first[tensor]
    assert f"over {tp} ranks" in failure["problem"]
    assert cause in failure["cause"], failure
    assert failure["position"] or "do not fit together" in failure["problem"]
    weights = mistake.__name__.startswith(("scale", "scales"))
    # What was cut rightly is not accused.
    other = "packed_ternary_weight" if weights else "weight_scale"
    assert not any(name.endswith(other) for name in first)


def test_a_loader_that_refuses(model, capsys, monkeypatch):
    def load(self, loaded_weight):
        assert self.data.shape == loaded_weight.shape

    monkeypatch.setattr(TernaryWeightParameter, "load_row_parallel_weight", load)
    first = failures_of(capsys, model, 2)
    assert (
        "vLLM's loader refuses it" in first[f"{DOWN}.packed_ternary_weight"]["problem"]
    )


def test_bytes_that_become_floats_on_the_way(model, capsys, monkeypatch):
    right = TernaryWeightParameter.load_column_parallel_weight

    def load(self, loaded_weight):
        # The memory of the bytes as half-precision floats, read as bytes.
        wide = loaded_weight.half().view(torch.uint8)[:, : loaded_weight.shape[1]]
        right(self, wide.contiguous())

    monkeypatch.setattr(TernaryWeightParameter, "load_column_parallel_weight", load)
    first = failures_of(capsys, model, 2)
    assert any(name.endswith("packed_ternary_weight") for name in first)


def test_a_row_that_no_rank_has_is_an_error(monkeypatch, model, capsys):
    right = Whole.pieces
    monkeypatch.setattr(Whole, "pieces", lambda self, i: [right(self, i)[0][:-1]])
    monkeypatch.setattr(check_shards, "_same_bytes", lambda *a: False)
    first = failures_of(capsys, model, 2)
    assert any("in no rank" in f["problem"] for f in first.values())


def test_every_kind_of_layer_is_driven(model, capsys, monkeypatch):
    made = []
    init = QKVParallelLinear.__init__

    def watch(self, *args, **kwargs):
        init(self, *args, **kwargs)
        made.append((self.tp_rank, self.tp_size, self.num_kv_head_replicas))

    monkeypatch.setattr(QKVParallelLinear, "__init__", watch)
    status, _ = validate(capsys, model, "--tp", "1,2,4,8")
    assert status == 0
    # Four key/value heads: eight ranks share them in pairs.
    assert set(made) == {
        (rank, tp, max(1, tp // 4)) for tp in (1, 2, 4, 8) for rank in range(tp)
    }


def test_memory_does_not_grow_with_the_model(tmp_path):
    """Five layers of 15 million weights need what one does: as little as one more
    tensor kept of each would show."""

    def peak(layers: int) -> int:
        folder = tmp_path / str(layers)
        ternary, plain = write_model(
            folder, layers, layers=layers, hidden=1056, mlp=4128
        )
        script = Path(validate_quant_weights.__file__)
        options = ["--reference", plain, "--tp", "2", "--device", "cpu"]
        return peak_memory(script, ternary, *options)

    assert peak(5) - peak(1) < 4 * 1056 * 4128
