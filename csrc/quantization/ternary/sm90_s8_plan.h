// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// From a product's sizes to the tiles of the Hopper int8 kernels: what a cut
// costs, and the choice. Host code without CUDA.
#pragma once

#include <algorithm>

#include "sm90_tiles.h"

namespace vllm::ternary::s8 {

// `tokens` x 64 * `warpgroups` * `tiles` is the output tile of a thread block.
struct Plan {
  int warpgroups, tiles, tokens;
  int sets;   // of warpgroups that take turns along K: 1, 2
  int split;  // blocks that share a tile along K: 1, 2, 4, 8
};

// Thread blocks that run at one time, as clusters of 1, 2, 4 and 8.
struct Slots {
  int clusters[4];
};
constexpr int kSplits[] = {1, 2, 4, 8};

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Time of N rows by M tokens under a variant and a split.
inline float launch_cost(const Variant& v, int split_log2, int M, int N,
                         int stages, const SplitCost& cost,
                         const Slots& slots) {
  const int split = kSplits[split_log2], rows = v.warpgroups * v.tiles;
  const int tiles = ceil_div(N, rows * 64) * ceil_div(M, v.tokens);
  const int waves = ceil_div(tiles, slots.clusters[split_log2]);
  float wave = ceil_div(stages, split) * rows * v.unit + v.wave;
  if (split > 1) {
    // A tile of 64 rows holds tokens / 4 KiB of partial sums.
    const float sent = rows * v.tokens * 0.25f * (split - 1) / split;
    wave += cost.meeting + cost.exchange * sent;
  }
  return waves * wave;
}

template <int kCount>
Plan cheapest(const Variant (&variants)[kCount], const SplitCost& split_cost,
              int M, int N, int stages, const Slots& slots) {
  Plan best{};
  float least = 1e30f;
  for (const Variant& v : variants) {
    for (int s = 0; s < 4; ++s) {
      // Every set of every block has a stage at least.
      if (kSplits[s] * v.sets > stages || slots.clusters[s] < 1) continue;
      const float cost = launch_cost(v, s, M, N, stages, split_cost, slots);
      if (cost < least) {
        least = cost;
        best = {v.warpgroups, v.tiles, v.tokens, v.sets, kSplits[s]};
      }
    }
  }
  return best;
}

inline Plan choose(int M, int N, int K_pad, bool blocks, const Slots& slots) {
  const int stages = ceil_div(K_pad, 256);
  return blocks ? cheapest(kBlockVariants, kBlockSplit, M, N, stages, slots)
                : cheapest(kRowVariants, kRowSplit, M, N, stages, slots);
}

}  // namespace vllm::ternary::s8
