// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// What the parts of the Hopper prefill kernel agree on: tile sizes, the split
// of shared memory, the parameters of a launch.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "sm90_prefill.h"

// A probe for timing the phases of a block; empty in the product.
#ifndef TERNARY_TRACE
  #define TERNARY_TRACE(event)
#endif

namespace vllm::ternary::sm90 {

// Where a scale meets its weights. kBlock: multiplied into the decoded weight,
// exact in fp16 for an fp16 scale, rounded to bf16 for bf16 activations. kRow:
// one scale a row, multiplied into the float32 sum, always exact.
enum class ScaleMode { kBlock, kRow };

template <typename T_, ScaleMode kMode_, int kWarpgroups_, int kTiles_,
          int kTokens_, int kGroups_, int kSets_ = 1>
struct Config {
  using T = T_;
  static constexpr ScaleMode kMode = kMode_;
  static constexpr int kWarpgroups = kWarpgroups_;  // that share a k-block
  static constexpr int kTiles = kTiles_;            // of 64 rows, per warpgroup
  static constexpr int kTokens = kTokens_;
  static constexpr int kGroups = kGroups_;  // scales per row and k-block: 1, 4
  static constexpr int kSets = kSets_;  // of warpgroups: they take turns at k

  static constexpr int kRowTiles = kWarpgroups * kTiles;
  static constexpr int kConsumers = kWarpgroups * kSets * 128;  // threads
  static constexpr int kThreads = kConsumers + 128;
  // Together what the block was launched with: 168 x 384 or 128 x 512.
  static constexpr int kConsumerRegs = kConsumers == 256 ? 232 : 152;
  static constexpr int kProducerRegs = kConsumers == 256 ? 40 : 56;

  // A job is what is decoded and committed together: kJobWords words of 32 k.
  // kBuffers jobs have registers; kPending of them may run while one is
  // decoded. (ptxas follows no more than these across the loop, and otherwise
  // waits after every single wgmma: its note C7513.)
  static constexpr int kJobWords = kTiles == 1 ? 2 : 1;
  static constexpr int kBuffers = 4 / kJobWords;
  static constexpr int kPending = kTiles;

  // One stage: tokens in two halves of 64 k (128-byte rows), codes, scales.
  static constexpr int kHalfBytes = kTokens * 128;
  static constexpr int kCodeBytes = kRowTiles * 4 * 512;
  static constexpr int kScaleBytes =
      kMode == ScaleMode::kRow ? 0 : kRowTiles * 64 * 4 * kGroups;
  static constexpr int kCodesAt = 2 * kHalfBytes;
  static constexpr int kScalesAt = kCodesAt + kCodeBytes;
  static constexpr int kStageBytes =
      (kScalesAt + kScaleBytes + 1023) / 1024 * 1024;
  // Output staging: per warpgroup, buffers of 64 tokens x 64 rows.
  static constexpr int kOutBuffers =
      kTokens == 256 || kTiles * kTokens / kSets == 64 ? 1 : 2;
  // Sets have one tile a block, and stage its output where the stages were.
  static constexpr int kOutBytes =
      kSets > 1 ? 0 : kWarpgroups * kOutBuffers * 8192;
  static constexpr int kBarBytes = 256;
  static constexpr int kFixedBytes = 1024 + kOutBytes + kBarBytes;
  static constexpr int kStagesFit = (227 * 1024 - kFixedBytes) / kStageBytes;
  // A multiple of the sets: then a stage is always the same set's, and one bit
  // is enough to tell its rounds apart.
  static constexpr int kStages =
      (kStagesFit < 10 ? kStagesFit : 10) / kSets * kSets;
  static constexpr int kSmemBytes = kFixedBytes + kStages * kStageBytes;
  static_assert(kStages >= 3 && kStages < 31);  // set up by a warp
  // The partial sums of a split product lie where the stages were; a set's sums
  // for the other in its own first stage, its output behind both of these.
  static constexpr int kSumBytes = kRowTiles * 64 * kTokens * 4;
  static constexpr int kOutAt = (kSets > 1 ? kSets : kStages) * kStageBytes;
  static_assert(kSumBytes <= kStages * kStageBytes);
  static_assert(kSets == 1 || (kSets == 2 && kRowTiles == 1));
  static_assert(kSets == 1 ||
                (kSumBytes / 2 <= kStageBytes &&
                 kOutAt + kSets * kOutBuffers * 8192 <= kStages * kStageBytes));
};

// A product cut into two launches runs them side by side: the first lets the
// second start only once the kernels before both are done, so that the second
// need not wait for the first before it works, only before it ends.
enum class Chain : int { kAlone, kFirst, kSecond };

// Division by a number that the host knows, of numbers from 0 to 2^31 - 1: the
// product of twice a number and 2^(31 + shift) / divisor, rounded up.
struct Divider {
  uint32_t factor = 0;
  int shift = 0;

