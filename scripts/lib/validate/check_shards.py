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
    for name, table in tables.items():
        for piece in pieces:
            failure = _compare_table(whole, piece, table, f"{module.name}.{name}")
            if failure is not None:
                failure.problem = (
                    f"{context}, rank {piece.rank.rank}: {failure.problem}"
                )
                yield failure
                break
    want_t = spec.decode(tensors[PACKED].numpy(), size_k)
    try:
        have_t = torch.cat(
            [
                whole.codes(pieces, part.start, part.stop)
                for part in fmt.row_chunks(size, 8 * size_k)
            ]
        ).numpy()
    except ShardError as e:
        yield Failure(
            f"{module.name}.{PACKED}",
            f"{context}: the parts do not fit together ({e})",
            cause=_weight_cause(whole, pieces, torch.from_numpy(want_t)),
        )
        return
    failure = compare(
        f"{module.name}.{PACKED}",
        torch.from_numpy(spec.encode(want_t)),
        torch.from_numpy(spec.encode(have_t)),
        f"{context}: put together differs",
    )
    if failure is not None:
        failure.cause = _weight_cause(
            whole, pieces, torch.from_numpy(want_t)
        ) or causes.of_packed(want_t, spec.encode(have_t))
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
    return all(
        _compare_table(whole, piece, table, name) is None
        for name, table in tables.items()
    )


def _compare_table(
    whole: Whole, piece: Piece, table: torch.Tensor, name: str
) -> Failure | None:
    """A rank's scales or zero points against its share of the whole, [N, blocks]."""
    local = piece.rank.table(name.rpartition(".")[2])
    assert local is not None
    local = local[piece.offset : piece.offset + piece.rows]
    first = whole.first_block(piece)
    blocks = slice(first, -(-piece.stop // whole.block))
    share = table[piece.first : piece.first + piece.rows, blocks].to(local.dtype)
    failure = compare(name, share, local, "differs from the whole", piece.first)
    if failure is not None:
        failure.cause = _table_cause(
            whole, piece, table.to(local.dtype), local, name
        ) or causes.of_scale(share, local)
    return failure


def _table_cause(
    whole: Whole, piece: Piece, table: torch.Tensor, local: torch.Tensor, name: str
) -> str:
    """The cut that was made in place of the right one, or ""."""
    what = "scale" if name.endswith(SCALE) else "zero point"
    who = f"rank {piece.rank.rank}"
    rows = slice(piece.first, piece.first + piece.rows)
    block, width = whole.first_block(piece), local.shape[1]
    if same_bits(local, table[: piece.rows, :width]):
        part = "blocks" if whole.spec.kind == "row" else "rows"
        return (
            f"{what} not cut with the weight: {who} has the first {part} of the whole"
        )
    for other in range(table.shape[1] - width + 1):
        if same_bits(local, table[rows, other : other + width]):
            return (
                f"a shard cut across a block: {who} has the {what}s from block {other} "
                f"on, its first weight is in block {block}"
            )
    for first in range(0, table.shape[0] - piece.rows + 1, max(1, piece.rows)):
        if same_bits(local, table[first : first + piece.rows, block : block + width]):
            return (
                f"{what} rows of another rank: {who} has rows from {first} on, "
                f"{piece.first} is due"
            )
    return ""


def _weight_cause(whole: Whole, pieces: Sequence[Piece], t: torch.Tensor) -> str:
    """The cut that was made in place of the right one, or ""."""
    for piece in pieces:
        rank, width = piece.rank, piece.stop - piece.start
        rows = slice(piece.first, piece.first + piece.rows)
        columns = slice(piece.start, piece.stop)
        mine = slice(piece.offset, piece.offset + piece.rows)
        have = fmt.unpack(rank.packed[mine], rank.lead + width)[:, rank.lead :]
        if torch.equal(have, t[rows, columns]):
            continue
        who = f"rank {rank.rank}"
        if torch.equal(have, t[: piece.rows, :width]):
            part = "inputs" if whole.spec.kind == "row" else "rows"
            return f"weight not cut: {who} has the first {part} of the whole"
        nearby = range(max(0, piece.start - whole.block), piece.start + whole.block)
        for start in nearby:
            part_t = t[rows, start : start + width]
            if part_t.shape == have.shape and torch.equal(have, part_t):
                inside = "byte" if abs(start - piece.start) < 4 else "block"
                return (
                    f"a shard cut inside a {inside}: {who} has the weights from input "
                    f"{start} on, {piece.start} is due"
                )
        for first in range(0, t.shape[0] - piece.rows + 1, max(1, piece.rows)):
            if torch.equal(have, t[first : first + piece.rows, columns]):
                return (
                    f"rows of another rank: {who} has rows from {first} on, "
                    f"{piece.first} is due"
                )
    return ""
