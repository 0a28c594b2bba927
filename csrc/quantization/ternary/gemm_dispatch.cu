// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
#include "gemm_dispatch.h"

namespace vllm::ternary {

void dispatch_gemm(const GemmArgs& a) { reference_gemm(a); }

void dispatch_w2a8(const W2A8Args& a) { reference_w2a8(a); }

}  // namespace vllm::ternary
