# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Builders of small checkpoints, each format through its own public library where
there is one."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

BLOCK_LINEARS = (
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    "query", "key", "value", "dense",
)  # fmt: skip

_SIZES: dict[str, Any] = dict(
    vocab_size=96,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)
_CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
    "bert": (transformers.BertConfig, transformers.BertModel),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
}


def tiny_model(kind: str, seed: int, **sizes: Any) -> transformers.PreTrainedModel:
    """A transformers model in float32 with random weights, norms included."""
    config_class, model_class = _CLASSES[kind]
    settings = dict(_SIZES, head_dim=64)
    if kind == "gemma3":
        settings |= {"sliding_window": 32, "query_pre_attn_scalar": 64}
    if kind == "qwen3_moe":
        settings |= {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
        }
    if kind in ("qwen2", "bert"):
        settings.pop("head_dim")
    if kind == "bert":
        settings.pop("num_key_value_heads")
    config = config_class(**settings | sizes)
    torch.manual_seed(seed)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name.lower() or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def save(model: transformers.PreTrainedModel, folder: Path) -> Path:
    """Saves as transformers does, with a small tokenizer's file beside it."""
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}\n')
    return folder


def read(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory, read by the safetensors library."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Applies ``change`` to the tensors of a directory and stores them in one file."""
    tensors = read(folder)
    change(tensors)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    tensors = {name: x.contiguous() for name, x in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def set_config(folder: Path, **changes: Any) -> None:
    """Sets keys of config.json; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    config = {k: v for k, v in config.items() if v is not None}
    path.write_text(json.dumps(config))


def is_block_linear(name: str) -> bool:
    """Whether the name is that of a projection's weight in a block."""
    parts = name.split(".")
    return (
        parts[-1] == "weight"
        and parts[-2] in BLOCK_LINEARS
        and ("layers" in parts or "layer" in parts)
    )


def random_ternary(
    seed: int, n: int, k: int, block: int, dtype: torch.dtype = torch.float16
) -> tuple[torch.Tensor, torch.Tensor]:
    """T int8 [n, k] and scale [n, ceil(k / block)] of ``dtype``, by NumPy; each block
    has all three values where it is long enough."""
    rng = np.random.default_rng(seed)
    t = rng.integers(-1, 2, (n, k)).astype(np.int8)
    for start in range(0, k - 2, block):
        t[:, start : start + 3] = rng.permuted(np.tile([-1, 0, 1], (n, 1)), axis=1)
    scale = rng.uniform(2**-7, 2**-4, (n, -(-k // block)))
    return torch.from_numpy(t), torch.from_numpy(scale).to(dtype)


def expand(t: torch.Tensor, scale: torch.Tensor, block: int) -> torch.Tensor:
    """The weight in float32, by NumPy."""
    wide = np.repeat(scale.float().numpy(), block, axis=1)[:, : t.shape[1]]
    return torch.from_numpy(wide * t.numpy().astype(np.float32))


def make_ternary(
    model: transformers.PreTrainedModel,
    seed: int,
    block: int,
    embeddings: bool = False,
    gain: float = 1.0,
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Gives the projections (and the embedding and head) of a model random ternary
    weights, in place; returns name of the weight -> (t, scale). ``gain``, a power of
    two, makes the projections' scales larger."""
    made = {}
    for i, (name, parameter) in enumerate(model.named_parameters()):
        table = name.endswith(("embed_tokens.weight", "lm_head.weight"))
        if is_block_linear(name) or (embeddings and table):
            t, scale = random_ternary(1000 * seed + i, *parameter.shape, block)
            scale = scale if table else scale * gain
            parameter.data.copy_(expand(t, scale, block))
            made[name] = t, scale
    return made


# --------------------------------------------------------------------------
# MLX


def pack_mlx(q: np.ndarray) -> np.ndarray:
    """Sixteen 2-bit codes per uint32 along K, lowest bits first."""
    words = np.zeros((q.shape[0], q.shape[1] // 16), dtype=np.uint32)
    for i in range(16):
        words |= q[:, i::16].astype(np.uint32) << np.uint32(2 * i)
    return words


def write_mlx(
    model: transformers.PreTrainedModel,
    folder: Path,
    seed: int,
    group: int,
    change: Callable | None = None,
    gain: float = 1.0,
) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Writes a model with random ternary weights as mlx-lm does: embedding, head and
    projections as 2-bit codes with biases = -scales.

    ``change(name, q, scales, biases)`` alters one weight's parts in place. Returns
    name -> (words uint32 [N, K / 16], scales, biases float16 [N, K / group]).
    """
    made = make_ternary(model, seed, group, embeddings=True, gain=gain)
    save(model, folder)
    stored = {}

    def to_mlx(tensors: dict[str, torch.Tensor]) -> None:
        for name, (t, scale) in made.items():
            if name not in tensors:
                continue
            q, scales = (t + 1).numpy().astype(np.uint8), scale.numpy()
            biases = -scales
            if change:
                change(name, q, scales, biases)
            words = pack_mlx(q)
            stored[name] = words, scales, biases
            module = name.removesuffix("weight")
            tensors[name] = torch.from_numpy(words)
            tensors[module + "scales"] = torch.from_numpy(scales)
            tensors[module + "biases"] = torch.from_numpy(biases)

    rewrite(folder, to_mlx)
    quantization = {"group_size": group, "bits": 2}
    set_config(folder, quantization=quantization, quantization_config=quantization)
    return stored


# --------------------------------------------------------------------------
# GGUF

_GGUF_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "bert": gguf.MODEL_ARCH.BERT,
}
GGML = gguf.GGMLQuantizationType


def permute_rope(w: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of the rows of Llama's q and k."""
    half = w.shape[0] // heads // 2
    return w.reshape(heads, 2, half, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def q2_0_bytes(t: np.ndarray, scale: np.ndarray, block: int) -> np.ndarray:
    """Q2_0 (block 64) and PQ2_0 (block 128): FP16 d, then four codes t + 1 per byte
    in order; ``t`` may hold +2. Returns uint8 [N, bytes]."""
    n, k = t.shape
    q = (t + 1).astype(np.uint8).reshape(n, k // block, block // 4, 4)
    codes = q[..., 0] | q[..., 1] << 2 | q[..., 2] << 4 | q[..., 3] << 6
    d = scale.astype("<f2").reshape(n, k // block, 1).view(np.uint8)
    return np.concatenate([d, codes], axis=2).reshape(n, -1)


class GgufBuilder:
    """Writes a GGUF file of a transformers model with the gguf package.

    ``encode(name, w)`` gives, for a projection's HF name and float32 [N, K] in
    llama.cpp's row order, either a GGML type (the gguf package then quantizes) or
    (type id, bytes uint8 [N, B], shape) for a type that the package does not know.
    """

    def __init__(self, model: transformers.PreTrainedModel, encode: Callable) -> None:
        self.model, self.config, self.encode = model, model.config, encode
        self.arch = _GGUF_ARCHITECTURES[model.config.model_type]
        self.name = gguf.MODEL_ARCH_NAMES[self.arch]
        self.unknown: dict[str, tuple[int, tuple[int, ...]]] = {}
        self.metadata: dict[str, Any] = {}
        self.skip: set[str] = set()

    def write(self, path: Path, tokenizer: Callable | None = None) -> Path:
        writer = gguf.GGUFWriter(path, self.name)
        self._add_metadata(writer)
        if tokenizer:
            tokenizer(writer)
        layers = self.config.num_hidden_layers
        names = gguf.get_tensor_name_map(self.arch, layers)
        for name, parameter in self.model.state_dict().items():
            tied = name == "lm_head.weight" and self.config.tie_word_embeddings
            if tied or name.endswith("position_ids") or name.startswith("pooler."):
                continue
            ours = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert ours is not None, name
            if ours not in self.skip:
                self._add_tensor(writer, ours, name, parameter.float().numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        self._patch(path)
        return path

    def _add_metadata(self, writer: gguf.GGUFWriter) -> None:
        c = self.config
        writer.add_context_length(c.max_position_embeddings)
        writer.add_embedding_length(c.hidden_size)
        writer.add_block_count(c.num_hidden_layers)
        writer.add_feed_forward_length(c.intermediate_size)
        writer.add_head_count(c.num_attention_heads)
        writer.add_vocab_size(c.vocab_size)
        if self.name == "bert":
            writer.add_layer_norm_eps(c.layer_norm_eps)
            writer.add_pooling_type(gguf.PoolingType.MEAN)
            return
        writer.add_head_count_kv(c.num_key_value_heads)
        head_dim = getattr(c, "head_dim", c.hidden_size // c.num_attention_heads)
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_rope_dimension_count(head_dim)
        writer.add_layer_norm_rms_eps(c.rms_norm_eps)
        rope = c.rope_parameters
        writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
        if self.name == "gemma3":
            writer.add_sliding_window(c.sliding_window)
        for key, value in self.metadata.items():
            if isinstance(value, str):
                writer.add_string(key, value)
            else:
                writer.add_float32(key, value)

    def _add_tensor(
        self, writer: gguf.GGUFWriter, ours: str, name: str, w: np.ndarray
    ) -> None:
        if self.name == "llama" and ".q_proj." in name:
            w = permute_rope(w, self.config.num_attention_heads)
        if self.name == "llama" and ".k_proj." in name:
            w = permute_rope(w, self.config.num_key_value_heads)
        if self.name == "gemma3" and name.endswith("norm.weight"):
            w = w + 1
        encoded = self.encode(name, w) if w.ndim == 2 else GGML.F32
        if isinstance(encoded, GGML):
            data = w.astype(np.float32)
            if encoded != GGML.F32:
                data = gguf.quants.quantize(data, encoded)
            writer.add_tensor(ours, data, raw_dtype=encoded)
        else:
            type_id, data, shape = encoded
            writer.add_tensor(ours, data.view(np.int8))
            self.unknown[ours] = type_id, shape

    def _patch(self, path: Path) -> None:
        """Gives tensors written as bytes their true type and shape."""
        content = bytearray(path.read_bytes())
        for name, (type_id, shape) in self.unknown.items():
            key = struct.pack("<Q", len(name)) + name.encode()
            at = content.index(key) + len(key)
            assert struct.unpack_from("<I", content, at) == (2,)
            struct.pack_into("<QQI", content, at + 4, shape[1], shape[0], type_id)
        path.write_bytes(content)


def projections_as(encoded: Any, others: Any = GGML.F32) -> Callable:
    """An ``encode`` that treats all projections alike."""

    def encode(name: str, w: np.ndarray) -> Any:
        if not is_block_linear(name):
            return others
        return encoded(name, w) if callable(encoded) else encoded

    return encode


def byte_level_tokenizer(writer: gguf.GGUFWriter) -> None:
    """A byte-level BPE vocabulary as llama.cpp stores that of GPT-2 and Qwen."""
    alphabet = [chr(c) for c in range(33, 127)] + ["Ġ"]
    tokens = [*alphabet, "he", "ll", "hell", "<|end|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 1) + [3])
    writer.add_token_merges(["h e", "l l", "he ll"])
    writer.add_eos_token_id(len(tokens) - 1)
