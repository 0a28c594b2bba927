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
  return max_active_clusters<&prefill_kernel<C>, C>(size);
}

}  // namespace vllm::ternary::sm90
