# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The ranks of a tensor-parallel group, one after the other in one process.

Layers, parameters and weight loaders are those of the installed vLLM. All that is
replaced is the group that tells them which rank they are (`tensor_parallel`), so the
cut under test is vLLM's own. Putting the parts together again (`Whole`) knows nothing
of the loaders: it relies on what each kind of layer means.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.quantization.ternary import TernaryConfig
from vllm.model_executor.layers.quantization.ternary.parameters import (
    PACKED,
    SCALE,
    ZERO_POINT,
)
from vllm.model_executor.layers.quantization.ternary.schemes import (
    Scheme,
    SchemeTable,
)
from vllm.model_executor.layers.quantization.utils import ternary_format as fmt
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

Kind = Literal["column", "merged", "qkv", "row", "replicated", "embedding", "head"]
Tensors = Mapping[str, torch.Tensor]
"""Tensors of a module, named as in the checkpoint without the module's name."""


class _Rank:
    """Stands in for the group coordinator of tensor parallelism.

    Collectives return their input: the caller has the parts of every rank.
    """

    def __init__(self, rank: int, size: int):
        self.rank_in_group, self.world_size = rank, size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return x


@contextmanager
def tensor_parallel(rank: int, size: int) -> Iterator[None]:
    """Be rank `rank` of `size`; needs `vllm_context` around it."""
    saved = parallel_state._TP
    parallel_state._TP = _Rank(rank, size)  # type: ignore[assignment]
    try:
        yield
    finally:
        parallel_state._TP = saved


def vllm_context() -> Any:
    """The configuration that layers ask for when they are made."""
    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    return set_current_vllm_config(config)


