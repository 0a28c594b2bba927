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

// The Hopper kernel for many tokens: whether it takes this call, and the call,
// under a cut as sm90_prefill.h describes it, or the kernel's own choice.
bool sm90_gemm_supported(const GemmArgs& args);
void sm90_gemm(const GemmArgs& args, const int64_t* cut = nullptr);

// dispatch_gemm with quantization in front; `args` reads what `quant` writes.
void dispatch_w2a8(const QuantArgs& quant, const W2A8Args& args);

// The Hopper kernel for many quantized tokens, likewise; cuts as in sm90_s8.h.
bool sm90_w2a8_supported(const W2A8Args& args);
void sm90_w2a8(const W2A8Args& args, const int64_t* cut = nullptr);

// How many clusters of `split` thread blocks of a Hopper kernel a device runs
// at one time. kernel 0: many tokens; 1, 2: few, so many blocks to a
// multiprocessor; 3: quantized tokens. 0: none, or no such kernel.
int sm90_clusters(int device, int kernel, int split);

}  // namespace vllm::ternary
