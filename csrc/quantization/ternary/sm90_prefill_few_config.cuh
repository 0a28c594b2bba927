// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Sizes and parameters of the Hopper kernels for few tokens.
#pragma once

#include "sm90_prefill_config.cuh"
#include "sm90_prefill_few_plan.h"

namespace vllm::ternary::sm90 {

template <typename T_, int kRows_, int kSets_, int kTokens_, int kBlocks_>
struct FewConfig {
  using T = T_;
  static constexpr int kRows = kRows_;  // tiles of 64 rows
  static constexpr int kSets = kSets_;  // of warpgroups, in turn along K
  static constexpr int kTokens = kTokens_;
  static constexpr int kBlocks = kBlocks_;  // per multiprocessor
  // With 8 tokens mma.sync keeps up, and its warps need not wait for each
  // other.
  static constexpr bool kSync = kTokens == 8;
  // K-blocks of a stage.
  static constexpr int kPair = few_pair(kTokens, kBlocks);

  static constexpr int kWarpgroups = kRows * kSets;
  static constexpr int kConsumers = kWarpgroups * 128;
  // A whole warpgroup where it gives registers to the others.
  static constexpr bool kGive = kBlocks == 1;
  static constexpr int kThreads = kConsumers + (kGive ? 128 : 64);
  // Together what the block was launched with: 72 x 896, 96 x 640, 128 x 512.
  static constexpr int kConsumerRegs = kWarpgroups == 6   ? 80
                                       : kWarpgroups == 4 ? 112
                                                          : 152;
  static constexpr int kProducerRegs = kWarpgroups == 6   ? 24
                                       : kWarpgroups == 4 ? 32
                                                          : 56;

  // One stage: tokens in runs of 64 k (128-byte rows), codes, scales.
  static constexpr int kHalfBytes = kTokens * 128;
  static constexpr int kCodesAt = 2 * kPair * kHalfBytes;
  static constexpr int kCodeBytes = kPair * kRows * 4 * 512;
  static constexpr int kScalesAt = kCodesAt + kCodeBytes;
  static constexpr int kScaleBytes = kPair * kRows * 64 * 4;
  static constexpr int kStageBytes =
      (kScalesAt + kScaleBytes + 1023) / 1024 * 1024;

  // Sums of a warpgroup, [token][row]; the pitch keeps both ways of access
  // free of bank conflicts.
  static constexpr int kPitch = 68;
  static constexpr int kSlotBytes = kTokens * kPitch * 4;
  static constexpr int kSlotsBytes = kWarpgroups * kSlotBytes;
  // Sums from the cluster, of this block's share of the tokens (rounded up).
  static constexpr int kExchangeBytes = kRows * (kTokens + 7) * 64 * 4;
  static constexpr int kMaxStages = 28 / kPair;
  static constexpr int kBarBytes = 512;
  static constexpr int kFixedBytes =
      1024 + kSlotsBytes + kExchangeBytes + kBarBytes;
  static constexpr int kSpace = (kBlocks == 1 ? 227 : 113) * 1024;
  static constexpr int kStagesFit = (kSpace - kFixedBytes) / kStageBytes;
  static constexpr int kStages =
      kStagesFit < kMaxStages ? kStagesFit : kMaxStages;
  static constexpr int kSmemBytes = kFixedBytes + kStages * kStageBytes;
  static_assert(kStages >= kSets && kStages >= 3);
};

// A k-stage below is the kPair k-blocks of a stage.
struct FewParams {
  const void* bias;
  void* y;
  int64_t ldy;
  int M, N;
  int k_stages;  // ceil(K_pad / 128 / kPair)
  int token_tiles;
  int num_tiles;  // row groups x token tiles, which come first
  int split;      // blocks of a cluster, along K
  int share;      // tokens that a block of a cluster finishes
  int num_clusters;
  int blocks_per_scale;
  DType scale_dtype;
  uint32_t stage_tx_bytes;
};

// Shared-memory addresses, this block's place in its cluster and its k-stages.
struct FewPlace {
  uint32_t stages, slots, exchange, full, empty, sums_in, sums_read;
  int cluster, rank, k_begin, k_end;
};

struct FewMaps {
  const CUtensorMap *x, *w, *s;
};

// A thread's place among the consumers; row, set and warp are the same in a
// warp.
struct FewConsumer {
  int row, set, warp, lane, thread;
};

}  // namespace vllm::ternary::sm90
