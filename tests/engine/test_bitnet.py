# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""BitNet checkpoints served as they are, against transformers on the same files."""

import json
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
import torch
from bitnet_models import (
    PROJECTIONS,
    VOCABULARY,
    BitNetPair,
    write_bitnet,
    write_config,
    write_tokenizer,
)
from plain_decoders import PlainDecoder
from safetensors.torch import save_file
from score_tokens import score
from server import DTYPE, serve
from transformers import (
    AutoModel,
    BitNetConfig,
    BitNetQuantConfig,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
)

STEPS = 12
# Row-parallel layers are cut inside a byte of the packed form: 148 / 2 and 4 = 74.
SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=128,
    intermediate_size=148,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    initializer_range=0.2,
    bos_token_id=None,
    eos_token_id=None,
)
CONFIGS = {
    # Falcon3 and Falcon-E are Llama with heads wider than hidden size / heads.
    "llama": (LlamaConfig(**SIZES, head_dim=64), BitNetQuantConfig()),
    "qwen3": (
        Qwen3Config(**SIZES, head_dim=64, tie_word_embeddings=True),
        BitNetQuantConfig(
            linear_class="autobitlinear",
            quantization_mode="online",
            use_rms_norm=True,
            rms_norm_eps=1e-5,
        ),
    ),
    "bitnet": (
        BitNetConfig(**SIZES),
        BitNetQuantConfig(linear_class="autobitlinear", quantization_mode="offline"),
    ),
}


@pytest.fixture(scope="module", autouse=True)
def eager_transformers():
    """Transformers compiles its BitNet functions; that needs no compiler here."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, BitNetPair]:
    folder = tmp_path_factory.mktemp("bitnet")
    return {
        name: write_bitnet(folder / name, config, quantization, seed=17 + i)
        for i, (name, (config, quantization)) in enumerate(CONFIGS.items())
    }


def prompts() -> list[list[int]]:
    gen = torch.Generator().manual_seed(5)
    return [
        torch.randint(0, VOCABULARY, (3 + 4 * i,), generator=gen).tolist()
        for i in range(8)
    ]


@dataclass
class Answers:
    """What an engine said: tokens [8, STEPS], logprobs [8, STEPS, VOCABULARY]."""

    tokens: torch.Tensor
    logprobs: torch.Tensor


def score_pairs(
    pairs: dict[str, BitNetPair], tp: int, folder: Path
) -> dict[str, Answers]:
    """Run an engine for each checkpoint, one after the other."""
    models = {name: pair.folder for name, pair in pairs.items()}
    found = score(models, prompts(), STEPS, tp, folder)
    return {name: Answers(**scores) for name, scores in found.items()}


@pytest.fixture(scope="module")
def one_rank(pairs, tmp_path_factory) -> dict[str, Answers]:
    return score_pairs(pairs, 1, tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def two_ranks(pairs, tmp_path_factory) -> dict[str, Answers]:
    return score_pairs(pairs, 2, tmp_path_factory.mktemp("two"))


# Two computations of an activation that differ in the last bit of float32 can round it
# to different ones of the 255 steps, which then moves all that follows in the text. In
# transformers itself, inputs that are changed by 1e-7 change the log-probabilities of
# these models by 3e-6 in most positions, and by up to 0.15 where that happens. Without
# the 8 bits, they change by 0.2 in the middle and by 0.1 or more in all of them.
SAME, FLIPPED = 1e-4, 0.5


def check(pair: BitNetPair, answers: Answers) -> None:
    assert answers.tokens.shape == (8, STEPS)
    # A model stuck on one token would agree with anything.
    assert len(answers.tokens.unique()) > 24
    difference = distance(pair, answers, answers.logprobs)
    if DTYPE == "float32":
        assert difference.quantile(0.25) < SAME, difference
        assert difference.max() < FLIPPED, difference
        return
    # Every activation is rounded twice, so many fall to other steps: as far from
    # float32 as transformers' own model is in this type, and hardly farther.
    rounded = pair.rounded(getattr(torch, DTYPE))
    again = [
        rounded.logprobs(prompt + tokens.tolist())[len(prompt) - 1 : -1]
        for prompt, tokens in zip(prompts(), answers.tokens)
    ]
    own = distance(pair, answers, again)
    print("median, greatest distance:", difference.median(), difference.max())
    print("of transformers in this type:", own.median(), own.max())
    assert difference.median() < 1.5 * own.median(), (difference, own)
    assert difference.max() < 2 * own.max(), (difference, own)


def distance(pair: BitNetPair, answers: Answers, logprobs: list) -> torch.Tensor:
    """Greatest difference from transformers' float32 model at each position."""
    differences = []
    for prompt, tokens, have in zip(prompts(), answers.tokens, logprobs):
        want = pair.logprobs(prompt + tokens.tolist())[len(prompt) - 1 : -1]
        differences.append((have - want).abs().amax(-1))
    return torch.cat(differences)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_logprobs_equal_those_of_transformers(name, pairs, one_rank):
    check(pairs[name], one_rank[name])


