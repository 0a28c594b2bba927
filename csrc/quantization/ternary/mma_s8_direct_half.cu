// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
#include "mma_s8_direct_digits_launch.cuh"

namespace vllm::ternary {

bool mma_s8_direct_digits_half(const DigitsArgs& args, const MmaConfig& config,
                               bool bytes) {
  return launch_direct_digits<half>(args, config, bytes);
}

}  // namespace vllm::ternary
