#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Measure a whole engine: memory of the weights, decoding and embedding speed.

Makes a Qwen3 model of a given shape with random weights, ternary or 16-bit, loads it
with the installed vLLM and times requests of random tokens. Run it once for each kind
of weights and compare.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lib.arguments import positive_int

SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": dict(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    ),
    "8B": dict(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    ),
    # For a try of the script itself.
    "tiny": dict(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
}
# (requests at once, tokens of each)
EMBEDDINGS = [(1, 32), (16, 32), (1, 512), (16, 512), (256, 512)]
DECODES = [1, 16, 128]
GENERATED = 128


def block_size(text: str) -> int | str:
    """A block size of the command line that divides every K of SHAPES, or "row"."""
    if text == "row":
        return text
    if not text.isdecimal() or int(text) not in (32, 64, 128, 256):
        raise argparse.ArgumentTypeError(f'{text!r} is not 32, 64, 128, 256 or "row"')
    return int(text)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="0.6B")
    parser.add_argument(
        "--weights",
        choices=["ternary", "ternary-all", "16-bit"],
        default="ternary",
        help="ternary: the linear layers; ternary-all: embedding and head, too",
    )
    parser.add_argument("--activation-bits", type=int, choices=[8], default=None)
    parser.add_argument(
        "--block-size",
        type=block_size,
        default=128,
        help='weights under one scale along K, or "row" (default: %(default)s)',
    )
    parser.add_argument("--task", choices=["generate", "embed"], default="generate")
    parser.add_argument(
        "--dtype",
        choices=["bfloat16", "float16", "float32"],
        default="bfloat16",
        help="of activations",
    )
    parser.add_argument("--vocab-size", type=positive_int, default=151936)
    parser.add_argument("--eager", action="store_true", help="no torch.compile")
    parser.add_argument(
        "--repeat", type=positive_int, default=5, help="timings per row"
    )
    parser.add_argument(
        "--requests",
        type=positive_int,
        default=256,
        help="leave out rows with more at once",
    )
    parser.add_argument("--max-model-len", type=positive_int, default=4096)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.6)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


def write_model(folder: Path, args: argparse.Namespace) -> None:
    """Write the config and random weights, one file a layer."""
    import torch
    from safetensors.torch import save_file
    from tqdm import tqdm
    from transformers import Qwen3Config

    from vllm.model_executor.layers.quantization.utils import ternary_format as fmt

    shape = SHAPES[args.shape]
    config = Qwen3Config(
        vocab_size=args.vocab_size, head_dim=128, max_position_embeddings=32768, **shape
    ).to_dict()
    config |= {"architectures": ["Qwen3ForCausalLM"], "dtype": args.dtype}
    ternary = args.weights != "16-bit"
    if ternary:
        quantization: dict[str, Any] = {
            "quant_method": "ternary",
            "block_size": args.block_size,
        }
        if args.activation_bits:
            quantization["activation_bits"] = args.activation_bits
        if args.weights == "ternary-all":
            quantization["module_overrides"] = {
                name: {"kind": "ternary", "activation_bits": None}
                for name in ("model.embed_tokens", "lm_head")
            }
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    if args.task == "embed":
        write_tokenizer(folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, args.dtype)

    def weight(module: str, n: int, k: int, packed: bool) -> dict[str, torch.Tensor]:
        if not packed:
            w = torch.randn(n, k, device=device, generator=generator) * k**-0.5
            return {f"{module}.weight": w.to(dtype)}
        t = torch.randint(
            -1, 2, (n, k), dtype=torch.int8, device=device, generator=generator
        )
        blocks = 1 if args.block_size == "row" else k // args.block_size
        scale = torch.rand(n, blocks, device=device, generator=generator)
        return {
            f"{module}.packed_ternary_weight": fmt.pack(t),
            f"{module}.weight_scale": ((scale + 0.5) * k**-0.5).half(),
        }

    hidden, mlp = shape["hidden_size"], shape["intermediate_size"]
    q, kv = 128 * shape["num_attention_heads"], 128 * shape["num_key_value_heads"]
    linears = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (mlp, hidden),
        "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
    }
    norms = {
        "self_attn.q_norm": 128,
        "self_attn.k_norm": 128,
        "input_layernorm": hidden,
        "post_attention_layernorm": hidden,
    }
    vocabulary = args.weights == "ternary-all"
    ends = weight("model.embed_tokens", args.vocab_size, hidden, vocabulary)
    if not shape["tie_word_embeddings"]:
        ends |= weight("lm_head", args.vocab_size, hidden, vocabulary)
    ends["model.norm.weight"] = torch.ones(hidden, dtype=dtype)
    save_file(ends, folder / "model-ends.safetensors")
    for i in tqdm(range(shape["num_hidden_layers"]), "write model", unit="layer"):
        layer: dict[str, torch.Tensor] = {}
        for name, (n, k) in linears.items():
            layer |= weight(f"model.layers.{i}.{name}", n, k, ternary)
        for name, size in norms.items():
            layer[f"model.layers.{i}.{name}.weight"] = torch.ones(size, dtype=dtype)
        save_file(layer, folder / f"model-{i:03}.safetensors")


