# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Decides for each weight what it becomes, before anything is written."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from . import names, quant_config
from .codec import TernaryFormatError, format, quantize, schemes
from .errors import ConversionError
from .experts import FusedExperts
from .model import Plain, Source, Ternary, Weight
from .safetensors_io import TensorSpec

Progress = Callable[[Iterable[Any], str], Iterable[Any]]


@dataclass(frozen=True)
class Options:
    """What the user asked for."""

    quantize: str | None = None
    """None (lossless or refused), "absmean" or "mse"."""
    block_size: int | str | None = None
    scale_dtype: torch.dtype | None = None
    not_convert: tuple[str, ...] = ()
    embeddings: str = "auto"
    """ "auto" (where they are ternary), "yes" or "no"."""
    merge_blocks: bool = True
    measure: bool = False
    """Compute what is needed for sparsity too, for a dry run."""


@dataclass(frozen=True)
class Decision:
    """What one weight becomes."""

    weight: Weight
    kind: str
    """ "ternary" or "unquantized"."""
    how: str
    """ "lossless", "absmean", "mse", "native", or why it is left as it is."""
    block_size: int | str | None = None
    zero_point_dtype: torch.dtype | None = None
    scale_dtype: torch.dtype = torch.float16
    zeros: int | None = None
    """Number of zero weights, where known."""
    mergeable: bool = False

    @property
    def specs(self) -> list[TensorSpec]:
        """Tensors written for the weight."""
        w = self.weight
        if self.kind != "ternary":
            shape = (w.size_k, w.size_n) if w.transposed else (w.size_n, w.size_k)
            return [TensorSpec(w.name, w.dtype, shape)]
        assert self.block_size is not None
        shape = format.scale_shape((w.size_n,), w.size_k, self.block_size)
        packed = (w.size_n, format.packed_width(w.size_k))
        result = [
            TensorSpec(w.module + ".packed_ternary_weight", torch.uint8, packed),
            TensorSpec(w.module + ".weight_scale", self.scale_dtype, shape),
        ]
        if self.zero_point_dtype is not None:
            name = w.module + ".weight_zero_point"
            result.append(TensorSpec(name, self.zero_point_dtype, shape))
        return result

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)

    @property
    def settings(self) -> dict[str, Any]:
        """The module's part of quantization_config."""
        if self.kind != "ternary":
            return {"kind": "unquantized"}
        return {
            "kind": "ternary",
            "block_size": self.block_size,
            "zero_point": self.zero_point_dtype is not None,
            "scale_dtype": str(self.scale_dtype).removeprefix("torch."),
        }


@dataclass
class Plan:
    source: Source
    options: Options
    steps: list[Plain | Decision]
    quantization_config: dict[str, Any]
    notes: list[str] = field(default_factory=list)

    @property
    def decisions(self) -> list[Decision]:
        return [s for s in self.steps if isinstance(s, Decision)]

    def specs(self) -> Iterator[TensorSpec]:
        for step in self.steps:
            yield from step.specs if isinstance(step, Decision) else [step.spec]


def make_plan(source: Source, options: Options, progress: Progress) -> Plan:
    """Reads what must be looked at (every weight that has to be ternary already)
    and decides. Raises ConversionError or TernaryFormatError naming the tensor."""
    model_type = str(source.config.get("model_type"))
    turned = any(isinstance(e, Weight) and e.transposed for e in source.entries)
    if model_type in names.TRANSPOSED and not turned:
        raise ConversionError(
            f"{source.path}: models of type {model_type} store their weights "
            "[inputs, outputs], which the converter turns around only for GPT-2 in "
            "floating-point safetensors. Serve this one unquantized."
        )
    notes = list(source.notes)
    patterns = [*source.not_convert, *options.not_convert]
    stored = _drop_tied_head(source, notes)
    entries, experts = _split_experts(stored, patterns, notes)
    _refuse_twice(entries)
    modules = {_module_of(e) for e in entries} | experts
    unused = [
        p
        for p in options.not_convert
        if not any(schemes.matches_not_convert(m, [p]) for m in modules)
    ]
    if unused:
        raise ConversionError(
            f"--modules-to-not-convert {unused[0]}: no module has such a name. A name "
            "is taken as the beginning, the end or a regular expression of the "
            "beginning of a module's name."
        )
    steps: list[Plain | Decision] = []
    for entry in progress(entries, "Looking at weights"):
        if isinstance(entry, Plain):
            steps.append(entry)
        else:
            steps.append(_decide(entry, source, options, patterns))
    steps = _settle_groups(steps, options)
    decided = {d.weight.module: d.settings for d in steps if isinstance(d, Decision)}
    decided |= {module: {"kind": "unquantized"} for module in sorted(experts)}
    if not any(s["kind"] == "ternary" for s in decided.values()):
        raise ConversionError(
            f"{source.path}: nothing to convert. No 2-D weight of a transformer block "
            "was found, or --modules-to-not-convert names them all."
        )
    head = any(
        isinstance(d, Decision) and d.weight.native and d.weight.module == "lm_head"
        for d in steps
    )
    config = quant_config.build(
        decided, source.activation_bits, source.input_norm, quantized_head=head
    )
    return Plan(source, options, steps, config, notes)


