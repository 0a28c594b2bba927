# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The ternary ops and their weights, for tests and benchmarks of the kernels.

The ops come from an installed patched vLLM, or from the library that the environment
variable ``TERNARY_LIBRARY`` names (for work on the kernels without a wheel).
"""

import ctypes
import importlib
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from lib.errors import BuildError

LIBRARY_VARIABLE = "TERNARY_LIBRARY"
_LAYOUT = "vllm.model_executor.layers.quantization.utils.ternary_layout_cuda"
_OVERLAY = Path(__file__).resolve().parents[3] / "overlay"


def load_ops() -> None:
    """Make ``torch.ops._C.ternary_*`` available.

    Raises:
        BuildError: there is neither a library nor a patched vLLM.

    """
    path = os.environ.get(LIBRARY_VARIABLE)
    if path:
        if not Path(path).is_file():
            raise BuildError(f"{LIBRARY_VARIABLE}={path}: there is no such file")
        # Python loads torch's libraries privately; show their symbols to ours.
        for name in ("c10", "torch_cpu", "c10_cuda", "torch_cuda"):
            library = Path(torch.__file__).parent / "lib" / f"lib{name}.so"
            if library.is_file():
                ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        torch.ops.load_library(path)
        return
    try:
        importlib.import_module("vllm._ternary_C")
    except ImportError as error:
        raise BuildError(
            f"the ternary ops cannot be loaded ({error}); install the wheel that "
            f"`make patched-wheel` builds, or set {LIBRARY_VARIABLE} to the library"
        ) from error


def layout_module() -> ModuleType:
    """Return ``ternary_layout_cuda``, from the overlay beside these scripts."""
    path = _OVERLAY.joinpath(*_LAYOUT.split(".")).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(_LAYOUT.rsplit(".", 1)[1], path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass
class TernaryWeight:
    """A random weight: what it means, and what the kernels read."""

    ternary: torch.Tensor  # int8 [N, K]
    row_scale: torch.Tensor  # [N, blocks]
    row_zero_point: torch.Tensor | None  # float32 [N, blocks]
    weight: torch.Tensor  # device layout
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    size_n: int
    size_k: int
    block_size: int

    def dequantize(self, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """W [N, K] in `dtype`, computed in float64."""

        def spread(per_block: torch.Tensor) -> torch.Tensor:
            wide = per_block.double().repeat_interleave(self.block_size, dim=1)
            return wide[:, : self.size_k]

        value = self.ternary.double()
        if self.row_zero_point is not None:
            value = value - spread(self.row_zero_point)
        return (value * spread(self.row_scale)).to(dtype)


def pack(ternary: torch.Tensor) -> torch.Tensor:
    """The checkpoint's bytes, uint8 [N, ceil(K / 4)], of int8 [N, K]."""
    size_n, size_k = ternary.shape
    codes = torch.zeros(
        (size_n, (size_k + 3) // 4 * 4), dtype=torch.uint8, device=ternary.device
    )
    codes[:, :size_k] = (ternary & 3).to(torch.uint8)  # 1 -> 01, -1 -> 11
    codes = torch.where(codes == 3, torch.full_like(codes, 2), codes)
    quads = codes.view(size_n, -1, 4)
    return quads[..., 0] | quads[..., 1] << 2 | quads[..., 2] << 4 | quads[..., 3] << 6


def random_weight(
    size_n: int,
    size_k: int,
    block_size: int = 128,
    *,
    scale_dtype: torch.dtype = torch.float16,
    zero_point: bool = False,
    device: torch.device | str = "cuda",
    generator: torch.Generator | None = None,
) -> TernaryWeight:
    """A weight of random signs and zeros with random scales."""
    block_size = min(block_size, (size_k + 3) // 4 * 4)
    blocks = -(-size_k // block_size)
    ternary = torch.randint(
        -1, 2, (size_n, size_k), device=device, generator=generator, dtype=torch.int8
    )
    scale = torch.rand((size_n, blocks), device=device, generator=generator)
    scale = ((scale + 0.5) / 16).to(scale_dtype)
    zero = None
    if zero_point:
        zero = torch.randn((size_n, blocks), device=device, generator=generator) / 2
    weight, device_scale, device_zero = layout_module().encode(
        pack(ternary), scale, zero, size_k, block_size
    )
    return TernaryWeight(
        ternary,
        scale,
        zero,
        weight,
        device_scale,
        device_zero,
        size_n,
        size_k,
        block_size,
    )
