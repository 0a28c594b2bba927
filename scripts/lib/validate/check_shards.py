# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""TP_SHARD: the ranks' parts, put together again, equal the whole.

vLLM's own layers, parameters and loaders make the cut, for each rank: every module as
a column-parallel and as a row-parallel layer, the parts of a fused layer as vLLM fuses
them, embeddings and heads as such.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lib.convert import names

from . import causes, spec
from .checkpoint import PACKED, SCALE, ZERO_POINT, Checkpoint, Module
from .difference import Failure, compare
from .ranks import (
    LayerSpec,
    Piece,
    Rank,
    Rows,
    ShardError,
    Whole,
    fmt,
    load_ranks,
    plain_scheme,
    same_bits,
)

QKV = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")


@dataclass
class Layer:
    """Modules of the checkpoint that vLLM may run as one layer."""

    spec: LayerSpec
    modules: list[Module]
    fused: bool = False

    def describe(self) -> str:
        """The layer in a few words."""
        fused = " fused" if len(self.modules) > 1 else ""
        return f"{self.spec.kind}-parallel{fused}".replace("qkv-parallel", "QKV")


def layers_of(checkpoint: Checkpoint, modules: Sequence[Module]) -> Iterator[Layer]:
    """Every layer that vLLM may make of some modules with a common parent."""
    by_last = {m.name.rpartition(".")[2]: m for m in modules}
    for last, module in by_last.items():
        if names.is_embedding(module.name):
            kind = "head" if last == "lm_head" else "embedding"
            yield _layer(kind, [module])
            continue
        yield _layer("column", [module])
        yield _layer("row", [module])
    yield from _fused(checkpoint, by_last)


def _fused(checkpoint: Checkpoint, by_last: dict[str, Module]) -> Iterator[Layer]:
    for kind, parts, whole in (
        ("qkv", QKV, "qkv_proj"),
        ("merged", GATE_UP, "gate_up_proj"),
    ):
        members = [by_last[p] for p in parts if p in by_last]
        if len(members) == len(parts) and len({m.scheme for m in members}) == 1:
            if len({m.size_k for m in members}) > 1:
                continue
            layer = _layer(kind, members, whole, parts, checkpoint)
            if layer is not None:
                yield layer
        if whole in by_last:
            layer = _layer(kind, [by_last[whole]], whole, parts, checkpoint)
            if layer is not None:
                yield layer


