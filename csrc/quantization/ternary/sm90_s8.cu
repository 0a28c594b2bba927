// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Entry of the Hopper int8 kernels: what they take, the choice, the launch.
#include "sm90_s8.h"

#include <cuda_runtime.h>

#include <cstdint>

#include "device_info.h"
#include "sm90_s8_launch.cuh"

namespace vllm::ternary {
namespace {

using namespace s8;

// How many blocks a device runs at one time, alone and in clusters (which
// cannot use every multiprocessor). Asked once per device.
const Slots& slots_of(int index) {
  return kept_per_device<Slots>(index, [index] {
    Slots slots{};
    slots.clusters[0] = device_info(index).processors;
    for (int s = 1; s < 4; ++s) slots.clusters[s] = max_clusters(kSplits[s]);
    return slots;
  });
}

void run(const W2A8Args& a, const Plan& plan) {
  const int processors = slots_of(a.device).clusters[0];
  const bool found = a.num_blocks > 1 ? launch_blocks(a, plan, processors)
                                      : launch_rows(a, plan, processors);
  if (!found)
    throw std::runtime_error("ternary_gemm_w2a8: no kernel for the plan");
}

}  // namespace

bool sm90_s8_supported(const W2A8Args& a) {
  if (a.dtype != DType::kHalf && a.dtype != DType::kBFloat16) return false;
  if (a.M < 1 || a.N < 1 || a.K < 1 || a.parts < 1 || a.K_pad > kMostK) {
    return false;
  }
  if (a.parts > 1 && a.part_ends == nullptr) return false;
  // The copy engine counts rows in 32 bits.
  if (int64_t(a.parts) * a.M > INT32_MAX) return false;
  if (a.num_blocks > 1 && a.block_size % 128 != 0) return false;
  const auto aligned = [](const void* p) {
    return reinterpret_cast<uintptr_t>(p) % 16 == 0;
  };
  return aligned(a.xq) && aligned(a.weight) && aligned(a.scale) && aligned(a.y);
}

void sm90_s8_gemm(const W2A8Args& a) {
  run(a, choose(a.M, a.N, a.K_pad, a.num_blocks > 1, slots_of(a.device)));
}

void sm90_s8_gemm_cut(const W2A8Args& a, const int64_t* cut) {
  int c[5];
  for (int i = 0; i < 5; ++i) c[i] = int(cut[i]);
  if (c[3] * c[4] > ceil_div(a.K_pad, 256)) {
    throw std::runtime_error("ternary_gemm_w2a8: no kernel for the plan");
  }
  run(a, {c[0], c[1], c[2], c[3], c[4]});
}

int sm90_s8_clusters(int device, int split) {
  for (int s = 0; s < 4; ++s) {
    if (kSplits[s] == split) return slots_of(device).clusters[s];
  }
  return 0;
}

}  // namespace vllm::ternary
