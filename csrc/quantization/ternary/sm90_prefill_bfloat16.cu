// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
#include "sm90_prefill_launch.cuh"

namespace vllm::ternary::sm90 {

bool launch_bfloat16(const PrefillArgs& a, const Plan& plan, Rows rows,
                     Chain chain, int num_sms) {
  return launch_type<__nv_bfloat16>(a, plan, rows, chain, num_sms);
}

}  // namespace vllm::ternary::sm90
