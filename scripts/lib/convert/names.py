# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which modules of a model are linears that vLLM quantizes, told by name."""

import re

EMBEDDINGS = {"embed_tokens", "lm_head"}

_BLOCK = re.compile(r"(^|\.)(layers|layer|h|blocks)\.\d+\.")
_ROUTERS = {"gate", "router", "shared_expert_gate", "wg"}
_OTHER_TOWERS = re.compile(
    r"(^|\.)(vision\w*|visual\w*|audio\w*|image\w*|multi_modal\w*|mm_\w+|qformer)\."
)
_NOT_LINEAR = re.compile(r"embed|norm|conv|relative_attention_bias", re.IGNORECASE)
TRANSPOSED = {"gpt2", "openai-gpt"}
"""Types of models whose projections are transformers' ``Conv1D``."""

_CONV_1D = re.compile(r"\.(c_attn|c_proj|c_fc)$")


# Of types of models whose classes in vLLM quantize not all: the first Mamba mixer, and
# Whisper's embedding, which is torch's own.
_NOT_QUANTIZED = {
    "mamba": ".mixer.",
    "falcon_mamba": ".mixer.",
    "jamba": ".mamba.",
    "whisper": ".embed_tokens",
}

FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "query": "qkv_proj",
    "key": "qkv_proj",
    "value": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "w1": "w13",
    "w3": "w13",
}
"""Modules that vLLM runs as one layer, which therefore share one setting."""


def is_embedding(module: str) -> bool:
    """Whether the module is the token embedding or the head."""
    return module.rpartition(".")[2] in EMBEDDINGS


def is_block_linear(module: str) -> bool:
    """Whether a 2-D weight of this name is a linear of the transformer blocks:
    attention and MLP projections and experts, but no router, norm, embedding and
    nothing of a vision or audio tower."""
    last = module.rpartition(".")[2]
    return (
        _BLOCK.search(module) is not None
        and last not in _ROUTERS
        and ".router." not in module
        and not _NOT_LINEAR.search(last)
        and not _OTHER_TOWERS.search(module + ".")
    )


def vllm_quantizes(module: str, model_type: str | None) -> bool:
    """Whether vLLM's class for this type of model would take the module quantized."""
    return _NOT_QUANTIZED.get(model_type or "", "\0") not in module


def is_transposed(module: str, model_type: str | None) -> bool:
    """Whether vLLM's class turns the module's weight around when it loads it."""
    return model_type == "gpt2" and _CONV_1D.search(module) is not None


_ALL_EXPERTS = re.compile(
    r"(.*?)\.(?:experts\.(?!\d)|(?:input_linear|output_linear)\."
    r"|(moe)\.(?:gate|up|down)_proj\.)"
)


def experts_in_one(tensor: str) -> str | None:
    """Name in vLLM of a layer's experts, if a 3-D tensor of this name holds them all:
    ``<...>.experts.gate_up_proj``, ``<...>.input_linear.weight`` of Granite, or
    ``<...>.moe.gate_proj.weight`` of Step 3."""
    match = _ALL_EXPERTS.match(tensor)
    if match is None:
        return None
    return ".".join(filter(None, [match[1], match[2], "experts"]))


def fused_group(module: str) -> str:
    """Name of the layer that vLLM makes of the module and its partners: q, k, v;
    gate, up; all experts of a layer."""
    parent, _, last = module.rpartition(".")
    experts = re.match(r"(.*\.experts)\.\d+\.", module)
    if experts:
        return experts[1]
    return f"{parent}.{FUSED.get(last, last)}" if parent else module


def tower(module: str) -> list[str]:
    """Beginning of the names in the vision or audio tower that the module is of, if it
    is of one."""
    match = _OTHER_TOWERS.search(module)
    return [module[: match.end()]] if match else []


def parts_of(module: str) -> list[str]:
    """Names of the modules that one which is stored fused may stand for."""
    parent, _, last = module.rpartition(".")
    return [f"{parent}.{part}" for part, fused in FUSED.items() if fused == last]


def suffix(module: str) -> str:
    """The name after the block's number, experts' numbers left open; the whole
    name outside of the blocks."""
    match = None
    for match in _BLOCK.finditer(module):
        pass
    tail = module[match.end() :] if match else module
    return re.sub(r"\.\d+\.", ".*.", tail)
