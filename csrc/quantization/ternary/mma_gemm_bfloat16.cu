// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
#include "mma_gemm_launch.cuh"

namespace vllm::ternary {

void mma_gemm_bfloat16(const MmaArgs& args, const MmaConfig& config,
                       bool general) {
  const DeviceInfo& device = device_info(args.g.device);
  if (general) {
    launch_for_tokens<__nv_bfloat16, true>(args, config, device);
  } else {
    launch_for_tokens<__nv_bfloat16, false>(args, config, device);
  }
}

}  // namespace vllm::ternary
