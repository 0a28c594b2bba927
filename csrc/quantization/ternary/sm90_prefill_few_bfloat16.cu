// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
#include "sm90_prefill_few_launch.cuh"

namespace vllm::ternary::sm90 {

bool launch_few_bfloat16(const PrefillArgs& a, const FewPlan& plan) {
  return launch_few_type<__nv_bfloat16>(a, plan);
}

}  // namespace vllm::ternary::sm90
