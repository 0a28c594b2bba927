# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Products on emulated devices: buffers, arguments, and what the answer should be."""

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

HALF, BFLOAT16, FLOAT = torch.float16, torch.bfloat16, torch.float32
DTYPE = {HALF: 0, BFLOAT16: 1, FLOAT: 2}
# Emulated devices: an H200, the same with three and eight multiprocessors, an A100,
# an L40S (99 KB of shared memory for a thread block).
H200, HOPPER_3, HOPPER_8, A100, L40S = range(5)
ROW = 1 << 20  # a block beyond every K: one scale a row
# By norm against float64; a rounding of the output is 2^-12 or 2^-9 of it at most.
TOLERANCE = {HALF: 5e-4, BFLOAT16: 3e-3}

# All cases, or a part of them that takes little time and enters every Hopper kernel.
ALL = os.environ.get("EMULATE") == "all"
# Another number, other schedules.
SEEDS = int(os.environ.get("EMULATE_SEED", "0"))

POINTER = ctypes.c_void_p


def _structure(name: str, fields: str) -> type[ctypes.Structure]:
    """A structure from "type names; type names"."""
    kinds = {
        "p": POINTER,
        "i": ctypes.c_int,
        "l": ctypes.c_int64,
        "f": ctypes.c_float,
        "b": ctypes.c_bool,
    }
    members = []
    for part in fields.split(";"):
        kind, *names = part.split()
        members += [(n, kinds[kind]) for n in names]
    return type(name, (ctypes.Structure,), {"_fields_": members})


GemmArgs = _structure(
    "GemmArgs",
    "p x; l ldx; i dtype; p weight scale; i scale_dtype; p zero_point bias y; l ldy;"
    "i M N K N_pad K_pad block_size num_blocks device; p stream",
)
W2A8Args = _structure(
    "W2A8Args",
    "p xq xs xsum xsum_tiles weight scale; i scale_dtype; p bias part_ends y; i dtype;"
    "i parts M N K N_pad K_pad block_size num_blocks device; p stream",
)
QuantArgs = _structure(
    "QuantArgs",
    "p x; l ldx; i dtype; p norm_weight; i norm_dtype; f eps; p xq xs xsum xsum_tiles;"
    "i parts M K K_pad device; p stream",
)
EmbeddingArgs = _structure(
    "EmbeddingArgs",
    "p indices; b indices_are_int64; l count; p weight scale; i scale_dtype;"
    "p zero_point out; i dtype N K N_pad K_pad block_size; p stream",
)
MoeGemmArgs = _structure(
    "MoeGemmArgs",
    "p x; l ldx; i dtype; p weight scale; i scale_dtype; p zero_point bias;"
    "p sorted_routes experts used route_weight y; i routes top_k blocks;"
    "i N K N_pad K_pad block_size num_blocks; p stream",
)


class Emulator:
    """One library, and the buffers of one call at a time."""

    def __init__(self, path: Path):
        self.library = ctypes.CDLL(str(path))
        self.library.emu_alloc.restype = POINTER
        self.library.emu_free.restype = ctypes.c_bool
        sizes = (ctypes.c_int * 5)()
        self.library.emu_sizes(sizes)
        kinds = (GemmArgs, W2A8Args, QuantArgs, EmbeddingArgs, MoeGemmArgs)
        assert list(sizes) == [ctypes.sizeof(kind) for kind in kinds]
        self.buffers: list[tuple[int, torch.dtype, tuple[int, ...]]] = []

    def put(self, tensor: torch.Tensor | None) -> int:
        """A copy in emulated memory; None is a null pointer."""
        if tensor is None:
            return 0
        tensor = tensor.contiguous()
        address = self.empty(tuple(tensor.shape), tensor.dtype)
        ctypes.memmove(address, tensor.data_ptr(), tensor.nbytes)
        return address

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Poison: NaN, or -1."""
        count = int(np.prod(shape)) * dtype.itemsize
        address = self.library.emu_alloc(ctypes.c_size_t(count))
        self.buffers.append((address, dtype, shape))
        return address

    def get(self, address: int) -> torch.Tensor:
        dtype, shape = next(b[1:] for b in self.buffers if b[0] == address)
        out = torch.empty(shape, dtype=dtype)
        ctypes.memmove(out.data_ptr(), address, out.nbytes)
        return out

    def withhold(self, *addresses: int) -> None:
        """Out of the next kernel's reach until the one before it has ended."""
        for address in addresses:
            if address:
                self.library.emu_withhold(POINTER(address))

    def free(self) -> None:
        """Free all buffers; the bytes around them must be as they were."""
        good = [self.library.emu_free(POINTER(b[0])) for b in self.buffers]
        self.buffers.clear()
        assert all(good), "a kernel writes beside a buffer"

    def call(self, name: str, *args, seed: int = 0, device: int = H200) -> None:
        """Run `name`; structures go by reference, lists as arrays of int."""
        self.library.emu_begin(ctypes.c_uint(seed + 1000 * SEEDS), device)
        function = getattr(self.library, f"emu_{name}")
        function.restype = ctypes.c_char_p
        given = [
            ctypes.byref(a)
            if isinstance(a, ctypes.Structure)
            else (ctypes.c_int * len(a))(*a)
            if isinstance(a, (list, tuple))
            else a
            for a in args
        ]
        message = function(*given)
        if message:
            self.buffers.clear()  # left to the operating system
            raise RuntimeError(message.decode())


