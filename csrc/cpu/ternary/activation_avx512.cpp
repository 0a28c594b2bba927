// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Activations, for AVX-512.

#include <cstdint>
#include <cstring>

#include "activation.h"
#include "kernels.h"
#include "simd.h"

#ifdef TERNARY_X86

  #define TERNARY_VECTORS
TERNARY_TARGET_BEGIN(TERNARY_AVX512)
  #include "activation_impl.h"

namespace vllm::ternary::cpu {

const ActivationOps kActivationAvx512 = {widen_row,   pad_row,    sum_blocks,
                                         rms_inverse, apply_norm, quantize_row};

}  // namespace vllm::ternary::cpu
TERNARY_TARGET_END

#endif  // TERNARY_X86
