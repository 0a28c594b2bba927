// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Host side of mma_s8_direct_tokens.cuh: how a product is cut among CTAs and
// warps, and which instantiation takes it.
#pragma once

#include <algorithm>

#include "mma_s8_direct_tokens.cuh"

namespace vllm::ternary {

// Fills in the cut for CTAs of `tokens` tokens as cut_digits() does: three
// variants from kDirect on, and three more with half as many warps along K
// where that leaves each no more than two k tiles. `k_most`: k tiles of a warp.
inline int cut_tokens(TokenArgs& a, const MmaConfig& c,
                      const DeviceInfo& device, int tokens, bool row,
                      int& groups, int& k_most) {
  const int variant = std::clamp(c.variant - kDirect, 0, 5);
  int budget = direct_budget(device, kDirect + variant);
  // Between two products of bytes there is another kernel, whose CTAs would
  // have the next ones meet on a multiprocessor: one of them fills it.
  const int least = a.xq ? device.shared_memory / 2 + 1024 : 0;
  if (a.xq) budget = device.shared_memory;
  // More than two CTAs of a cluster leave multiprocessors idle.
  a.split_log2 = floor_log2(std::clamp(c.split, 1, a.xq ? 8 : 2));
  a.split = 1 << a.split_log2;
  a.k_tiles = a.all_k_tiles / a.split;
  a.k_rest = a.all_k_tiles % a.split;
  const int cta_k_tiles = a.k_tiles + (a.k_rest > 0);
  if (a.k_tiles < 4) return 0;
  a.parts_log2 = floor_log2(std::min(kTokenWarps, a.k_tiles));
  if (variant >= 3 && a.parts_log2 > 2 && cta_k_tiles <= 1 << a.parts_log2) {
    --a.parts_log2;
  }
  const int parts = 1 << a.parts_log2;
  k_most = (cta_k_tiles + parts - 1) / parts;
  // What stays in registers: columns of two k tiles, and where each starts.
  if (k_most > (row || tokens == 8 ? 2 : 1)) return 0;
  a.tokens_log2 = 0;
  while (1 << a.tokens_log2 < std::min(a.M, tokens)) ++a.tokens_log2;
  const int chunks = kTokenRounds * (kTokenWarps >> a.tokens_log2);
  if (!a.xq && cta_k_tiles > 4 * chunks) return 0;
  a.row_bytes = cta_k_tiles * 512;
  // A multiple of 128 and 16: neighbouring columns lie in different banks.
  a.pitch = cta_k_tiles * 128 + 16;
  const int row_tiles = a.N_pad / 16;
  const int along_m = (a.M + tokens - 1) / tokens;
  groups = std::clamp(c.groups / along_m, 1, std::min(row_tiles, 65535));
  while (true) {
    a.groups = groups;
    a.tiles = row_tiles / groups;
    a.tiles_rest = row_tiles % groups;
    const int all = a.tiles + (a.tiles_rest > 0);
    a.sum_rows = all * 16;
    a.own_rows = (all + a.split - 1) / a.split * 16;
    // Where even the weights do not fit, bytes may be beyond 2^31.
    if (int64_t(all) * a.row_bytes <= budget) {
      a.scales = all * a.row_bytes;
      a.scale_pitch = all * 32;
      a.columns = a.scales + (row ? 0 : cta_k_tiles * a.scale_pitch);
      a.rows = a.columns + std::min(a.M, tokens) * a.pitch;
      a.sums = a.rows + a.sum_rows * 8;
      a.factors = a.sums + (row ? tokens / 2 : tokens) * a.sum_rows * parts * 4;
      a.most = a.factors + tokens * 4;
      a.barriers = a.most + kTokenWarps * a.split * 4;
      a.received = a.barriers + (4 + all) * 8;
      const int bytes =
          a.received +
          (a.split > 1 ? a.split * tokens / 2 * a.own_rows * 8 : 0);
      if (bytes <= budget) {
        // A cluster that finds a multiprocessor empty puts two CTAs there.
        if (a.split > 1) {
          groups = std::max(groups, device.processors / (a.split * along_m));
        }
        return std::max(bytes, least);
      }
    }
    if (groups >= std::min(row_tiles, 65535)) return 0;
    groups = std::min({groups * 2, row_tiles, 65535});
  }
}

// False where this kernel does not take the product.
template <typename T, bool kInside, bool kRow, int kTokens>
bool launch_tokens(TokenArgs a, const MmaConfig& c) {
  const DeviceInfo& device = device_info(a.device);
  int groups = 0, k_most = 0;
  const int bytes = cut_tokens(a, c, device, kTokens, kRow, groups, k_most);
  if (bytes == 0) return false;
  auto launch = [&]<int kTiles, int kRounds>() {
    // All rounds need more than one k tile.
    constexpr bool kExists = (kRow || kTokens == 8 || kTiles == 1) &&
                             (kTiles > 1 || kRounds < kTokenRounds);
    if constexpr (kExists) {
      static std::atomic<bool> raised[kMaxDevices] = {};
      launch_cut(
          direct_tokens_kernel<T, kInside, kRow, kTokens, kTiles, kRounds>, a,
          c.pdl, device, a.device, raised,
          dim3(unsigned(a.split), unsigned(groups),
               unsigned((a.M + kTokens - 1) / kTokens)),
          kTokenWarps * 32, bytes, a.stream);
    }
    return kExists;
  };
  auto of_rounds = [&]<int kTiles>() {
    if constexpr (kInside) {
      const int chunks = 4 * (kTokenWarps >> a.tokens_log2);
      const int k_tiles = a.k_tiles + (a.k_rest > 0);
      if (k_tiles > 2 * chunks) {
        return launch.template operator()<kTiles, kTokenRounds>();
      }
      if (k_tiles > chunks) return launch.template operator()<kTiles, 2>();
    }
    return launch.template operator()<kTiles, 1>();
  };
  return k_most == 1 ? of_rounds.template operator()<1>()
                     : of_rounds.template operator()<2>();
}

// Two CTAs of eight quantize sixteen tokens faster than one; of bytes, one CTA
// reads the weights once.
template <typename T, bool kInside, bool kRow>
bool launch_tokens(const TokenArgs& a, const MmaConfig& c) {
  if constexpr (!kInside) {
    if (a.M > 8) return launch_tokens<T, kInside, kRow, 16>(a, c);
  }
  return launch_tokens<T, kInside, kRow, 8>(a, c);
}

template <typename T>
bool launch_tokens(const TokenArgs& a, const MmaConfig& c, bool row) {
  if (a.M > 16) return false;
  if (a.xq) {
    return row ? launch_tokens<T, false, true>(a, c)
               : launch_tokens<T, false, false>(a, c);
  }
  return row ? launch_tokens<T, true, true>(a, c)
             : launch_tokens<T, true, false>(a, c);
}

}  // namespace vllm::ternary
