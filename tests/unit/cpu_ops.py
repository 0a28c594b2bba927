# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The CPU ops, random weights for them, and references in float64.

The library is the one that TERNARY_LIBRARY names, else that of an installed patched
vLLM, else built from csrc into build/obj.
"""

import importlib.util
import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
MODULE = "vllm._ternary_C"
LAYOUT = "overlay/vllm/model_executor/layers/quantization/utils/ternary_layout_cpu.py"
ISA_VARIABLE = "VLLM_TERNARY_CPU_ISA"
ISAS = ("portable", "avx2", "avx512vnni", "avx512bf16", "amx")
# Relative error by norm that a kernel may have, and what exact sums would leave.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 4e-3}


def load_module(name: str, path: Path):
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


layout = load_module("ternary_layout_cpu", ROOT / LAYOUT)


def _find_library() -> Path:
    if named := os.environ.get("TERNARY_LIBRARY"):
        return Path(named)
    spec = importlib.util.find_spec("vllm")  # does not import it
    for folder in (spec and spec.submodule_search_locations) or ():
        if (path := Path(folder, "_ternary_C.abi3.so")).is_file():
            return path
    from lib import build, extension
    from lib.project import Project

    project = Project()
    compilers = build.find_compilers(project, build.Options(device="cpu"))
    return extension.build(project.root / "csrc", project.build / "obj", compilers).path


def load_ops():
    """Return torch.ops._C with the ternary ops in it."""
    if MODULE not in sys.modules and not hasattr(torch.ops._C, "ternary_gemm"):
        # Under its name in vLLM, which then does not register the ops once more.
        sys.modules[MODULE] = load_module(MODULE, _find_library())
    return torch.ops._C


@contextmanager
def isa(name: str | None):
    """Force the kernels of one instruction set."""
    before = os.environ.pop(ISA_VARIABLE, None)
    try:
        if name is not None:
            os.environ[ISA_VARIABLE] = name
        yield
    finally:
        os.environ.pop(ISA_VARIABLE, None)
        if before is not None:
            os.environ[ISA_VARIABLE] = before


def available_isas() -> list[str]:
    """The instruction sets of this processor, by the kernels' own account."""
    ops = load_ops()
    weight = random_weight(16, 16, 16, seed=0)
    found = []
    for name in ISAS:
        with isa(name):
            try:
                ops.ternary_gemm(torch.zeros(1, 16), *weight.arguments())
            except RuntimeError as error:
                assert "this processor" in str(error)
                continue
        found.append(name)
    return found


@dataclass
class Weight:
    """A random weight: disk layout, CPU layout, and its meaning in float64."""

    packed: torch.Tensor
    disk_scale: torch.Tensor
    disk_zero_point: torch.Tensor | None
    weight: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    ternary: torch.Tensor  # int8 [N, K]
    dense: torch.Tensor  # float64 [N, K]
    size_n: int
    size_k: int
    block_size: int

    def arguments(self, bias: torch.Tensor | None = None) -> tuple:
        """What ternary_gemm takes after x."""
        sizes = (self.size_n, self.size_k, self.block_size)
        return (self.weight, self.scale, self.zero_point, bias, *sizes)


def pack(ternary: torch.Tensor) -> torch.Tensor:
    """uint8 [N, ceil(K/4)] of int8 [N, K], code by code as quant_format.md says."""
    size_n, size_k = ternary.shape
    code = torch.zeros(size_n, -(-size_k // 4) * 4, dtype=torch.uint8)
    code[:, :size_k] = torch.where(ternary < 0, 2, ternary).to(torch.uint8)
    four = code.view(size_n, -1, 4)
    return four[..., 0] | four[..., 1] << 2 | four[..., 2] << 4 | four[..., 3] << 6


def random_weight(
    size_n: int,
    size_k: int,
    block_size: int,
    *,
    seed: int,
    scale_dtype: torch.dtype = torch.float16,
    zero_point: torch.dtype | None = None,
    ternary: torch.Tensor | None = None,
) -> Weight:
    generator = torch.Generator().manual_seed(seed)
    if ternary is None:
        ternary = torch.randint(
            -1, 2, (size_n, size_k), generator=generator, dtype=torch.int8
        )
    nblocks = 1 if block_size >= size_k else -(-size_k // block_size)
    scale = (torch.rand(size_n, nblocks, generator=generator) + 0.5).to(scale_dtype)
    zero = None
    if zero_point is not None:
        zero = torch.randn(size_n, nblocks, generator=generator).to(zero_point)
    block = torch.arange(size_k) // block_size if nblocks > 1 else [0] * size_k
    shifted = ternary.double() - (0 if zero is None else zero.double()[:, block])
    packed = pack(ternary)
    encoded = layout.encode(packed, scale, zero, size_k, block_size)
    return Weight(
        packed,
        scale,
        zero,
        *encoded,
        ternary,
        scale.double()[:, block] * shifted,
        size_n,
        size_k,
        block_size,
    )


def random_x(size_m: int, size_k: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 1000)
    return torch.randn(size_m, size_k, generator=generator).to(dtype)


def relative_error(y: torch.Tensor, reference: torch.Tensor) -> float:
    norm = reference.norm()
    return ((y.double() - reference).norm() / norm).item() if norm else 0.0
