// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
#include "mma_gemm_launch.cuh"

namespace vllm::ternary {

void mma_gemm_half(const MmaArgs& args, const MmaConfig& config, bool general) {
  const DeviceInfo& device = device_info(args.g.device);
  if (general) {
    launch_for_tokens<half, true>(args, config, device);
  } else {
    launch_for_tokens<half, false>(args, config, device);
  }
}

}  // namespace vllm::ternary