def resolve(decision: Decision, options: Options) -> Ternary | torch.Tensor:
    """Reads the weight and makes of it what was decided."""
    weight = decision.weight
    value = weight.read()
    if decision.kind != "ternary":
        if isinstance(value, Ternary):
            return format.dequantize(
                value.t, value.scale, value.zero_point, value.block_size, weight.dtype
            )
        return value.t().contiguous() if weight.transposed else value
    if isinstance(value, Ternary):
        value = _merged(value, decision)
        if decision.zero_point_dtype is not None and value.zero_point is None:
            zeros = torch.zeros(value.scale.shape, dtype=decision.zero_point_dtype)
            value = replace(value, zero_point=zeros)
        return value
    block, name = decision.block_size, weight.name
    assert block is not None
    function = {
        "lossless": quantize.find_ternary,
        "absmean": quantize.quantize_absmean,
        "mse": quantize.quantize_mse,
    }[decision.how]
    t, scale = function(value, block, decision.scale_dtype, name=name)
    return Ternary(t, scale, None, block)


def _decide(
    weight: Weight, source: Source, options: Options, patterns: list[str]
) -> Decision:
    module = weight.module
    if schemes.matches_not_convert(module, patterns):
        return Decision(weight, "unquantized", "modules_to_not_convert")
    embedding = names.is_embedding(module)
    if embedding and options.embeddings == "no":
        return Decision(weight, "unquantized", "embedding")
    if not embedding and not names.is_block_linear(module):
        return Decision(weight, "unquantized", "not in a transformer block")
    if not names.vllm_quantizes(module, source.config.get("model_type")):
        return Decision(weight, "unquantized", "vLLM does not quantize it")
    if weight.native:
        return _decide_native(weight, options)
    block = options.block_size or format.DEFAULT_BLOCK_SIZE
    dtype = options.scale_dtype or torch.float16
    lossless = Decision(weight, "ternary", "lossless", block, None, dtype)
    wanted = not embedding or options.embeddings == "yes"
    try:
        value = weight.read()
        assert isinstance(value, torch.Tensor)
        t, _ = quantize.find_ternary(value, block, dtype, name=weight.name)
        return replace(lossless, zeros=_zeros(t))
    except TernaryFormatError as error:
        if not wanted:
            return Decision(weight, "unquantized", "embedding, not ternary")
        if options.quantize is None:
            hint = _block_size_hint(value, block, dtype)
            raise TernaryFormatError(
                error.name,
                error.problem,
                f"{hint}If it must be converted all the same, pass --quantize mse "
                "(loses information), or leave it as it is with "
                f"--modules-to-not-convert {module}",
            ) from None
    del value  # which is read again
    decision = Decision(weight, "ternary", options.quantize, block, None, dtype)
    if not options.measure:
        return decision
    result = resolve(decision, options)
    assert isinstance(result, Ternary)
    return replace(decision, zeros=_zeros(result.t))


def _decide_native(weight: Weight, options: Options) -> Decision:
    value = weight.read()
    assert isinstance(value, Ternary)
    block, size_k = value.block_size, weight.size_k
    target = options.block_size
    mergeable = target is None and options.merge_blocks and block == 64
    if target is None:
        target = 128 if mergeable else block
    fits = True
    if target != block:
        if not isinstance(block, int):
            raise ConversionError(
                f"{weight.name}: has one scale per {block}, --block-size {target} does "
                "not apply to it. Leave --block-size out."
            )
        for x in (value.scale, value.zero_point):
            if x is not None:
                fits &= format.merge_blocks(x, size_k, block, target) is not None
        if not fits and not mergeable:
            raise ConversionError(
                f"{weight.name}: its blocks of {block} do not all have the same scale "
                f"within {target}. Leave --block-size out to keep {block}."
            )
    return Decision(
        weight,
        "ternary",
        "native",
        target if fits else block,
        None if value.zero_point is None else value.zero_point.dtype,
        value.scale.dtype,
        _zeros(value.t),
        mergeable and fits,
    )