def some(cases: Sequence, turn: int, always: int = 0) -> list[tuple]:
    """The numbered cases: all, or the first `always` and the one whose turn it is."""
    numbered = list(enumerate(cases))
    if ALL:
        return numbered
    return [*numbered[:always], numbered[always + turn % (len(numbered) - always)]]


# --- Weights


def up(value: int, to: int) -> int:
    return (value + to - 1) // to * to


def pack(t: np.ndarray, n_pad: int, k_pad: int) -> torch.Tensor:
    """The layout of the device, by the formula of ternary_layout_cuda.py."""
    codes = np.ones((n_pad, k_pad), np.uint32)
    codes[: t.shape[0], : t.shape[1]] = t + 1
    # Row 8 h + g of a tile, k = 32 word + 16 s + 8 c + 2 pair + b of it.
    axes = codes.reshape(n_pad // 16, 2, 8, k_pad // 128, 4, 2, 2, 4, 2)
    h, s, c, b = np.ogrid[:2, :2, :2, :2]
    bit = (2 * (4 * s + h + 2 * c) + 16 * b).astype(np.uint32)
    # tile, k tile, g, pair, word; h, s, c, b
    words = axes.transpose(0, 3, 2, 7, 4, 1, 5, 6, 8) << bit
    return torch.from_numpy(words.sum((5, 6, 7, 8), dtype=np.uint32).view(np.int32))


@dataclass
class Weight:
    """t [N, K] in -1, 0, 1; scale and zero point [blocks, N_pad]."""

    t: np.ndarray
    packed: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    size_n: int
    size_k: int
    n_pad: int
    k_pad: int
    block_size: int

    @property
    def num_blocks(self) -> int:
        return self.scale.shape[0]

    def dense(self) -> torch.Tensor:
        """[N, K] in float64."""
        value = torch.from_numpy(self.t).double()
        for b in range(self.num_blocks):
            last = b + 1 == self.num_blocks
            end = self.size_k if last else (b + 1) * self.block_size
            part = value[:, b * self.block_size : end]
            if self.zero_point is not None:
                part -= self.zero_point[b, : self.size_n, None]
            part *= self.scale[b, : self.size_n, None].double()
        return value


def make_weight(
    rng: np.random.Generator,
    size_n: int,
    size_k: int,
    block_size: int,
    scale_dtype: torch.dtype = HALF,
    zero_point: bool = False,
) -> Weight:
    n_pad, k_pad = up(size_n, 64), up(size_k, 128)
    t = rng.integers(-1, 2, (size_n, size_k)).astype(np.int8)
    blocks = 1 if block_size >= size_k else -(-size_k // block_size)
    scale = torch.zeros((blocks, n_pad), dtype=scale_dtype)
    drawn = rng.uniform(0.02, 0.06, (blocks, size_n))
    scale[:, :size_n] = torch.from_numpy(drawn).to(scale_dtype)
    zero = None
    if zero_point:
        zero = torch.zeros((blocks, n_pad))
        zero[:, :size_n] = torch.from_numpy(rng.uniform(-0.5, 0.5, (blocks, size_n)))
    return Weight(
        t, pack(t, n_pad, k_pad), scale, zero, size_n, size_k, n_pad, k_pad, block_size
    )


def tokens(
    rng: np.random.Generator, m: int, k: int, dtype: torch.dtype
) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal((m, k))).to(dtype)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """By norm, of the worst token; NaN where anything is NaN."""
    difference = (found.double() - expected).norm(dim=-1)
    return float((difference / expected.norm(dim=-1)).max())


# --- Calls


def put_rows(emulator: Emulator, x: torch.Tensor) -> tuple[int, int, int]:
    """x, ldx and dtype of the arguments, with NaN behind each row."""
    m, k = x.shape
    rows = torch.full((m, up(k, 8)), float("nan"), dtype=x.dtype)
    rows[:, :k] = x
    return emulator.put(rows), up(k, 8), DTYPE[x.dtype]


def gemm_arguments(
    emulator: Emulator,
    x: torch.Tensor,
    w: Weight,
    bias: torch.Tensor | None = None,
    device: int = H200,
) -> GemmArgs:
    """NaN lies behind each row of x, and in y."""
    m, k = x.shape
    a = GemmArgs()
    a.x, a.ldx, a.dtype = put_rows(emulator, x)
    a.weight, a.scale = emulator.put(w.packed), emulator.put(w.scale)
    a.scale_dtype = DTYPE[w.scale.dtype]
    a.zero_point, a.bias = emulator.put(w.zero_point), emulator.put(bias)
    a.y, a.ldy = emulator.empty((m, w.size_n), x.dtype), w.size_n
    a.M, a.N, a.K, a.N_pad, a.K_pad = m, w.size_n, k, w.n_pad, w.k_pad
    a.block_size, a.num_blocks, a.device = w.block_size, w.num_blocks, device
    return a


def gemm(
    emulator: Emulator,
    name: str,
    choice: Sequence[int],
    x: torch.Tensor,
    w: Weight,
    *,
    bias: torch.Tensor | None = None,
    device: int = H200,
    seed: int = 0,
    extra: Sequence[int] = (),
) -> torch.Tensor:
    """Y of a 16-bit product, by the entry `name` of entry.cpp under `choice`."""
    a = gemm_arguments(emulator, x, w, bias, device)
    emulator.withhold(a.x, a.y)
    given = [list(choice)] if choice else []
    emulator.call(name, a, *given, *extra, seed=seed, device=device)
    y = emulator.get(a.y)
    emulator.free()
    return y


def expected_gemm(
    x: torch.Tensor, w: Weight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    y = x.double() @ w.dense().t()
    return y if bias is None else y + bias.double()


def expected_int8(
    x: torch.Tensor, dense: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The product of x as AutoBitLinear quantizes it, and `dense` [N, K] in float64."""
    top = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-5)
    integers = (x.float() * (127.0 * (1.0 / top))).round().double()
    y = integers @ dense.t() * (top.double() / 127)
    return y if bias is None else y + bias.double()


INVERSE = np.argsort(
    [
        (k & ~31) + 2 * (k & 8) + 2 * (k & 6) + (k >> 4 & 1) + 2 * (k & 1)
        for k in range(32)
    ]
)


def permuted(q: torch.Tensor) -> torch.Tensor:
    """Int8 values of K (a multiple of 32) in the order of int8_position."""
    groups = q.reshape(*q.shape[:-1], -1, 32)
    return groups[..., torch.from_numpy(INVERSE)].reshape(q.shape)


@dataclass
class Quantized:
    """Tokens as quantize_tokens leaves them: q [parts, M, K_pad], in order of k."""

    q: torch.Tensor
    xs: torch.Tensor

    def put(self, emulator: Emulator, with_tiles: bool) -> tuple[int, int, int, int]:
        parts, m, k_pad = self.q.shape
        sums = self.q.int().reshape(parts, m, k_pad // 128, 128).sum(-1)
        tiles = sums.transpose(1, 2).contiguous().int() if with_tiles else None
        return (
            emulator.put(permuted(self.q)),
            emulator.put(self.xs),
            emulator.put(sums.sum(-1).int()),
            emulator.put(tiles),
        )


def make_quantized(
    rng: np.random.Generator, parts: int, m: int, k: int, k_pad: int
) -> Quantized:
    q = torch.zeros((parts, m, k_pad), dtype=torch.int8)
    q[..., :k] = torch.from_numpy(
        rng.integers(-127, 128, (parts, m, k)).astype(np.int8)
    )
    return Quantized(q, torch.from_numpy(rng.uniform(0.01, 0.02, (parts, m))).float())


def quantize_arguments(
    emulator: Emulator,
    x: torch.Tensor,
    norm: torch.Tensor | None,
    parts: int,
    k_pad: int,
    device: int,
    with_tiles: bool,
) -> QuantArgs:
    """Arguments of quantize_tokens, with fresh outputs."""
    m, k = x.shape
    q = QuantArgs()
    q.x, q.ldx, q.dtype = put_rows(emulator, x)
    q.norm_weight = emulator.put(norm)
    q.norm_dtype = DTYPE[norm.dtype if norm is not None else x.dtype]
    q.eps = 1e-6
    q.xq = emulator.empty((parts, m, k_pad), torch.int8)
    q.xs = emulator.empty((parts, m), FLOAT)
    q.xsum = emulator.empty((parts, m), torch.int32)
    if with_tiles:
        q.xsum_tiles = emulator.empty((parts, k_pad // 128, m), torch.int32)
    q.parts, q.M, q.K, q.K_pad, q.device = parts, m, k, k_pad, device
    return q


def w2a8_arguments(
    emulator: Emulator,
    w: Weight,
    bias: torch.Tensor | None,
    ends: Sequence[int],
    m: int,
    dtype: torch.dtype,
    device: int,
) -> W2A8Args:
    """All but the tokens."""
    a = W2A8Args()
    a.weight, a.scale = emulator.put(w.packed), emulator.put(w.scale)
    a.scale_dtype, a.bias = DTYPE[w.scale.dtype], emulator.put(bias)
    if len(ends) > 1:
        a.part_ends = emulator.put(torch.tensor(ends, dtype=torch.int32))
    a.y, a.dtype = emulator.empty((m, w.size_n), dtype), DTYPE[dtype]
    a.parts, a.M, a.N, a.K = max(1, len(ends)), m, w.size_n, w.size_k
    a.N_pad, a.K_pad, a.block_size = w.n_pad, w.k_pad, w.block_size
    a.num_blocks, a.device = w.num_blocks, device
    return a


def w2a8(
    emulator: Emulator,
    name: str,
    choice: Sequence[int],
    tokens: Quantized,
    w: Weight,
    dtype: torch.dtype,
    *,
    bias: torch.Tensor | None = None,
    ends: Sequence[int] = (),
    device: int = H200,
    seed: int = 0,
    extra: Sequence[int | None] = (),
) -> torch.Tensor:
    """Y of a product of quantized tokens, by the entry `name` under `choice`."""
    m = tokens.q.shape[1]
    a = w2a8_arguments(emulator, w, bias, ends, m, dtype, device)
    a.xq, a.xs, a.xsum, a.xsum_tiles = tokens.put(emulator, w.num_blocks > 1)
    emulator.withhold(a.xq, a.xs, a.xsum, a.xsum_tiles, a.y)
    given = [list(choice)] if choice else []
    emulator.call(name, a, *given, *extra, seed=seed, device=device)
    y = emulator.get(a.y)
    emulator.free()
    return y


def expected_w2a8(
    tokens: Quantized,
    w: Weight,
    bias: torch.Tensor | None = None,
    ends: Sequence[int] = (),
) -> torch.Tensor:
    dense, out, begin = w.dense(), [], 0
    for part, end in enumerate(ends or [w.size_n]):
        q = tokens.q[part, :, : w.size_k].double()
        rows = dense[begin : max(begin, min(end, w.size_n))]
        out.append(q @ rows.t() * tokens.xs[part].double()[:, None])
        begin = max(begin, end)
    y = torch.cat(out, dim=1)
    return y if bias is None else y + bias.double()
