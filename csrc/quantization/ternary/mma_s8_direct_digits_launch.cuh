// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Host side of mma_s8_direct_digits.cuh: how a product is cut among CTAs and
// warps, and which instantiation takes it.
#pragma once

#include <algorithm>

#include "mma_s8_direct_digits.cuh"

namespace vllm::ternary {

constexpr int kDigitsKTiles = 10;  // of a warp, at most

// Fills in the cut for `tokens` tokens, or one of 8 bits. Returns bytes of
// shared memory, 0 where nothing fits, and leaves the number of CTAs along N in
// `groups`.
inline int cut_digits(DigitsArgs& a, const MmaConfig& c,
                      const DeviceInfo& device, int tokens, bool bytes,
                      int& groups) {
  const int budget =
      direct_budget(device, std::clamp(c.variant, kDirect, kDirect + 2));
  const int row_tiles = a.N_pad / 16;
  // Of bytes, as many warps as share_largest() takes.
  const int most = std::min(a.all_k_tiles, bytes ? 2 : 8);
  a.split_log2 = floor_log2(std::clamp(c.split, 1, most));
  a.split = 1 << a.split_log2;
  a.parts_log2 = floor_log2(std::min(kDigitsWarps, a.all_k_tiles / a.split));
  a.step_log2 = floor_log2(kDigitsWarps) - a.parts_log2;
  const int parts = 1 << a.parts_log2, step = 1 << a.step_log2;
  a.k_tiles = a.all_k_tiles / (parts * a.split);
  a.k_rest = a.all_k_tiles % (parts * a.split);
  const int k_most = a.k_tiles + (a.k_rest > 0);
  if (k_most > kDigitsKTiles) return 0;
  const int cta_most = a.k_tiles * parts + std::min(a.k_rest, parts);
  a.slot_bytes = cta_most * 512;
  a.pitch = column_pitch(k_most);
  a.warp_bytes = tokens * (bytes ? 1 : 4) * a.pitch + k_most * 16;
  groups = std::clamp(c.groups, 1, std::min(row_tiles, 65535));
  while (true) {
    a.tiles = row_tiles / groups;
    a.tiles_rest = row_tiles % groups;
    const int all = a.tiles + (a.tiles_rest > 0);
    const int outputs = all * 16 * tokens;
    a.scale_bytes = all * 32;
    a.rank_sums = (outputs + a.split - 1) / a.split;
    // No more slots than might fit: bytes stay far below 2^31.
    a.slots = std::min(all, budget / a.slot_bytes);
    for (; a.slots > 0; --a.slots) {
      // A slot is always the same warps', unless nothing is refilled.
      if (a.slots < all && a.slots % step) continue;
      a.scale_at = a.slots * a.slot_bytes;
      a.columns_at =
          a.scale_at + (bytes ? all * 16 * 4 : cta_most * a.scale_bytes);
      a.sums_at = a.columns_at + kDigitsWarps * a.warp_bytes;
      a.bias_at = a.sums_at + outputs * kSumPitch;
      a.received_at = a.bias_at + all * 16 * 4;
      a.most_at = a.received_at + (a.split > 1 ? a.split * a.rank_sums * 4 : 0);
      a.barriers_at = a.most_at + (bytes ? kDigitsWarps * a.split * 4 : 0);
      a.barriers_at = (a.barriers_at + 7) / 8 * 8;
      const int per_warp = a.slots < all ? kDigitsWarps * a.slots : 0;
      const int all_bytes = a.barriers_at + (a.slots + 2 + per_warp) * 8;
      // A warp without a row tile looks where its first would be.
      const int seen = a.slots < all ? 0 : step * a.slot_bytes;
      if (all_bytes <= budget) return std::max(all_bytes, seen);
    }
    if (groups >= std::min(row_tiles, 65535)) return 0;
    groups = std::min({groups * 2, row_tiles, 65535});
  }
}

template <auto kKernel>
bool launch_digits(const DigitsArgs& a, const DeviceInfo& device, int groups,
                   int bytes, bool pdl) {
  static std::atomic<bool> raised[kMaxDevices] = {};
  launch_cut(kKernel, a, pdl, device, a.device, raised,
             dim3(unsigned(a.split), unsigned(groups)), kDigitsWarps * 32,
             bytes, a.stream);
  return true;
}

// False where this kernel does not take the product.
template <typename T, int kTokens, bool kBytes>
bool launch_direct_digits(DigitsArgs a, const MmaConfig& c) {
  const DeviceInfo& device = device_info(a.device);
  int groups = 0;
  const int bytes = cut_digits(a, c, device, kTokens, kBytes, groups);
  if (bytes == 0) return false;
  const int k_most = a.k_tiles + (a.k_rest > 0);
  const bool all = a.step_log2 == 0;
#define LAUNCH(held, rounds, all_warps)                                   \
  return launch_digits<                                                   \
      direct_digits_kernel<T, kTokens, held, rounds, all_warps, kBytes>>( \
      a, device, groups, bytes, c.pdl)
  if (k_most == 1 && all) LAUNCH(1, 0, true);
  if (k_most == 1) LAUNCH(1, 0, false);
  if (k_most == 2 && all) LAUNCH(2, 1, true);
  if (k_most == 2) LAUNCH(2, 1, false);
  if constexpr (kTokens == 1) {
    if (k_most == 3) LAUNCH(3, 1, true);
  }
  if (k_most <= 6) LAUNCH(0, 3, true);
  if (k_most <= kDigitsKTiles) LAUNCH(0, 5, true);
#undef LAUNCH
  return false;
}

// One or two tokens of 16 bits; or `bytes`, one of 8 with a scale per row.
template <typename T>
bool launch_direct_digits(const DigitsArgs& a, const MmaConfig& c, bool bytes) {
  if (bytes) return a.M == 1 && launch_direct_digits<T, 1, true>(a, c);
  return a.M == 1 ? launch_direct_digits<T, 1, false>(a, c)
                  : a.M == 2 && launch_direct_digits<T, 2, false>(a, c);
}

}  // namespace vllm::ternary
