# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A TQ2_0 file run by llama.cpp, and served by the engine once it is converted.

llama-cpp-python has no wheel and compiles llama.cpp, for ten minutes, so `make test`
does not install it: `.venv/bin/pip install llama-cpp-python`, and these tests run.
"""

import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from bitnet_models import VOCABULARY, write_tokenizer
from models import dequantized_weights
from server import DTYPE, GPU_MEMORY, engine_env

llama_cpp = pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests/unit"), str(ROOT / "scripts")]

import checkpoints as build  # noqa: E402
import convert_checkpoint  # noqa: E402

STEPS = 12
SIZES = dict(vocab_size=VOCABULARY, initializer_range=0.05, max_position_embeddings=256)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(65)
    return [
        torch.randint(0, VOCABULARY - 1, (3 + 4 * i,), generator=generator).tolist()
        for i in range(8)
    ]


def words(writer: gguf.GGUFWriter) -> None:
    """llama.cpp loads no model without a vocabulary; the tests give it token ids."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"t{i}" for i in range(VOCABULARY)])
    writer.add_token_types([1] * VOCABULARY)
    writer.add_token_merges(["t 0"])
    writer.add_eos_token_id(VOCABULARY - 1)


def engine_answers(model: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Tokens [8, STEPS] and log-probabilities [8, STEPS, VOCABULARY]."""
    job = {"model": str(model), "prompts": prompts(), "steps": STEPS}
    job |= {"engine": {"dtype": DTYPE, **GPU_MEMORY}, "out": str(folder / "out.pt")}
    (folder / "jobs.json").write_text(json.dumps([job]))
    script = Path(__file__).parent / "score_tokens.py"
    result = subprocess.run(
        [sys.executable, str(script), str(folder / "jobs.json")],
        env=engine_env(VLLM_ENABLE_V1_MULTIPROCESSING="0"),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    return torch.load(folder / "out.pt")


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logprobs(family: str, tmp_path: Path) -> None:
    """The engine is as near to llama.cpp as float32 transformers is.

    llama.cpp rounds what enters a TQ2_0 product to 8 bits, 256 values at a time, so
    neither is equal to it; transformers says how far that moves a log-probability.
    """
    model = build.tiny_model(family, 61, **SIZES)
    encode = build.projections_as(build.GGML.TQ2_0)
    path = build.GgufBuilder(model, encode).write(tmp_path / "m.gguf", tokenizer=words)
    write_tokenizer(tmp_path / "tokenizer")
    arguments = ["--tokenizer", str(tmp_path / "tokenizer"), "--dtype", DTYPE]
    dest = tmp_path / "ternary"
    command = [str(path), str(dest), "--verify", *arguments]
    assert convert_checkpoint.main(command) == 0
    answers = engine_answers(dest, tmp_path)
    assert len(answers["tokens"].unique()) > 12

    model.load_state_dict(dequantized_weights(dest))
    peer = llama_cpp.Llama(str(path), n_ctx=256, logits_all=True, verbose=False)
    ours, theirs, compared = [], [], 0
    for prompt, tokens, have in zip(prompts(), answers["tokens"], answers["logprobs"]):
        text = prompt + tokens.tolist()
        steps = slice(len(prompt) - 1, len(text) - 1)
        peer.reset()
        peer.eval(text)
        logits = torch.from_numpy(np.array(peer.scores[: len(text)]))
        want = torch.log_softmax(logits, -1)[steps]
        with torch.no_grad():
            exact = model(torch.tensor([text])).logits[0]
        ours.append((have - want).abs().amax(-1))
        theirs.append((torch.log_softmax(exact, -1)[steps] - want).abs().amax(-1))
        # Every greedy token that 8 bits leave no doubt of.
        top = want.topk(2).values
        sure = top[:, 0] - top[:, 1] > 2 * float(theirs[-1].max())
        assert torch.equal(tokens[sure], want.argmax(-1)[sure])
        compared += int(sure.sum())
    found, expected = torch.cat(ours), torch.cat(theirs)
    print(f"{family}: median {found.median():.4f}, greatest {found.max():.4f};")
    print(
        f"transformers {expected.median():.4f}, {expected.max():.4f}; {compared} sure"
    )
    assert found.median() < 1.1 * expected.median() + 1e-3
    assert found.max() < 1.1 * expected.max() + 1e-3
    # The log-probabilities themselves spread by 0.8.
    assert found.max() < 0.2
    assert compared > 40
