// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Entry of the Hopper prefill kernels: what they take, and the launch.
#include "device_info.h"
#include "sm90_prefill_few_launch.cuh"
#include "sm90_prefill_launch.cuh"

namespace vllm::ternary {
namespace {

using namespace sm90;

struct Device {
  int processors = 0;
  Slots slots{};
  FewSlots few_slots{};
};

// How many blocks of the largest kind a device runs at one time, alone and in
// clusters (which cannot use every multiprocessor). Asked once per device.
const Device& device_of(int index) {
  return kept_per_device<Device>(index, [index] {
    Device d;
    d.processors = device_info(index).processors;
    d.slots.clusters[0] = d.processors;
    for (int s = 1; s < 4; ++s) d.slots.clusters[s] = max_clusters(kSplits[s]);
    for (int blocks = 1; blocks <= 2; ++blocks) {
      for (int s = 1; s <= kFewMostSplit; ++s) {
        d.few_slots.clusters[blocks - 1][s] = few_max_clusters(blocks, s);
      }
    }
    return d;
  });
}

void run(const PrefillArgs& a, const Plan& plan, Rows rows, Chain chain,
         int num_sms) {
  const bool found = a.dtype == DType::kHalf
                         ? launch_half(a, plan, rows, chain, num_sms)
                         : launch_bfloat16(a, plan, rows, chain, num_sms);
  if (!found)
    throw std::runtime_error("ternary prefill: no kernel for the plan");
}

void run_few(const PrefillArgs& a, const FewPlan& plan) {
  const bool found = a.dtype == DType::kHalf ? launch_few_half(a, plan)
                                             : launch_few_bfloat16(a, plan);
  if (!found) throw std::runtime_error("ternary prefill: no kernel for few");
}

// More tokens than this never go to the kernels for few.
constexpr int kFewMostTokens = 1024;

// Which kernels take a call.
struct Takes {
  bool few, many;
  bool fine;  // several scales in a k-block
};

Takes takes(const PrefillArgs& a) {
  const bool rows = a.num_blocks == 1;
  Takes t;
  t.fine = !rows && a.block_size < 128;
  t.few = a.M <= kFewMostTokens && (rows || a.block_size % 128 == 0);
  // Where many tokens meet a scale per block, the scale takes their type; fp16
  // has not the range for others.
  t.many =
      rows ||
      ((a.block_size == 32 || a.block_size == 64 || a.block_size % 128 == 0) &&
       (a.dtype != DType::kHalf || a.scale_dtype == DType::kHalf));
  return t;
}

// One way to compute a product: few tokens, or many (one launch or two).
struct Way {
  bool is_few = false;
  FewPlan few;
  Schedule many;
};

Way choose_way(int M, int N_pad, int K_pad, const Takes& t, const Device& d) {
  Way w;
  const int row_tiles = N_pad / 64, k_blocks = K_pad / 128;
  float cost = 1e30f;
  if (t.many) {
    w.many = choose(M, N_pad, K_pad, t.fine, d.slots);
    cost = w.many.cost;
  }
  if (t.few) {
    const FewChoice c = few_choose(M, row_tiles, k_blocks, d.few_slots);
    w.is_few = c.cost < cost;
    w.few = c.plan;
  }
  return w;
}

// The ways of recent sizes: choosing takes some ten microseconds.
const Way& way_of(const PrefillArgs& a, const Takes& t, const Device& d) {
  struct Entry {
    int M = 0, N_pad = 0, K_pad = 0, kind = 0, device = 0;
    Way way;
  };
  constexpr unsigned kEntries = 256;
  static thread_local Entry entries[kEntries];
  const int kind = t.few + 2 * t.many + 4 * t.fine;
  const unsigned hash = (unsigned(a.M) * 31u + unsigned(a.N_pad) / 64u) * 31u +
                        unsigned(a.K_pad) / 128u + unsigned(kind);
  Entry& e = entries[(hash ^ (hash >> 8)) % kEntries];
  if (e.M != a.M || e.N_pad != a.N_pad || e.K_pad != a.K_pad ||
      e.kind != kind || e.device != a.device) {
    e = {a.M,  a.N_pad,  a.K_pad,
         kind, a.device, choose_way(a.M, a.N_pad, a.K_pad, t, d)};
  }
  return e.way;
}

}  // namespace

bool sm90_prefill_supported(const PrefillArgs& a) {
  if (a.dtype != DType::kHalf && a.dtype != DType::kBFloat16) return false;
  if (a.M < 1 || a.N < 1 || a.K < 1 || a.zero_point != nullptr) return false;
  const Takes t = takes(a);
  if (!t.many && (!t.few || a.M > 64)) return false;
  const auto aligned = [](const void* p) {
    return reinterpret_cast<uintptr_t>(p) % 16 == 0;
  };
  return a.ldx % 8 == 0 && a.ldx >= a.K && aligned(a.x) && aligned(a.weight) &&
         aligned(a.scale) && aligned(a.y);
}

void sm90_prefill_gemm(const PrefillArgs& a) {
  const Device& d = device_of(a.device);
  const Way& w = way_of(a, takes(a), d);
  if (w.is_few) {
    run_few(a, w.few);
    return;
  }
  const Schedule& s = w.many;
  if (!s.two) {
    run(a, s.first, {0, a.N_pad}, Chain::kAlone, d.processors);
    return;
  }
  run(a, s.first, {0, s.first_rows}, Chain::kFirst, d.processors);
  run(a, s.second, {s.first_rows, a.N_pad}, Chain::kSecond, d.processors);
}

void sm90_prefill_gemm_cut(const PrefillArgs& a, const int64_t* cut) {
  const Takes t = takes(a);
  int c[6];
  for (int i = 0; i < 6; ++i) c[i] = int(cut[i + 1]);
  if (!(cut[0] ? t.few : t.many)) {
    throw std::runtime_error("the Hopper kernel does not take this call");
  }
  const int k_blocks = a.K_pad / 128;
  if (cut[0]) {
    const FewPlan plan{c[0], c[1], c[2],
                       c[3], c[4], sm90_prefill_clusters(a.device, c[5], c[4])};
    const int pair = few_pair(plan.tokens, plan.blocks);
    if (plan.clusters < 1 || plan.split > ceil_div(k_blocks, pair)) {
      throw std::runtime_error("ternary prefill: no kernel for few");
    }
    run_few(a, plan);
  } else {
    const Plan plan{c[0], c[1], c[2], c[3], c[4], c[5]};
    if (!splits(plan, plan.split, k_blocks)) {
      throw std::runtime_error("ternary prefill: no kernel for the plan");
    }
    run(a, plan, {0, a.N_pad}, Chain::kAlone, device_of(a.device).processors);
  }
}

int sm90_prefill_clusters(int device, int blocks, int split) {
  const Device& d = device_of(device);
  if (blocks >= 1 && blocks <= 2 && split >= 1 && split <= kFewMostSplit) {
    return d.few_slots.clusters[blocks - 1][split];
  }
  for (int s = 0; s < 4; ++s) {
    if (blocks == 0 && kSplits[s] == split) return d.slots.clusters[s];
  }
  return 0;
}

}  // namespace vllm::ternary
