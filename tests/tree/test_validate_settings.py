# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The settings that the validator and the converter find are those that vLLM finds."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from lib.convert.hf_safetensors import find_quantization
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.weight_utils import get_quant_config
from vllm.transformers_utils.config import get_config

TOP, FILE = "quantization_config", "hf_quant_config.json"
TEXT, OTHER = "text_config", "compression_config"


@pytest.mark.parametrize(
    "places",
    [
        (TOP,),
        (TEXT,),
        (FILE,),
        (OTHER,),
        (TOP, FILE, TEXT, OTHER),
        (FILE, TEXT),
        (TEXT, OTHER),
    ],
)
def test_where_settings_stand(places: tuple[str, ...], tmp_path: Path) -> None:
    """The first of the places counts."""
    text = transformers.LlamaConfig(num_hidden_layers=1, hidden_size=64)
    config = transformers.LlavaConfig(text_config=text).to_dict()
    config["architectures"] = ["LlavaForConditionalGeneration"]
    for i, place in enumerate(places):
        settings: dict[str, Any] = {"quant_method": "ternary", "block_size": 4 * i + 4}
        if place == FILE:
            (tmp_path / FILE).write_text(json.dumps(settings))
        elif place == TEXT:
            config[TEXT][TOP] = settings
        else:
            config[place] = settings
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = SimpleNamespace(
        model=str(tmp_path),
        hf_config=get_config(str(tmp_path), trust_remote_code=False),
        quantization="ternary",
        quantization_config=None,
    )
    schemes = get_quant_config(model, LoadConfig()).schemes
    where, found = find_quantization(tmp_path, config)
    assert where == (f"{TEXT}.{TOP}" if places[0] == TEXT else places[0])
    assert found["block_size"] == schemes.scheme("a.module").block_size == 4
