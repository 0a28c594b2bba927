// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Activations, for any processor.

#include "activation_impl.h"

namespace vllm::ternary::cpu {

const ActivationOps kActivationPortable = {
    widen_row, pad_row, sum_blocks, rms_inverse, apply_norm, quantize_row};

}  // namespace vllm::ternary::cpu
