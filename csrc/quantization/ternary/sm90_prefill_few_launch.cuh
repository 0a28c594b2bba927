// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Host side of the Hopper kernels for few tokens.
#pragma once

#include "sm90_prefill_few.cuh"
#include "sm90_prefill_few_plan.h"
#include "sm90_prefill_launch.cuh"

namespace vllm::ternary::sm90 {

template <typename C>
void launch_few(const PrefillArgs& a, const FewPlan& plan) {
  const int scale_bytes = a.scale_dtype == DType::kFloat ? 4 : 2;
  FewParams p{};
  p.bias = a.bias;
  p.y = a.y;
  p.ldy = a.ldy;
  p.M = a.M;
  p.N = a.N;
  const int k_blocks = a.K_pad / 128;
  p.k_stages = (k_blocks + C::kPair - 1) / C::kPair;
  p.token_tiles = (a.M + C::kTokens - 1) / C::kTokens;
  p.num_tiles = (a.N_pad / 64 + C::kRows - 1) / C::kRows * p.token_tiles;
  p.split = plan.split;
  p.share = (C::kTokens + plan.split - 1) / plan.split;
  p.num_clusters = std::min(p.num_tiles, plan.clusters);
  p.blocks_per_scale = a.num_blocks == 1 ? k_blocks : a.block_size / 128;
  p.scale_dtype = a.scale_dtype;
  p.stage_tx_bytes = 2 * C::kPair * C::kHalfBytes + C::kCodeBytes +
                     C::kPair * C::kRows * 64 * scale_bytes;

  const CUtensorMapDataType x_type = a.dtype == DType::kHalf
                                         ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                         : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUtensorMap x_map =
      make_map(x_type, 2, a.x, a.M, a.K, a.ldx, C::kTokens, 64,
               CU_TENSOR_MAP_SWIZZLE_128B);
  const CUtensorMap w_map = make_map(
      CU_TENSOR_MAP_DATA_TYPE_INT32, 4, a.weight, a.N_pad / 16, a.K_pad,
      a.K_pad, C::kRows * 4, 128 * C::kPair, CU_TENSOR_MAP_SWIZZLE_NONE);
  const CUtensorMap s_map =
      make_map(scale_bytes == 4 ? CU_TENSOR_MAP_DATA_TYPE_INT32
                                : CU_TENSOR_MAP_DATA_TYPE_UINT16,
               scale_bytes, a.scale, a.num_blocks, a.N_pad, a.N_pad, C::kPair,
               C::kRows * 64, CU_TENSOR_MAP_SWIZZLE_NONE);

  launch_clusters<&few_kernel<C>, C>(a.device, a.stream, p.num_clusters,
                                     plan.split, x_map, w_map, s_map, p);
}

template <typename T>
bool launch_few_type(const PrefillArgs& a, const FewPlan& plan) {
  const int key =
      plan.rows * 100000 + plan.sets * 10000 + plan.tokens * 10 + plan.blocks;
  switch (key) {
#define TERNARY_FEW(r, s, n, b)                    \
  case r * 100000 + s * 10000 + n * 10 + b:        \
    launch_few<FewConfig<T, r, s, n, b>>(a, plan); \
    return true;
    TERNARY_FEW(3, 2, 8, 1)
    TERNARY_FEW(1, 3, 8, 2)
    TERNARY_FEW(3, 2, 16, 1)
    TERNARY_FEW(1, 3, 16, 2)
    TERNARY_FEW(3, 1, 32, 1)
    TERNARY_FEW(1, 3, 32, 2)
    TERNARY_FEW(3, 1, 64, 1)
    TERNARY_FEW(2, 2, 64, 1)
    TERNARY_FEW(1, 4, 64, 1)
#undef TERNARY_FEW
    default:
      return false;
  }
}

bool launch_few_half(const PrefillArgs& a, const FewPlan& plan);
bool launch_few_bfloat16(const PrefillArgs& a, const FewPlan& plan);
// Clusters of `size` blocks that the current device runs at one time, with one
// or two blocks per multiprocessor.
int few_max_clusters(int blocks, int size);

}  // namespace vllm::ternary::sm90
