// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The cost model of the Hopper kernels for tune_sm90.py: the tiles that there
// are, and what a cut costs, both by the headers that the kernels choose with.
// A kernel is 0: many tokens; 1: few; 2: quantized tokens, a scale per row; 3:
// the same, a scale per block.
#include <algorithm>
#include <iterator>

#include "sm90_prefill_few_plan.h"
#include "sm90_prefill_plan.h"
#include "sm90_s8_plan.h"

namespace sm90 = vllm::ternary::sm90;
namespace s8 = vllm::ternary::s8;

namespace {

// Calls f(variants, kernel's shared costs) for a kernel of quantized tokens.
template <typename F>
double with_s8(int kernel, F f) {
  return kernel == 2 ? f(s8::kRowVariants, s8::kRowSplit)
                     : f(s8::kBlockVariants, s8::kBlockSplit);
}

int split_index(int split) {
  const auto* at =
      std::find(std::begin(sm90::kSplits), std::end(sm90::kSplits), split);
  return int(at - std::begin(sm90::kSplits));
}

int step_count(int K_pad, int step) { return (K_pad + step - 1) / step; }

}  // namespace

extern "C" {

// Writes five numbers for each tile, unused ones 0, and its two costs; returns
// how many tiles there are.
int tiles(int kernel, int* shapes, float* costs) {
  int count = 0;
  const auto put = [&](int a, int b, int c, int d, int e, float unit,
                       float wave) {
    const int shape[5] = {a, b, c, d, e};
    std::copy(shape, shape + 5, shapes + 5 * count);
    costs[2 * count] = unit;
    costs[2 * count + 1] = wave;
    ++count;
  };
  if (kernel == 0) {
    for (const auto& v : sm90::kVariants) {
      put(v.warpgroups, v.tiles, v.tokens, v.sets, v.multicast, v.unit, v.wave);
    }
  } else if (kernel == 1) {
    for (const auto& v : sm90::kFewVariants) {
      put(v.rows, v.sets, v.tokens, v.blocks, v.resident, v.unit, v.wave);
    }
  } else {
    with_s8(kernel, [&](const auto& variants, s8::SplitCost) {
      for (const auto& v : variants) {
        put(v.warpgroups, v.tiles, v.tokens, v.sets, 0, v.unit, v.wave);
      }
      return 0.0;
    });
  }
  return count;
}

// What all tiles of a kernel share: launch, meeting, and the third by its name
// in sm90_tiles.h.
void shared_costs(int kernel, float* to) {
  if (kernel == 0) {
    to[0] = 0.f, to[1] = sm90::kSplit.meeting, to[2] = sm90::kSplit.exchange;
  } else if (kernel == 1) {
    to[0] = sm90::kFewCost.launch, to[1] = sm90::kFewCost.meeting;
    to[2] = sm90::kFewCost.token;
  } else {
    with_s8(kernel, [&](const auto&, s8::SplitCost c) {
      to[0] = 0.f, to[1] = c.meeting, to[2] = c.exchange;
      return 0.0;
    });
  }
}

// Microseconds of a product under tile `index` and `split`, of whose clusters
// `clusters` run at one time, if the tile cost `costs[0..1]` and all share
// `costs[2..4]`. Negative where the kernel would not choose this cut.
double cost(int kernel, int index, int split, int clusters, int M, int N_pad,
            int K_pad, const float* costs) {
  if (clusters < 1) return -1.0;
  const int s = split_index(split);
  if (kernel == 1) {
    sm90::FewVariant v = sm90::kFewVariants[index];
    const int pair = sm90::few_pair(v.tokens, v.blocks);
    if (v.tokens != sm90::few_tile(M) || split > sm90::kFewMostSplit ||
        split > step_count(K_pad / 128, pair)) {
      return -1.0;
    }
    v.unit = costs[0], v.wave = costs[1];
    return few_cost(v, split, M, N_pad / 64, K_pad / 128, clusters,
                    {costs[2], costs[3], costs[4]});
  }
  if (s == int(std::size(sm90::kSplits))) return -1.0;
  if (kernel == 0) {
    sm90::Variant v = sm90::kVariants[index];
    const int size = s + v.multicast / 2;
    if (!splits(v, split, K_pad / 128) || size > 3) return -1.0;
    v.unit = costs[0], v.wave = costs[1];
    sm90::Slots slots{};
    slots.clusters[size] = clusters;
    return launch_cost(v, s, M, N_pad / 64, K_pad / 128, slots,
                       {costs[3], costs[4]});
  }
  return with_s8(kernel, [&](const auto& variants, s8::SplitCost) {
    s8::Variant v = variants[index];
    if (split * v.sets > step_count(K_pad, 256)) return -1.0f;
    v.unit = costs[0], v.wave = costs[1];
    s8::Slots slots{};
    slots.clusters[s] = clusters;
    return launch_cost(v, s, M, N_pad, step_count(K_pad, 256),
                       {costs[3], costs[4]}, slots);
  });
}
}
