# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Checkpoints with all experts of a layer in one tensor, converted and loaded by vLLM's
own classes: every expert is where transformers has it."""

from dataclasses import dataclass, field
from typing import Any

import convert_checkpoint
import fused_experts as fused
import pytest
import torch
from fused_experts import BLOCK, EXPERTS, INNER, KINDS
from load_models import load_all

RANKS = {
    "llama4": [(0, 1), (0, 2), (1, 2)],
    "granitemoe": [(0, 2)],
    "granitemoehybrid": [(1, 2)],
    "gemma4": [(0, 1)],
    "qwen3": [(1, 2)],
}
QUERY = "model.layers.1.self_attn.qkv_proj"


@dataclass
class Loaded:
    """Models as transformers has them, and what vLLM makes of the converted ones."""

    models: dict[str, Any] = field(default_factory=dict)
    jobs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    results: list[Any] = field(default_factory=list)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder, made = tmp_path_factory.mktemp("fused"), Loaded()
    for seed, name in enumerate(RANKS, 40):
        kind = KINDS[name]
        made.models[name] = model = fused.tiny_model(kind, seed)
        fused.make_ternary(kind, model, seed)
        source, dest = folder / name, folder / f"{name}-ternary"
        fused.write(kind, model, source)
        arguments = [str(source), str(dest), "--block-size", str(BLOCK)]
        assert convert_checkpoint.main(arguments) == 0, name
        made.jobs[name] = [
            {
                "model": str(dest),
                "rank": rank,
                "experts": f"{dest}-{rank[0]}-of-{rank[1]}",
            }
            for rank in RANKS[name]
        ]
    made.jobs["llama4"][0]["read"] = QUERY
    plain = {"model": str(folder / "llama4"), "read": QUERY}
    made.results = load_all([plain, *sum(made.jobs.values(), [])])
    return made


def experts_of(
    name: str, model: torch.nn.Module
) -> dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Gate, up [E, I, H] and down [E, H, I] of each layer in transformers' module."""
    found = {}
    for layer, module in model.named_modules():
        if layer.endswith(".experts"):
            gate_up, down = module.gate_up_proj.detach(), module.down_proj.detach()
            if KINDS[name].transposed:
                gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
            gate, up = gate_up.chunk(2, dim=1)
            found[layer] = gate, up, down
    return found


@pytest.mark.parametrize("name", RANKS)
def test_every_expert(name: str, loaded: Loaded) -> None:
    """The whole, or the part of a rank, which begins inside a block."""
    assert [r for r in loaded.results if isinstance(r, str)] == []
    expected = experts_of(name, loaded.models[name])
    assert len(expected) == 2
    for (rank, size), job in zip(RANKS[name], loaded.jobs[name], strict=True):
        found = torch.load(job["experts"])
        assert found.keys() == expected.keys()
        share = slice(rank * INNER // size, (rank + 1) * INNER // size)
        for layer, (gate, up, down) in expected.items():
            assert len(gate) == EXPERTS
            w13 = torch.cat([gate[:, share], up[:, share]], 1)
            assert torch.equal(found[layer]["w13"], w13), layer
            assert torch.equal(found[layer]["w2"], down[:, :, share]), layer


def test_rotary_order_of_llama4(loaded: Loaded) -> None:
    """Its class turns the rows of q and k while they load."""
    plain, ternary, *_ = loaded.results
    assert torch.equal(torch.tensor(ternary), torch.tensor(plain))
