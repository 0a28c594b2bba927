# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Two ranks against one: the same greedy tokens, wherever the cut falls."""

from pathlib import Path

import pytest
import torch
from drive_engine import assert_same_greedy, drive, tokens_of
from models import write_qwen3_pair
from server import DEVICE

# One core for each rank, where the machine has a single NUMA node.
CPU_RANKS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}

pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and torch.cuda.device_count() < 2, reason="needs two GPUs"
)


def test_greedy_tokens(tmp_path: Path) -> None:
    """A cut on blocks, and one inside a byte and a block, with all kinds of tensors."""
    aligned, unaligned = tmp_path / "aligned", tmp_path / "unaligned"
    aligned.mkdir()
    unaligned.mkdir()
    # 512 / 2 inputs are two blocks; 330 / 2 = 165 end inside a byte.
    sizes = {"hidden_size": 256, "intermediate_size": 512}
    models = [
        write_qwen3_pair(aligned, seed=21, **sizes)[0],
        write_qwen3_pair(
            unaligned, seed=22, zero_point=True, embeddings=True, tied=True
        )[0],
    ]
    jobs = [{"model": str(m), "steps": [["generate"]]} for m in models]
    one_rank = drive(jobs, tmp_path / "one.log")
    two_ranks = drive(
        [job | {"args": {"tensor_parallel_size": 2}} for job in jobs],
        tmp_path / "two.log",
        **(CPU_RANKS if DEVICE == "cpu" else {}),
    )
    for (found,), (expected,) in zip(two_ranks, one_rank, strict=True):
        assert_same_greedy(found, expected)
        # A model stuck on one token would agree with anything.
        assert len({token for row in tokens_of(expected) for token in row}) > 16
