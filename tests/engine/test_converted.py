# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Checkpoints of other formats, converted, served, and compared with the format's
own runtime on the file that was converted."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import torch
from bitnet_models import VOCABULARY, write_bitnet, write_tokenizer
from mlx_lm.utils import load_model
from score_tokens import Scores, score
from server import DEVICE, DTYPE, serve
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


@dataclass
class Converted:
    """Converted checkpoints, and what their formats' own runtimes say."""

    folders: dict[str, Path]
    references: dict[str, Logprobs]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    folder = tmp_path_factory.mktemp("converted")
    made = Converted({}, {})
    for maker in MAKERS:
        name = maker.__name__
        (folder / name).mkdir()
        made.folders[name], made.references[name] = maker(folder / name)
    return made


@pytest.fixture(scope="module")
def answers(converted: Converted, tmp_path_factory) -> dict[str, Scores]:
    folder = tmp_path_factory.mktemp("one")
    return score(converted.folders, prompts(), STEPS, 1, folder)


def assert_agrees(name: str, reference: Logprobs, found: Scores) -> None:
    """The engine's log-probabilities along its text are the reference's."""
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


@pytest.mark.parametrize("name", NAMES)
def test_logprobs_equal_those_of_the_formats_own_runtime(
    name: str, converted: Converted, answers: dict[str, Scores]
) -> None:
    found = answers[name]
    assert found["tokens"].shape == (8, STEPS)
    # A model stuck on one token would agree with anything.
    assert len(found["tokens"].unique()) > 12
    assert_agrees(name, converted.references[name], found)


@pytest.mark.skipif(
    DEVICE == "cuda" and torch.cuda.device_count() < 2, reason="needs two GPUs"
)
def test_two_ranks(
    converted: Converted, answers: dict[str, Scores], tmp_path: Path
) -> None:
    """Fused layers of which each rank has a part; blocks of 256 and whole tensors."""
    models = {name: converted.folders[name] for name in ("gguf_tq2_0", "bitnet")}
    for name, found in score(models, prompts(), STEPS, 2, tmp_path).items():
        assert_agrees(name, converted.references[name], found)
        if DTYPE == "float32":
            assert torch.equal(found["tokens"], answers[name]["tokens"])


def test_bert_from_gguf(tmp_path: Path) -> None:
    """An embedding model: the converted file served, against the weights put in."""
    model = build.tiny_model("bert", 56, **SIZES)
    build.make_ternary(model, 56, 256)
    encode = build.projections_as(build.GGML.TQ2_0)
    path = build.GgufBuilder(model, encode).write(tmp_path / "bert.gguf")
    write_tokenizer(tmp_path / "tokenizer")
    folder = convert(path, "--tokenizer", tmp_path / "tokenizer", "--dtype", DTYPE)
    arguments = ("--runner", "pooling")
    with serve(folder, tmp_path / "server.log", *arguments) as client:
        answer = client.embeddings.create(model="model", input=prompts())
    for prompt, item in zip(prompts(), answer.data, strict=True):
        with torch.no_grad():
            hidden = model(torch.tensor([prompt])).last_hidden_state[0]
        want, have = hidden.mean(0), torch.tensor(item.embedding)
        cosine = torch.nn.functional.cosine_similarity(have, want, dim=0)
        assert cosine > (0.99999 if DTYPE == "float32" else 0.999)
