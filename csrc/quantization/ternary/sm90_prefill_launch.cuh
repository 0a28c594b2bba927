// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Host side of the Hopper prefill kernels: parameters and the launch.
#pragma once

#include <algorithm>

#include "sm90_launch.cuh"
#include "sm90_prefill_kernel.cuh"
#include "sm90_prefill_plan.h"

namespace vllm::ternary::sm90 {

// Rows [begin, end) of the weight, multiples of 64 (end: or N_pad).
struct Rows {
  int begin, end;
};

template <typename C>
void launch(const PrefillArgs& whole, const Plan& plan, Rows rows, Chain chain,
            int num_sms) {
  const int scale_bytes = whole.scale_dtype == DType::kFloat ? 4 : 2;
  PrefillArgs a = whole;
  a.weight += int64_t(rows.begin / 16) * a.K_pad;
  a.scale =
      static_cast<const char*>(a.scale) + int64_t(rows.begin) * scale_bytes;
  if (a.bias)
    a.bias = static_cast<const char*>(a.bias) + int64_t(rows.begin) * 2;
  a.y = static_cast<char*>(a.y) + int64_t(rows.begin) * 2;
  a.N = std::min(a.N, rows.end) - rows.begin;
  a.N_pad = rows.end - rows.begin;

  const int cluster_size = plan.split * plan.multicast;
  if (a.K_pad / 128 < C::kSets * plan.split) {
    throw std::runtime_error("ternary prefill: a set without a k-block");
  }
  KernelParams p{};
  p.bias = a.bias;
  p.y = a.y;
  p.ldy = a.ldy;
  p.scale = a.scale;
  p.M = a.M;
  p.N = a.N;
  p.N_pad = a.N_pad;
  p.k_blocks = a.K_pad / 128;
  const int group_tiles = C::kRowTiles * plan.multicast;
  p.row_groups = (a.N_pad / 64 + group_tiles - 1) / group_tiles;
  p.token_tiles = (a.M + C::kTokens - 1) / C::kTokens;
  p.token_group = p.token_tiles < kTokenGroup ? p.token_tiles : kTokenGroup;
  p.split = plan.split;
  p.multicast = plan.multicast;
  p.split_log2 = floor_log2(plan.split);
  p.multicast_log2 = floor_log2(plan.multicast);
  p.groups_log2 = floor_log2(C::kTokens / 8 / plan.split);
  p.num_tiles = p.row_groups * p.token_tiles;
  p.by_group = Divider(p.token_group * p.row_groups);
  p.by_width = Divider(p.token_group);
  const int rest = p.token_tiles % p.token_group;
  p.by_last = Divider(rest > 0 ? rest : p.token_group);
  p.num_clusters = plan.split > 1 || C::kSets > 1
                       ? p.num_tiles
                       : std::min(p.num_tiles, num_sms / cluster_size);
  p.stagger = p.num_tiles > p.num_clusters && plan.stagger < p.k_blocks
                  ? plan.stagger
                  : 0;
  p.scale_dtype = a.scale_dtype;
  p.blocks_per_scale = a.num_blocks == 1 ? p.k_blocks : a.block_size / 128;
  p.scales_per_block =
      a.num_blocks > 1 && a.block_size < 128 ? 128 / a.block_size : 1;
  const bool wide = a.scale_dtype == DType::kFloat;
  const bool half = a.dtype == DType::kHalf;
  p.weight_tx_bytes = C::kCodeBytes;
  if (C::kMode == ScaleMode::kBlock) {
    p.weight_tx_bytes += C::kRowTiles * 64 * scale_bytes * p.scales_per_block;
  }
  // Where a block has one tile, waiting for the copy engine takes longer.
  p.tma_store = a.ldy % 8 == 0 && plan.split == 1 && C::kSets == 1;
  p.chain = chain;

  const CUtensorMapDataType x_type =
      half ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUtensorMap x_map =
      make_map(x_type, 2, a.x, a.M, a.K, a.ldx, C::kTokens / plan.multicast, 64,
               CU_TENSOR_MAP_SWIZZLE_128B);
  const CUtensorMap w_map = make_map(
      CU_TENSOR_MAP_DATA_TYPE_INT32, 4, a.weight, a.N_pad / 16, a.K_pad,
      a.K_pad, C::kRowTiles * 4, 128, CU_TENSOR_MAP_SWIZZLE_NONE);
  const CUtensorMap s_map = make_map(
      wide ? CU_TENSOR_MAP_DATA_TYPE_INT32 : CU_TENSOR_MAP_DATA_TYPE_UINT16,
      scale_bytes, a.scale, a.num_blocks, a.N_pad, whole.N_pad,
      p.scales_per_block, C::kRowTiles * 64, CU_TENSOR_MAP_SWIZZLE_NONE);

  // Without wide rows y is written by ordinary stores and needs no map.
  const CUtensorMap y_map = p.tma_store
                                ? make_map(x_type, 2, a.y, a.M, a.N, a.ldy, 64,
                                           64, CU_TENSOR_MAP_SWIZZLE_128B)
                                : x_map;

  launch_clusters<&prefill_kernel<C>, C>(a.device, a.stream, p.num_clusters,
                                         cluster_size, x_map, w_map, s_map,
                                         y_map, p);
}

// Picks the kernel that was built for a plan; false if none was.
template <typename T, ScaleMode kMode, int kGroups>
bool launch_variant(const PrefillArgs& a, const Plan& plan, Rows rows,
                    Chain chain, int num_sms) {
  const int key = plan.sets * 100000 + plan.warpgroups * 10000 +
                  plan.tiles * 1000 + plan.tokens;
  switch (key) {
#define TERNARY_VARIANT(w, t, n, s)                                     \
  case s * 100000 + w * 10000 + t * 1000 + n:                           \
    launch<Config<T, kMode, w, t, n, kGroups, s>>(a, plan, rows, chain, \
                                                  num_sms);             \
    return true;
    TERNARY_VARIANT(3, 1, 64, 1)
    TERNARY_VARIANT(3, 1, 128, 1)
    default:
      break;
  }
  if constexpr (kGroups == 1) {
    switch (key) {
      TERNARY_VARIANT(2, 1, 64, 1)
      TERNARY_VARIANT(2, 2, 64, 1)
      TERNARY_VARIANT(2, 1, 128, 1)
      TERNARY_VARIANT(1, 1, 128, 2)
      TERNARY_VARIANT(2, 2, 128, 1)
      TERNARY_VARIANT(2, 1, 256, 1)
#undef TERNARY_VARIANT
      default:
        break;
    }
  }
  return false;
}

template <typename T>
bool launch_type(const PrefillArgs& a, const Plan& plan, Rows rows, Chain chain,
                 int num_sms) {
  if (a.num_blocks == 1) {
    return launch_variant<T, ScaleMode::kRow, 1>(a, plan, rows, chain, num_sms);
  }
  if (a.block_size < 128) {
    return launch_variant<T, ScaleMode::kBlock, 4>(a, plan, rows, chain,
                                                   num_sms);
  }
  return launch_variant<T, ScaleMode::kBlock, 1>(a, plan, rows, chain, num_sms);
}

// One translation unit per type of activation.
bool launch_half(const PrefillArgs& a, const Plan& plan, Rows rows, Chain chain,
                 int num_sms);
bool launch_bfloat16(const PrefillArgs& a, const Plan& plan, Rows rows,
                     Chain chain, int num_sms);
// Clusters of `size` blocks that the current device runs at one time.
int max_clusters(int size);

}  // namespace vllm::ternary::sm90