@dataclass(frozen=True)
class LayerSpec:
    """One layer of vLLM, and what the checkpoint has for it.

    Attributes:
        kind: the class of the layer.
        scheme: how the weights are stored.
        size_k: inputs.
        sizes: output rows of each part that the checkpoint has or that is fused.
        heads: of "qkv": (query heads, key/value heads, head size, value head size).
        bias: whether the layer has one.
        names: last names of the modules that the layer fuses.
        prefix: the layer's name.
        padding_size: of "embedding" and "head": the vocabulary is padded to it.

    """

    kind: Kind
    scheme: Scheme
    size_k: int
    sizes: tuple[int, ...]
    heads: tuple[int, int, int, int] | None = None
    bias: bool = False
    names: tuple[str, ...] = ()
    prefix: str = "model.layers.0.mlp.proj"
    padding_size: int = 64

    @property
    def shard_ids(self) -> tuple[Any, ...]:
        """What vLLM's models pass to the weight loader for each part."""
        if self.kind == "qkv":
            return ("q", "k", "v")
        if self.kind == "merged":
            return tuple(range(len(self.sizes)))
        return (None,)

    def fits(self, tp: int) -> bool:
        """Whether vLLM can make the unquantized layer for `tp` ranks."""
        if self.kind == "row":
            return self.size_k % tp == 0
        if self.kind == "qkv":
            assert self.heads is not None
            heads, kv_heads = self.heads[:2]
            kv_fits = tp % kv_heads == 0 if tp >= kv_heads else kv_heads % tp == 0
            return heads % tp == 0 and kv_fits
        if self.kind in ("embedding", "head"):
            return -(-self.sizes[0] // self.padding_size) * self.padding_size % tp == 0
        return self.kind == "replicated" or all(n % tp == 0 for n in self.sizes)

    def build(self, *, strict: bool = False, **settings: Any) -> torch.nn.Module:
        """The layer for the rank that is current; settings go to vLLM's class."""
        vocabulary = self.kind in ("embedding", "head")
        overrides = {self.prefix: self.scheme} if vocabulary else {}
        config = TernaryConfig(
            SchemeTable(self.scheme, strict=strict, overrides=overrides)
        )
        fused = self.prefix.rpartition(".")[2]
        if self.names:
            config.packed_modules_mapping = {fused: list(self.names)}
        common: dict[str, Any] = {"quant_config": config, "prefix": self.prefix}
        common |= settings
        if vocabulary:
            common["padding_size"] = self.padding_size
            if self.kind == "embedding":
                return VocabParallelEmbedding(self.sizes[0], self.size_k, **common)
            return ParallelLMHead(self.sizes[0], self.size_k, bias=self.bias, **common)
        common["bias"] = self.bias
        if self.kind == "merged":
            return MergedColumnParallelLinear(self.size_k, list(self.sizes), **common)
        if self.kind == "qkv":
            assert self.heads is not None
            heads, kv_heads, head_size, v_head_size = self.heads
            return QKVParallelLinear(
                self.size_k,
                head_size,
                heads,
                kv_heads,
                v_head_size=v_head_size,
                **common,
            )
        cls: Any = {
            "column": ColumnParallelLinear,
            "row": RowParallelLinear,
            "replicated": ReplicatedLinear,
        }[self.kind]
        return cls(self.size_k, self.sizes[0], **common)


def load(layer: torch.nn.Module, tensors: Tensors, shard_id: Any = None) -> None:
    """Load one module of the checkpoint as vLLM's models do."""
    for name, tensor in tensors.items():
        param = getattr(layer, name)
        if shard_id is None:
            param.weight_loader(param, tensor)
        else:
            param.weight_loader(param, tensor, shard_id)


def plain_scheme(scheme: Any) -> Scheme:
    """How the weight is stored, without what only concerns the inputs."""
    return Scheme(
        block_size=scheme.block_size,
        zero_point=scheme.zero_point,
        scale_dtype=scheme.scale_dtype,
    )


@dataclass
class Rank:
    """One rank's part of a layer, as loaded, in the layout of the checkpoint."""

    rank: int
    packed: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    bias: torch.Tensor | None
    lead: int
    layer: torch.nn.Module = field(repr=False)

    def table(self, name: str) -> torch.Tensor | None:
        """The scale or the zero point."""
        return self.scale if name == SCALE else self.zero_point

    @classmethod
    def of(cls, rank: int, layer: Any) -> "Rank":
        """The parameters of a layer that was loaded as rank `rank`."""
        zero_point = getattr(layer, ZERO_POINT, None)
        bias = getattr(layer, "bias", None)
        return cls(
            rank,
            getattr(layer, PACKED).data,
            getattr(layer, SCALE).data,
            None if zero_point is None else zero_point.data,
            None if bias is None else bias.data,
            layer.ternary_lead,
            layer,
        )


def load_ranks(
    spec: LayerSpec, parts: Sequence[Tensors], tp: int, *, fused: bool = False
) -> list[Rank]:
    """Make the layer for each rank of `tp` and load it.

    Args:
        spec: the layer.
        parts: the tensors of each part of `spec.sizes`, or with `fused` the one
            module that the checkpoint has for all of them.
        tp: number of ranks.
        fused: whether the parts are one module in the checkpoint.

    """
    ranks = []
    for rank in range(tp):
        with tensor_parallel(rank, tp):
            layer = spec.build()
            shard_ids: tuple[Any, ...] = (None,) if fused else spec.shard_ids
            for shard_id, tensors in zip(shard_ids, parts, strict=True):
                load(layer, tensors, shard_id)
        ranks.append(Rank.of(rank, layer))
    return ranks


@dataclass(frozen=True)
class Piece:
    """Rows of one rank that hold rows of a part: `rows` of them, from `first` in the
    part and `offset` in the rank's parameters, and inputs [start, stop)."""

    rank: Rank
    first: int
    offset: int
    rows: int
    start: int
    stop: int


@dataclass
class Rows:
    """Some rows of a part, put together from all ranks that have them.

    Attributes:
        t: int8 [rows, K].
        scale: [rows, blocks].
        zero_point: of the scale's shape, or None.

    """

    t: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None


class Whole:
    """The parts of all ranks, put together again.

    Args:
        spec: the layer.
        ranks: from `load_ranks`.

    """

    def __init__(self, spec: LayerSpec, ranks: Sequence[Rank]):
        self.spec, self.ranks, self.tp = spec, ranks, len(ranks)
        self.block = fmt.block_length(spec.size_k, spec.scheme.block_size)

    def pieces(self, index: int) -> list[list[Piece]]:
        """Where the rows of a part are: one list for each copy of the part.

        A replicated part has as many copies as replicas; a row-parallel one has one
        copy, in pieces along the inputs.
        """
        spec, tp = self.spec, self.tp
        rows, size_k = spec.sizes[index], spec.size_k
        if spec.kind == "row":
            share = size_k // tp
            return [
                [
                    Piece(r, 0, 0, rows, r.rank * share, (r.rank + 1) * share)
                    for r in self.ranks
                ]
            ]
        if spec.kind == "replicated":
            return [[Piece(r, 0, 0, rows, 0, size_k)] for r in self.ranks]
        if spec.kind in ("embedding", "head"):
            share = -(-rows // spec.padding_size) * spec.padding_size // tp
            firsts = [r.rank * share for r in self.ranks]
            return [
                [
                    Piece(r, f, 0, max(0, min(share, rows - f)), 0, size_k)
                    for f, r in zip(firsts, self.ranks)
                ]
            ]
        replicas = 1
        if spec.kind == "qkv":
            assert spec.heads is not None
            heads, kv_heads, head_size, v_head_size = spec.heads
            kv_local = max(1, kv_heads // tp)
            local = [heads // tp * head_size, kv_local * head_size]
            local.append(kv_local * v_head_size)
            replicas = 1 if index == 0 else max(1, tp // kv_heads)
        else:
            local = [n // tp for n in spec.sizes]
        n, offset = local[index], sum(local[:index])
        return [
            [
                Piece(r, r.rank // replicas * n, offset, n, 0, size_k)
                for r in self.ranks[copy::replicas]
            ]
            for copy in range(replicas)
        ]

    def padding(self) -> Iterator[torch.Tensor]:
        """Rows of the parameters that no row of the checkpoint fills."""
        if self.spec.kind in ("embedding", "head"):
            for piece in self.pieces(0)[0]:
                rank = piece.rank
                for tensor in (rank.packed, rank.scale, rank.zero_point):
                    if tensor is not None:
                        yield tensor[piece.rows :]

    def rows(self, pieces: Sequence[Piece], begin: int, end: int) -> Rows:
        """Rows [begin, end) of one copy of a part.

        Raises:
            ShardError: a row or an input is in no rank or in two, ranks that share
                a block have different scales for it, or a code before a rank's
                first input is not 0.

        """
        scale = self.table(pieces, SCALE, begin, end)
        assert scale is not None
        zero_point = self.table(pieces, ZERO_POINT, begin, end)
        return Rows(self.codes(pieces, begin, end), scale, zero_point)

    def codes(self, pieces: Sequence[Piece], begin: int, end: int) -> torch.Tensor:
        """The integers of `rows`, int8 [rows, K]."""
        shape = (end - begin, self.spec.size_k)
        t = torch.empty(shape, dtype=torch.int8)
        seen = torch.zeros(shape, dtype=torch.bool)
        for piece, here, there in _overlaps(pieces, begin, end):
            rank, columns = piece.rank, slice(piece.start, piece.stop)
            codes = fmt.unpack(rank.packed[there], rank.lead + piece.stop - piece.start)
            if bool(codes[:, : rank.lead].any()):
                raise ShardError(
                    f"rank {rank.rank}: a code before its first input is not 0"
                )
            if bool(seen[here, columns].any()):
                raise ShardError(f"rank {rank.rank}: rows that another rank has, too")
            seen[here, columns] = True
            t[here, columns] = codes[:, rank.lead :]
        if not bool(seen.all()):
            raise ShardError("some weights are in no rank")
        return t

    def first_block(self, piece: Piece) -> int:
        """Block of the whole that a rank's block 0 is."""
        return (piece.start - piece.rank.lead) // self.block

    def table(
        self, pieces: Sequence[Piece], name: str, begin: int, end: int
    ) -> torch.Tensor | None:
        """The scale or zero point of `rows`, [rows, blocks]."""
        first = pieces[0].rank.table(name)
        if first is None:
            return None
        blocks = -(-self.spec.size_k // self.block)
        values = torch.zeros(end - begin, blocks, dtype=first.dtype)
        seen = torch.zeros(end - begin, blocks, dtype=torch.bool)
        for piece, here, there in _overlaps(pieces, begin, end):
            table = piece.rank.table(name)
            assert table is not None
            local, block = table[there], self.first_block(piece)
            columns = slice(block, block + local.shape[1])
            where = f"rank {piece.rank.rank}, {name}"
            if values[here, columns].shape != local.shape:
                raise ShardError(f"{where}: has blocks beyond the last")
            both = seen[here, columns]
            if not same_bits(values[here, columns][both], local[both]):
                raise ShardError(f"{where}: has another value than its neighbour")
            values[here, columns] = local
            seen[here, columns] = True
        if not bool(seen.all()):
            raise ShardError(f"some blocks of {name} are in no rank")
        return values


def _overlaps(
    pieces: Sequence[Piece], begin: int, end: int
) -> Iterator[tuple[Piece, slice, slice]]:
    """Pieces with rows in [begin, end): which of these rows, and of the rank's."""
    for piece in pieces:
        low, high = max(begin, piece.first), min(end, piece.first + piece.rows)
        if low < high:
            shift = piece.offset - piece.first
            yield (
                piece,
                slice(low - begin, high - begin),
                slice(low + shift, high + shift),
            )


class ShardError(Exception):
    """The ranks' parts do not fit together."""


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in dtype, shape and every bit (so NaN equals itself, -0.0 not 0.0)."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not a.numel():
        return True
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    kind = raw[a.dtype.itemsize]
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))