@pytest.mark.parametrize("name", list(CONFIGS))
def test_two_ranks(name, pairs, one_rank, two_ranks):
    check(pairs[name], two_ranks[name])
    agreed = 0
    for i in range(8):
        top = one_rank[name].logprobs[i].topk(2).values
        for step in range(STEPS):
            if top[step, 0] - top[step, 1] < FLIPPED:
                break  # either token may win, and the texts part
            agreed += 1
            assert two_ranks[name].tokens[i, step] == one_rank[name].tokens[i, step]
    assert agreed >= 3


EMBEDDERS = {
    "qwen3": Qwen3Config(**SIZES, head_dim=64, tie_word_embeddings=True),
    # Full and sliding attention; the window is shorter than the longest text.
    "gemma3": Gemma3TextConfig(
        **SIZES,
        head_dim=64,
        query_pre_attn_scalar=48,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        pad_token_id=0,
    ),
}
# What nothing in the config of such a model says.
QUANTIZATION = {
    "quant_method": "bitnet",
    "linear_class": "autobitlinear",
    "quantization_mode": "online",
    "use_rms_norm": True,
    "rms_norm_name": "norm",
    "rms_norm_eps": 1e-6,
}


def embedder_weights(config: PreTrainedConfig, seed: int) -> dict[str, torch.Tensor]:
    """Masters in bfloat16 and a norm in front of each projection."""
    torch.manual_seed(seed)
    weights = AutoModel.from_config(config, dtype=torch.bfloat16).state_dict()
    for name, weight in list(weights.items()):
        module = name.removesuffix(".weight")
        if module.endswith(PROJECTIONS):
            norm = torch.rand(weight.shape[1]) + 0.5
            weights[f"{module}.norm.weight"] = norm.bfloat16()
        elif "norm" in name:
            weight.copy_(weight + torch.rand_like(weight) / 2)
    return weights


@pytest.mark.parametrize("family", list(EMBEDDERS))
def test_plain_decoder_is_the_architecture(family):
    """The reference without norms and rounding equals transformers' model."""
    config = EMBEDDERS[family]
    torch.manual_seed(3)
    model = AutoModel.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    decoder = PlainDecoder(config, dict(model.state_dict()), quantized=False)
    tokens = torch.randint(0, VOCABULARY, (21,)).tolist()
    with torch.no_grad():
        want = model(torch.tensor([tokens])).last_hidden_state[0]
    assert torch.allclose(decoder.hidden(tokens), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", list(EMBEDDERS))
def test_embeddings(family, tmp_path):
    """What the checkpoint holds is said on the command line, or in its config."""
    config = EMBEDDERS[family]
    weights = embedder_weights(config, seed=29)
    folder = tmp_path / family
    folder.mkdir()
    write_tokenizer(folder)
    arguments, dtype = ["--runner", "pooling"], DTYPE
    if family == "qwen3":
        config.architectures = ["Qwen3ForCausalLM"]
        write_config(folder, config, None)
        overrides = json.dumps({"quantization_config": QUANTIZATION})
        arguments += ["--hf-overrides", overrides]
        stored = {f"model.{name}": weight for name, weight in weights.items()}
    else:
        config.architectures = ["Gemma3TextModel"]
        write_config(folder, config, QUANTIZATION)
        stored = weights
        if DTYPE == "float16":  # which vLLM refuses for this model
            dtype = "bfloat16"
            arguments += ["--dtype", dtype]
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    with serve(folder, tmp_path / "server.log", *arguments) as client:
        served = embed(client, prompts())

    decoder = PlainDecoder(config, weights)
    end = VOCABULARY - 1
    want = torch.stack([decoder.embed([*tokens, end]) for tokens in prompts()])
    away = (served - want).norm(dim=1)
    if DTYPE == "float32":
        # Half of the texts without an activation on the other side of a rounding.
        assert away.median() < SAME and away.max() < 0.1, away
    else:
        rounding = PlainDecoder(config, weights, dtype=getattr(torch, dtype))
        again = torch.stack([rounding.embed([*tokens, end]) for tokens in prompts()])
        own = (again - want).norm(dim=1)
        print("distances:", away, "of the rounded reference:", own)
        assert away.median() < 1.5 * own.median() and away.max() < 2 * own.max()
    # No two texts nearly as close as a text and its reference.
    apart = torch.cdist(served, served) + 2 * torch.eye(len(served))
    assert apart.min() > 0.3, apart


def embed(client: openai.OpenAI, texts: list[list[int]]) -> torch.Tensor:
    """Embeddings [texts, hidden size] of texts that the tokenizer splits so."""
    inputs = [" ".join(f"t{token}" for token in tokens) for tokens in texts]
    answer = client.embeddings.create(model="model", input=inputs)
    return torch.tensor([item.embedding for item in answer.data])
