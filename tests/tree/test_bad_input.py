# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What is wrong with a checkpoint is said by name, value and remedy, at load."""

import re
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from lib.validate.ranks import LayerSpec, tensor_parallel
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.config.quantization import resolve_quantization_config
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.online.base import (
    OnlineQuantizationConfig,
)
from vllm.model_executor.layers.quantization.ternary.checkpoint_files import (
    check_safetensors_files,
)
from vllm.model_executor.layers.quantization.ternary.schemes import (
    Scheme,
    SchemeTable,
    TernaryConfigError,
)
from vllm.model_executor.layers.quantization.utils.ternary_format import (
    TernaryFormatError,
    pack,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

N, K = 8, 300
NAME = "model.layers.0.mlp.proj"


def make_layer(scheme: Scheme | None = None, **settings):
    spec = LayerSpec("column", scheme or Scheme(), K, (N,))
    with tensor_parallel(0, 1):
        return spec.build(**settings)


def good_tensors(seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    t = torch.randint(-1, 2, (N, K), dtype=torch.int8, generator=g)
    return {
        "packed_ternary_weight": pack(t),
        "weight_scale": (torch.rand(N, 3, generator=g) + 0.1).half(),
    }


def load(layer, tensors: dict[str, torch.Tensor]) -> None:
    with tensor_parallel(0, 1):
        for name, tensor in tensors.items():
            param = getattr(layer, name)
            param.weight_loader(param, tensor)
        layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize(
    "name,change,said",
    [
        ("packed_ternary_weight", lambda x: x[:, :-1], ["[8, 74]", "[8, 75]"]),
        ("packed_ternary_weight", lambda x: x.t().contiguous(), ["[75, 8]"]),
        ("packed_ternary_weight", lambda x: x.half(), ["float16", "uint8"]),
        ("weight_scale", lambda x: x[:, :-1], ["[8, 2]", "[8, 3]"]),
        ("weight_scale", lambda x: x.repeat(1, 2), ["[8, 6]", "block"]),
        ("weight_scale", lambda x: x.bfloat16(), ["bfloat16", "float16"]),
        ("weight_scale", lambda x: _with(x, float("nan")), ["nan"]),
        ("weight_scale", lambda x: _with(x, float("inf")), ["inf"]),
        ("weight_scale", lambda x: _with(x, -0.5), ["-0.5"]),
    ],
)
def test_bad_tensor(name, change, said) -> None:
    layer = make_layer()
    tensors = good_tensors(seed=zlib.crc32(" ".join(said).encode()) % 1000)
    tensors[name] = change(tensors[name])
    with pytest.raises(TernaryFormatError) as raised:
        load(layer, tensors)
    for text in [f"{NAME}.{name}", *said]:
        assert text in str(raised.value), raised.value
    assert raised.value.remedy


def _with(scale: torch.Tensor, value: float) -> torch.Tensor:
    scale = scale.clone()
    scale[3, 1] = value
    return scale


@pytest.mark.parametrize("missing", ["packed_ternary_weight", "weight_scale", "both"])
def test_missing_tensor(missing: str) -> None:
    tensors = good_tensors(seed=len(missing))
    kept = {k: v for k, v in tensors.items() if missing not in (k, "both")}
    with pytest.raises(TernaryFormatError, match="missing from the checkpoint") as e:
        load(make_layer(), kept)
    for name in set(tensors) - set(kept):
        assert f"{NAME}.{name}" in str(e.value)


@pytest.mark.parametrize("kind", ["ternary", "int8"])
def test_tensors_for_a_layer_that_is_loaded(kind: str) -> None:
    """They cannot be copied into the layout of a kernel; a reload takes them."""
    layer = make_layer(Scheme(kind=kind, block_size="row"))
    tensors = {
        name: param.new_ones(param.shape) for name, param in layer.named_parameters()
    }
    load(layer, tensors)
    held = {name: param.clone() for name, param in layer.named_parameters()}
    for name, tensor in tensors.items():
        with (
            tensor_parallel(0, 1),
            pytest.raises(RuntimeError, match=rf"{re.escape(NAME)}.*reload_weights"),
        ):
            getattr(layer, name).weight_loader(getattr(layer, name), tensor)
    assert all(torch.equal(p, held[name]) for name, p in layer.named_parameters())


def test_missing_part_of_a_fused_layer() -> None:
    names = ("gate_proj", "up_proj")
    spec = LayerSpec(
        "merged", Scheme(), K, (N, N), names=names, prefix="model.mlp.gate_up_proj"
    )
    with tensor_parallel(0, 1):
        layer = spec.build()
        for name, tensor in good_tensors(seed=5).items():
            param = getattr(layer, name)
            param.weight_loader(param, tensor, 0)
        param = layer.packed_ternary_weight
        param.weight_loader(param, good_tensors(seed=6)["packed_ternary_weight"], 1)
        with pytest.raises(
            TernaryFormatError, match=r"^model\.mlp\.up_proj\.weight_scale: "
        ):
            layer.quant_method.process_weights_after_loading(layer)


def test_value_in_a_part_of_a_fused_layer() -> None:
    """The tensor of the checkpoint is named, not the layer that it was fused into."""
    names = ("gate_proj", "up_proj")
    spec = LayerSpec(
        "merged", Scheme(), K, (N, N), names=names, prefix="model.mlp.gate_up_proj"
    )
    with tensor_parallel(0, 1):
        layer = spec.build()
        for part in (0, 1):
            tensors = good_tensors(seed=8 + part)
            if part == 1:
                tensors["weight_scale"] = _with(tensors["weight_scale"], -2.0)
            for name, tensor in tensors.items():
                param = getattr(layer, name)
                param.weight_loader(param, tensor, part)
        with pytest.raises(TernaryFormatError) as raised:
            layer.quant_method.process_weights_after_loading(layer)
    assert raised.value.name == "model.mlp.up_proj.weight_scale"


def test_reserved_codes(caplog: pytest.LogCaptureFixture) -> None:
    """Code 3 reads as 0, counted in one warning a tensor; or is refused."""
    caplog.set_level("WARNING", "vllm")
    tensors = good_tensors(seed=7)
    tensors["packed_ternary_weight"][2, 10] = 0b11_00_11_01
    tensors["packed_ternary_weight"][7, 0] = 0b00_00_11_00
    layer = make_layer()
    load(layer, tensors)
    warnings = [r.getMessage() for r in caplog.records if "reserved" in r.msg]
    assert len(warnings) == 1
    assert f"{NAME}.packed_ternary_weight: 3 of {N * K}" in warnings[0]
    packed, _, _ = layer.quant_method.unpacked_weight(layer)
    assert packed[2, 10] == 0b00_00_00_01 and packed[7, 0] == 0
    with pytest.raises(TernaryFormatError, match="3 weights have the reserved code"):
        load(make_layer(strict=True), tensors)


@pytest.mark.parametrize("block_size", [128, "row"])
def test_reserved_codes_of_a_cut(block_size, caplog: pytest.LogCaptureFixture) -> None:
    """Every rank counts its own, also where its first weight is inside a byte."""
    caplog.set_level("WARNING", "vllm")
    size_k = 270  # 135 for each of two ranks
    packed = torch.zeros(N, 68, dtype=torch.uint8)
    packed[1, 0] = 0b00_00_00_11  # weight 0
    packed[2, 33] = 0b11_11_11_00  # weights 133, 134 and 135
    packed[5, 67] = 0b11_00_11_00  # weight 269, and one beyond the last
    scale = torch.ones(N, 3 if block_size == 128 else 1).half()
    spec = LayerSpec("row", Scheme(block_size=block_size), size_k, (N,))
    for rank, count in enumerate((3, 2)):
        caplog.clear()
        with tensor_parallel(rank, 2):
            layer = spec.build()
            for name, x in (("packed_ternary_weight", packed), ("weight_scale", scale)):
                param = getattr(layer, name)
                param.weight_loader(param, x)
            layer.quant_method.process_weights_after_loading(layer)
        (warning,) = [r.getMessage() for r in caplog.records if "reserved" in r.msg]
        assert f"{NAME}.packed_ternary_weight: {count} of " in warning


@pytest.mark.parametrize("method", ["ternary", "bitnet"])
@pytest.mark.parametrize(
    "load_format", ["sharded_state", "runai_streamer_sharded", "tensorizer"]
)
def test_load_formats_of_a_saved_model(load_format: str, method: str) -> None:
    """They hold the kernels' layout, which no ternary layer loads."""
    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    config.load_config.load_format = load_format
    quantization = get_quantization_config(method).from_config({"quant_method": method})
    with (
        set_current_vllm_config(config),
        tensor_parallel(0, 1),
        pytest.raises(ValueError, match=f"load_format is {load_format}.*{method}"),
    ):
        ColumnParallelLinear(K, N, quant_config=quantization, prefix=NAME)


@pytest.mark.parametrize("method", ["ternary", "bitnet"])
def test_online_quantization_of_a_quantized_layer(method: str) -> None:
    """--quantization-config is for what the checkpoint leaves unquantized."""
    quantization = get_quantization_config(method).from_config(
        {"quant_method": method, "modules_to_not_convert": ["plain"]}
    )
    args = resolve_quantization_config(method, {"linear": "fp8_per_tensor"})
    quantization.online_quantization_config = OnlineQuantizationConfig(args)
    with tensor_parallel(0, 1):
        with pytest.raises(ValueError, match=f"quantize {NAME} again"):
            ColumnParallelLinear(K, N, quant_config=quantization, prefix=NAME)
        method_of = quantization.get_quant_method
        plain = ColumnParallelLinear(K, N, prefix="plain")
        assert isinstance(method_of(plain, "plain"), UnquantizedLinearMethod)
        args.ignore = [NAME]
        quantization.online_quantization_config = OnlineQuantizationConfig(args)
        layer = ColumnParallelLinear(K, N, quant_config=quantization, prefix=NAME)
    assert hasattr(layer, "ternary_scheme")


@pytest.mark.parametrize("method", ["ternary", "bitnet"])
def test_names_of_a_draft_model(method: str) -> None:
    """A word that vLLM puts before them, of which the draft's settings know nothing."""
    quantization = get_quantization_config(method).from_config(
        {"quant_method": method, "modules_to_not_convert": ["model.layers.0"]}
    )
    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    found = []
    for runner in ("generate", "draft"):
        config.model_config = SimpleNamespace(runner_type=runner)
        with set_current_vllm_config(config), tensor_parallel(0, 1):
            layer = ColumnParallelLinear(K, N, prefix="x")
            method_of = quantization.get_quant_method
            found.append(type(method_of(layer, f"draft_model.{NAME}")).__name__)
    assert found[0] != found[1] == "UnquantizedLinearMethod"


@pytest.mark.parametrize("method", ["ternary", "bitnet"])
def test_head_that_vllm_unties(method: str) -> None:
    """A checkpoint may have a head of its own although config.json says it is tied."""
    model = LlamaConfig(tie_word_embeddings=True)
    settings = {
        "ternary": {"module_overrides": {"model.embed_tokens": {"kind": "ternary"}}},
        "bitnet": {"modules_to_not_convert": []},
    }
    quantization = get_quantization_config(method).from_config(
        {"quant_method": method, **settings[method]}
    )
    quantization.maybe_update_config("", hf_config=model)
    model.tie_word_embeddings = False
    with tensor_parallel(0, 1):
        embedding = VocabParallelEmbedding(
            64, K, quant_config=quantization, prefix="model.embed_tokens"
        )
        head = ParallelLMHead(64, K, quant_config=quantization, prefix="lm_head")
    ternary = [hasattr(x, "packed_ternary_weight") for x in (embedding, head)]
    # Of bitnet, the head is quantized, and keeps the checkpoint's name of the tensor.
    assert ternary == [method == "ternary", False]
    assert head.weight.dtype == (torch.uint8 if method == "bitnet" else torch.float32)


@pytest.mark.parametrize(
    "settings,said",
    [
        ({"block_size": 126}, "block_size is 126"),
        ({"block_size": 0}, "block_size is 0"),
        ({"block_size": True}, "block_size is True"),
        ({"block_size": "column"}, "block_size is 'column'"),
        ({"blocksize": 128}, "unknown key 'blocksize'"),
        ({"zero_point": 1}, "zero_point is 1"),
        ({"activation_bits": 4}, "activation_bits is 4"),
        ({"activation_bits": 8, "zero_point": True}, "zero_point is True"),
        ({"input_norm": {"name": "n"}}, "input_norm is {'name': 'n'}"),
        ({"input_norm": {"name": "a.b", "eps": 1e-6}}, "input_norm.name is 'a.b'"),
        ({"input_norm": {"name": 3, "eps": 1e-6}}, "input_norm.name is 3"),
        ({"input_norm": {"name": "n", "eps": "1e-6"}}, "input_norm.eps is '1e-6'"),
        ({"input_norm": {"name": "n", "eps": -1}}, "input_norm.eps is -1"),
        ({"input_norm": {"name": "n", "eps": True}}, "input_norm.eps is True"),
        ({"scale_dtype": "float8"}, "scale_dtype is 'float8'"),
        ({"strict": "yes"}, "strict is 'yes'"),
        ({"format_version": 2}, "format_version is 2"),
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert is 'lm_head'"),
        ({"module_overrides": {"a": {"kind": "int3"}}}, "kind is 'int3'"),
        ({"module_overrides": {"a": {"bits": 2}}}, "unknown key 'bits'"),
        ({"quant_method": "gptq", "bits": 4}, "quant_method is 'gptq'"),
    ],
)
def test_impossible_config(settings: dict, said: str) -> None:
    config = {"quant_method": "ternary", **settings}
    with pytest.raises(TernaryConfigError, match=re.escape(said)):
        get_quantization_config("ternary").from_config(config)


def test_parts_of_a_fused_layer_must_agree() -> None:
    table = SchemeTable.from_config(
        {
            "quant_method": "ternary",
            "module_overrides": {"m.up_proj": {"block_size": 64}},
        }
    )
    with pytest.raises(TernaryConfigError, match="m.gate_up_proj fuses.*block 64"):
        table.fused_scheme("m.gate_up_proj", ["m.gate_proj", "m.up_proj"])


@pytest.mark.parametrize(
    "settings",
    [
        {"modules_to_not_convert": ["v_proj"]},
        {"module_overrides": {"re:.*v_proj": {"kind": "unquantized"}}},
        {"module_overrides": {"re:.*v_proj": {"activation_bits": 8}}},
        {
            "module_overrides": {
                "m": {"kind": "unquantized"},
                "m.q_proj": {"kind": "ternary"},
            }
        },
    ],
)
def test_a_pattern_for_a_part_is_not_for_the_fused_layer(settings: dict) -> None:
    """The name qkv_proj ends with v_proj, and begins as its parts do."""
    table = SchemeTable.from_config(settings)
    with pytest.raises(TernaryConfigError, match="m.qkv_proj fuses"):
        table.fused_scheme("m.qkv_proj", ["m.q_proj", "m.k_proj", "m.v_proj"])


@pytest.mark.parametrize(
    "settings",
    [
        {"modules_to_not_convert": ["qkv_proj"]},
        {"modules_to_not_convert": ["q_proj", "k_proj", "v_proj"]},
        {"module_overrides": {"m.qkv_proj": {"kind": "unquantized"}}},
        {"module_overrides": {"m": {"kind": "unquantized"}}},
        {
            "block_size": 64,
            "modules_to_not_convert": ["q_proj"],
            "module_overrides": {"re:m.[kv]_proj": {"kind": "unquantized"}},
        },
    ],
)
def test_parts_of_a_fused_layer_that_agree(settings: dict) -> None:
    table = SchemeTable.from_config(settings)
    parts = ["m.q_proj", "m.k_proj", "m.v_proj"]
    assert table.fused_scheme("m.qkv_proj", parts).kind == "unquantized"


@pytest.mark.parametrize("method", ["ternary", "bitnet"])
def test_asked_for_by_name_on_a_plain_model(method: str) -> None:
    """A config is made from nothing where config.json has none."""
    with pytest.raises(TernaryConfigError, match=f"{method}.*no quantization_config"):
        get_quantization_config(method)()


@pytest.mark.parametrize("kept", [0, 5, 40, -1])
def test_truncated_file(tmp_path: Path, kept: int) -> None:
    file = tmp_path / "model.safetensors"
    save_file(good_tensors(seed=kept + 1), file)
    check_safetensors_files(str(tmp_path))
    whole = file.read_bytes()
    file.write_bytes(whole[:kept])
    with pytest.raises(TernaryFormatError, match="cut short") as raised:
        check_safetensors_files(str(tmp_path))
    assert str(file) in str(raised.value)


def test_header_of_something_else(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes((4).to_bytes(8, "little") + b"PK\x03\x04" + b"\0" * 64)
    with pytest.raises(TernaryFormatError, match="header"):
        check_safetensors_files(str(tmp_path))


def test_tensor_in_two_files(tmp_path: Path) -> None:
    """One would silently replace the other, unless an index names one of them."""
    tensors = {f"{NAME}.{name}": x for name, x in good_tensors(seed=41).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    save_file({f"{NAME}.bias": torch.ones(N)}, tmp_path / "more.safetensors")
    check_safetensors_files(str(tmp_path))
    save_file(tensors, tmp_path / "old.safetensors")
    with pytest.raises(TernaryFormatError, match="in model.*and in old.safetensors"):
        check_safetensors_files(str(tmp_path))
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    check_safetensors_files(str(tmp_path))
