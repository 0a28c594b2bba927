// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// What the parts of the Hopper int8 kernel agree on: tile sizes, the split of
// shared memory, the parameters of a launch, and which tile is whose.
#pragma once

#include <cstdint>

#include "cuda_common.h"

namespace vllm::ternary::s8 {

// kRow: one scale a row; sums stay int32 over all of K. kBlock: a scale per row
// and 128 k or a multiple; int32 sums of 128 k are scaled into float32 ones.
enum class ScaleMode { kRow, kBlock };

// Weights enter the products as -64, 0 and 64 (sm90_s8_kernel.cuh).
constexpr int kUnitLog2 = 6;
constexpr float kUnit = 1.0f / 64.0f;
// Beyond this K a sum of 128 * 1 might leave the range of to_float.
constexpr int kMostK = (1 << 15) - 128;

template <ScaleMode kMode_, int kWarpgroups_, int kTiles_, int kTokens_,
          int kSets_>
struct Config {
  static constexpr ScaleMode kMode = kMode_;
  static constexpr int kWarpgroups = kWarpgroups_;  // that own rows
  static constexpr int kTiles = kTiles_;            // of 64 rows, per warpgroup
  static constexpr int kTokens = kTokens_;
  // Sets of warpgroups that take turns along K; the first adds the sums up.
  static constexpr int kSets = kSets_;
  static_assert(kMode == ScaleMode::kRow || (kSets == 1 && kTiles == 1));

  static constexpr int kRowTiles = kWarpgroups * kTiles;
  static constexpr int kRows = kRowTiles * 64;
  static constexpr int kConsumers = kWarpgroups * kSets;
  static constexpr int kThreads = (kConsumers + 1) * 128;
  // Together no more than what the block was launched with: 168 x 384,
  // 128 x 512 or 96 x 640.
  static constexpr int kConsumerRegs = kConsumers == 2   ? 232
                                       : kConsumers == 3 ? 152
                                                         : 104;
  static constexpr int kProducerRegs = kConsumers == 3 ? 56 : 40;

  // One stage is 256 k: tokens in two halves of 128 k (128-byte rows), codes,
  // the scales of both halves.
  static constexpr int kHalfBytes = kTokens * 128;
  static constexpr int kCodeBytes = kRows * 64;
  static constexpr int kScaleRow = kMode == ScaleMode::kRow ? 0 : kRows * 4;
  static constexpr int kCodesAt = 2 * kHalfBytes;
  static constexpr int kScalesAt = kCodesAt + kCodeBytes;
  static constexpr int kStageBytes =
      (kScalesAt + 2 * kScaleRow + 1023) / 1024 * 1024;
  // Output staging, per warpgroup: buffers of 64 tokens x 64 rows.
  static constexpr int kOutBuffers = kTiles * kTokens == 64 ? 1 : 2;
  static constexpr int kOutBytes = kWarpgroups * kOutBuffers * 8192;
  static constexpr int kTokenScaleBytes = kWarpgroups * kTokens * 4;
  static constexpr int kSumBytes = kRows * kTokens * 4;
  static constexpr int kMeetBytes = kSets > 1 ? kSumBytes : 0;
  static constexpr int kBarBytes = 256;
  static constexpr int kFixedBytes =
      1024 + kOutBytes + kMeetBytes + kTokenScaleBytes + kBarBytes;
  static constexpr int kStagesFit = (227 * 1024 - kFixedBytes) / kStageBytes;
  // A multiple of the sets, so that each stage is always the same set's: by one
  // bit of parity a set cannot tell another's round, still on its way, from its
  // own.
  static constexpr int kStages =
      (kStagesFit < 8 ? kStagesFit : 8) / kSets * kSets;
  static constexpr int kSmemBytes = kFixedBytes + kStages * kStageBytes;
  static_assert(kStages >= 3);
  // The partial sums of a split product lie where the stages were.
  static_assert(kSumBytes <= kStages * kStageBytes);
};

struct KernelParams {
  const float* xs;
  const void* scale;  // read here under kRow only
  const void* bias;
  const int32_t* part_ends;  // nullptr for one part
  void* y;
  int parts, M, N, N_pad;
  int stages;       // ceil(K_pad / 256)
  int k_blocks;     // K_pad / 128
  int row_groups;   // of kRows rows; for several parts the kernel counts them
  int token_tiles;  // ceil(M / kTokens)
  int token_group;  // token tiles that are walked before the next row group
  int split;        // blocks that share a tile along K
  int groups_log2;  // log2 of the 8-token groups per block under `split`
  int num_clusters;
  int blocks_per_scale;  // k-blocks of 128 under one scale
  uint32_t stage_tx_bytes;
  DType dtype, scale_dtype;
  bool tma_store;  // rows of y are 16-byte aligned
};

// Rows [row, row + kRows) by tokens [token, token + kTokens) of the product
// with the activations of `part`, whose rows are [lo, hi); stages
// [begin, end) of K.
struct Tile {
  int row, token, begin, end, part, lo, hi;
};

// The parts' rows in groups (of `rows`): a part's first group begins at the
// 16-row tile in which the part does, so that a group has one part's tokens.
// Rows of the neighbours in it are computed and not stored.
__device__ __forceinline__ int part_groups(int begin, int end, int rows) {
  return end > begin ? (end - (begin & ~15) + rows - 1) / rows : 0;
}

template <typename C>
__device__ __forceinline__ int count_row_groups(const KernelParams& p) {
  if (p.part_ends == nullptr) return p.row_groups;
  int groups = 0, begin = 0;
  for (int i = 0; i < p.parts; ++i) {
    const int end = min(p.part_ends[i], p.N);
    groups += part_groups(begin, end, C::kRows);
    begin = max(begin, end);
  }
  return groups;
}

// Where tile `index` lies. Row groups follow each other within a group of
// token tiles, so that blocks that run at one time share tokens and weights in
// the L2 cache.
template <typename C>
__device__ __forceinline__ Tile locate(const KernelParams& p, int row_groups,
                                       int index, int k_part) {
  Tile t;
  int row = index, token = 0;
  if (p.token_tiles > 1) {
    const int group_tiles = p.token_group * row_groups;
    const int group = index / group_tiles, rest = index % group_tiles;
    const int first = group * p.token_group;
    const int width = min(p.token_group, p.token_tiles - first);
    row = rest / width;
    token = first + rest % width;
  }
  t.token = token * C::kTokens;
  t.row = row * C::kRows;
  t.part = 0;
  t.lo = 0;
  t.hi = p.N;
  if (p.part_ends != nullptr) {
    for (int i = 0; i < p.parts; ++i) {
      const int end = min(p.part_ends[i], p.N);
      const int groups = part_groups(t.lo, end, C::kRows);
      if (row < groups) {
        t.part = i;
        t.row = (t.lo & ~15) + row * C::kRows;
        t.hi = end;
        break;
      }
      row -= groups;
      t.lo = max(t.lo, end);
    }
  }
  t.begin = 0;
  t.end = p.stages;
  if (p.split > 1) {
    t.begin = p.stages * k_part / p.split;
    t.end = p.stages * (k_part + 1) / p.split;
  }
  return t;
}

}  // namespace vllm::ternary::s8
