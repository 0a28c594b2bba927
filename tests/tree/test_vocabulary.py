# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What vLLM asks of an embedding or head besides looking up and multiplying."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import checkpoints as build
import convert_checkpoint
import pytest
import torch
from load_models import load_all
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, PreTrainedTokenizerFast

from lib.validate.ranks import LayerSpec, load, tensor_parallel
from vllm.compilation.backends import set_model_tag
from vllm.config import get_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.quantization.ternary import TernaryConfig
from vllm.model_executor.layers.quantization.ternary.schemes import (
    Scheme,
    SchemeTable,
)
from vllm.model_executor.layers.quantization.utils import ternary_format as fmt
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.worker.gpu.spec_decode.eagle.utils import _should_share

ROWS, HIDDEN = 70, 132


def make_table(seed: int, scheme: Scheme) -> tuple[torch.nn.Module, torch.Tensor]:
    """An embedding as loaded, and its rows in float32."""
    g = torch.Generator().manual_seed(seed)
    t = torch.randint(-1, 2, (ROWS, HIDDEN), dtype=torch.int8, generator=g)
    shape = fmt.scale_shape((ROWS,), HIDDEN, scheme.block_size)
    scale = (torch.rand(shape, generator=g) + 0.1).half()
    tensors = {"packed_ternary_weight": fmt.pack(t), "weight_scale": scale}
    zero = None
    if scheme.zero_point:
        zero = torch.randint(-1, 2, shape, generator=g).float() / 4
        tensors["weight_zero_point"] = zero
    spec = LayerSpec("embedding", scheme, HIDDEN, (ROWS,), prefix="model.embed_tokens")
    layer = spec.build()
    load(layer, tensors)
    return layer, fmt.dequantize(t, scale, zero, scheme.block_size)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parallel_state, "_PP", SimpleNamespace(world_size=1))
    with tensor_parallel(0, 1):
        yield


@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize("block", [64, "row", "tensor"])
def test_rows(block: Any, zero_point: bool) -> None:
    """Decoded alike from the layout of the checkpoint and from that of the kernels."""
    layer, dense = make_table(5, Scheme(block_size=block, zero_point=zero_point))
    method, ids = layer.quant_method, [69, 0, 3]
    assert torch.equal(method.rows(layer, ids), dense[ids])
    method.process_weights_after_loading(layer)
    assert torch.equal(method.rows(layer, ids), dense[ids])


def test_no_weight() -> None:
    """Not a tensor, equal to none, and an error that says why for all else."""
    layer, _ = make_table(6, Scheme())
    plain = torch.nn.Parameter(torch.ones(ROWS, HIDDEN))
    assert not isinstance(layer.weight, torch.Tensor)
    assert not torch.equal(plain, layer.weight)
    assert not torch.equal(layer.weight, plain)
    assert layer.weight.dtype == torch.float32
    assert layer.weight.device == torch.device("cpu")
    for use in (
        lambda w: w.data,
        lambda w: torch.nn.functional.linear(torch.ones(1, HIDDEN), w),
        lambda w: torch.matmul(w, w),
    ):
        with pytest.raises(AttributeError, match=r"model\.embed_tokens is ternary"):
            use(layer.weight)


class Draft(SimpleNamespace):
    """A draft model with, or without, an embedding and head of its own."""


