// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The choice of a cut for the kernels for few tokens, as in
// sm90_prefill_plan.h.
#pragma once

#include <algorithm>

#include "sm90_tiles.h"

namespace vllm::ternary::sm90 {

// rows x sets warpgroups, tokens of a tile, and how many thread blocks of the
// kernel a multiprocessor can hold.
struct FewPlan {
  int rows, sets, tokens, blocks;
  int split;     // blocks of a cluster, which share a tile along K: 1 to 8
  int clusters;  // at most, at one time
};

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

// The smallest tile that holds all tokens; several of the largest.
constexpr int few_tile(int M) {
  return M <= 8 ? 8 : M <= 16 ? 16 : M <= 32 ? 32 : 64;
}

// Time of `row_tiles` x 64 rows by M tokens under a variant and a split, of
// whose clusters `clusters` run at one time. Where a multiprocessor could hold
// one block more than it gets, the next kernel of the stream begins while this
// one runs.
inline float few_cost(const FewVariant& v, int split, int M, int row_tiles,
                      int k_blocks, int clusters,
                      const FewCost& cost = kFewCost) {
  const int columns = (M + v.tokens - 1) / v.tokens;
  const int tiles = (row_tiles + v.rows - 1) / v.rows * columns;
  const int waves = (tiles + clusters - 1) / clusters;
  const int units = (k_blocks + split - 1) / split * v.rows * v.resident;
  float wave = v.wave + units * v.unit;
  if (split > 1) wave += cost.meeting + cost.token * v.tokens;
  return cost.launch + waves * wave;
}

struct FewChoice {
  FewPlan plan;
  float cost;
};

inline FewChoice few_choose(int M, int row_tiles, int k_blocks,
                            const FewSlots& slots) {
  FewChoice best{{}, 1e30f};
  for (const FewVariant& v : kFewVariants) {
    if (v.tokens != few_tile(M)) continue;
    const int pair = few_pair(v.tokens, v.blocks);
    const int stages = (k_blocks + pair - 1) / pair;
    for (int split = 1; split <= std::min(stages, kFewMostSplit); ++split) {
      const int clusters = slots.clusters[v.resident - 1][split];
      if (clusters < 1) continue;
      const float cost = few_cost(v, split, M, row_tiles, k_blocks, clusters);
      if (cost < best.cost) {
        best = {{v.rows, v.sets, v.tokens, v.blocks, split, clusters}, cost};
      }
    }
  }
  return best;
}

}  // namespace vllm::ternary::sm90