  Divider() = default;
  explicit Divider(int divisor) {
    while ((int64_t(1) << shift) < divisor) ++shift;
    const uint64_t power = uint64_t(1) << (31 + shift);
    factor = uint32_t((power + divisor - 1) / divisor);
  }
  __host__ __device__ __forceinline__ int operator()(int n) const {
    return int(uint32_t(uint64_t(2u * n) * factor >> 32) >> shift);
  }
};

struct KernelParams {
  const void* scale;  // read here under kRow only
  const void* bias;
  void* y;
  int64_t ldy;
  int M, N, N_pad;
  int k_blocks;     // K_pad / 128
  int row_groups;   // ceil(N_pad / 64 / kRowTiles / multicast)
  int token_tiles;  // ceil(M / kTokens)
  int token_group;  // token tiles that are walked before the next row group
  int split;        // blocks that share a tile along K
  int multicast;    // blocks that share the loads of the tokens
  int split_log2, multicast_log2;
  int groups_log2;  // log2 of the 8-token groups per block under `split`
  int stagger;      // k-blocks by which a warpgroup starts after its neighbour
  int num_tiles;    // row_groups * token_tiles
  // By the tiles of a token group and by its width, and by that of the last
  // one.
  Divider by_group, by_width, by_last;
  int num_clusters;
  DType scale_dtype;
  int blocks_per_scale;      // k-blocks under one scale (kGroups == 1)
  int scales_per_block;      // 1; or 2, 4 (kGroups == 4)
  uint32_t weight_tx_bytes;  // codes and scales of a stage
  bool tma_store;            // rows of y are 16-byte aligned
  Chain chain;
};

struct Tile {
  int row_tile, token, kb_begin, kb_end;
};

// Where tile `index` of this block's cluster lies. Row groups follow each other
// within a group of token tiles, so that the blocks that run at one time share
// both tokens and weights in the L2 cache.
template <typename C>
__device__ __forceinline__ Tile locate(const KernelParams& p, int index,
                                       int row_part, int k_part) {
  Tile t;
  int row = index, token = 0;
  if (p.token_tiles > 1) {
    const int group = p.by_group(index);
    const int rest = index - group * p.token_group * p.row_groups;
    const int first = group * p.token_group;
    const int width = min(p.token_group, p.token_tiles - first);
    row = width == p.token_group ? p.by_width(rest) : p.by_last(rest);
    token = first + rest - row * width;
  }
  t.token = token * C::kTokens;
  t.row_tile = ((row << p.multicast_log2) + row_part) * C::kRowTiles;
  t.kb_begin = 0;
  t.kb_end = p.k_blocks;
  if (p.split_log2 > 0) {
    t.kb_begin = p.k_blocks * k_part >> p.split_log2;
    t.kb_end = p.k_blocks * (k_part + 1) >> p.split_log2;
  }
  return t;
}

}  // namespace vllm::ternary::sm90
