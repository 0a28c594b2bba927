# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Ternary embeddings of model classes that hand them no name, or no settings at all."""

from pathlib import Path
from typing import Any

import pytest
import torch
from drive_engine import assert_same_greedy, drive, tokens_of
from mixed_models import Stored, store_ternary, write_pair
from models import QWEN3_SIZES
from server import DEVICE
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
)

SETTINGS = {
    "module_overrides": {
        "model.embed_tokens": {"kind": "ternary", "block_size": 64},
        "lm_head": {"kind": "ternary"},
    }
}
# Two ranks of one core each, where the machine has a single NUMA node.
CPU_RANKS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if DEVICE == "cpu" else {}


def _store(module: str, w: torch.Tensor) -> Stored | None:
    return store_ternary(w, 64 if module.endswith("embed_tokens") else 128)


def _model(config: type, cls: type, tied: bool, seed: int) -> Any:
    torch.manual_seed(seed)
    return cls(
        config(
            **QWEN3_SIZES,
            tie_word_embeddings=tied,
            # Large enough for greedy tokens to be told apart well above rounding.
            initializer_range=0.2,
            dtype="float32",
            bos_token_id=None,
            eos_token_id=None,
        )
    )


@pytest.mark.skipif(
    DEVICE == "cuda" and torch.cuda.device_count() < 2, reason="needs two GPUs"
)
def test_greedy_tokens(tmp_path: Path) -> None:
    """Those of the dequantized models, on one rank and on two."""
    models = {
        "llama": _model(LlamaConfig, LlamaForCausalLM, True, 61),
        "nemotron": _model(NemotronConfig, NemotronForCausalLM, False, 62),
    }
    ternary, plain = [], []
    for name, model in models.items():
        (tmp_path / name).mkdir()
        pair = write_pair(tmp_path / name, model, _store, SETTINGS)
        for jobs, folder in zip((ternary, plain), pair, strict=True):
            jobs.append({"model": str(folder), "steps": [["generate"]]})
    one = drive([*ternary, *plain], tmp_path / "one.log")
    two = drive(
        [job | {"args": {"tensor_parallel_size": 2}} for job in ternary],
        tmp_path / "two.log",
        **CPU_RANKS,
    )
    for (expected,), (found,), (cut,) in zip(one[2:], one[:2], two, strict=True):
        assert_same_greedy(found, expected)
        assert_same_greedy(cut, expected)
        # A model stuck on one token would agree with anything.
        assert len({token for row in tokens_of(expected) for token in row}) > 16
