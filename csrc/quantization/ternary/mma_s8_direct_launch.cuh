// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Host side of the int8 kernels with short chains: how a product is cut among
// CTAs and warps, and which instantiation takes it.
#pragma once

#include "mma_s8_direct_digits_launch.cuh"
#include "mma_s8_direct_int8.cuh"

namespace vllm::ternary {

constexpr int kDirectWarps = 16;
constexpr int kDirectKTiles = 10;  // of a warp, at most

// Fills in the cut; `columns` of bytes, `tokens` of sums. Variant kDirect lets
// two CTAs share a multiprocessor, so that the next kernel's may begin, the two
// after it three and one. Returns bytes of shared memory, 0 where nothing fits,
// and leaves the number of CTAs along N in `groups`.
inline int cut_direct(DirectArgs& a, const MmaConfig& c,
                      const DeviceInfo& device, int columns, int tokens,
                      bool scales, int& groups) {
  constexpr int kShare[] = {2, 3, 1};
  const int share = kShare[std::clamp(c.variant - kDirect, 0, 2)];
  // A kilobyte per CTA is the system's.
  const int budget = (device.shared_memory + 1024) / share - 1024;
  const int row_tiles = a.N_pad / 16;
  a.split_log2 = floor_log2(std::clamp(c.split, 1, std::min(a.all_k_tiles, 8)));
  a.split = 1 << a.split_log2;
  a.parts_log2 = floor_log2(std::min(kDirectWarps, a.all_k_tiles / a.split));
  a.step_log2 = floor_log2(kDirectWarps) - a.parts_log2;
  const int parts = 1 << a.parts_log2, step = 1 << a.step_log2;
  a.k_tiles = a.all_k_tiles / (parts * a.split);
  a.k_rest = a.all_k_tiles % (parts * a.split);
  const int k_most = a.k_tiles + (a.k_rest > 0);
  if (k_most > kDirectKTiles) return 0;
  a.slot_bytes = k_most * 512;
  // A multiple of 128 and 16: neighbouring columns lie in different banks.
  a.pitch = k_most * 128 + 16;
  groups = std::clamp(c.groups, 1, std::min(row_tiles, 65535));
  while (true) {
    a.tiles = row_tiles / groups;
    a.tiles_rest = row_tiles % groups;
    const int all = a.tiles + (a.tiles_rest > 0);
    a.rows_most = (all + step - 1) / step;
    a.part_sums = all * 16 * tokens;
    a.rank_sums = (a.part_sums + a.split - 1) / a.split;
    // No more slots than might fit: bytes stay far below 2^31.
    a.slots = std::min(a.rows_most, budget / a.slot_bytes);
    for (; a.slots > 0; --a.slots) {
      a.scales = a.slots * a.slot_bytes;
      a.columns = a.scales + (scales ? k_most * a.rows_most * 32 : 0);
      a.starts = a.columns + columns * a.pitch;
      a.barriers = a.starts + k_most * 64;
      a.warp_bytes = (a.barriers + a.slots * 8 + 127) / 128 * 128;
      a.rows = kDirectWarps * a.warp_bytes;
      a.sums = a.rows + all * 16 * 8;
      a.tokens = a.sums + parts * a.part_sums * 4;
      a.counter = a.tokens + (kDirectWarps + 1) * tokens * 4;
      a.counter = (a.counter + 7) / 8 * 8;
      a.received = a.counter + 8;
      const int bytes =
          a.received + (a.split > 1 ? a.split * a.rank_sums * 4 : 0);
      if (bytes <= budget) return bytes;
    }
    if (groups >= std::min(row_tiles, 65535)) return 0;
    groups = std::min({groups * 2, row_tiles, 65535});
  }
}

template <auto kKernel>
bool launch_direct(const DirectArgs& a, const DeviceInfo& device, int groups,
                   int bytes, bool pdl) {
  static std::atomic<bool> raised[kMaxDevices] = {};
  launch_cut(kKernel, a, pdl, device, a.device, raised,
             dim3(unsigned(a.split), unsigned(groups)), kDirectWarps * 32,
             bytes, a.stream);
  return true;
}

// False where this kernel does not take the product.
template <typename T, bool kRow, int kTokens>
bool launch_direct_int8(DirectArgs a, MmaConfig c) {
  const DeviceInfo& device = device_info(a.device);
  c.split = 1;  // a CTA finds the largest value of a token in all of K
  int groups = 0;
  const int bytes = cut_direct(a, c, device, kTokens, kTokens, !kRow, groups);
  if (bytes == 0) return false;
  const int k_most = a.slot_bytes / 512;
#define LAUNCH(held, rounds)                                             \
  return launch_direct<                                                  \
      direct_int8_kernel<T, kRow, kDirectWarps, kTokens, held, rounds>>( \
      a, device, groups, bytes, c.pdl)
  if (k_most == 1) LAUNCH(1, 1);
  if (k_most == 2) LAUNCH(2, 1);
  if constexpr (kTokens == 1) {
    if (k_most <= 6) LAUNCH(0, 3);
    if (k_most <= kDirectKTiles) LAUNCH(0, 5);
  }
#undef LAUNCH
  return false;
}

template <typename T>
bool launch_direct_int8(const DirectArgs& a, const MmaConfig& c, bool row) {
  if (a.M == 1) {
    return row ? launch_direct_int8<T, true, 1>(a, c)
               : launch_direct_int8<T, false, 1>(a, c);
  }
  return a.M <= 8 && (row ? launch_direct_int8<T, true, 8>(a, c)
                          : launch_direct_int8<T, false, 8>(a, c));
}

}  // namespace vllm::ternary
