// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
#include "mma_s8_direct_digits_launch.cuh"

namespace vllm::ternary {

bool mma_s8_direct_digits_bfloat16(const DigitsArgs& args,
                                   const MmaConfig& config, bool bytes) {
  return launch_direct_digits<__nv_bfloat16>(args, config, bytes);
}

}  // namespace vllm::ternary
