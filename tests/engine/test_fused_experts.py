# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A checkpoint with all experts of a layer in one tensor, converted, served and
compared with transformers running what was converted: the gate is the gate."""

import sys
from pathlib import Path

import torch
from bitnet_models import VOCABULARY
from score_tokens import score
from server import DTYPE

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests/unit"), str(ROOT / "scripts")]

import convert_checkpoint  # noqa: E402
import fused_experts as fused  # noqa: E402

STEPS = 8
TOLERANCE = 1e-3 if DTYPE == "float32" else 0.1


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(57)
    return [
        torch.randint(1, VOCABULARY - 1, (3 + 4 * i,), generator=generator).tolist()
        for i in range(6)
    ]


def test_logprobs_equal_those_of_transformers(tmp_path: Path) -> None:
    """Llama 4: transposed, q and k turned, the router's weight on the inputs."""
    kind = fused.KINDS["llama4"]
    model = fused.tiny_model(kind, 58, vocab_size=VOCABULARY)
    fused.make_ternary(kind, model, 58)
    source, dest = tmp_path / "source", tmp_path / "dest"
    fused.write(kind, model, source)
    command = [str(source), str(dest), "--block-size", str(fused.BLOCK)]
    assert convert_checkpoint.main(command) == 0
    found = score({"llama4": dest}, prompts(), STEPS, 1, tmp_path)["llama4"]
    # A model stuck on one token would agree with anything.
    assert len(found["tokens"].unique()) > 12
    for prompt, tokens, have in zip(prompts(), found["tokens"], found["logprobs"]):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens.tolist()])).logits[0]
        want = torch.log_softmax(logits.float(), -1)[len(prompt) - 1 : -1]
        assert (have - want).abs().max() < TOLERANCE
