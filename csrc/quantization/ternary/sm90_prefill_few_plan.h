// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The choice of a cut for the kernels for few tokens, as in
// sm90_prefill_plan.h: a table of costs and an enumeration.
#pragma once

#include <algorithm>

namespace vllm::ternary::sm90 {

// rows x sets warpgroups, tokens of a tile, and how many thread blocks of the
// kernel a multiprocessor can hold.
struct FewPlan {
  int rows, sets, tokens, blocks;
  int split;     // blocks of a cluster, which share a tile along K: 1 to 8
  int clusters;  // at most, at one time
};

// Microseconds on an H200 (docs/kernels_prefill.md): `unit` for 64 rows of a
// k-block on one multiprocessor, `wave` for the ends of a tile. `resident`:
// thread blocks that a multiprocessor gets. Where it could hold one more, the
// next kernel of the stream begins while this one runs.
struct FewVariant {
  int rows, sets, tokens, blocks, resident;
  float unit, wave;
};
constexpr FewVariant kFewVariants[] = {
    {3, 2, 8, 1, 1, 0.112f, 0.45f},  {1, 3, 8, 2, 1, 0.180f, 0.10f},
    {1, 3, 8, 2, 2, 0.111f, 0.45f},  {3, 2, 16, 1, 1, 0.130f, 0.73f},
    {1, 3, 16, 2, 1, 0.190f, 0.35f}, {1, 3, 16, 2, 2, 0.124f, 0.73f},
    {3, 1, 32, 1, 1, 0.171f, 1.06f}, {1, 3, 32, 2, 1, 0.270f, 1.06f},
    {1, 3, 32, 2, 2, 0.173f, 1.06f}, {3, 1, 64, 1, 1, 0.245f, 0.80f},
    {2, 2, 64, 1, 1, 0.242f, 0.80f}, {1, 4, 64, 1, 1, 0.310f, 0.80f},
};
constexpr float kFewLaunchCost = 1.45f;
constexpr float kFewSplitCost = 0.32f;
constexpr float kFewTokenSplitCost = 0.006f;  // per token of a tile

// Thread blocks that run at one time as clusters of `split`, for one and for
// two blocks per multiprocessor.
constexpr int kFewMostSplit = 8;
struct FewSlots {
  int clusters[2][kFewMostSplit + 1];
};

// K-blocks of a stage, which is what a cluster's blocks share out.
constexpr int few_pair(int tokens, int blocks) {
  return tokens <= 16 || (tokens == 32 && blocks == 1) ? 2 : 1;
}

struct FewChoice {
  FewPlan plan;
  float cost;
};

inline FewChoice few_choose(int M, int row_tiles, int k_blocks,
                            const FewSlots& slots) {
  FewChoice best{{}, 1e30f};
  // The smallest tile that holds all tokens, or several of the largest.
  const int tokens = M <= 8 ? 8 : M <= 16 ? 16 : M <= 32 ? 32 : 64;
  for (const FewVariant& v : kFewVariants) {
    if (v.tokens != tokens) continue;
    const int columns = (M + v.tokens - 1) / v.tokens;
    const int tiles = (row_tiles + v.rows - 1) / v.rows * columns;
    const int pair = few_pair(v.tokens, v.blocks);
    const int stages = (k_blocks + pair - 1) / pair;
    for (int split = 1; split <= std::min(stages, kFewMostSplit); ++split) {
      const int clusters = slots.clusters[v.resident - 1][split];
      if (clusters < 1) continue;
      const int waves = (tiles + clusters - 1) / clusters;
      const int units = (k_blocks + split - 1) / split * v.rows * v.resident;
      float wave = v.wave + units * v.unit;
      if (split > 1) wave += kFewSplitCost + kFewTokenSplitCost * v.tokens;
      const float cost = kFewLaunchCost + waves * wave;
      if (cost < best.cost) {
        best = {{v.rows, v.sets, v.tokens, v.blocks, split, clusters}, cost};
      }
    }
  }
  return best;
}

}  // namespace vllm::ternary::sm90
