# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A small ternary checkpoint and its full-precision model, written with NumPy alone."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

HEADS, KV_HEADS, HEAD, HIDDEN, MLP, VOCABULARY = 8, 4, 12, 144, 264, 90
SIZES = {
    "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
    "mlp.gate_proj": (MLP, HIDDEN),
    "mlp.up_proj": (MLP, HIDDEN),
    "mlp.down_proj": (HIDDEN, MLP),
}
FILE = "model.safetensors"
Change = Callable[[dict[str, torch.Tensor]], None]


def pack(t: np.ndarray) -> torch.Tensor:
    """int8 [N, K] of -1, 0, 1 to uint8 [N, ceil(K / 4)], by the format's definition."""
    codes = np.pad(
        np.where(t < 0, 2, t).astype(np.uint8), ((0, 0), (0, -t.shape[1] % 4))
    )
    return torch.from_numpy(sum(codes[:, i::4] << 2 * i for i in range(4)).astype("u1"))


def write_model(
    folder: Path,
    seed: int,
    *,
    block_size: int | str = 32,
    zero_point: bool = False,
    embeddings: bool = False,
    layers: int = 1,
    hidden: int = HIDDEN,
    mlp: int = MLP,
) -> tuple[Path, Path]:
    """Write a decoder with random ternary weights.

    Returns:
        (ternary, full precision): two model directories.

    """
    rng = np.random.default_rng(seed)
    sizes = {}
    for layer in range(layers):
        for name, (n, k) in SIZES.items():
            n, k = ({HIDDEN: hidden, MLP: mlp}.get(s, s) for s in (n, k))
            sizes[f"model.layers.{layer}.{name}"] = (n, k)
    for name in ("model.embed_tokens", "lm_head"):
        sizes[name] = (VOCABULARY, hidden)
    packed: dict[str, torch.Tensor] = {"model.norm.weight": torch.ones(hidden).half()}
    plain = dict(packed)
    for name, (n, k) in sizes.items():
        t = rng.integers(-1, 2, (n, k)).astype(np.int8)
        blocks = 1 if isinstance(block_size, str) else -(-k // block_size)
        length = k if isinstance(block_size, str) else block_size
        shape = (1,) if block_size == "tensor" else (n, blocks)
        # Multiples of 1/64 keep the weights exact in float16, zero points included.
        scale = rng.integers(3, 128, shape) / 64
        zero = rng.integers(-2, 3, shape) / 4 if zero_point else np.zeros(shape)
        t[:, ::length] = 1  # no block of zeros, whose scale would be free

        def wide(x: np.ndarray, k=k, length=length) -> np.ndarray:
            return np.repeat(x.reshape(-1, x.shape[-1]), length, axis=1)[:, :k]

        weight = torch.from_numpy(wide(scale) * (t - wide(zero))).float()
        plain[f"{name}.weight"] = weight
        if "layers" not in name and not embeddings:
            packed[f"{name}.weight"] = weight
            continue
        packed[f"{name}.packed_ternary_weight"] = pack(t)
        packed[f"{name}.weight_scale"] = torch.from_numpy(scale).half()
        if zero_point:
            packed[f"{name}.weight_zero_point"] = torch.from_numpy(zero).float()
    quantization: dict[str, object] = {
        "quant_method": "ternary",
        "block_size": block_size,
        "zero_point": zero_point,
        "modules_to_not_convert": [] if embeddings else ["lm_head"],
    }
    if embeddings:
        quantization["module_overrides"] = {
            name: {"kind": "ternary"} for name in ("model.embed_tokens", "lm_head")
        }
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "vocab_size": VOCABULARY,
    }
    paths = folder / "ternary", folder / "plain"
    for path, tensors in zip(paths, (packed, plain)):
        path.mkdir(parents=True)
        save_file(tensors, path / FILE)
        (path / "config.json").write_text(json.dumps(config))
        config = {k: v for k, v in config.items() if k != "quantization_config"}
    config["quantization_config"] = quantization
    (paths[0] / "config.json").write_text(json.dumps(config))
    return paths


def change(model: Path, mistake: Change) -> None:
    """Make a mistake in the tensors of a checkpoint."""
    tensors = {n: t.clone() for n, t in load_file(model / FILE).items()}
    mistake(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, model / FILE)


def change_config(model: Path, **settings: object) -> None:
    """Change settings of a checkpoint's quantization_config."""
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] |= settings
    (model / "config.json").write_text(json.dumps(config))
