// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Which kernels this processor can run.

#pragma once

namespace vllm::ternary::cpu {

// Each includes those before it.
enum class Isa : int {
  kPortable,
  kAvx2,        // AVX2, FMA, F16C
  kAvx512Vnni,  // AVX-512 F, BW, VL, DQ, VNNI
  kAvx512Bf16,  // and AVX512-BF16
  kAmx,         // and AMX-TILE, AMX-INT8, AMX-BF16
};

// The best that the processor and the system offer, or the one named by the
// environment variable VLLM_TERNARY_CPU_ISA (portable, avx2, avx512vnni,
// avx512bf16, amx), read at every call. Throws if that one is not available.
Isa select_isa();

}  // namespace vllm::ternary::cpu
