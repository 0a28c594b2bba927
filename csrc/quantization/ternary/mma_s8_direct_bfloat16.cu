// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
#include "mma_s8_direct_digits_launch.cuh"

namespace vllm::ternary {

bool mma_s8_direct_digits_bfloat16(const GemmArgs& args,
                                   const MmaConfig& config) {
  return launch_direct_digits<__nv_bfloat16>(args, config);
}

bool mma_s8_direct_one_bfloat16(const W2A8Args& args, const QuantArgs& quant,
                                const MmaConfig& config) {
  return launch_direct_digits<__nv_bfloat16>(args, quant, config);
}

}  // namespace vllm::ternary
