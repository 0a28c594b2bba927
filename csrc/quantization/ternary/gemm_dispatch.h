// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// From a product's sizes to the kernel that computes it.
#pragma once

#include "cuda_common.h"

namespace vllm::ternary {

// Enqueues the product on args.stream with the kernel that dispatch_table.h
// names for these sizes and this device.
void dispatch_gemm(const GemmArgs& args);

// The Hopper kernel for many tokens: whether it takes this call, and the call.
bool sm90_gemm_supported(const GemmArgs& args);
void sm90_gemm(const GemmArgs& args);

// The same for quantized activations.
void dispatch_w2a8(const W2A8Args& args);

// One kernel of three: 0 the naive one, 1 int8 tensor cores for few tokens with
// this cut, 2 the Hopper kernel for many. Throws where it does not take the
// call.
void w2a8_with(const W2A8Args& args, int kernel, int groups, int split);

}  // namespace vllm::ternary
