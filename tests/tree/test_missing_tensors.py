# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A checkpoint that lacks any tensor is refused by name; one that is whole loads.

Models are loaded by vLLM's own loader and model classes: only they know which tensors
there are besides those of the ternary layers.
"""

from pathlib import Path
from typing import Any

import checkpoints as build
import convert_checkpoint
import pytest
from load_models import load_all

from lib.validate.ranks import LayerSpec, tensor_parallel
from vllm.model_executor.layers.quantization.ternary.schemes import Scheme
from vllm.model_executor.layers.quantization.utils.ternary_format import (
    TernaryFormatError,
)

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
    "qwen2": dict(tie_word_embeddings=True),
    "qwen3": dict(tie_word_embeddings=True),
    "gemma3": {},
    "bert": {},
    "qwen3_moe": dict(tie_word_embeddings=False),
}
MASTERS = {
    "quant_method": "bitnet",
    "linear_class": "autobitlinear",
    "quantization_mode": "online",
    "modules_to_not_convert": ["lm_head"],
}
NORMS = {"use_rms_norm": True, "rms_norm_name": "norm"}

# (model, tensor that is left out, what the message names)
MISSING = [
    ("llama", "model.norm.weight", "model.norm.weight"),
    (
        "llama",
        "model.layers.1.input_layernorm.weight",
        "model.layers.1.input_layernorm.weight",
    ),
    ("llama", "model.embed_tokens.weight", "model.embed_tokens.weight"),
    ("llama", "lm_head.weight", "lm_head.weight"),
    (
        "llama",
        "model.layers.0.self_attn.o_proj.bias",
        "model.layers.0.self_attn.o_proj.bias",
    ),
    # One part of a fused bias, where the others are there.
    ("llama", "model.layers.0.mlp.up_proj.bias", "model.layers.0.mlp.up_proj.bias"),
    (
        "qwen2",
        "model.layers.1.self_attn.k_proj.bias",
        "model.layers.1.self_attn.k_proj.bias",
    ),
    (
        "qwen3",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.self_attn.q_norm.weight",
    ),
    (
        "qwen3",
        "model.layers.0.mlp.up_proj.weight_scale",
        "model.layers.0.mlp.up_proj.weight_scale: missing",
    ),
    (
        "bert",
        "encoder.layer.1.output.LayerNorm.bias",
        "encoder.layer.1.output.LayerNorm.bias",
    ),
    ("qwen3_moe", "model.layers.0.mlp.gate.weight", "model.layers.0.mlp.gate.weight"),
    (
        "masters",
        "model.layers.0.post_attention_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight",
    ),
    (
        "masters_norms",
        "model.layers.1.self_attn.v_proj.norm.weight",
        "model.layers.1.self_attn.v_proj.norm.weight: missing",
    ),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Whole checkpoints, as the converter writes them, and of bitnet masters."""
    found = {}
    for seed, (family, settings) in enumerate(FAMILIES.items()):
        folder = tmp_path_factory.mktemp(family)
        source = build.save(
            build.tiny_model(family, seed, **settings), folder / "source"
        )
        arguments = [str(source), str(folder / "ternary"), "--quantize", "absmean"]
        assert convert_checkpoint.main(arguments) == 0
        found[family] = folder / "ternary"
    for name, settings in (("masters", {}), ("masters_norms", NORMS)):
        folder = tmp_path_factory.mktemp(name)
        model = build.tiny_model("llama", 17, tie_word_embeddings=False)
        build.save(model, folder)
        build.set_config(folder, quantization_config=MASTERS | settings)
        if settings:
            build.rewrite(folder, _add_norms)
        found[name] = folder
    found["unquantized_experts"] = _with_plain_experts(tmp_path_factory.mktemp("plain"))
    return found


def _add_norms(tensors: dict[str, Any]) -> None:
    for name in [n for n in tensors if build.is_block_linear(n)]:
        norm = tensors[name].new_ones(tensors[name].shape[1])
        tensors[f"{name.removesuffix('weight')}norm.weight"] = norm


def _with_plain_experts(folder: Path) -> Path:
    build.save(build.tiny_model("qwen3_moe", 18), folder)
    plain = {"re:.*": {"kind": "unquantized"}}
    settings = {"quant_method": "ternary", "module_overrides": plain}
    build.set_config(folder, quantization_config=settings)
    return folder


