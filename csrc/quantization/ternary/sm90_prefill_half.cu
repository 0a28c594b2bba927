// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
#include "sm90_prefill_launch.cuh"

namespace vllm::ternary::sm90 {

bool launch_half(const PrefillArgs& a, const Plan& plan, Rows rows, Chain chain,
                 int num_sms) {
  return launch_type<__half>(a, plan, rows, chain, num_sms);
}

int max_clusters(int size) {
  using C = Config<__half, ScaleMode::kBlock, 3, 1, 128, 1>;
  auto* kernel = &prefill_kernel<C>;
  check(cudaFuncSetAttribute(
            kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSmemBytes),
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
  check(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config),
        "cluster occupancy");
  return clusters;
}

}  // namespace vllm::ternary::sm90
