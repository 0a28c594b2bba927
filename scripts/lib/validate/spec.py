# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The format once more, in NumPy and from its specification alone.

A second opinion on the codec under validation: it shares no code with it.
"""

import numpy as np

# Byte -> the four weights in it, the lowest bits first; the reserved code 3 is 0.
_VALUES = np.array([0, 1, -1, 0], dtype=np.int8)
_BYTES = np.arange(256, dtype=np.uint8)
DECODE = np.stack([_VALUES[(_BYTES >> shift) & 3] for shift in (0, 2, 4, 6)], axis=1)


def decode(packed: np.ndarray, size_k: int) -> np.ndarray:
    """uint8 [N, ceil(K / 4)] -> int8 [N, K]."""
    return DECODE[packed].reshape(len(packed), -1)[:, :size_k]


def encode(t: np.ndarray, codes: tuple[int, int, int] = (2, 0, 1)) -> np.ndarray:
    """int8 [N, K] -> uint8 [N, ceil(K / 4)].

    Args:
        t: values -1, 0, +1.
        codes: of -1, 0 and +1; another choice than the format's is a mistake.

    """
    table = np.array(codes, dtype=np.uint8)
    rest = -t.shape[1] % 4
    c = np.pad(table[t + 1], ((0, 0), (0, rest)))
    return c[:, 0::4] | c[:, 1::4] << 2 | c[:, 2::4] << 4 | c[:, 3::4] << 6


def codes_of(packed: np.ndarray) -> np.ndarray:
    """uint8 [...] -> its two-bit codes, uint8 [..., 4]."""
    return (packed[..., None] >> np.array([0, 2, 4, 6], dtype=np.uint8)) & 3
