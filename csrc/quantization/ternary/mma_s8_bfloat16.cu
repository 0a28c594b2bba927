// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
#include "mma_s8_launch.cuh"

namespace vllm::ternary {

void mma_s8_digits_bfloat16(const S8Args& args, const MmaConfig& config) {
  launch_s8_digits<__nv_bfloat16>(args, config);
}

void mma_s8_int8_bfloat16(const S8Args& args, const MmaConfig& config,
                          S8Scale scale) {
  launch_s8_int8<__nv_bfloat16>(args, config, scale);
}

}  // namespace vllm::ternary
