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
  return max_active_clusters<&s8_kernel<C>, C>(size);
}

}  // namespace vllm::ternary::s8
