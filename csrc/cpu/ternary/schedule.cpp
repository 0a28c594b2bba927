// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project

#include "schedule.h"

#include <algorithm>

#include <torch/csrc/stable/ops.h>

#include "../../quantization/ternary/ternary_common.h"

namespace vllm::ternary::cpu {
namespace {

constexpr int64_t kUnitsPerTile = kTileRows / kLaneRows;

struct Item {
  const Problem* problem;
  int64_t m_begin, m_end, unit_begin, unit_end;

  // Whether `next` only goes on where this one ends.
  bool continues(const Item& next) const {
    return problem == next.problem && m_begin == next.m_begin &&
           unit_end == next.unit_begin;
  }
};

// Lane groups per item: a memory tile, or less where threads would idle.
int64_t units_per_item(const std::vector<Problem>& problems) {
  const int64_t threads = torch::stable::get_num_threads();
  int64_t units = 0;
  for (const Problem& p : problems) {
    units += ceil_div(p.row_end - p.row_begin, kLaneRows);
  }
  int64_t step = kUnitsPerTile;
  while (step > 1 && units < 3 * threads * step) {
    step /= 2;
  }
  return step;
}

}  // namespace

void run_parallel(const std::vector<Problem>& problems, Kernel kernel,
                  int64_t token_chunk) {
  const int64_t step = units_per_item(problems);
  std::vector<Item> items;
  for (const Problem& p : problems) {
    const int64_t first = p.row_begin / kLaneRows;
    const int64_t last = ceil_div(p.row_end, kLaneRows);
    for (int64_t m = 0; m < p.size_m; m += token_chunk) {
      const int64_t m_end = std::min(m + token_chunk, p.size_m);
      for (int64_t unit = first; unit < last;) {
        const int64_t end = std::min((unit / step + 1) * step, last);
        items.push_back({&p, m, m_end, unit, end});
        unit = end;
      }
    }
  }
  torch::stable::parallel_for(
      0, static_cast<int64_t>(items.size()), 1,
      [&](int64_t begin, int64_t end) {
        while (begin < end) {
          Item item = items[begin++];
          while (begin < end && item.continues(items[begin])) {
            item.unit_end = items[begin++].unit_end;
          }
          Problem p = *item.problem;
          p.m_begin = item.m_begin;
          p.m_end = item.m_end;
          kernel(p, item.unit_begin, item.unit_end);
        }
      });
}

}  // namespace vllm::ternary::cpu
