# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Ternary experts against vLLM's own unquantized experts on the dequantized weights."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from drive_engine import assert_same_greedy, drive, tokens_of
from mixed_models import Stored, qwen3_moe, store_ternary, write_pair
from server import DEVICE

# Two ranks of one core each, where the machine has a single NUMA node.
CPU_RANKS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if DEVICE == "cpu" else {}


def _store(module: str, w: torch.Tensor) -> Stored | None:
    if module.endswith(("embed_tokens", "lm_head", "mlp.gate")):
        return None
    down = module.endswith("down_proj")
    return store_ternary(
        w, block_size=64 if down else 128, zero_point="experts" in module
    )


SETTINGS = {
    "block_size": 128,
    "modules_to_not_convert": ["lm_head", "mlp.gate"],
    "module_overrides": {
        "re:.*experts\\..*(gate|up)_proj": {"zero_point": True},
        "re:.*experts\\..*down_proj": {"block_size": 64, "zero_point": True},
        "re:.*down_proj": {"block_size": 64},
    },
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A sparse and a dense layer, with zero points and two block sizes."""
    model = qwen3_moe(seed=5, mlp_only_layers=[1])
    mixed, plain = write_pair(tmp_path_factory.mktemp("moe"), model, _store, SETTINGS)
    return str(mixed), str(plain)


@pytest.fixture(scope="module")
def tokens(
    models: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What one rank makes of the ternary model, before and after a reload."""
    ternary, plain = models
    log = tmp_path_factory.mktemp("logs") / "log"
    (*results,), (expected,) = drive(
        [
            {
                "model": ternary,
                "steps": [["generate"], ["tensors"], ["reload_weights"], ["generate"]],
            },
            {"model": plain, "steps": [["generate"]]},
        ],
        log,
    )
    generated, (held,), _, again = results
    return {
        "ternary": generated,
        "reloaded": again,
        "plain": expected,
        "held": held,
        "log": log.read_text(),
    }


def test_greedy_tokens(tokens: dict[str, Any]) -> None:
    """Those of vLLM's unquantized experts, also after the weights are reloaded."""
    assert_same_greedy(tokens["ternary"], tokens["plain"])
    assert_same_greedy(tokens["reloaded"], tokens["plain"])
    # A model stuck on one token would agree with anything.
    assert len({token for row in tokens_of(tokens["plain"]) for token in row}) > 16


def test_memory(tokens: dict[str, Any]) -> None:
    """Experts stay packed: under 3 bits a weight, all scales, zero points (which are
    float32) and padding of the kernels included."""
    held = [t for t in tokens["held"] if t["method"] == "TernaryMoEMethod"]
    assert {t["name"] for t in held} == {
        f"{projection}_{name}"
        for projection in ("w13", "w2")
        for name in ("packed_ternary_weight", "weight_scale", "weight_zero_point")
    }
    weights = 6 * 3 * 330 * 256
    assert sum(t["bytes"] for t in held) * 8 < 3 * weights
    assert re.search(
        rf"ternary, block 64, zero point +1 +{weights:,} .*mlp.experts", tokens["log"]
    )


@pytest.mark.skipif(
    DEVICE == "cuda" and torch.cuda.device_count() < 2, reason="needs two GPUs"
)
def test_two_ranks(
    models: tuple[str, str], tokens: dict[str, Any], tmp_path: Path
) -> None:
    """Tensor parallelism cuts inside bytes and blocks; expert parallelism does not."""
    tensor = {"tensor_parallel_size": 2}
    expert = tensor | {"enable_expert_parallel": True}
    results = drive(
        [
            {"model": models[0], "args": arguments, "steps": [["generate"]]}
            for arguments in (tensor, expert)
        ],
        tmp_path / "log",
        **CPU_RANKS,
    )
    assert len(results) == 2
    for (found,) in results:
        assert_same_greedy(found, tokens["plain"])
