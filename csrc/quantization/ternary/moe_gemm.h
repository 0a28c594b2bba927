// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The product of tokens with the weights of the experts that they are routed
// to.
#pragma once

#include "cuda_common.h"

namespace vllm::ternary {

// y[r, n] = (x[r / top_k] W[e]^T + bias[e])[n] * route_weight[r] for each route
// r, where e is the expert of the block of `sorted_routes` that holds r. Routes
// of a block with a negative expert become 0.
//
// What the caller guarantees:
//   x              [routes / top_k, K], inner stride 1, 16-byte aligned, ldx a
//                  multiple of 8; columns past K are not read.
//   weight, scale, zero_point   [E, ...], per expert as in sm90_prefill.h;
//                  block_size is a multiple of 16.
//   bias           [E, N] in dtype, or nullptr.
//   sorted_routes  int32 [blocks * kMoeBlock]: routes ordered by expert, every
//                  expert's filled up to whole blocks; entries that are not
//                  below `routes` are filling.
//   experts        int32 [blocks], one for each block of kMoeBlock entries.
//   used           int32 [1]: entries of sorted_routes that count.
//   route_weight   float32 [routes], or nullptr for 1.
//   y              [routes, N], contiguous.
struct MoeGemmArgs {
  const void* x;
  int64_t ldx;
  DType dtype;  // of x, bias and y: kHalf or kBFloat16
  const int32_t* weight;
  const void* scale;
  DType scale_dtype;
  const float* zero_point;
  const void* bias;
  const int32_t* sorted_routes;
  const int32_t* experts;
  const int32_t* used;
  const float* route_weight;
  void* y;
  int routes, top_k, blocks;
  int N, K, N_pad, K_pad, block_size, num_blocks;
  cudaStream_t stream;
};

// Routes in a block of sorted_routes. Blocks of 64 were slower on an H200 for
// every number of tokens: few tokens leave them empty, many are better served
// by 16 at a time in more thread blocks.
constexpr int kMoeBlock = 16;

// Blocks that a launch takes: they lie along a grid's y. (Along x they would
// come in another order: now thread blocks that share x and the expert follow
// each other.)
constexpr int kMoeLaunch = 65535;

// Enqueues on args.stream, in launches of up to `most` blocks (fewer are for
// tests); throws std::runtime_error on a failed launch.
void moe_gemm(const MoeGemmArgs& args, int most = kMoeLaunch);

}  // namespace vllm::ternary
