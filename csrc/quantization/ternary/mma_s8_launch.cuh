// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Host side of the int8 kernel for few tokens. One source per activation type
// and op includes this, so that they compile side by side.
#pragma once

#include "mma_s8.cuh"

namespace vllm::ternary {

// False where the device's shared memory is too small for this shape.
template <typename S>
bool launch_s8(S8Args a, const MmaConfig& c) {
  const DeviceInfo& device = device_info(a.device);
  const int tokens = std::min(a.M, S::kTokens);
  int groups = 0;
  const int bytes = fit_cut(a, c, device, a.N_pad / S::kRows, a.K_pad / 128,
                            S::kWarps, S::kTiles, tokens, groups,
                            [&] { return s8_shared<S>(a, tokens).total; });
  if (bytes == 0) return false;
  static std::atomic<bool> raised[kMaxDevices] = {};
  const dim3 grid(unsigned(a.split), unsigned(groups),
                  unsigned((a.M + S::kTokens - 1) / S::kTokens));
  launch_cut(mma_s8_kernel<S>, a, c.pdl, device, a.device, raised, grid,
             S::kThreads, bytes, a.stream);
  return true;
}

// Column tiles, row tiles, warps, k tiles of a granule, granules in the ring,
// CTAs per multiprocessor. Where there are variants, the dispatch table says
// which.
template <typename T, S8Scale kScale, S8Input kInput>
bool launch_s8_fastest(const S8Args& a, const MmaConfig& c) {
  constexpr bool kVariants = kScale != S8Scale::kGeneral;
  const int variant = kVariants ? c.variant : 0;
  if (a.M <= 8) {
    if constexpr (kVariants) {
      if (variant == 1) {
        return launch_s8<S8Shape<T, kScale, kInput, 1, 2, 16, 4, 2, 1>>(a, c);
      }
      if (variant == 2) {
        return launch_s8<S8Shape<T, kScale, kInput, 1, 2, 8, 2, 3, 2>>(a, c);
      }
    }
    return launch_s8<S8Shape<T, kScale, kInput, 1, 2, 8, 4, 2, 2>>(a, c);
  } else if (a.M <= 16) {
    if constexpr (kVariants) {
      if (variant == 1) {
        return launch_s8<S8Shape<T, kScale, kInput, 2, 2, 16, 2, 2, 1>>(a, c);
      }
    }
    return launch_s8<S8Shape<T, kScale, kInput, 2, 2, 8, 4, 2, 2>>(a, c);
  } else if constexpr (kInput == S8Input::kBytes) {
    if (a.M <= 32) {
      return launch_s8<S8Shape<T, kScale, kInput, 4, 2, 8, 2, 2, 1>>(a, c);
    } else {
      return launch_s8<S8Shape<T, kScale, kInput, 8, 1, 8, 2, 4, 1>>(a, c);
    }
  } else {
    throw std::runtime_error("ternary_gemm_w2a8: too many tokens");
  }
}

// Where the shape does not fit (99 KB on 8.6, 8.9 and 12.0), 8 tokens at a
// time.
template <typename T, S8Scale kScale, S8Input kInput>
void launch_s8_int8(const S8Args& a, const MmaConfig& c) {
  if (launch_s8_fastest<T, kScale, kInput>(a, c)) return;
  if (!launch_s8<S8Shape<T, kScale, kInput, 1, 2, 8, 4, 2, 2>>(a, c)) {
    throw std::runtime_error("ternary_gemm_w2a8: too little shared memory");
  }
}

template <typename T>
void launch_s8_int8(const S8Args& a, const MmaConfig& c, S8Scale scale) {
  constexpr S8Input kBytes = S8Input::kBytes, kInside = S8Input::kInside;
  if (scale == S8Scale::kRow) {
    a.xq ? launch_s8_int8<T, S8Scale::kRow, kBytes>(a, c)
         : launch_s8_int8<T, S8Scale::kRow, kInside>(a, c);
  } else if (scale == S8Scale::kTile) {
    a.xq ? launch_s8_int8<T, S8Scale::kTile, kBytes>(a, c)
         : launch_s8_int8<T, S8Scale::kTile, kInside>(a, c);
  } else {
    launch_s8_int8<T, S8Scale::kGeneral, kBytes>(a, c);
  }
}

template <typename T>
void launch_s8_digits(const S8Args& a, const MmaConfig& c) {
  constexpr S8Scale kTile = S8Scale::kTile;
  constexpr S8Input kDigits = S8Input::kDigits;
  if (c.variant == 1 &&
      launch_s8<S8Shape<T, kTile, kDigits, 1, 2, 16, 2, 2, 1>>(a, c)) {
    return;
  }
  if (!launch_s8<S8Shape<T, kTile, kDigits, 1, 2, 8, 4, 2, 2>>(a, c)) {
    throw std::runtime_error("ternary_gemm: too little shared memory");
  }
}

}  // namespace vllm::ternary