def _copy_without(folder: Path, name: str, to: Path) -> Path:
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    build.rewrite(to, lambda tensors: tensors.pop(name))
    return to


def test_whole_checkpoints_load(folders: dict[str, Path]) -> None:
    """No tensor is missed that vLLM makes itself: tied heads, a master's scale, ..."""
    jobs: list[dict[str, Any]] = [{"model": str(f)} for f in folders.values()]
    # Random weights in place of a checkpoint that has none.
    jobs.append({"model": str(folders["qwen2"]), "args": {"load_format": "dummy"}})
    assert load_all(jobs) == [None] * len(jobs)


def test_missing_tensors(folders: dict[str, Path], tmp_path: Path) -> None:
    jobs = [
        {"model": str(_copy_without(folders[model], name, tmp_path / str(i)))}
        for i, (model, name, _) in enumerate(MISSING)
    ]
    errors = load_all(jobs)
    for (model, name, said), error in zip(MISSING, errors, strict=True):
        assert error is not None and said in error, (model, name, error)
    # Who knows better can say so.
    args = {"model_loader_extra_config": {"enable_weights_track": False}}
    assert load_all([{**jobs[0], "args": args}]) == [None]


# (model, module that is stored unquantized all the same, what the message names)
PLAIN = [
    ("llama", "model.layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj: "),
    ("qwen2", "model.layers.1.self_attn.v_proj", "model.layers.1.self_attn.v_proj: "),
    ("llama", "model.layers.0.mlp.down_proj", "layers.0.mlp.down_proj.weight"),
    (
        "qwen3_moe",
        "model.layers.1.mlp.experts.2.down_proj",
        "model.layers.1.mlp.experts, expert 2, w2: ",
    ),
]


def test_unquantized_module_that_should_be_ternary(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    jobs = []
    for i, (model, module, _) in enumerate(PLAIN):
        plain = build.read(folders[model].parent / "source")[f"{module}.weight"]
        folder = _copy_without(
            folders[model], f"{module}.packed_ternary_weight", tmp_path / str(i)
        )

        def add(
            tensors: dict[str, Any], name: str = f"{module}.weight", w: Any = plain
        ) -> None:
            tensors[name] = w

        build.rewrite(folder, add)
        jobs.append({"model": str(folder)})
    # All experts of a layer in one tensor.
    folder = tmp_path / "fused"
    _copy_without(folders["qwen3_moe"], "model.norm.weight", folder)
    build.rewrite(folder, _fuse_experts)
    jobs.append({"model": str(folder)})
    said = [text for _, _, text in PLAIN] + ["one module for each expert"]
    for text, error in zip(said, load_all(jobs), strict=True):
        assert error is not None and text in error, (text, error)


def _fuse_experts(tensors: dict[str, Any]) -> None:
    for name in [n for n in tensors if ".experts." in n]:
        del tensors[name]
    shapes = {"gate_up_proj": (4, 256, 256), "down_proj": (4, 256, 128)}
    for name, shape in shapes.items():
        weight = tensors["model.embed_tokens.weight"].new_ones(shape)
        tensors[f"model.layers.0.mlp.experts.{name}"] = weight


@pytest.mark.parametrize("kind", ["ternary", "int8"])
def test_missing_part_of_a_fused_bias(kind: str) -> None:
    """The part is named as the checkpoint would."""
    scheme = Scheme(kind=kind, block_size="row")
    names = ("gate_proj", "up_proj")
    spec = LayerSpec(
        "merged",
        scheme,
        64,
        (32, 32),
        names=names,
        prefix="model.mlp.gate_up_proj",
        bias=True,
    )
    with tensor_parallel(0, 1):
        layer = spec.build()
        for part in (0, 1):
            for name in layer.ternary_tensors:
                param = getattr(layer, name)
                rows = param.new_ones(32, param.shape[1])
                param.weight_loader(param, rows, part)
        layer.bias.weight_loader(layer.bias, layer.bias.new_ones(32), 0)
        with pytest.raises(TernaryFormatError, match="model.mlp.up_proj.bias: missing"):
            layer.quant_method.process_weights_after_loading(layer)