@pytest.mark.parametrize("draft_is_ternary", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_draft_models(own: bool, draft_is_ternary: bool) -> None:
    """A draft without tables takes the target's modules; one with keeps its own."""
    target, _ = make_table(7, Scheme())
    if draft_is_ternary:
        table, _ = make_table(8, Scheme())
    else:
        spec = LayerSpec("embedding", Scheme(), HIDDEN, (ROWS,), prefix="plain")
        table = spec.build(quant_config=None)
    language_model = SimpleNamespace(
        model=SimpleNamespace(embed_tokens=target), lm_head=target
    )
    draft = Draft(
        has_own_embed_tokens=own,
        has_own_lm_head=own,
        model=SimpleNamespace(embed_tokens=table),
        lm_head=table,
    )
    no_settings = SimpleNamespace(speculative_config=None)
    proposer = SimpleNamespace(
        model=draft, vllm_config=no_settings, use_local_argmax_reduction=False
    )
    SpecDecodeBaseProposer._maybe_share_embeddings(proposer, language_model)
    SpecDecodeBaseProposer._maybe_share_lm_head(proposer, language_model)
    expected = table if own else target
    assert draft.model.embed_tokens is expected and draft.lm_head is expected
    for flag in ("has_own_embed_tokens", "has_own_lm_head"):
        assert _should_share(draft, flag, table, target) is not own


def test_tied_head_of_a_model_with_further_tables() -> None:
    """It has the settings of the token embedding, whatever is made in between."""
    config = TernaryConfig.from_config(
        {"module_overrides": {"model.embed_tokens": {"kind": "ternary"}}}
    )
    sizes = dict(vocab_size=ROWS, hidden_size=HIDDEN, num_attention_heads=2)
    model = LlamaConfig(**sizes, tie_word_embeddings=True)
    config.maybe_update_config("", hf_config=model)
    # As in Llama, which gives no name, and as a table of positions.
    tokens = VocabParallelEmbedding(ROWS, HIDDEN, quant_config=config)
    positions = VocabParallelEmbedding(ROWS + 1, HIDDEN, quant_config=config)
    head = ParallelLMHead(ROWS, HIDDEN, quant_config=config, prefix="lm_head")
    assert tokens.prefix == "model.embed_tokens"
    ternary = [hasattr(x, "packed_ternary_weight") for x in (tokens, positions, head)]
    assert ternary == [True, False, True]


@pytest.mark.parametrize("tag", [None, "draft_model", "eagle_head"])
def test_embedding_without_config_beside_a_speculator(tag: str | None) -> None:
    """The target, and a draft that is a whole model, have their own config in force;
    other drafts are made under the target's."""
    config = get_current_vllm_config()
    config.speculative_config = SimpleNamespace(method="any")
    config.quant_config = TernaryConfig.from_config(
        {"module_overrides": {"model.embed_tokens": {"kind": "ternary"}}}
    )
    with set_model_tag(tag) if tag else nullcontext():
        layer = VocabParallelEmbedding(ROWS, HIDDEN, prefix="model.embed_tokens")
    assert hasattr(layer, "packed_ternary_weight") is (tag != "eagle_head")


def test_pooling_without_the_head(tmp_path: Path) -> None:
    """A causal model that embeds: vLLM leaves out the tensors of its head."""
    source, folder = tmp_path / "source", tmp_path / "ternary"
    build.save(build.tiny_model("qwen3", 10, tie_word_embeddings=False), source)
    arguments = ["--quantize", "absmean", "--embeddings", "yes"]
    assert convert_checkpoint.main([str(source), str(folder), *arguments]) == 0
    job = {"model": str(folder), "args": {"runner": "pooling"}}
    headless = tmp_path / "headless"
    shutil.copytree(folder, headless)
    build.rewrite(headless, _drop_head)
    bad = {"model": str(headless)}
    found, refused = load_all([job, bad])
    assert found is None
    assert "lm_head.packed_ternary_weight" in refused and "missing" in refused


def _drop_head(tensors: dict[str, torch.Tensor]) -> None:
    for name in [n for n in tensors if n.startswith("lm_head.")]:
        del tensors[name]


@pytest.mark.parametrize("method", ["from_2_way_softmax", "no_post_processing"])
@pytest.mark.parametrize("tied", [False, True])
def test_reranker(tied: bool, method: str, tmp_path: Path) -> None:
    """The score of a classifier made of two rows of a ternary head."""
    source, folder = tmp_path / "source", tmp_path / "ternary"
    build.save(build.tiny_model("qwen3", 9, tie_word_embeddings=tied), source)
    words = WordLevel({f"t{i}": i for i in range(96)}, unk_token="t0")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words))
    tokenizer.save_pretrained(source)
    arguments = ["--quantize", "absmean", "--embeddings", "yes"]
    assert convert_checkpoint.main([str(source), str(folder), *arguments]) == 0
    overrides = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["t3", "t7"],
        "method": method,
        "num_labels": 1 if method == "from_2_way_softmax" else 2,
    }
    job = {
        "model": str(folder),
        "args": {"hf_overrides": overrides, "runner": "pooling"},
        "read": "score",
    }
    (found,) = load_all([job])
    settings = json.loads((folder / "config.json").read_text())
    table = SchemeTable.from_config(settings["quantization_config"])
    module = "model.embed_tokens" if tied else "lm_head"
    block = table.scheme(module).block_size
    tensors = build.read(folder)
    t = fmt.unpack(tensors[f"{module}.packed_ternary_weight"], 256)
    dense = fmt.dequantize(t, tensors[f"{module}.weight_scale"], None, block)
    rows = dense[[3, 7]]
    if method == "from_2_way_softmax":
        rows = rows[1:] - rows[:1]
    assert not isinstance(found, str), found
    torch.testing.assert_close(torch.tensor(found), rows)
