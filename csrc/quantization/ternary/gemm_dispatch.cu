// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
#include "gemm_dispatch.h"

#include <algorithm>

#include "device_info.h"
#include "dispatch_table.h"
#include "mma_gemm.h"
#include "mma_s8.h"

namespace vllm::ternary {

// Builds without the sm_90a objects leave these undefined.
__attribute__((weak)) bool sm90_prefill_supported(const PrefillArgs& args);
__attribute__((weak)) void sm90_prefill_gemm(const PrefillArgs& args);
__attribute__((weak)) void sm90_prefill_gemm_cut(const PrefillArgs& args,
                                                 const int64_t* cut);
__attribute__((weak)) int sm90_prefill_clusters(int device, int blocks,
                                                int split);
__attribute__((weak)) bool sm90_s8_supported(const W2A8Args& args);
__attribute__((weak)) void sm90_s8_gemm(const W2A8Args& args);
__attribute__((weak)) void sm90_s8_gemm_cut(const W2A8Args& args,
                                            const int64_t* cut);
__attribute__((weak)) int sm90_s8_clusters(int device, int split);

namespace {

// How far two sizes are apart, as a ratio of at least 1.
double ratio(int a, int b) {
  return a > b ? double(a) / double(b) : double(b) / double(a);
}

bool is_direct(const DispatchEntry& e) { return e.variant >= kDirect; }

// The measured entry for the class of M (the first with at least M tokens)
// whose N and K are nearest, or nullptr when M is beyond the table. `direct`:
// among those of the kernels with short chains, too.
template <size_t kEntries, typename Product>
const DispatchEntry* nearest_entry(const DispatchEntry (&table)[kEntries],
                                   const Product& a, bool direct) {
  const DispatchEntry* found = nullptr;
  double least = 0.0;
  for (const DispatchEntry& e : table) {
    if (e.M < a.M || (found && e.M > found->M)) continue;
    if (!direct && is_direct(e)) continue;
    const double distance = ratio(e.N, a.N) * ratio(e.K, a.K);
    if (!found || distance < least) {
      found = &e;
      least = distance;
    }
  }
  return found;
}

// The cut of an entry, which was measured on Hopper; without one, K is cut
// until a CTA's part of x takes less than 100 KiB.
MmaConfig config_of(const DispatchEntry* entry, int64_t x_bytes,
                    const DeviceInfo& device) {
  if (entry && entry->kernel != 1 && device.capability >= 90) {
    const int groups = device.processors * entry->sixths / 6 / entry->split;
    return {entry->variant, std::max(1, groups), entry->split};
  }
  MmaConfig config{0, device.processors, 1};
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

void sm90_gemm(const GemmArgs& a, const int64_t* cut) {
  cut ? sm90_prefill_gemm_cut(a, cut) : sm90_prefill_gemm(a);
}

void dispatch_gemm(const GemmArgs& a) {
  const DeviceInfo& device = device_info(a.device);
  const DispatchEntry* entry = nearest_entry(kDispatchTable, a, true);
  const int64_t x_bytes = int64_t(std::min(a.M, 64)) * a.K_pad * 2;
  if (entry && is_direct(*entry)) {
    if (mma_s8_direct(a, config_of(entry, x_bytes, device))) return;
    entry = nearest_entry(kDispatchTable, a, false);
  }
  if ((!entry || entry->kernel == 1) && sm90_gemm_supported(a)) {
    sm90_gemm(a);
  } else if (entry && entry->kernel == 2 && mma_s8_supported(a)) {
    mma_s8_gemm(a, config_of(entry, 2 * x_bytes, device));
  } else if (mma_supported(a)) {
    mma_gemm(a, config_of(entry, x_bytes, device));
  } else {
    reference_gemm(a);
  }
}

bool sm90_w2a8_supported(const W2A8Args& a) {
  return device_info(a.device).capability == 90 && sm90_s8_supported &&
         sm90_s8_gemm && sm90_s8_supported(a);
}

void sm90_w2a8(const W2A8Args& a, const int64_t* cut) {
  cut ? sm90_s8_gemm_cut(a, cut) : sm90_s8_gemm(a);
}

int sm90_clusters(int device, int kernel, int split) {
  if (device_info(device).capability != 90 || !sm90_prefill_clusters) return 0;
  return kernel == 3 ? sm90_s8_clusters(device, split)
                     : sm90_prefill_clusters(device, kernel, split);
}

void dispatch_w2a8(const QuantArgs& q, const W2A8Args& a) {
  const DeviceInfo& device = device_info(a.device);
  const DispatchEntry* entry = nearest_entry(kW2A8Table, a, true);
  const int64_t x_bytes = int64_t(std::min(a.M, 64)) * a.K_pad;
  bool quantized = false;
  if (entry && is_direct(*entry)) {
    const bool inside = entry->kernel == 2;
    if (!inside) quantize_tokens(q);
    quantized = !inside;
    const MmaConfig config = config_of(entry, x_bytes, device);
    if (mma_s8_direct(a, config, inside ? &q : nullptr)) return;
    entry = nearest_entry(kW2A8Table, a, false);
  }
  const MmaConfig config = config_of(entry, x_bytes, device);
  if (entry && entry->kernel == 2 && !quantized && mma_s8_quantizes(q, a)) {
    mma_s8_gemm(a, config, &q);
    return;
  }
  if (!quantized) quantize_tokens(q);
  if ((!entry || entry->kernel == 1) && sm90_w2a8_supported(a)) {
    sm90_w2a8(a);
  } else if (mma_s8_supported(a)) {
    mma_s8_gemm(a, config);
  } else {
    reference_w2a8(a);
  }
}

}  // namespace vllm::ternary
