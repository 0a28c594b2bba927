# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""llama.cpp's TQ2_0 matmul, through the ggml libraries that a package ships.

`pip install llama-cpp-python` (compiles llama.cpp for this processor, ten minutes) or
`pip install libggml-python` (prebuilt). ggml's product of TQ2_0 has an AVX2 and a NEON
form and no other for x86. It quantizes x to 8 bits per 256 values: W2A8.
"""

import ctypes
import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

TQ2_0 = 35
BLOCK = 256  # weights
BLOCK_BYTES = 66  # 64 of codes, then a float16 scale
MAX_THREADS = 512


class _InitParams(ctypes.Structure):
    _fields_ = [
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    ]


class _Plan(ctypes.Structure):
    _fields_ = [
        ("work_size", ctypes.c_size_t),
        ("work_data", ctypes.c_void_p),
        # Threads, a pool, callbacks: as the library fills them, in any version.
        ("rest", ctypes.c_void_p * 14),
    ]


def find_libraries() -> Path | None:
    """The folder of libggml-base.so and libggml-cpu.so, if there is one."""
    for package, subfolder in (("llama_cpp", "lib"), ("libggml", "lib64")):
        spec = importlib.util.find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            if (found := Path(folder, subfolder)).is_dir():
                return found
    return None


class Tq2:
    """Copies of a random layer, and a call for each.

    Args:
        folder: what `find_libraries` found.
        size_n: outputs.
        size_k: inputs, a multiple of 256.
        copies: how many weights.
        threads: at most this many.

    """

    def __init__(
        self, folder: Path, size_n: int, size_k: int, copies: int, threads: int
    ):
        mode = ctypes.RTLD_GLOBAL
        self.base = ctypes.CDLL(str(folder / "libggml-base.so"), mode=mode)
        self.cpu = ctypes.CDLL(str(folder / "libggml-cpu.so"), mode=mode)
        self._declare()
        self.cpu.ggml_cpu_init()
        self.size_n, self.size_k = size_n, size_k
        self.threads = min(threads, MAX_THREADS)
        blocks = size_n * size_k // BLOCK
        code = torch.randint(0, 3, (4, blocks, 64), dtype=torch.uint8)
        bytes_ = code[0] | code[1] << 2 | code[2] << 4 | code[3] << 6
        scale = torch.full((blocks, 1), 0.0625, dtype=torch.float16)
        data = torch.cat([bytes_, scale.view(torch.uint8)], 1).contiguous()
        self.context = self._context(copies * (data.numel() + 4096))
        self.weights = []
        for _ in range(copies):
            tensor = self.base.ggml_new_tensor_2d(self.context, TQ2_0, size_k, size_n)
            if self.base.ggml_nbytes(tensor) != data.numel():
                raise RuntimeError("this ggml lays TQ2_0 out in another way")
            ctypes.memmove(
                self.base.ggml_get_data(tensor), data.data_ptr(), data.numel()
            )
            self.weights.append(tensor)

    def calls(self, x: torch.Tensor) -> list[Callable[[], None]]:
        """One call per weight for x [M, K]; valid until the next `calls`."""
        size_m = x.shape[0]
        self.scratch = getattr(self, "scratch", None)
        if self.scratch:
            self.base.ggml_free(self.scratch)
        copies = len(self.weights) if size_m < 64 else 2
        # Results, x and the graphs themselves.
        room = copies * (size_m * self.size_n * 4 + (1 << 18)) + (64 << 20)
        self.scratch = self._context(room)
        tensor = self.base.ggml_new_tensor_2d(self.scratch, 0, self.size_k, size_m)
        wide = x.float().contiguous()
        ctypes.memmove(
            self.base.ggml_get_data(tensor), wide.data_ptr(), wide.numel() * 4
        )
        calls: list[Callable[[], None]] = []
        for weight in self.weights[:copies]:
            product = self.base.ggml_mul_mat(self.scratch, weight, tensor)
            graph = self.base.ggml_new_graph(self.scratch)
            self.base.ggml_build_forward_expand(graph, product)
            plan = self.cpu.ggml_graph_plan(graph, self.threads, None)
            # For the quantized x; the call keeps it alive.
            work = ctypes.create_string_buffer(max(plan.work_size, 1))
            plan.work_data = ctypes.addressof(work)
            calls.append(partial(self._compute, graph, plan, work))
        return calls

    def _compute(self, graph: int, plan: _Plan, work: ctypes.Array) -> None:
        if status := self.cpu.ggml_graph_compute(graph, ctypes.byref(plan)):
            raise RuntimeError(f"ggml: status {status}")

    def close(self) -> None:
        for context in (self.context, getattr(self, "scratch", None)):
            if context:
                self.base.ggml_free(context)

    def _context(self, size: int) -> int:
        return self.base.ggml_init(_InitParams(size, None, False))

    def _declare(self) -> None:
        pointer, integer = ctypes.c_void_p, ctypes.c_int
        signatures = {
            "ggml_init": (pointer, [_InitParams]),
            "ggml_free": (None, [pointer]),
            "ggml_new_tensor_2d": (
                pointer,
                [pointer, integer, ctypes.c_int64, ctypes.c_int64],
            ),
            "ggml_mul_mat": (pointer, [pointer, pointer, pointer]),
            "ggml_new_graph": (pointer, [pointer]),
            "ggml_build_forward_expand": (None, [pointer, pointer]),
            "ggml_get_data": (pointer, [pointer]),
            "ggml_nbytes": (ctypes.c_size_t, [pointer]),
        }
        for name, (result, arguments) in signatures.items():
            function = getattr(self.base, name)
            function.restype, function.argtypes = result, arguments
        plan = self.cpu.ggml_graph_plan
        plan.restype, plan.argtypes = _Plan, [pointer, integer, pointer]
        compute = self.cpu.ggml_graph_compute
        compute.restype, compute.argtypes = integer, [pointer, ctypes.POINTER(_Plan)]
