# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""GPT-2: vLLM's class turns plain weights around when it loads them, but no packed
ones, which the converter therefore turns."""

from pathlib import Path
from typing import Any

import checkpoints as build
import convert_checkpoint
import torch
import transformers
from load_models import load_all

# A square one, which loads either way; and fused q, k, v, of which a rank has a part.
READ = [("attn.c_proj", (0, 1)), ("attn.c_attn", (1, 2))]


def test_layers_equal_those_of_the_plain_model(tmp_path: Path) -> None:
    config = transformers.GPT2Config(
        vocab_size=96, n_positions=64, n_embd=128, n_layer=1, n_head=4, n_inner=192
    )
    torch.manual_seed(90)
    model = transformers.GPT2LMHeadModel(config)
    for seed, (name, parameter) in enumerate(model.named_parameters(), 91):
        if "c_" in name and parameter.ndim == 2:
            size_k, size_n = parameter.shape
            t, scale = build.random_ternary(seed, size_n, size_k, 32)
            parameter.data.copy_(build.expand(t, scale, 32).t())
    source, dest = build.save(model, tmp_path / "source"), tmp_path / "dest"
    assert convert_checkpoint.main([str(source), str(dest), "--block-size", "32"]) == 0
    jobs: list[dict[str, Any]] = [
        {"model": str(folder), "read": f"transformer.h.0.{name}", "rank": rank}
        for name, rank in READ
        for folder in (source, dest)
    ]
    results = load_all(jobs)
    assert [r for r in results if isinstance(r, str)] == []
    pairs = zip(results[::2], results[1::2], strict=True)
    for (name, _), (plain, ternary) in zip(READ, pairs, strict=True):
        error = (torch.tensor(plain) - torch.tensor(ternary)).abs().max()
        assert error < 1e-6, name
