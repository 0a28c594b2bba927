// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
#include "gemm_dispatch.h"

#include <algorithm>

#include "device_info.h"
#include "dispatch_table.h"
#include "mma_gemm.h"

namespace vllm::ternary {

// Builds without the sm_90a objects leave these undefined.
__attribute__((weak)) bool sm90_prefill_supported(const PrefillArgs& args);
__attribute__((weak)) void sm90_prefill_gemm(const PrefillArgs& args);
__attribute__((weak)) bool sm90_s8_supported(const W2A8Args& args);
__attribute__((weak)) void sm90_s8_gemm(const W2A8Args& args);

namespace {

// How far two sizes are apart, as a ratio of at least 1.
double ratio(int a, int b) {
  return a > b ? double(a) / double(b) : double(b) / double(a);
}

// The measured entry for the class of M (the first with at least M tokens)
// whose N and K are nearest, or nullptr when M is beyond the table.
const DispatchEntry* nearest_entry(int M, int N, int K) {
  const DispatchEntry* found = nullptr;
  double least = 0.0;
  for (const DispatchEntry& e : kDispatchTable) {
    if (e.M < M || (found && e.M > found->M)) continue;
    const double distance = ratio(e.N, N) * ratio(e.K, K);
    if (!found || distance < least) {
      found = &e;
      least = distance;
    }
  }
  return found;
}

// Without a measurement: cut K until a CTA's part of x takes less than 100 KiB.
MmaConfig default_config(const GemmArgs& a, const DeviceInfo& device) {
  MmaConfig config{0, device.processors, 1};
  const int64_t x_bytes = int64_t(std::min(a.M, 64)) * a.K_pad * 2;
  while (config.split < 8 && x_bytes / config.split > (100 << 10)) {
    config.split *= 2;
  }
  config.groups = std::max(1, device.processors / config.split);
  return config;
}

}  // namespace

bool sm90_gemm_supported(const GemmArgs& a) {
  return device_info(a.device).capability == 90 && sm90_prefill_supported &&
         sm90_prefill_gemm && sm90_prefill_supported(a);
}

void sm90_gemm(const GemmArgs& a) { sm90_prefill_gemm(a); }

void dispatch_gemm(const GemmArgs& a) {
  const DeviceInfo& device = device_info(a.device);
  const DispatchEntry* entry = nearest_entry(a.M, a.N, a.K);
  if ((!entry || entry->kernel == 1) && sm90_gemm_supported(a)) {
    sm90_gemm(a);
  } else if (!mma_supported(a)) {
    reference_gemm(a);
  } else if (entry && entry->kernel == 0 && device.capability >= 90) {
    const int groups = device.processors * entry->waves / entry->split;
    mma_gemm(a, {0, std::max(1, groups), entry->split});
  } else {
    mma_gemm(a, default_config(a, device));
  }
}

void w2a8_with(const W2A8Args& a, int kernel, int groups, int split) {
  const bool hopper = device_info(a.device).capability == 90 &&
                      sm90_s8_supported && sm90_s8_gemm && sm90_s8_supported(a);
  if (kernel == 2 && hopper) {
    sm90_s8_gemm(a);
  } else if (kernel == 0) {
    reference_w2a8(a);
  } else {
    throw std::runtime_error(
        "ternary_gemm_w2a8: the kernel asked for does not take this call");
  }
}

void dispatch_w2a8(const W2A8Args& a) {
  const bool hopper = device_info(a.device).capability == 90 &&
                      sm90_s8_supported && sm90_s8_gemm && sm90_s8_supported(a);
  w2a8_with(a, hopper ? 2 : 0, 0, 0);
}

}  // namespace vllm::ternary
