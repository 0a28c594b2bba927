# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Source: a GGUF file."""

import json
import shutil
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import gguf_names
from .codec import format
from .errors import ConversionError
from .gguf_file import GgufFile, GgufTensor, read_gguf
from .gguf_types import decode_ternary
from .hf_safetensors import read_config
from .model import Plain, Source, Ternary, Weight
from .safetensors_io import TensorSpec

_TOKENIZER_FILES = (
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "generation_config.json",
)
_IGNORED = ("rope_freqs.weight",)
"""Made from the config by every runtime."""
_POOLING = {1: "mean", 2: "cls", 3: "lasttoken"}


@dataclass
class GgufSource(Source):
    """A GGUF file with ternary tensors of whatever type."""

    file: GgufFile | None = None
    tokenizer: Path | None = None

    @property
    def kind(self) -> str:
        return "GGUF"

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        tokenizer: Path | None = None,
        config: Path | None = None,
        dtype: str = "bfloat16",
    ) -> "GgufSource":
        file = read_gguf(path)
        architecture = str(file.metadata.get("general.architecture"))
        shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
        gguf_names.check_architecture(architecture)
        if config is not None:
            made = read_config(config)
            made.pop("quantization_config", None)
        else:
            made = gguf_names.hf_config(architecture, file.metadata, shapes)
            made["torch_dtype"] = dtype
        if tokenizer is not None and not tokenizer.is_dir():
            raise ConversionError(f"--tokenizer {tokenizer} is not a directory.")
        source = cls(path, made, notes=list(file.notes), file=file, tokenizer=tokenizer)
        source.entries = [
            _entry(tensor, architecture, file.metadata)
            for tensor in file.tensors.values()
            if tensor.name not in _IGNORED
        ]
        return source

    def write_extra(self, directory: Path) -> None:
        assert self.file is not None
        if self.tokenizer is not None:
            _copy_tokenizer(self.tokenizer, directory)
        else:
            tokenizer_from_metadata(self.file, directory)
        if self.config.get("model_type") == "bert":
            _write_pooling(self.file, self.config["hidden_size"], directory)


def tokenizer_from_metadata(file: GgufFile, directory: Path) -> None:
    """Writes the tokenizer in the file's metadata as transformers understands it;
    raises ConversionError if it does not."""
    try:
        import transformers
    except ImportError:
        raise ConversionError(
            f"{file.path}: the tokenizer in the metadata needs transformers. Install "
            "it, or pass --tokenizer with the model's directory."
        ) from None
    wordpiece = file.metadata.get("tokenizer.ggml.model") == "bert"
    read = _wordpiece_tokenizer if wordpiece else _tokenizer_of_transformers
    with tempfile.TemporaryDirectory() as scratch:
        try:
            tokenizer = read(transformers, file, Path(scratch))
        except Exception as e:
            raise ConversionError(
                f"{file.path}: transformers makes no tokenizer of the metadata "
                f"({type(e).__name__}: {e}). Pass --tokenizer with the directory of "
                "the model's tokenizer."
            ) from None
        tokenizer.save_pretrained(directory)


def _tokenizer_of_transformers(transformers: Any, file: GgufFile, scratch: Path) -> Any:
    """Transformers reads a copy of the file without tensors, because it refuses
    files with types that it does not know."""
    copy = scratch / "tokenizer.gguf"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, file.kv_count)
    content = head + file.header
    copy.write_bytes(content + bytes(-len(content) % 32))
    return transformers.AutoTokenizer.from_pretrained(scratch, gguf_file=copy.name)


def _wordpiece_tokenizer(transformers: Any, file: GgufFile, scratch: Path) -> Any:
    """BERT's, which transformers does not read from GGUF. llama.cpp marks the first
    piece of a word with U+2581 where BERT marks the others with ##, and lowercases."""
    tokens = file.metadata["tokenizer.ggml.tokens"]

    def spell(token: str) -> str:
        if token.startswith("[") and token.endswith("]"):
            return token
        return token[1:] if token.startswith("\u2581") else "##" + token

    (scratch / "vocab.txt").write_text("\n".join(map(spell, tokens)) + "\n")
    limit = file.metadata.get("bert.context_length", 512)
    return transformers.BertTokenizerFast.from_pretrained(
        scratch, do_lower_case=True, model_max_length=limit
    )