def _merged(value: Ternary, decision: Decision) -> Ternary:
    old, new = value.block_size, decision.block_size
    if old == new:
        return value
    assert new is not None
    size_k = value.t.shape[-1]

    def merge(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else format.merge_blocks(x, size_k, old, new)

    return Ternary(value.t, merge(value.scale), merge(value.zero_point), new)


def _refuse_twice(entries: list[Plain | Weight]) -> None:
    """Raises ConversionError for a weight that the source has in two forms."""
    seen: set[str] = set()
    for entry in entries:
        if entry.name in seen:
            raise ConversionError(
                f"{entry.name}: is there on its own and in one tensor with all "
                "experts. Remove the form that does not belong to the checkpoint."
            )
        seen.add(entry.name)


def _settle_groups(
    steps: list[Plain | Decision], options: Options
) -> list[Plain | Decision]:
    """Parts of one layer of vLLM must be stored alike: gives merged blocks back
    where a partner could not be merged, and zero points to partners without;
    refuses other differences."""
    groups: dict[str, list[Decision]] = defaultdict(list)
    for step in steps:
        if isinstance(step, Decision):
            groups[names.fused_group(step.weight.module)].append(step)
    changed: dict[str, Decision] = {}
    for group, parts in groups.items():
        merged = [p for p in parts if p.mergeable]
        if merged and len({str(p.block_size) for p in parts}) > 1:
            for part in merged:
                changed[part.weight.module] = replace(
                    part, block_size=64, mergeable=False
                )
        dtypes = {p.zero_point_dtype for p in parts if p.kind == "ternary"}
        if len(dtypes) > 1:
            wanted = next(d for d in dtypes if d is not None)
            for part in parts:
                if part.kind == "ternary" and part.zero_point_dtype is None:
                    part = changed.get(part.weight.module, part)
                    changed[part.weight.module] = replace(part, zero_point_dtype=wanted)
        final = [changed.get(p.weight.module, p) for p in parts]
        first = final[0]
        for other in final[1:]:
            if first.settings != other.settings:
                remedy = "List both in --modules-to-not-convert, or convert both."
                if group.endswith(".experts"):
                    pattern = f"--modules-to-not-convert {names.suffix(group)}"
                    remedy = f"Leave all experts as they are with {pattern}, or none."
                raise ConversionError(
                    f"{first.weight.module} ({_words(first)}) and "
                    f"{other.weight.module} ({_words(other)}) are one layer ({group}) "
                    f"in vLLM and must be stored alike. {remedy}"
                )
    return [
        changed.get(s.weight.module, s) if isinstance(s, Decision) else s for s in steps
    ]


def _words(decision: Decision) -> str:
    if decision.kind != "ternary":
        return decision.how
    zero_point = ", zero point" if decision.zero_point_dtype else ""
    return f"ternary, block {decision.block_size}{zero_point}"


def _module_of(entry: Plain | Weight) -> str:
    return entry.name.rpartition(".")[0]


def _split_experts(
    entries: list[Plain | Weight], patterns: list[str], notes: list[str]
) -> tuple[list[Plain | Weight], set[str]]:
    """Entries in which a tensor with all experts of a layer is replaced by the experts'
    weights, unless they are to be left alone: vLLM expects them ternary; and names in
    vLLM of the layers that are left alone."""
    result: list[Plain | Weight] = []
    left: set[str] = set()
    tensors = 0
    for entry in entries:
        three = isinstance(entry, Plain) and len(entry.spec.shape) >= 3
        module = names.experts_in_one(entry.name) if three else None
        if module is None:
            result.append(entry)
        elif schemes.matches_not_convert(module, patterns):
            left.add(module)
            result.append(entry)
        else:
            assert isinstance(entry, Plain)
            parts = FusedExperts.of(entry).split(module)
            result += parts
            tensors += 1
    if tensors:
        notes.append(f"{tensors} tensors with all experts of a layer were split")
    return result, left


def _drop_tied_head(source: Source, notes: list[str]) -> list[Plain | Weight]:
    """Without a stored copy of the head that transformers and vLLM never read,
    because the config says that it is the embedding."""
    if not source.config.get("tie_word_embeddings"):
        return source.entries
    by_name = {e.name: e for e in source.entries}
    head = by_name.get("lm_head.weight")
    table = next(
        (e for n, e in by_name.items() if n.endswith("embed_tokens.weight")), None
    )
    if head is None or table is None:
        return source.entries
    notes.append("lm_head.weight dropped: config.json ties it to the embedding")
    return [e for e in source.entries if e is not head]


def _block_size_hint(value: torch.Tensor, block: int | str, dtype: torch.dtype) -> str:
    """Says with which other block size the weight would be ternary."""
    for size in (64, 32, 16):
        if isinstance(block, int) and size >= block:
            continue
        try:
            quantize.find_ternary(value, size, dtype)
        except TernaryFormatError:
            continue
        return f"It is ternary with --block-size {size}. "
    return ""


def _zeros(t: torch.Tensor) -> int:
    return t.numel() - int(t.count_nonzero())
