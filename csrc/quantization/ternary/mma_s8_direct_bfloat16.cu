// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
#include "mma_s8_direct_digits_launch.cuh"

namespace vllm::ternary {

bool mma_s8_direct_digits_bfloat16(const GemmArgs& args,
                                   const MmaConfig& config) {
  return launch_direct_digits<__nv_bfloat16>(args, config);
}

}  // namespace vllm::ternary