def _copy_tokenizer(source: Path, directory: Path) -> None:
    found = {p for pattern in _TOKENIZER_FILES for p in source.glob(pattern)}
    if not any(p.name.startswith(("tokenizer", "vocab")) for p in found):
        raise ConversionError(
            f"--tokenizer {source}: no tokenizer file there. Give the directory of the "
            "model's tokenizer."
        )
    for path in found:
        if path.is_file():
            shutil.copyfile(path, directory / path.name)


def _write_pooling(file: GgufFile, size: int, directory: Path) -> None:
    """sentence-transformers' description of how token vectors become one."""
    mode = _POOLING.get(file.metadata.get("bert.pooling_type", 0))
    if mode is None:
        return
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": path,
            "type": f"sentence_transformers.{kind}",
        }
        for i, (path, kind) in enumerate(
            (("", "models.Transformer"), ("1_Pooling", "models.Pooling"))
        )
    ]
    (directory / "modules.json").write_text(json.dumps(modules, indent=2) + "\n")
    pooling: dict[str, Any] = {"word_embedding_dimension": size}
    for name in ("cls_token", "mean_tokens", "lasttoken"):
        pooling[f"pooling_mode_{name}"] = name.startswith(mode)
    (directory / "1_Pooling").mkdir(exist_ok=True)
    path = directory / "1_Pooling/config.json"
    path.write_text(json.dumps(pooling, indent=2) + "\n")


def _entry(
    tensor: GgufTensor, architecture: str, metadata: dict[str, Any]
) -> Plain | Weight:
    name = gguf_names.hf_name(tensor.name, architecture)
    if name is None:
        raise ConversionError(
            f"{tensor.path}: tensor {tensor.name} has no counterpart in a Hugging Face "
            f"{architecture} model. Convert the model from its safetensors."
        )
    rows = gguf_names.row_transform(tensor.name, architecture, metadata)
    values = gguf_names.value_transform(tensor.name, architecture)
    kind = tensor.type
    dtype = kind.dtype or (torch.float16 if kind.decode else torch.float32)

    def read_ternary() -> Ternary:
        t, scale = decode_ternary(tensor.read_bytes(), kind, tensor.name)
        format.check_scale(
            scale, t.shape[:-1], t.shape[-1], kind.block, name=tensor.name
        )
        if rows is not None:
            t, scale = rows(t), rows(scale)
        return Ternary(t, scale, None, kind.block)

    def read_full() -> torch.Tensor:
        raw = tensor.read_bytes()
        if kind.dtype is not None:
            x = raw.view(-1).view(kind.dtype).view(tensor.shape)
        else:
            x = _dequantize(raw, kind.id).view(tensor.shape)
        for transform in (rows, values):
            x = x if transform is None else transform(x)
        return x

    if len(tensor.shape) == 2 and name.endswith(".weight"):
        read: Callable[[], torch.Tensor | Ternary]
        read = read_ternary if kind.decode else read_full
        return Weight(
            module=name.removesuffix(".weight"),
            size_n=tensor.shape[0],
            size_k=tensor.shape[1],
            nbytes=tensor.nbytes,
            stored=kind.name,
            dtype=dtype,
            read=read,
            native=kind.decode is not None,
            block_size=kind.block if kind.decode else None,
        )
    if kind.dtype is None:
        raise ConversionError(
            f"{tensor.path}: tensor {tensor.name} of shape {list(tensor.shape)} is "
            f"{kind.name}; only 2-D weights can be quantized."
        )
    spec = TensorSpec(name, kind.dtype, tensor.shape)
    return Plain(spec, read_full, kind.name, tensor.nbytes)


def _dequantize(raw: torch.Tensor, type_id: int) -> torch.Tensor:
    try:
        from gguf import GGMLQuantizationType, dequantize
    except ImportError:
        raise ConversionError(
            "Tensors of GGUF types other than the ternary ones need the gguf package. "
            "Install it: pip install gguf"
        ) from None
    return torch.from_numpy(dequantize(raw.numpy(), GGMLQuantizationType(type_id)))
