# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What a failed comparison shows: where, and 64 bytes of both sides."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from . import spec

SHOWN = 64
_PER_LINE = 8
_SYMBOLS = np.array(["0", "+", "-", "x"])


@dataclass
class Failure:
    """One tensor that is not as it should be.

    Attributes:
        tensor: its name in the checkpoint.
        problem: what is wrong, in a sentence.
        position: where the first difference is, in words.
        cause: the known mistake that explains the data, if one does.
        dump: lines that show both sides.

    """

    tensor: str
    problem: str
    position: str = ""
    cause: str = ""
    dump: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """The failure as text."""
        lines = [f"{self.tensor}: {self.problem}"]
        if self.position:
            lines.append(f"  first difference: {self.position}")
        lines += [f"  {line}" for line in self.dump]
        if self.cause:
            lines.append(f"  likely cause: {self.cause}")
        return lines

    def as_dict(self) -> dict[str, Any]:
        """The failure for JSON."""
        return asdict(self)


def raw_bytes(x: torch.Tensor) -> np.ndarray:
    """A tensor's bytes, uint8 [bytes]."""
    x = x.detach().cpu().contiguous().reshape(-1)
    return x.view(torch.uint8).numpy() if x.numel() else np.empty(0, np.uint8)


def first_difference(expected: torch.Tensor, found: torch.Tensor) -> int | None:
    """Index of the first element that differs in any bit, or None.

    Args:
        expected: any dtype.
        found: of the same dtype and shape.

    """
    size = expected.dtype.itemsize
    a = raw_bytes(expected).reshape(-1, size)
    b = raw_bytes(found).reshape(-1, size)
    different = (a != b).any(axis=1)
    return int(different.argmax()) if different.any() else None


def compare(
    name: str,
    expected: torch.Tensor,
    found: torch.Tensor,
    what: str,
    first_row: int = 0,
) -> Failure | None:
    """Compare two tensors bit for bit, as the dtype that they have.

    Args:
        name: of the tensor in the checkpoint.
        expected: [rows, columns].
        found: what it is compared with.
        what: the sentence that states the problem.
        first_row: row of the whole tensor that row 0 here is.

    """
    if expected.dtype != found.dtype or expected.shape != found.shape:
        return Failure(
            name,
            f"{what}: expected {_kind(expected)}, found {_kind(found)}",
        )
    index = first_difference(expected, found)
    if index is None:
        return None
    size = expected.dtype.itemsize
    columns = expected.shape[-1] if expected.ndim else 1
    row, column = divmod(index, columns)
    offset = first_row * columns * size
    a, b = raw_bytes(expected), raw_bytes(found)
    count = int((a != b).reshape(-1, size).any(axis=1).sum())
    unit = "byte" if expected.dtype == torch.uint8 else "element"
    place = f"row {first_row + row}, {unit} {column}"
    if expected.dtype == torch.uint8:
        window = int((spec.codes_of(a[index]) != spec.codes_of(b[index])).argmax())
        place += f" (weight {4 * column + window})"
    place += f", at byte {offset + index * size} of the tensor"
    return Failure(
        name,
        f"{what} in {count} of {expected.numel()} {unit}s",
        place,
        dump=side_by_side(a, b, expected.dtype, index * size, offset),
    )


def side_by_side(
    expected: np.ndarray,
    found: np.ndarray,
    dtype: torch.dtype,
    at: int = 0,
    offset: int = 0,
) -> tuple[str, ...]:
    """The first 64 bytes of both sides, or the 64 in which the difference is.

    Packed bytes are shown with their four weights (+, -, 0 and x for the reserved
    code), the lowest bits first, and each differing two-bit window is marked. Other
    dtypes are shown by element, with differing elements marked.

    Args:
        expected: uint8 [bytes].
        found: uint8 [bytes].
        dtype: of the elements.
        at: byte of the first difference.
        offset: of byte 0 here in the whole tensor.

    """
    begin = at // SHOWN * SHOWN
    a, b = expected[begin : begin + SHOWN], found[begin : begin + SHOWN]
    head = f"{'byte':>8}  {'expected':<40}  found"
    lines = [head]
    for i in range(0, len(a), _PER_LINE):
        x, y = a[i : i + _PER_LINE], b[i : i + _PER_LINE]
        if dtype == torch.uint8:
            top, low, marks = _packed_lines(x, y)
        else:
            top, low, marks = _element_lines(x, y, dtype)
        lines.append(f"{offset + begin + i:>8}  {top[0]:<40}  {top[1]}".rstrip())
        lines.append(f"{'':>8}  {low[0]:<40}  {low[1]}".rstrip())
        if marks.strip():
            lines.append(f"{'':>8}  {marks:<40}  {marks}".rstrip())
    return tuple(lines)


def _packed_lines(x: np.ndarray, y: np.ndarray):
    def text(bytes_: np.ndarray) -> tuple[str, str]:
        top = " ".join(f"{int(b):02x}  " for b in bytes_)
        low = " ".join("".join(_SYMBOLS[spec.codes_of(b)]) for b in bytes_)
        return top, low

    (top_x, low_x), (top_y, low_y) = text(x), text(y)
    different = spec.codes_of(x) != spec.codes_of(y)
    marks = " ".join("".join(np.where(d, "^", " ")) for d in different)
    return (top_x, top_y), (low_x, low_y), marks


def _element_lines(x: np.ndarray, y: np.ndarray, dtype: torch.dtype):
    size = dtype.itemsize
    width = 5 * size - 1

    def text(bytes_: np.ndarray) -> tuple[str, str]:
        elements = torch.from_numpy(bytes_.copy()).view(dtype).tolist()
        words = bytes_.reshape(-1, size)
        top = " ".join(f"{w.tobytes().hex(' '):<{width}}" for w in words)
        low = " ".join(f"{float(e):<{width}.{max(3, width - 6)}g}" for e in elements)
        return top, low

    (top_x, low_x), (top_y, low_y) = text(x), text(y)
    different = (x.reshape(-1, size) != y.reshape(-1, size)).any(axis=1)
    marks = " ".join(
        ("^" * (3 * size - 1) if d else "").ljust(width) for d in different
    )
    return (top_x, top_y), (low_x, low_y), marks


def _kind(x: torch.Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
