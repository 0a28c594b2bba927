// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Host side of the Hopper int8 kernels: parameters and the launch.
#pragma once

#include <algorithm>

#include "sm90_launch.cuh"
#include "sm90_s8.h"
#include "sm90_s8_kernel.cuh"
#include "sm90_s8_plan.h"

namespace vllm::ternary::s8 {

template <typename C>
void launch(const W2A8Args& a, const Plan& plan, int num_sms) {
  const int scale_bytes = a.scale_dtype == DType::kFloat ? 4 : 2;
  const bool in_parts = a.parts > 1 && a.part_ends != nullptr;
  KernelParams p{};
  p.xs = a.xs;
  p.scale = a.scale;
  p.bias = a.bias;
  p.part_ends = in_parts ? a.part_ends : nullptr;
  p.y = a.y;
  p.parts = a.parts;
  p.M = a.M;
  p.N = a.N;
  p.N_pad = a.N_pad;
  p.stages = (a.K_pad + 255) / 256;
  p.k_blocks = a.K_pad / 128;
  // For parts the most that the kernel may count: a part begins up to 15 rows
  // early and ends in a group of its own.
  const int spare = in_parts ? (a.parts - 1) * (15 + C::kRows - 1) : 0;
  p.row_groups = (a.N + spare + C::kRows - 1) / C::kRows;
  p.token_tiles = (a.M + C::kTokens - 1) / C::kTokens;
  p.token_group = std::min(p.token_tiles, kTokenGroup);
  p.split = plan.split;
  p.groups_log2 = floor_log2(C::kTokens / 8 / plan.split);
  const int num_tiles = p.row_groups * p.token_tiles;
  p.num_clusters = plan.split > 1 ? num_tiles : std::min(num_tiles, num_sms);
  p.dtype = a.dtype;
  p.scale_dtype = a.scale_dtype;
  p.blocks_per_scale = a.num_blocks == 1 ? p.k_blocks : a.block_size / 128;
  p.stage_tx_bytes = 2 * C::kHalfBytes + C::kCodeBytes;
  if (C::kMode == ScaleMode::kBlock) {
    p.stage_tx_bytes += 2 * C::kRows * scale_bytes;
  }
  p.tma_store = a.N % 8 == 0 && plan.split == 1;

  const CUtensorMap x_map =
      make_map(CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, a.xq, uint64_t(a.parts) * a.M,
               a.K_pad, a.K_pad, C::kTokens, 128, CU_TENSOR_MAP_SWIZZLE_128B);
  const CUtensorMap w_map = make_map(
      CU_TENSOR_MAP_DATA_TYPE_INT32, 4, a.weight, a.N_pad / 16, a.K_pad,
      a.K_pad, C::kRows / 16, 256, CU_TENSOR_MAP_SWIZZLE_NONE);
  CUtensorMap s_map = w_map, y_map = w_map;  // where they are not used
  if (C::kMode == ScaleMode::kBlock) {
    s_map = make_map(scale_bytes == 4 ? CU_TENSOR_MAP_DATA_TYPE_INT32
                                      : CU_TENSOR_MAP_DATA_TYPE_UINT16,
                     scale_bytes, a.scale, a.num_blocks, a.N_pad, a.N_pad, 1,
                     C::kRows, CU_TENSOR_MAP_SWIZZLE_NONE);
  }
  if (p.tma_store) {
    y_map = make_map(CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, a.y, a.M, a.N, a.N, 64,
                     64, CU_TENSOR_MAP_SWIZZLE_128B);
  }

  launch_clusters<&s8_kernel<C>, C>(a.device, a.stream, p.num_clusters,
                                    plan.split, x_map, w_map, s_map, y_map, p);
}

// Picks the kernel that was built for a plan; false if none was. One
// translation unit per mode.
bool launch_rows(const W2A8Args& a, const Plan& plan, int num_sms);
bool launch_blocks(const W2A8Args& a, const Plan& plan, int num_sms);
// Clusters of `size` blocks that the current device runs at one time.
int max_clusters(int size);

constexpr int plan_key(int warpgroups, int tiles, int tokens, int sets) {
  return ((warpgroups * 10 + tiles) * 1000 + tokens) * 10 + sets;
}

#define TERNARY_S8_VARIANT(mode, w, t, n, s)            \
  case plan_key(w, t, n, s):                            \
    launch<Config<mode, w, t, n, s>>(a, plan, num_sms); \
    return true;

}  // namespace vllm::ternary::s8
