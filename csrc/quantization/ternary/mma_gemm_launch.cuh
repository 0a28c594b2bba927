// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Host side of the portable tensor core kernel. One source per activation type
// includes this, so that the two compile side by side.
#pragma once

#include "mma_gemm.cuh"

namespace vllm::ternary {

// False where the device's shared memory is too small for this shape.
template <typename T, typename S>
bool launch(MmaArgs a, const MmaConfig& c, const DeviceInfo& device) {
  const GemmArgs& g = a.g;
  const int tokens = std::min(g.M, S::kMT * 8);
  int groups = 0;
  const int bytes = fit_cut(a, c, device, g.N_pad / S::kRows, g.K_pad / 128,
                            S::kWarps, S::kTiles, tokens, groups,
                            [&] { return mma_shared<S>(a, tokens).total; });
  if (bytes == 0) return false;
  static std::atomic<bool> raised[kMaxDevices] = {};
  const dim3 grid(unsigned(a.split), unsigned(groups),
                  unsigned((g.M + S::kMT * 8 - 1) / (S::kMT * 8)));
  launch_cut(mma_gemm_kernel<T, S>, a, c.pdl, device, g.device, raised, grid,
             S::kThreads, bytes, g.stream);
  return true;
}

// Token tiles, row tiles, warps, k tiles of a granule, granules in the ring,
// CTAs per multiprocessor. Where there are variants, the dispatch table says
// which.
template <typename T, bool kGeneral>
bool launch_fastest(const MmaArgs& a, const MmaConfig& c,
                    const DeviceInfo& device) {
  if constexpr (kGeneral) {
    if (a.g.M <= 8) {
      return launch<T, MmaShape<1, 1, 16, 2, 4, true, 2>>(a, c, device);
    } else if (a.g.M <= 16) {
      return launch<T, MmaShape<2, 2, 16, 1, 4, true, 1>>(a, c, device);
    } else if (a.g.M <= 32) {
      return launch<T, MmaShape<4, 2, 8, 1, 4, true, 1>>(a, c, device);
    } else {
      return launch<T, MmaShape<8, 1, 8, 1, 4, true, 1>>(a, c, device);
    }
  } else if (a.g.M <= 8) {
    if (c.variant == 1) {
      return launch<T, MmaShape<1, 2, 16, 4, 2, false, 1>>(a, c, device);
    } else if (c.variant == 2) {
      return launch<T, MmaShape<1, 2, 8, 2, 2, false, 2>>(a, c, device);
    } else {
      return launch<T, MmaShape<1, 2, 8, 4, 2, false, 2>>(a, c, device);
    }
  } else if (a.g.M <= 16) {
    if (c.variant == 1) {
      return launch<T, MmaShape<2, 2, 12, 2, 2, false, 1>>(a, c, device);
    } else if (c.variant == 2) {
      return launch<T, MmaShape<2, 2, 8, 2, 2, false, 2>>(a, c, device);
    } else if (c.variant == 3) {
      return launch<T, MmaShape<2, 1, 16, 4, 2, false, 1>>(a, c, device);
    } else {
      return launch<T, MmaShape<2, 2, 16, 2, 2, false, 1>>(a, c, device);
    }
  } else if (a.g.M <= 32) {
    return launch<T, MmaShape<4, 1, 16, 1, 4, false, 1>>(a, c, device);
  } else {
    return launch<T, MmaShape<8, 1, 8, 1, 4, false, 1>>(a, c, device);
  }
}

// Where the shape does not fit (99 KB on 8.6, 8.9 and 12.0), 8 tokens at a
// time.
template <typename T, bool kGeneral>
void launch_for_tokens(const MmaArgs& a, const MmaConfig& c,
                       const DeviceInfo& device) {
  using Small = MmaShape<1, kGeneral ? 1 : 2, 8, kGeneral ? 2 : 4,
                         kGeneral ? 4 : 2, kGeneral, 2>;
  if (launch_fastest<T, kGeneral>(a, c, device)) return;
  if (!launch<T, Small>(a, c, device)) {
    throw std::runtime_error("ternary_gemm: too little shared memory");
  }
}

}  // namespace vllm::ternary
