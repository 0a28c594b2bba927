# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Checkpoints of other formats, converted, served, and compared with the format's
own runtime on the file that was converted."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import torch
from bitnet_models import VOCABULARY, write_bitnet, write_tokenizer
from mlx_lm.utils import load_model
from server import DTYPE, GPU_MEMORY, engine_env
from transformers import AutoModelForCausalLM, BitNetQuantConfig, LlamaConfig

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests/unit"), str(ROOT / "scripts")]

import checkpoints as build  # noqa: E402
import convert_checkpoint  # noqa: E402

STEPS = 12
SIZES = dict(vocab_size=VOCABULARY, initializer_range=0.2, max_position_embeddings=256)
# Of a log-probability: float32's rounding, or float16's.
TOLERANCE = 1e-3 if DTYPE == "float32" else 0.1

Logprobs = Callable[[list[int]], torch.Tensor]


def of_transformers(model: torch.nn.Module) -> Logprobs:
    """Log-probabilities [tokens, vocabulary] of each next token."""

    @torch.no_grad()
    def logprobs(tokens: list[int]) -> torch.Tensor:
        return torch.log_softmax(model(torch.tensor([tokens])).logits[0].float(), -1)

    return logprobs


def convert(source: Path, *arguments: object) -> Path:
    dest = source.parent / f"{source.stem}-ternary"
    command = [str(source), str(dest), "--verify", *map(str, arguments)]
    assert convert_checkpoint.main(command) == 0
    return dest


def gguf_tq2_0(folder: Path) -> tuple[Path, Logprobs]:
    """Llama, whose q and k are permuted in the file, quantized by the gguf package;
    read by transformers."""
    model = build.tiny_model("llama", 51, **SIZES)
    encode = build.projections_as(build.GGML.TQ2_0)
    path = build.GgufBuilder(model, encode).write(folder / "llama.gguf")
    reference = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=path.name, dtype=torch.float32
    )
    write_tokenizer(folder / "tokenizer")
    arguments = ("--tokenizer", folder / "tokenizer", "--dtype", DTYPE)
    return convert(path, *arguments), of_transformers(reference.eval())


def gguf_q2_0(folder: Path) -> tuple[Path, Logprobs]:
    """Gemma 3 in blocks of 64; no package reads them, so the weights put in."""
    model = build.tiny_model("gemma3", 52, **SIZES | {"initializer_range": 0.02})
    build.make_ternary(model, 52, 64)

    def encode(name: str, w: np.ndarray) -> tuple[int, np.ndarray, tuple[int, ...]]:
        scale = np.abs(w.reshape(len(w), -1, 64)).max(-1)
        t = np.sign(w).astype(np.int8)
        return 42, build.q2_0_bytes(t, scale, 64), w.shape

    builder = build.GgufBuilder(model, build.projections_as(encode))
    path = builder.write(folder / "gemma3.gguf")
    write_tokenizer(folder / "tokenizer")
    arguments = ("--tokenizer", folder / "tokenizer", "--dtype", DTYPE)
    return convert(path, *arguments), of_transformers(model)


def mlx_2_bit(folder: Path) -> tuple[Path, Logprobs]:
    """Qwen3 with a ternary, tied embedding; run by mlx-lm."""
    model = build.tiny_model("qwen3", 53, tie_word_embeddings=True, **SIZES)
    build.write_mlx(model, folder / "mlx", 53, 128, gain=8)
    reference, _ = load_model(folder / "mlx")
    reference.set_dtype(mx.float32)

    def logprobs(tokens: list[int]) -> torch.Tensor:
        logits = torch.from_numpy(np.array(reference(mx.array([tokens]))))[0]
        return torch.log_softmax(logits, -1)

    return convert(folder / "mlx"), logprobs


def bitnet(folder: Path) -> tuple[Path, Logprobs]:
    """Llama with inverse scales, and scales per tensor that differ within qkv."""
    sizes = SIZES | dict(
        hidden_size=256,
        intermediate_size=320,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    quantization = BitNetQuantConfig()
    pair = write_bitnet(folder / "bitnet", LlamaConfig(**sizes), quantization, 54)
    return convert(pair.folder), pair.logprobs


MAKERS = [gguf_tq2_0, gguf_q2_0, mlx_2_bit, bitnet]
NAMES = [maker.__name__ for maker in MAKERS]


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(55)
    return [
        torch.randint(0, VOCABULARY - 1, (3 + 4 * i,), generator=generator).tolist()
        for i in range(8)
    ]


@pytest.fixture(scope="module", autouse=True)
def eager_transformers():
    """Transformers compiles its BitNet functions; that needs no compiler here."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[str, tuple[Logprobs, dict[str, torch.Tensor]]]:
    """For each format: the reference, and tokens [8, STEPS] and logprobs
    [8, STEPS, VOCABULARY] of the engine on the converted checkpoint."""
    folder = tmp_path_factory.mktemp("converted")
    references, jobs = {}, []
    for maker in MAKERS:
        name = maker.__name__
        (folder / name).mkdir()
        model, references[name] = maker(folder / name)
        out = str(folder / f"{name}.pt")
        job = {"model": str(model), "prompts": prompts(), "steps": STEPS, "out": out}
        jobs.append(job | {"engine": {"dtype": DTYPE, **GPU_MEMORY}})
    (folder / "jobs.json").write_text(json.dumps(jobs))
    script = Path(__file__).parent / "score_tokens.py"
    result = subprocess.run(
        [sys.executable, str(script), str(folder / "jobs.json")],
        env=engine_env(VLLM_ENABLE_V1_MULTIPROCESSING="0"),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    loaded = {name: torch.load(folder / f"{name}.pt") for name in NAMES}
    return {name: (references[name], loaded[name]) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_logprobs_equal_those_of_the_formats_own_runtime(name, answers):
    reference, found = answers[name]
    assert found["tokens"].shape == (8, STEPS)
    # A model stuck on one token would agree with anything.
    assert len(found["tokens"].unique()) > 12
    worst = []
    for prompt, tokens, have in zip(prompts(), found["tokens"], found["logprobs"]):
        want = reference(prompt + tokens.tolist())[len(prompt) - 1 : -1]
        worst.append((have - want).abs().amax(-1))
    off = torch.stack(worst)
    if name == "bitnet":
        # An activation at the edge between two of its 255 steps may fall to either.
        assert off.median() < TOLERANCE and off.max() < 0.5
    else:
        assert off.max() < TOLERANCE
