// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
#include "sm90_s8_launch.cuh"

namespace vllm::ternary::s8 {

bool launch_blocks(const W2A8Args& a, const Plan& plan, int num_sms) {
  switch (plan_key(plan.warpgroups, plan.tiles, plan.tokens, plan.sets)) {
    TERNARY_S8_VARIANT(ScaleMode::kBlock, 2, 1, 128, 1)
    TERNARY_S8_VARIANT(ScaleMode::kBlock, 3, 1, 64, 1)
    TERNARY_S8_VARIANT(ScaleMode::kBlock, 2, 1, 64, 1)
    default:
      return false;
  }
}

int max_clusters(int size) {
  using C = Config<ScaleMode::kBlock, 3, 1, 64, 1>;
  auto* kernel = &s8_kernel<C>;
  check_cuda(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           C::kSmemBytes),
      "shared memory");
  cudaLaunchAttribute attr;
  attr.id = cudaLaunchAttributeClusterDimension;
  attr.val.clusterDim.x = size;
  attr.val.clusterDim.y = attr.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(size);
  config.blockDim = dim3(C::kThreads);
  config.dynamicSmemBytes = C::kSmemBytes;
  config.attrs = &attr;
  config.numAttrs = 1;
  int clusters = 0;
  check_cuda(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config),
             "cluster occupancy");
  return clusters;
}

}  // namespace vllm::ternary::s8
