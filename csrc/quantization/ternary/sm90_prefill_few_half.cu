// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
#include "sm90_prefill_few_launch.cuh"

namespace vllm::ternary::sm90 {

bool launch_few_half(const PrefillArgs& a, const FewPlan& plan) {
  return launch_few_type<__half>(a, plan);
}

int few_max_clusters(int blocks, int size) {
  using One = FewConfig<__half, 3, 2, 16, 1>;
  using Two = FewConfig<__half, 1, 3, 16, 2>;
  return blocks == 1 ? max_active_clusters<&few_kernel<One>, One>(size)
                     : max_active_clusters<&few_kernel<Two>, Two>(size);
}

}  // namespace vllm::ternary::sm90
