// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
#include "sm90_s8_launch.cuh"

namespace vllm::ternary::s8 {

bool launch_rows(const W2A8Args& a, const Plan& plan, int num_sms) {
  switch (plan_key(plan.warpgroups, plan.tiles, plan.tokens, plan.sets)) {
    TERNARY_S8_VARIANT(ScaleMode::kRow, 2, 2, 128, 1)
    TERNARY_S8_VARIANT(ScaleMode::kRow, 3, 1, 128, 1)
    TERNARY_S8_VARIANT(ScaleMode::kRow, 2, 1, 128, 1)
    TERNARY_S8_VARIANT(ScaleMode::kRow, 3, 2, 64, 1)
    TERNARY_S8_VARIANT(ScaleMode::kRow, 2, 2, 64, 1)
    TERNARY_S8_VARIANT(ScaleMode::kRow, 3, 1, 64, 1)
    TERNARY_S8_VARIANT(ScaleMode::kRow, 4, 1, 64, 1)
    TERNARY_S8_VARIANT(ScaleMode::kRow, 2, 1, 64, 2)
    TERNARY_S8_VARIANT(ScaleMode::kRow, 2, 1, 64, 1)
    default:
      return false;
  }
}

}  // namespace vllm::ternary::s8
