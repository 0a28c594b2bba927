# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""One checkpoint with modules of every kind, named in every way that a config can."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from drive_engine import assert_same_greedy, drive, tokens_of
from mixed_models import Stored, qwen3, store_int8, store_ternary, write_pair
from server import DEVICE

SETTINGS = {
    "block_size": 128,
    "modules_to_not_convert": ["lm_head"],
    "module_overrides": {
        # By exact name, by prefix, and by regular expression.
        "model.layers.0.self_attn.o_proj": {"block_size": 32, "zero_point": True},
        "model.layers.0.mlp.down_proj": {"kind": "int8", "block_size": 64},
        "model.layers.1.mlp": {"kind": "int8", "block_size": "row"},
        "re:model\\.layers\\.1\\.self_attn\\.[qkv]_proj": {"kind": "unquantized"},
    },
}
# Two ranks of one core each, where the machine has a single NUMA node.
CPU_RANKS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if DEVICE == "cpu" else {}


def _store(module: str, w: torch.Tensor) -> Stored | None:
    if module.endswith(("embed_tokens", "lm_head")):
        return None
    if module == "model.layers.0.self_attn.o_proj":
        return store_ternary(w, 32, zero_point=True)
    if module == "model.layers.0.mlp.down_proj":
        return store_int8(w, 64)
    if module.startswith("model.layers.1.mlp."):
        return store_int8(w)
    if re.fullmatch(r"model\.layers\.1\.self_attn\.[qkv]_proj", module):
        return None
    return store_ternary(w)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    mixed, plain = write_pair(
        tmp_path_factory.mktemp("mixed"), qwen3(seed=41), _store, SETTINGS
    )
    return str(mixed), str(plain)


@pytest.fixture(scope="module")
def one_rank(
    models: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What one rank makes of the two models."""
    mixed, plain = models
    log = tmp_path_factory.mktemp("logs") / "log"
    (tokens, (held,)), (expected,) = drive(
        [
            {"model": mixed, "steps": [["generate"], ["tensors"]]},
            {"model": plain, "steps": [["generate"]]},
        ],
        log,
    )
    return {"mixed": tokens, "plain": expected, "held": held, "log": log.read_text()}


def test_greedy_tokens(one_rank: dict[str, Any]) -> None:
    """The tokens of the dequantized model."""
    assert_same_greedy(one_rank["mixed"], one_rank["plain"])
    # A model stuck on one token would agree with anything.
    assert len({token for row in tokens_of(one_rank["mixed"]) for token in row}) > 16


def test_table(one_rank: dict[str, Any]) -> None:
    """What is which is logged once, and is true."""
    methods = {t["module"]: t["method"] for t in one_rank["held"]}
    assert methods["model.layers.0.self_attn.o_proj"] == "TernaryLinearMethod"
    assert methods["model.layers.0.mlp.down_proj"] == "TernaryInt8LinearMethod"
    assert methods["model.layers.1.mlp.gate_up_proj"] == "TernaryInt8LinearMethod"
    assert methods["model.layers.1.self_attn.qkv_proj"] == "UnquantizedLinearMethod"

    text = one_rank["log"]
    assert text.count("Weights of the checkpoint") == 1
    rows = {
        "ternary, block 128": (3, 512 * 268 + 660 * 268 + 256 * 268),
        "ternary, block 32, zero point": (1, 256 * 268),
        "int8, block 64": (1, 330 * 268),
        "int8, row": (2, 3 * 330 * 268),
        "unquantized": (3, 512 * 268 + 2 * 320 * 268),
    }
    for storage, (modules, weights) in rows.items():
        assert re.search(rf"\] {storage} +{modules} +{weights:,} +[\d.]+  \w", text), (
            storage
        )


@pytest.mark.skipif(
    DEVICE == "cuda" and torch.cuda.device_count() < 2, reason="needs two GPUs"
)
def test_two_ranks(
    models: tuple[str, str], one_rank: dict[str, Any], tmp_path: Path
) -> None:
    """Tensor parallelism cuts 330 inputs inside bytes and blocks of every kind."""
    arguments = {"tensor_parallel_size": 2}
    ((two,),) = drive(
        [{"model": models[0], "args": arguments, "steps": [["generate"]]}],
        tmp_path / "log",
        **CPU_RANKS,
    )
    assert_same_greedy(two, one_rank["plain"])
