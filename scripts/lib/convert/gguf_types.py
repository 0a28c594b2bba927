# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""GGUF tensor types: sizes, and how ternary blocks decode to integers."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .codec import TernaryFormatError

Decoder = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""uint8 [blocks, bytes] to (q uint8 [blocks, weights], d float16 [blocks])."""


@dataclass(frozen=True)
class TensorType:
    """A block of ``block`` weights takes ``block_bytes``."""

    name: str
    block: int
    block_bytes: int
    dtype: torch.dtype | None = None
    """dtype of plain numbers."""
    decode: Decoder | None = None
    """Of ternary types: t = q - 1."""
    refused: str = ""
    id: int = -1

    def nbytes(self, count: int) -> int:
        return count // self.block * self.block_bytes


def _half(raw: torch.Tensor) -> torch.Tensor:
    """uint8 [blocks, 2] to float16 [blocks]."""
    return raw.contiguous().view(torch.float16).squeeze(-1)


def _base3(raw: torch.Tensor, digits: int) -> torch.Tensor:
    """Base-3 digits, most significant first, of bytes that hold them as a fixed-point
    fraction: uint8 [blocks, bytes] to [blocks, digits, bytes]."""
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.int16)[:digits]
    wrapped = (raw.to(torch.int16).unsqueeze(1) * powers.view(1, -1, 1)) & 0xFF
    return ((wrapped * 3) >> 8).to(torch.uint8)


def decode_tq1_0(raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """32 bytes of five digits, 16 of five, 4 of four, d: digit by digit."""
    parts = (_base3(raw[:, :32], 5), _base3(raw[:, 32:48], 5), _base3(raw[:, 48:52], 4))
    return torch.cat([p.flatten(1) for p in parts], dim=1), _half(raw[:, 52:])


def decode_tq2_0(raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two halves of 32 bytes; byte j of a half holds weights j, j + 32, j + 64 and
    j + 96, lowest bits first; d."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1)
    q = (raw[:, :64].view(-1, 2, 1, 32) >> shifts) & 3
    return q.flatten(1), _half(raw[:, 64:])


def decode_q2_0(raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """d, then four codes per byte in order, lowest bits first."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)
    return ((raw[:, 2:].unsqueeze(-1) >> shifts) & 3).flatten(1), _half(raw[:, :2])


def decode_ternary(
    raw: torch.Tensor, kind: TensorType, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 ``[rows, bytes]`` to t int8 ``[rows, K]`` and scale float16
    ``[rows, K / block]``. A negative d becomes positive with t negated. Raises
    TernaryFormatError for a weight of +2, naming its block."""
    assert kind.decode is not None
    rows = raw.shape[0]
    t = torch.empty(
        rows, raw.shape[1] // kind.block_bytes * kind.block, dtype=torch.int8
    )
    scale = torch.empty(rows, t.shape[1] // kind.block, dtype=torch.float16)
    step = max(1, (8 << 20) // max(1, t.shape[1]))
    for start in range(0, rows, step):
        part = raw[start : start + step]
        q, d = kind.decode(part.reshape(-1, kind.block_bytes))
        if bool((q > 2).any()):
            block = int((q > 2).any(-1).nonzero()[0])
            row, index = divmod(block, scale.shape[1])
            first = index * kind.block
            raise TernaryFormatError(
                name,
                f"block {index} of row {start + row} (columns {first} to "
                f"{first + kind.block - 1}) holds a weight of +2",
                f"{kind.name} has four levels and this model uses them all, so it is "
                "not ternary: start from its full-precision checkpoint and pass "
                "--quantize",
            )
        signs = torch.where(d < 0, -1, 1).to(torch.int8).unsqueeze(-1)
        t[start : start + step] = ((q.to(torch.int8) - 1) * signs).view(len(part), -1)
        scale[start : start + step] = d.abs().view(len(part), -1)
    return t, scale


ID_42 = 42
Q2_0 = TensorType("Q2_0", 64, 18, decode=decode_q2_0, id=42)
Q2_0_LEGACY = TensorType("Q2_0 of older files", 128, 34, decode=decode_q2_0, id=42)

TYPES: dict[int, TensorType] = {
    0: TensorType("F32", 1, 4, torch.float32),
    1: TensorType("F16", 1, 2, torch.float16),
    24: TensorType("I8", 1, 1, torch.int8),
    25: TensorType("I16", 1, 2, torch.int16),
    26: TensorType("I32", 1, 4, torch.int32),
    27: TensorType("I64", 1, 8, torch.int64),
    28: TensorType("F64", 1, 8, torch.float64),
    30: TensorType("BF16", 1, 2, torch.bfloat16),
    34: TensorType("TQ1_0", 256, 54, decode=decode_tq1_0, id=34),
    35: TensorType("TQ2_0", 256, 66, decode=decode_tq2_0, id=35),
    142: TensorType("PQ2_0", 128, 34, decode=decode_q2_0, id=142),
    143: TensorType(
        "PTQ1_0",
        128,
        28,
        refused="its weights are for Hadamard-rotated activations, which the ternary "
        "method does not compute. Take the model's file in PQ2_0 or Q2_0 instead.",
    ),
    # Not ternary: decoded to float32 by the gguf package.
    2: TensorType("Q4_0", 32, 18, id=2),
    3: TensorType("Q4_1", 32, 20, id=3),
    6: TensorType("Q5_0", 32, 22, id=6),
    7: TensorType("Q5_1", 32, 24, id=7),
    8: TensorType("Q8_0", 32, 34, id=8),
    10: TensorType("Q2_K", 256, 84, id=10),
    11: TensorType("Q3_K", 256, 110, id=11),
    12: TensorType("Q4_K", 256, 144, id=12),
    13: TensorType("Q5_K", 256, 176, id=13),
    14: TensorType("Q6_K", 256, 210, id=14),
}