def _layer(
    kind: Any,
    modules: list[Module],
    fused_name: str = "",
    parts: Sequence[str] = (),
    checkpoint: Checkpoint | None = None,
) -> Any:
    first = modules[0]
    parent = first.name.rpartition(".")[0]
    sizes = tuple(m.size_n for m in modules)
    heads = None
    fused_on_disk = bool(parts) and len(modules) == 1
    if kind == "qkv":
        assert checkpoint is not None
        heads = _heads(checkpoint, sizes)
        if heads is None:
            return None
        if fused_on_disk:
            q, kv, size, v_size = heads
            sizes = (q * size, kv * size, kv * v_size)
    elif fused_on_disk:
        if sizes[0] % len(parts):
            return None
        sizes = (sizes[0] // len(parts),) * len(parts)
    prefix = f"{parent}.{fused_name}".lstrip(".") if fused_name else first.name
    layer_spec = LayerSpec(
        kind,
        plain_scheme(first.scheme),
        first.size_k,
        sizes,
        heads=heads,
        names=tuple(parts),
        prefix=prefix,
    )
    return Layer(layer_spec, modules, fused_on_disk)


def _heads(
    checkpoint: Checkpoint, sizes: tuple[int, ...]
) -> tuple[int, int, int, int] | None:
    """(query heads, key/value heads, head size, value head size), by config.json."""
    config = checkpoint.config.get("text_config") or checkpoint.config
    heads = config.get("num_attention_heads")
    if not heads:
        return None
    kv = config.get("num_key_value_heads") or heads
    if len(sizes) == 3:
        q, k, v = sizes
        if q % heads or k % kv or v % kv or q // heads != k // kv:
            return None
        return heads, kv, k // kv, v // kv
    size = config.get("head_dim") or sizes[0] // (heads + 2 * kv)
    if (heads + 2 * kv) * size != sizes[0]:
        return None
    return heads, kv, size, size


def check_layer(checkpoint: Checkpoint, layer: Layer, tp: int) -> Iterator[Failure]:
    """Failures of one layer cut for `tp` ranks, at most one for each tensor."""
    parts = [
        {n: checkpoint.read(t) for n, t in m.tensors.items() if n != "bias"}
        for m in layer.modules
    ]
    context = f"{layer.describe()} over {tp} rank{'s' if tp > 1 else ''}"
    first = layer.modules[0].name
    needed = [SCALE, ZERO_POINT] if layer.spec.scheme.zero_point else [SCALE]
    for module, tensors in zip(layer.modules, parts):
        for name in needed:
            if name not in tensors:
                yield Failure(f"{module.name}.{name}", "is missing")
                return
    try:
        ranks = load_ranks(layer.spec, parts, tp, fused=layer.fused)
    except (fmt.TernaryFormatError, AssertionError, RuntimeError, ValueError) as e:
        message = str(e).strip().splitlines()
        yield Failure(
            f"{first}.{PACKED}",
            f"{context}: vLLM's loader refuses it ({message[0] if message else e!r})",
        )
        return
    whole = Whole(layer.spec, ranks)
    offset = 0
    for index, size in enumerate(layer.spec.sizes):
        if layer.fused:
            module, tensors = layer.modules[0], _rows_of(parts[0], offset, size)
            offset += size
        else:
            module, tensors = layer.modules[index], parts[index]
        for pieces in whole.pieces(index):
            failures = list(_check_copy(whole, pieces, module, tensors, context, size))
            yield from failures
            if failures:
                break
    if any(bool(t.view(torch.uint8).any()) for t in whole.padding() if t.numel()):
        yield Failure(f"{first}.{PACKED}", f"{context}: padding rows are not 0")


def _rows_of(
    tensors: dict[str, torch.Tensor], offset: int, size: int
) -> dict[str, torch.Tensor]:
    """Rows of a module that is fused on disk; one scale for all stays whole."""
    return {
        n: t if t.shape == (1,) else t[offset : offset + size]
        for n, t in tensors.items()
    }


def _check_copy(
    whole: Whole,
    pieces: Sequence[Piece],
    module: Module,
    tensors: dict[str, torch.Tensor],
    context: str,
    size: int,
) -> Iterator[Failure]:
    """One copy of a part against the module that it came from."""
    scheme, size_k = whole.spec.scheme, whole.spec.size_k
    tables = {
        name: fmt.expand_scale(tensors[name], (size,), size_k, scheme.block_size)
        for name in (SCALE, ZERO_POINT)
        if name in tensors
    }
    if all(_same_bytes(whole, piece, tensors[PACKED], tables) for piece in pieces):
        return
    found: list[Rows] = []
    try:
        for part in fmt.row_chunks(size, 8 * size_k):
            found.append(whole.rows(pieces, part.start, part.stop))
    except ShardError as e:
        yield Failure(
            f"{module.name}.{PACKED}",
            f"{context}: the parts do not fit together ({e})",
            cause=_cut_cause(whole, pieces, tensors[PACKED], tables),
        )
        return
    want_t = spec.decode(tensors[PACKED].numpy(), size_k)
    have_t = torch.cat([rows.t for rows in found])
    failure = compare(
        f"{module.name}.{PACKED}",
        torch.from_numpy(spec.encode(want_t)),
        torch.from_numpy(spec.encode(have_t.numpy())),
        f"{context}: put together differs",
    )
    if failure is not None:
        failure.cause = _cut_cause(
            whole, pieces, tensors[PACKED], {}
        ) or causes.of_packed(want_t, spec.encode(have_t.numpy()))
        yield failure
    for name, table in tables.items():
        parts = [rows.scale if name == SCALE else rows.zero_point for rows in found]
        have = torch.cat([p for p in parts if p is not None])
        want = table.contiguous().to(have.dtype)
        failure = compare(
            f"{module.name}.{name}",
            want,
            have,
            f"{context}: put together differs",
        )
        if failure is not None:
            failure.cause = _cut_cause(
                whole, pieces, None, {name: table}
            ) or causes.of_scale(want, have)
            yield failure


def _same_bytes(
    whole: Whole, piece: Piece, packed: torch.Tensor, tables: dict[str, torch.Tensor]
) -> bool:
    """Whether a piece equals its share of the whole byte for byte.

    A quick yes; anything else is looked at again, as integers.
    """
    rank, width = piece.rank, piece.stop - piece.start
    if rank.lead or piece.start % 4 or (width % 4 and piece.stop != whole.spec.size_k):
        return False
    mine = slice(piece.offset, piece.offset + piece.rows)
    rows = slice(piece.first, piece.first + piece.rows)
    columns = slice(piece.start // 4, -(-piece.stop // 4))
    if not same_bits(rank.packed[mine], packed[rows, columns]):
        return False
    for name, table in tables.items():
        local = rank.scale if name == SCALE else rank.zero_point
        assert local is not None
        block = piece.start // whole.block
        share = table[rows, block : block + local.shape[1]].to(local.dtype)
        if not same_bits(local[mine], share):
            return False
    return True


def _cut_cause(
    whole: Whole,
    pieces: Sequence[Piece],
    packed: torch.Tensor | None,
    tables: dict[str, torch.Tensor],
) -> str:
    """The cut that was made in place of the right one, or ""."""
    for piece in pieces:
        rank = piece.rank
        mine = slice(piece.offset, piece.offset + piece.rows)
        for name, table in tables.items():
            local = rank.scale if name == SCALE else rank.zero_point
            assert local is not None
            cause = _table_cause(whole, piece, table, local[mine], name)
            if cause:
                return cause
        if packed is not None:
            t = spec.decode(packed.numpy(), whole.spec.size_k)
            cause = _weight_cause(whole, piece, torch.from_numpy(t), rank)
            if cause:
                return cause
    return ""


def _table_cause(
    whole: Whole, piece: Piece, table: torch.Tensor, local: torch.Tensor, name: str
) -> str:
    what = "scale" if name == SCALE else "zero point"
    rows = slice(piece.first, piece.first + piece.rows)
    block = piece.start // whole.block
    width = local.shape[1]
    if same_bits(local, table[rows, block : block + width].to(local.dtype)):
        return ""
    table = table.to(local.dtype)
    if same_bits(local, table[: piece.rows, :width]):
        return (
            f"{what} not cut with the weight: rank {piece.rank.rank} has the first "
            f"{'blocks' if whole.spec.kind == 'row' else 'rows'} of the whole, as "
            "every rank does"
        )
    for other in range(table.shape[1] - width + 1):
        if same_bits(local, table[rows, other : other + width]):
            return (
                f"a shard cut across a block: rank {piece.rank.rank} has the {what}s "
                f"from block {other} on, its first weight is in block {block}"
            )
    for first in range(0, table.shape[0] - piece.rows + 1, max(1, piece.rows)):
        if same_bits(local, table[first : first + piece.rows, block : block + width]):
            return (
                f"{what} rows of another rank: rank {piece.rank.rank} has rows from "
                f"{first} on, {piece.first} is due"
            )
    return ""


def _weight_cause(whole: Whole, piece: Piece, t: torch.Tensor, rank: Rank) -> str:
    rows = slice(piece.first, piece.first + piece.rows)
    width = piece.stop - piece.start
    mine = slice(piece.offset, piece.offset + piece.rows)
    have = fmt.unpack(rank.packed[mine], rank.lead + width)[:, rank.lead :]
    if torch.equal(have, t[rows, piece.start : piece.stop]):
        return ""
    if torch.equal(have, t[: piece.rows, :width]):
        return (
            f"weight not cut: rank {rank.rank} has the first "
            f"{'inputs' if whole.spec.kind == 'row' else 'rows'} of the whole"
        )
    for start in range(max(0, piece.start - whole.block), piece.start + whole.block):
        part = t[rows, start : start + width]
        if part.shape == have.shape and torch.equal(have, part):
            inside = "byte" if abs(start - piece.start) < 4 else "block"
            return (
                f"a shard cut inside a {inside}: rank {rank.rank} has the weights "
                f"from input {start} on, {piece.start} is due"
            )
    for first in range(0, t.shape[0] - piece.rows + 1, max(1, piece.rows)):
        if torch.equal(have, t[first : first + piece.rows, piece.start : piece.stop]):
            return (
                f"rows of another rank: rank {rank.rank} has rows from {first} on, "
                f"{piece.first} is due"
            )
    return ""
