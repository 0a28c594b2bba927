// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The portable tensor core kernel (sm_80 and later), made for few tokens.
#pragma once

#include "cuda_common.h"

namespace vllm::ternary {

// How one product is cut. Any values give the right answer; which are fast is
// the business of dispatch_table.h.
struct MmaConfig {
  int variant;      // shape of a CTA, where a kernel has several
  int groups;       // CTAs along N (and M, where tokens have their own)
  int split;        // CTAs along K, one cluster: 1, 2, 4 or 8 (1 before sm_90)
  bool pdl = true;  // start before the kernel ahead has ended (sm_90 and later)
};

// False for scale blocks that are no multiple of 32 (or absurd sizes).
bool mma_supported(const GemmArgs& args);

// Enqueues the product on args.stream; throws std::runtime_error if it cannot.
void mma_gemm(const GemmArgs& args, const MmaConfig& config);

}  // namespace vllm::ternary
