// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
#include "mma_s8_direct_tokens_launch.cuh"

namespace vllm::ternary {

bool mma_s8_tokens_bfloat16(const TokenArgs& args, const MmaConfig& config,
                            bool row) {
  return launch_tokens<__nv_bfloat16>(args, config, row);
}

}  // namespace vllm::ternary
