# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Features of vLLM around a ternary base: adapters, reload, pipeline, dummy, sleep."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from drive_engine import Texts, assert_same_greedy, drive, same_greedy
from mixed_models import Stored, qwen3, store_ternary, write_pair
from safetensors.torch import save_file
from server import DEVICE

SETTINGS = {"module_overrides": {"re:model.embed_tokens|lm_head": {"kind": "ternary"}}}
# Two ranks of one core each, where the machine has a single NUMA node.
CPU_RANKS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if DEVICE == "cpu" else {}
# Small blocks of the KV cache: some prompts fill one, and are found there again.
LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1, "block_size": 32}


def _store(module: str, w: torch.Tensor) -> Stored | None:
    return store_ternary(w)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two models of one architecture, each ternary and dequantized."""
    paths = {}
    for name, seed in (("a", 31), ("b", 32)):
        folder = tmp_path_factory.mktemp(name)
        mixed, plain = write_pair(folder, qwen3(seed), _store, SETTINGS)
        paths[name], paths[f"plain_{name}"] = str(mixed), str(plain)
    return paths


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A LoRA adapter for every kind of linear layer of the models."""
    folder = tmp_path_factory.mktemp("adapter")
    model = qwen3(0)
    generator = torch.Generator().manual_seed(33)
    tensors = {}
    names = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in names:
            n, k = module.weight.shape
            prefix = f"base_model.model.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(8, k, generator=generator)
            tensors[f"{prefix}.lora_B.weight"] = (
                torch.randn(n, 8, generator=generator) * 0.05
            )
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": names}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return str(folder)


@pytest.fixture(scope="module")
def expected(models: dict[str, str], adapter: str) -> dict[str, Texts]:
    """Greedy tokens of vLLM on the dequantized models."""
    results = drive(
        [
            {
                "model": models["plain_a"],
                "args": LORA,
                "steps": [["generate"], ["generate", adapter]],
            },
            {"model": models["plain_b"], "steps": [["generate"]]},
        ]
    )
    (a, adapted), (b,) = results
    assert not same_greedy(a, b) and not same_greedy(a, adapted)
    return {"a": a, "adapted": adapted, "b": b}


def test_dummy_then_reload_with_adapters(
    models: dict[str, str], adapter: str, expected: dict[str, Any], tmp_path: Path
) -> None:
    """A start without weights, then a checkpoint, an adapter, another checkpoint."""
    (results,) = drive(
        [
            {
                "model": models["a"],
                "args": {"load_format": "dummy", **LORA},
                "steps": [
                    ["generate"],
                    ["load_format", "auto"],
                    ["reload_weights"],
                    ["generate"],
                    ["generate", adapter],
                    ["reload_weights", models["b"]],
                    ["generate"],
                    ["reload_weights", models["a"]],
                    ["generate", adapter],
                ],
            }
        ],
        tmp_path / "log",
    )
    dummy, _, _, a, adapted, _, b, _, again = results
    assert all(len(tokens) == 16 for tokens in dummy)
    assert_same_greedy(a, expected["a"])
    assert_same_greedy(adapted, expected["adapted"])
    assert_same_greedy(b, expected["b"])
    assert_same_greedy(again, expected["adapted"])


def test_draft_model(
    models: dict[str, str], expected: dict[str, Any], tmp_path: Path
) -> None:
    """A whole ternary model drafts for another one, each by its own settings."""
    speculation = {"model": models["b"], "method": "draft_model"}
    ((tokens,),) = drive(
        [
            {
                "model": models["a"],
                "args": {
                    "speculative_config": {**speculation, "num_speculative_tokens": 2}
                },
                "steps": [["generate"]],
            }
        ],
        tmp_path / "log",
    )
    assert_same_greedy(tokens, expected["a"])


@pytest.mark.skipif(
    DEVICE == "cuda" and torch.cuda.device_count() < 2, reason="needs two GPUs"
)
def test_pipeline_parallel(
    models: dict[str, str], expected: dict[str, Any], tmp_path: Path
) -> None:
    """Two stages: the embedding on the first, the head on the last."""
    ((_, tokens),) = drive(
        [
            {
                "model": models["a"],
                "args": {"pipeline_parallel_size": 2},
                "steps": [["warm_up"], ["generate"]],
            }
        ],
        tmp_path / "log",
        **CPU_RANKS,
    )
    assert_same_greedy(tokens, expected["a"])


def test_sleep(
    models: dict[str, str], expected: dict[str, Any], tmp_path: Path
) -> None:
    """Weights go to the host and come back; vLLM refuses to sleep on the CPU."""
    (results,) = drive(
        [
            {
                "model": models["a"],
                "args": {"enable_sleep_mode": True},
                "steps": [
                    ["generate"],
                    ["sleep", 1],
                    ["generate"],
                    ["sleep", 2],
                    ["reload_weights"],
                    ["generate"],
                ],
            }
        ],
        tmp_path / "log",
        may_fail=DEVICE == "cpu",
    )
    if DEVICE == "cpu":
        assert "leep mode is not supported" in results[-1]["error"]
    else:
        for index in (0, 2, 5):
            assert_same_greedy(results[index], expected["a"])
