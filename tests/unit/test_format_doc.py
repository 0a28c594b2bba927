# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The worked examples of docs/quant_format.md are true."""

import doctest
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from lib.convert.codec import format as codec
from lib.convert.codec import quantize, schemes

DOCUMENT = Path(__file__).parents[2] / "docs/quant_format.md"
UTILS = "vllm.model_executor.layers.quantization.utils"


@pytest.fixture
def codec_under_its_name_in_vllm(monkeypatch):
    """The codec importable as in a patched vLLM, without one installed."""
    parts = UTILS.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(
            sys.modules, ".".join(parts[:end]), ModuleType(parts[end - 1])
        )
    package = sys.modules[UTILS]
    package.ternary_format, package.ternary_quantize = codec, quantize
    # Tracebacks name a class of __main__ without its module.
    monkeypatch.setattr(codec.TernaryFormatError, "__module__", "__main__")


def test_examples(codec_under_its_name_in_vllm):
    text = DOCUMENT.read_text().replace("```", "")
    test = doctest.DocTestParser().get_doctest(
        text, {}, DOCUMENT.name, str(DOCUMENT), 0
    )
    assert len(test.examples) >= 25
    output: list[str] = []
    runner = doctest.DocTestRunner()
    runner.run(test, out=output.append)
    assert not runner.failures, "".join(output)


def test_example_config_is_read_as_the_text_says():
    block = re.search(r"```json\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    table = schemes.SchemeTable.from_config(json.loads(block[1]))
    q_proj = "model.layers.1.self_attn.q_proj"
    assert table.scheme(q_proj).kind == "ternary"
    assert table.scheme(q_proj).block_size == 128
    assert table.scheme("model.layers.1.mlp.down_proj").block_size == 64
    assert table.scheme("model.layers.0.mlp.down_proj").kind == "unquantized"
    assert table.scheme("model.layers.1.mlp.gate").kind == "unquantized"
    assert table.scheme("model.layers.1.mlp.gate_proj").kind == "ternary"
    assert table.explicit("model.embed_tokens").kind == "ternary"


def test_every_config_key_is_documented():
    text = DOCUMENT.read_text()
    for key in schemes._TOP_KEYS | schemes._SCHEME_KEYS:
        assert f"`{key}`" in text, key
