// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Entry of the Hopper prefill kernels: what they take, and the launch.
#include <mutex>

#include "sm90_prefill_launch.cuh"

namespace vllm::ternary {
namespace {

using namespace sm90;

struct Device {
  int processors = 0;
  Slots slots{};
};

// How many blocks of the largest kind a device runs at one time, alone and in
// clusters (which cannot use every multiprocessor). Asked once per device.
const Device& device_of(int index) {
  constexpr int kMost = 64;
  static Device devices[kMost];
  static bool known[kMost];
  static std::mutex mutex;  // std::call_once would need glibc 2.34
  const int i = index & (kMost - 1);
  const std::lock_guard<std::mutex> lock(mutex);
  if (!known[i]) {
    Device d;
    check(cudaDeviceGetAttribute(&d.processors, cudaDevAttrMultiProcessorCount,
                                 index),
          "multiprocessor count");
    d.slots.clusters[0] = d.processors;
    for (int s = 1; s < 4; ++s) d.slots.clusters[s] = max_clusters(kSplits[s]);
    devices[i] = d;
    known[i] = true;
  }
  return devices[i];
}

void run(const PrefillArgs& a, const Plan& plan, Rows rows, Chain chain,
         int num_sms) {
  const bool found = a.dtype == DType::kHalf
                         ? launch_half(a, plan, rows, chain, num_sms)
                         : launch_bfloat16(a, plan, rows, chain, num_sms);
  if (!found)
    throw std::runtime_error("ternary prefill: no kernel for the plan");
}

// The schedule of recent sizes: choosing takes some ten microseconds.
const Schedule& schedule_of(int M, int N_pad, int K_pad, bool fine, int device,
                            const Slots& slots) {
  struct Entry {
    int M = 0, N_pad = 0, K_pad = 0, fine = 0, device = 0;
    Schedule schedule;
  };
  constexpr unsigned kEntries = 256;
  static thread_local Entry entries[kEntries];
  const unsigned hash = (unsigned(M) * 31u + unsigned(N_pad) / 64u) * 31u +
                        unsigned(K_pad) / 128u + unsigned(fine);
  Entry& e = entries[(hash ^ (hash >> 8)) % kEntries];
  if (e.M != M || e.N_pad != N_pad || e.K_pad != K_pad || e.fine != fine ||
      e.device != device) {
    e = {M, N_pad, K_pad, fine, device, choose(M, N_pad, K_pad, fine, slots)};
  }
  return e.schedule;
}

bool fine_scales(const PrefillArgs& a) {
  return a.num_blocks > 1 && a.block_size < 128;
}

}  // namespace

bool sm90_prefill_supported(const PrefillArgs& a) {
  if (a.dtype != DType::kHalf && a.dtype != DType::kBFloat16) return false;
  if (a.M < 1 || a.N < 1 || a.K < 1 || a.zero_point != nullptr) return false;
  const bool rows = a.num_blocks == 1;
  const bool blocks =
      a.block_size == 32 || a.block_size == 64 || a.block_size % 128 == 0;
  if (!rows && !blocks) return false;
  // Under a scale per block the scale takes the activations' type; fp16 has not
  // the range for others.
  if (!rows && a.dtype == DType::kHalf && a.scale_dtype != DType::kHalf) {
    return false;
  }
  const auto aligned = [](const void* p) {
    return reinterpret_cast<uintptr_t>(p) % 16 == 0;
  };
  return a.ldx % 8 == 0 && a.ldx >= a.K && aligned(a.x) && aligned(a.weight) &&
         aligned(a.scale) && aligned(a.y);
}

void sm90_prefill_gemm(const PrefillArgs& a) {
  const Device& d = device_of(a.device);
  const Schedule& s =
      schedule_of(a.M, a.N_pad, a.K_pad, fine_scales(a), a.device, d.slots);
  if (!s.two) {
    run(a, s.first, {0, a.N_pad}, Chain::kAlone, d.processors);
    return;
  }
  run(a, s.first, {0, s.first_rows}, Chain::kFirst, d.processors);
  run(a, s.second, {s.first_rows, a.N_pad}, Chain::kSecond, d.processors);
}

}  // namespace vllm::ternary