def write_tokenizer(folder: Path) -> None:
    """One word: vLLM's pooling engine wants a tokenizer even for token ids."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"x": 0}, unk_token="x"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="x").save_pretrained(
        folder
    )


def measure(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Load the model and time it; seconds are medians of `--repeat` runs.

    Each is printed when it is known, so that a run cut short has told something.
    """
    import random

    from lib.bench.weight_bytes import weight_bytes
    from vllm import LLM, SamplingParams

    random.seed(0)
    start = time.perf_counter()
    llm = LLM(
        str(folder),
        dtype=args.dtype,
        skip_tokenizer_init=args.task != "embed",
        enforce_eager=args.eager,
        max_model_len=args.max_model_len,
        gpu_memory_utilization=args.gpu_memory_utilization,
        runner="pooling" if args.task == "embed" else "generate",
    )
    result: dict[str, Any] = {
        "engine_start_s": time.perf_counter() - start,
        "weights_gib": sum(llm.apply_model(weight_bytes)) / 2**30,
        "rows": [],
    }

    report = sys.stderr if args.json else sys.stdout
    print(
        f"{args.shape}, {args.weights} weights: {result['weights_gib']:.3f} GiB, "
        f"engine start {result['engine_start_s']:.0f} s",
        file=report,
        flush=True,
    )

    def prompts(count: int, length: int) -> list[dict]:
        ids = range(1, args.vocab_size)
        return [
            {"prompt_token_ids": random.choices(ids, k=length)} for _ in range(count)
        ]

    def embed(count: int, length: int) -> None:
        llm.embed(prompts(count, length), use_tqdm=False)

    sampling = SamplingParams(
        max_tokens=GENERATED, temperature=0, detokenize=False, ignore_eos=True
    )

    def generate(count: int, length: int) -> None:
        llm.generate(prompts(count, length), sampling, use_tqdm=False)

    rows = EMBEDDINGS if args.task == "embed" else [(n, 32) for n in DECODES]
    for count, length in rows:
        if count > args.requests:
            continue
        work = embed if args.task == "embed" else generate
        work(count, length)
        seconds = []
        for _ in range(args.repeat):
            begin = time.perf_counter()
            work(count, length)
            seconds.append(time.perf_counter() - begin)
        median = statistics.median(seconds)
        each = length if args.task == "embed" else GENERATED
        row = {
            "requests": count,
            "tokens_each": each,
            "ms": median * 1e3,
            "tokens_per_s": count * each / median,
        }
        result["rows"].append(row)
        print(
            f"{args.task} {count:4} x {each}: "
            f"{row['ms']:9.2f} ms {row['tokens_per_s']:10.0f} tokens/s",
            file=report,
            flush=True,
        )
    return result


def main() -> int:
    """Run the benchmark; exit status 2 without a patched vLLM."""
    args = parse_arguments()
    # `weight_bytes` is sent to the engine's process.
    os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    try:
        import vllm
        import vllm.model_executor.layers.quantization.ternary  # noqa: F401
    except ImportError as e:
        print(
            f"error: {e}. Install the wheel of `make patched-wheel`.", file=sys.stderr
        )
        return 2
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), args)
        result = measure(Path(folder), args)
    names = ("shape", "weights", "activation_bits", "block_size", "task")
    what = {k: getattr(args, k) for k in names}
    result = {**what, "dtype": args.dtype, "vllm": vllm.__version__, **result}
    if args.json:
        print("RESULT " + json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
