# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Ternary experts against vLLM's own unquantized experts on the dequantized weights."""

from pathlib import Path

import pytest
import torch
from drive_engine import drive
from mixed_models import Stored, qwen3_moe, store_ternary, write_pair


def _store(module: str, w: torch.Tensor) -> Stored | None:
    if module.endswith(("embed_tokens", "lm_head", "mlp.gate")):
        return None
    down = module.endswith("down_proj")
    return store_ternary(
        w, block_size=64 if down else 128, zero_point="experts" in module
    )


SETTINGS = {
    "block_size": 128,
    "modules_to_not_convert": ["lm_head", "re:never", "mlp.gate"],
    "module_overrides": {
        "re:.*experts\\..*(gate|up)_proj": {"zero_point": True},
        "re:.*experts\\..*down_proj": {"block_size": 64, "zero_point": True},
        "re:.*down_proj": {"block_size": 64},
    },
}


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("moe")
    return write_pair(folder, qwen3_moe(seed=5, mlp_only_layers=[1]), _store, SETTINGS)


def test_greedy_tokens(moe: tuple[Path, Path], tmp_path: Path) -> None:
    ternary, plain = map(str, moe)
    log = tmp_path / "log"
    (tokens, held), (expected,) = drive(
        [
            {"model": ternary, "steps": [["generate"], ["tensors"]]},
            {"model": plain, "steps": [["generate"]]},
        ],
        log,
    )
    assert tokens == expected
    print(log.read_text())
