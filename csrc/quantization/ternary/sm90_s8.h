// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Boundary between the operator and the Hopper kernels for int8 tokens
// (sm90_s8*.cu, compiled for sm_90a only).
#pragma once

#include "cuda_common.h"

namespace vllm::ternary {

// True where sm90_s8_gemm computes this call. Looks at sizes, types and
// pointers only, never synchronizes.
bool sm90_s8_supported(const W2A8Args& args);

// Enqueues the product on args.stream. Called only on a device of compute
// capability 9.0 for which sm90_s8_supported returned true, with args.device
// current. Throws std::runtime_error on a failed launch.
void sm90_s8_gemm(const W2A8Args& args);

// The same under a cut of the caller's, for the tuning script and the tests:
// warpgroups, tiles, tokens, sets, split. Throws std::runtime_error where no
// kernel was built for it.
void sm90_s8_gemm_cut(const W2A8Args& args, const int64_t* cut);

// How many clusters of `split` blocks a device runs at one time.
int sm90_s8_clusters(int device, int split);

}  // namespace vllm::ternary
