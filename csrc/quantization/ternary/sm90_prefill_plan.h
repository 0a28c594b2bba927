// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// From a product's sizes to the tiles of the Hopper prefill kernels: what a cut
// costs, and the choice. Host code without CUDA.
#pragma once

#include <algorithm>
#include <climits>

#include "sm90_tiles.h"

namespace vllm::ternary::sm90 {

// How one launch is cut up. `tokens` x 64 * `warpgroups` * `tiles` is the
// output tile of a thread block.
struct Plan {
  int warpgroups, tiles, tokens;
  int split;          // blocks that share a tile along K: 1, 2, 4, 8
  int multicast = 1;  // blocks that share the tokens' loads: 1, 2, 4
  int sets = 1;       // of warpgroups that take k-blocks in turn: 1, 2
  int stagger = 0;    // k-blocks between the starts of warpgroups
};

// A product in one launch, or in two that run side by side: rows
// [0, first_rows) under `first`, the others under `second`.
struct Schedule {
  Plan first, second;
  int first_rows = INT_MAX;
  bool two = false;
  float cost = 0.0f;
};

constexpr float kSecondLaunchCost = 2.1f;  // of the second of two launches

// Thread blocks that run at one time, as clusters of 1, 2, 4 and 8.
struct Slots {
  int clusters[4];
};

// Products of more operations than this run at the card's power limit, where
// the tile of 256 tokens, which brings twice the bytes of tokens through the L2
// cache, loses what it gains elsewhere.
constexpr double kLongProduct = 6e11;
constexpr float kLongFactor = 1.08f;

constexpr int kSplits[] = {1, 2, 4, 8};

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Clusters of a variant and a split that run at one time; 0: too large ones.
inline int clusters_of(const Variant& v, int split_log2, const Slots& slots) {
  const int size_log2 = split_log2 + v.multicast / 2;  // 1, 2, 4: 0, 1, 2
  return size_log2 < 4 ? slots.clusters[size_log2] : 0;
}

// Whether there is K enough for a split, and for every set of a block. A tile
// is a Variant or a Plan.
template <typename Tile>
bool splits(const Tile& v, int split, int k_blocks) {
  return split <= v.tokens / 8 && split * v.sets <= k_blocks;
}

inline Plan plan_of(const Variant& v, int split) {
  return {v.warpgroups, v.tiles, v.tokens, split, v.multicast, v.sets};
}

// Time of `row_tiles` x 64 rows by M tokens under a variant and a split.
inline float launch_cost(const Variant& v, int split_log2, int M, int row_tiles,
                         int k_blocks, const Slots& slots,
                         const SplitCost& split_cost = kSplit) {
  const int split = kSplits[split_log2], rows = v.warpgroups * v.tiles;
  const int tiles =
      ceil_div(row_tiles, rows * v.multicast) * ceil_div(M, v.tokens);
  const int waves = ceil_div(tiles, clusters_of(v, split_log2, slots));
  float wave = ceil_div(k_blocks, split) * rows * v.unit + v.wave;
  const double operations = 2.0 * 64 * 128 * row_tiles * k_blocks * M;
  if (v.tokens == 256 && operations > kLongProduct) wave *= kLongFactor;
  if (split > 1) {
    // A tile of 64 rows holds tokens / 4 KiB of partial sums.
    const float sent = rows * v.tokens * 0.25f * (split - 1) / split;
    wave += split_cost.meeting + split_cost.exchange * sent;
  }
  return waves * wave;
}

struct Choice {
  Plan plan;
  float cost;
};

// The cheapest single launch. `fine`: several scales in a k-block, which only
// the tiles of three warpgroups are built for.
inline Choice cheapest(int M, int row_tiles, int k_blocks, bool fine,
                       const Slots& slots) {
  Choice best{{}, 1e30f};
  for (const Variant& v : kVariants) {
    if (fine && v.warpgroups != 3) continue;
    for (int s = 0; s < 4; ++s) {
      if (!splits(v, kSplits[s], k_blocks) || clusters_of(v, s, slots) < 1) {
        continue;
      }
      const float cost = launch_cost(v, s, M, row_tiles, k_blocks, slots);
      if (cost < best.cost) {
        best = {plan_of(v, kSplits[s]), cost};
      }
    }
  }
  return best;
}

inline Schedule choose(int M, int N_pad, int K_pad, bool fine,
                       const Slots& slots) {
  const int row_tiles = N_pad / 64, k_blocks = K_pad / 128;
  const Choice one = cheapest(M, row_tiles, k_blocks, fine, slots);
  Schedule best;
  best.first = best.second = one.plan;
  float cost = one.cost;
  // Two launches: as many full waves as there are, and a better cut for the
  // rest.
  for (const Variant& v : kVariants) {
    if (fine && v.warpgroups != 3) continue;
    const int rows = v.warpgroups * v.tiles * v.multicast;
    const int columns = ceil_div(M, v.tokens);
    const int clusters = clusters_of(v, 0, slots);
    if (clusters < 1 || !splits(v, 1, k_blocks)) continue;
    const int waves = row_tiles / rows * columns / clusters;
    if (waves == 0) continue;
    const int first = waves * clusters / columns * rows;
    if (first == 0 || first >= row_tiles) continue;
    const float base = launch_cost(v, 0, M, first, k_blocks, slots);
    if (base + kSecondLaunchCost >= cost) continue;
    const Choice rest = cheapest(M, row_tiles - first, k_blocks, fine, slots);
    if (base + rest.cost + kSecondLaunchCost < cost) {
      cost = base + rest.cost + kSecondLaunchCost;
      best.first = plan_of(v, 1);
      best.second = rest.plan;
      best.first_rows = first * 64;
      best.two = true;
    }
  }
  best.cost = cost;
  return best;
}

}  // namespace vllm::ternary::sm90
