# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The CUDA kernels of vLLM for int8 weights, as far as a CPU can have them.

The ops have upstream's schemas (csrc/torch_bindings.cpp), the conditions that its CUDA
sources check before they launch, and a product in float64 that reads weights and scales
where the kernel would find them: one that was packed, padded or permuted wrongly gives
wrong numbers, or breaks a condition. Only the order that the kernels want *inside* a
repacked weight is not imitated: a repacked weight stays as it came.
"""

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

# Asks the platform when it is imported, and a stand-in for a GPU cannot answer all.
import vllm.model_executor.layers.quantization.online.fp8  # noqa: F401
from vllm import _custom_ops
from vllm.model_executor.kernels.linear.scaled_mm import triton as triton_kernel
from vllm.model_executor.layers.quantization.compressed_tensors import (
    triton_scaled_mm as triton_module,
)
from vllm.model_executor.layers.quantization.utils import marlin_utils
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability, PlatformEnum
from vllm.scalar_type import scalar_types

_SCHEMAS = {
    "gptq_marlin_repack": "(Tensor b_q_weight, SymInt size_k, SymInt size_n, "
    "int num_bits, bool is_a_8bit) -> Tensor",
    "marlin_gemm": "(Tensor a, Tensor? c_or_none, Tensor b_q_weight, "
    "Tensor? b_bias_or_none, Tensor b_scales, Tensor? a_scales, "
    "Tensor? global_scale, Tensor? b_zeros_or_none, Tensor workspace, "
    "int b_type_id, SymInt size_m, SymInt size_n, SymInt size_k, "
    "bool use_atomic_add, bool use_fp32_reduce, bool is_zp_float) -> Tensor",
    "machete_prepack_B": "(Tensor B, ScalarType a_type, int b_type, "
    "ScalarType? group_scales_type) -> Tensor",
    "machete_mm": "(Tensor A, Tensor B, int b_type, ScalarType? out_type, "
    "Tensor? group_scales, Tensor? group_zeros, int? group_size, "
    "Tensor? channel_scales, Tensor? token_scales, str? schedule) -> Tensor",
    "cutlass_scaled_mm": "(Tensor! out, Tensor a, Tensor b, Tensor a_scales, "
    "Tensor b_scales, Tensor? bias) -> ()",
}
PROCESSORS = 132


def _unpack(words: torch.Tensor) -> torch.Tensor:
    """[K / 4, N] int32 -> [K, N]: byte i of a word is k = 4 row + i, offset by 128."""
    parts = torch.stack([(words >> 8 * i) & 0xFF for i in range(4)], 1)
    return parts.flatten(0, 1).double() - 128


def _unpermuted(row: torch.Tensor, order: list[int]) -> torch.Tensor:
    """The inverse of `row.reshape(-1, len(order))[:, order]`, by rows of the tensor."""
    back = torch.empty(len(order), dtype=torch.long)
    back[torch.tensor(order)] = torch.arange(len(order))
    return row.reshape(-1, len(order))[:, back].reshape(row.shape)


def gptq_marlin_repack(b_q_weight, size_k, size_n, num_bits, is_a_8bit):
    assert b_q_weight.dtype == torch.int32 and b_q_weight.is_contiguous()
    assert num_bits == 8 and not is_a_8bit
    assert size_k % 16 == 0 and size_n % 64 == 0
    assert b_q_weight.shape == (size_k // 4, size_n)
    return b_q_weight.clone().view(size_k // 16, size_n * 4)


def marlin_gemm(
    a,
    c_or_none,
    b_q_weight,
    b_bias,
    b_scales,
    a_scales,
    global_scale,
    b_zeros,
    workspace,
    b_type_id,
    size_m,
    size_n,
    size_k,
    use_atomic_add,
    use_fp32_reduce,
    is_zp_float,
):
    assert a.dtype in (torch.float16, torch.bfloat16) and a.shape == (size_m, size_k)
    assert a.stride(1) == 1 and a.stride(0) % 8 == 0 and a.data_ptr() % 16 == 0
    assert b_q_weight.is_contiguous() and b_q_weight.dtype == torch.int32
    assert b_q_weight.shape == (size_k // 16, size_n * 4)
    assert (size_n % 64 == 0 and size_k % 128 == 0) or (
        size_n % 128 == 0 and size_k % 64 == 0
    )
    assert b_type_id == scalar_types.uint8b128.id and not is_zp_float
    assert c_or_none is None and a_scales is None and global_scale is None
    assert b_zeros is None or b_zeros.shape[-1] == 0
    assert workspace.dtype == torch.int32 and workspace.numel() >= PROCESSORS
    groups = b_scales.shape[0]
    assert b_scales.is_contiguous() and b_scales.dtype == a.dtype
    assert b_scales.shape == (groups, size_n) and size_k % groups == 0
    # The kernels that are built: one scale a row, or blocks of these sizes.
    assert groups == 1 or size_k // groups in (32, 64, 128)
    for_groups, for_rows = marlin_utils.get_scale_perms()
    scale = _unpermuted(b_scales, for_groups if groups > 1 else for_rows).double()
    weight = _unpack(b_q_weight.view(size_k // 4, size_n))
    out = a.double() @ (weight * scale.repeat_interleave(size_k // groups, 0))
    if b_bias is not None:
        assert b_bias.shape == (size_n,) and b_bias.is_contiguous()
        assert b_bias.dtype == a.dtype
        out += _unpermuted(b_bias, for_rows).double()
    return out.to(a.dtype)


def machete_prepack_B(b, a_type, b_type, group_scales_type):
    assert b.dtype == torch.int32 and b_type == scalar_types.uint8b128.id
    assert b.stride(0) == 1 and a_type == group_scales_type
    assert b.shape[0] * 4 % 64 == 0 and b.shape[1] % 128 == 0
    return b.contiguous()


def machete_mm(
    a,
    b,
    b_type,
    out_type,
    group_scales,
    group_zeros,
    group_size,
    channel_scales,
    token_scales,
    schedule,
):
    size_k, size_n = b.shape[0] * 4, b.shape[1]
    assert b_type == scalar_types.uint8b128.id and a.dtype == group_scales.dtype
    assert a.shape[1] == size_k and a.stride(1) == 1 and a.data_ptr() % 16 == 0
    assert group_zeros is None and channel_scales is None and token_scales is None
    length = size_k if group_size == -1 else group_size
    assert group_size in (-1, 64, 128)
    assert group_scales.shape == (-(-size_k // length), size_n)
    assert group_scales.is_contiguous()
    scale = group_scales.double().repeat_interleave(length, 0)[:size_k]
    return (a.double() @ (_unpack(b) * scale)).to(a.dtype)


def cutlass_scaled_mm(out, a, b, a_scales, b_scales, bias):
    assert not current_platform.has_device_capability(100)  # it has FP8 alone there
    assert a.dtype == b.dtype == torch.int8 and a.shape[1] == b.shape[0]
    assert a.stride(1) == 1 and out.stride(1) == 1 and b.stride(0) == 1
    assert out.stride(0) % 16 == 0 and b.stride(1) % 16 == 0
    assert a_scales.numel() in (1, a.shape[0]) and b_scales.numel() in (1, b.shape[1])
    for scales in (a_scales, b_scales):
        assert scales.dtype == torch.float32 and scales.is_contiguous()
    sums = a.double() @ b.double() * a_scales.double() * b_scales.double().view(1, -1)
    if bias is not None:
        assert bias.shape == (b.shape[1],) and bias.dtype == out.dtype
        sums += bias.double()
    out.copy_(sums)


def triton_scaled_mm(a, b, scale_a, scale_b, out_dtype, bias=None, **tiles):
    """Where CUTLASS does not take a size; compiled for a GPU, so replaced whole."""
    assert a.shape[0] > 0 and a.dtype == b.dtype and a.shape[1] == b.shape[0]
    assert scale_a.shape == (a.shape[0], 1) and scale_b.shape == (b.shape[1], 1)
    assert scale_a.dtype == scale_b.dtype == torch.float32
    sums = a.double() @ b.double() * scale_a.double() * scale_b.double().view(1, -1)
    return (sums if bias is None else sums + bias.double()).to(out_dtype)


def _register_fakes() -> None:
    """Run what _custom_ops does on import where these ops exist: their fakes."""
    tree = ast.parse(Path(_custom_ops.__file__).read_text())
    names = set(_SCHEMAS)
    for node in tree.body:
        if isinstance(node, ast.If) and (
            names
            & {c.value for c in ast.walk(node.test) if isinstance(c, ast.Constant)}
        ):
            module = ast.Module([node], [])
            exec(compile(module, _custom_ops.__file__, "exec"), vars(_custom_ops))


_library = torch.library.Library("_C", "FRAGMENT")


def define() -> None:
    """Define the ops in this process, once."""
    if hasattr(torch.ops._C, "marlin_gemm"):
        return
    for name, schema in _SCHEMAS.items():
        _library.define(name + schema)
        _library.impl(name, globals()[name], "CPU")
    _register_fakes()


@contextmanager
def cuda(major: int, minor: int) -> Iterator[None]:
    """Make vLLM take the CPU, where the tensors are, for a GPU."""
    define()
    platform = type(current_platform)
    answers = {
        "is_cpu": False,
        "is_cuda": True,
        "is_cuda_alike": True,
        "get_device_capability": DeviceCapability(major, minor),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platform, "_enum", PlatformEnum.CUDA)
        for name, value in answers.items():
            patch.setattr(
                platform, name, classmethod(lambda *args, value=value, **kw: value)
            )
        patch.setattr(
            marlin_utils,
            "get_marlin_workspace",
            lambda device: torch.zeros(4 * PROCESSORS, dtype=torch.int32),
        )
        for module in (triton_module, triton_kernel):
            patch.setattr(module, "triton_scaled_mm", triton_scaled_mm)
        yield
