# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Small BitNet checkpoints, written and read with transformers' own modules."""

import copy
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForCausalLM,
    BitNetQuantConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)
from transformers.integrations.bitnet import (
    AutoBitLinear,
    BitLinear,
    pack_weights,
    replace_with_bitnet_linear,
)
from transformers.quantizers.base import get_keys_to_not_convert

LINEAR_CLASSES = (AutoBitLinear, BitLinear)
VOCABULARY = 160
PROJECTIONS = tuple(
    f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")
)


@dataclass
class BitNetPair:
    """A checkpoint for vLLM, and transformers' model that reads the same file."""

    folder: Path
    model: torch.nn.Module

    @torch.no_grad()
    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """Log-probabilities [len(tokens), vocabulary] of each next token."""
        logits = self.model(torch.tensor([tokens])).logits[0]
        return torch.log_softmax(logits.float(), -1)

    def rounded(self, dtype: torch.dtype) -> "BitNetPair":
        """The same checkpoint with transformers' model computing in `dtype`."""
        model = copy.deepcopy(self.model).to(dtype)
        for layer in model.modules():
            if isinstance(layer, LINEAR_CLASSES):
                layer.dtype = dtype
        return BitNetPair(self.folder, model)


def write_bitnet(
    folder: Path, config: PreTrainedConfig, quantization: BitNetQuantConfig, seed: int
) -> BitNetPair:
    """Write random weights as `quantization` stores them.

    Args:
        folder: of the checkpoint; made here.
        config: a decoder's, float32.
        quantization: packed with a scale or its inverse, or masters.
        seed: of the weights.

    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    weights = {k: v.detach().clone() for k, v in model.state_dict().items()}
    if config.tie_word_embeddings:
        del weights["lm_head.weight"]
    config.architectures = [type(model).__name__]
    kept = get_keys_to_not_convert(model)
    replace_with_bitnet_linear(model, kept, quantization)
    layers = {
        name: m for name, m in model.named_modules() if isinstance(m, LINEAR_CLASSES)
    }
    assert len(layers) == 7 * config.num_hidden_layers
    for name, layer in layers.items():
        if quantization.use_rms_norm:
            norm = torch.rand(layer.in_features) + 0.5
            weights[f"{name}.rms_norm.weight"] = norm
        if quantization.quantization_mode == "online":
            continue
        master = weights[f"{name}.weight"]
        scale = master.abs().mean()
        t = (master / scale).round().clamp(-1, 1)
        weights[f"{name}.weight"] = pack_weights(t)
        inverse = quantization.linear_class == "bitlinear"
        weights[f"{name}.weight_scale"] = (1 / scale if inverse else scale).view(1)
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_config(folder, config, quantization.to_dict())

    # Read back, by transformers' hooks for packed weights.
    missing, unexpected = model.load_state_dict(
        load_file(folder / "model.safetensors"), strict=False, assign=True
    )
    tied = ["lm_head.weight"] if config.tie_word_embeddings else []
    assert (missing, unexpected) == (tied, [])
    model.tie_weights()
    for layer in layers.values():
        layer.dtype = torch.float32  # transformers takes it from the model
    return BitNetPair(folder, model)


def write_config(
    folder: Path, config: PreTrainedConfig, quantization: dict | None
) -> None:
    settings = config.to_dict() | {"dtype": "float32"}
    if quantization is not None:
        settings["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(settings, indent=2))


def write_tokenizer(folder: Path) -> None:
    """Words "t0", "t1" and so on; the last one of them ends each text."""
    words = WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = Whitespace()
    end = f"t{VOCABULARY - 1}"
    tokenizer.post_processor = TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, VOCABULARY - 1)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="t0", eos_token=end
    ).save_pretrained(folder)
