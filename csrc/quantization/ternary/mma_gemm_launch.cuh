// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Host side of the portable tensor core kernel. One source per activation type
// includes this, so that the two compile side by side.
#pragma once

#include <algorithm>

#include "device_info.h"
#include "mma_gemm.cuh"

namespace vllm::ternary {

inline bool is_power_of_two(int v) { return (v & (v - 1)) == 0; }

template <typename T, typename S>
void launch(MmaArgs a, const MmaConfig& c, const DeviceInfo& device) {
  const GemmArgs& g = a.g;
  const int row_units = g.N_pad / S::kRows, k_tiles = g.K_pad / 128;
  const int tokens = std::min(g.M, S::kMT * 8);
  int groups = std::max(1, std::min(c.groups, row_units));
  a.split = device.capability >= 90 ? c.split : 1;
  a.split = std::max(1, std::min({a.split, k_tiles, 8}));
  while (!is_power_of_two(a.split)) --a.split;
  a.k_tiles = k_tiles / a.split;
  a.k_rest = k_tiles % a.split;
  a.tokens_log2 = 0;
  while ((1 << a.tokens_log2) < tokens) ++a.tokens_log2;

  // Smaller pieces of x, then fewer rows per CTA, until it fits.
  auto fit = [&] {
    a.group_units = row_units / groups;
    a.group_rest = row_units % groups;
    a.units = a.group_units + (a.group_rest > 0);
    a.segments = a.units / S::kWarps + 2;
    a.chunk = a.k_tiles + (a.k_rest > 0);
    int bytes = mma_shared<S>(a, tokens).total;
    while (bytes > device.shared_memory && a.chunk > 1) {
      a.chunk = (a.chunk + 1) / 2;
      a.chunk += a.chunk > S::kTiles ? a.chunk % S::kTiles : 0;
      const int now = mma_shared<S>(a, tokens).total;
      if (now >= bytes) break;
      bytes = now;
    }
    return bytes;
  };
  int bytes = fit();
  while (bytes > device.shared_memory && groups < row_units) {
    groups = std::min(row_units, groups * 2);
    bytes = fit();
  }
  if (bytes > device.shared_memory || row_units >= 1 << 24 ||
      a.units >= 1 << 16) {
    throw std::runtime_error(
        "ternary_gemm: the product does not fit this kernel's shared memory");
  }

  auto* kernel = mma_gemm_kernel<T, S>;
  // Raising the limit once is enough; doing it again does no harm.
  static bool raised[kMaxDevices] = {};
  if (!raised[g.device]) {
    check_cuda(cudaFuncSetAttribute(kernel,
                                    cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    device.shared_memory),
               "ternary_gemm");
    raised[g.device] = true;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(a.split), unsigned(groups),
                        unsigned((g.M + S::kMT * 8 - 1) / (S::kMT * 8)));
  config.blockDim = dim3(S::kThreads);
  config.dynamicSmemBytes = size_t(bytes);
  config.stream = g.stream;
  cudaLaunchAttribute attributes[2];
  config.attrs = attributes;
  if (c.pdl && device.capability >= 90) {
    attributes[config.numAttrs].id =
        cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed =
        1;
  }
  if (a.split > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs].val.clusterDim.x = unsigned(a.split);
    attributes[config.numAttrs].val.clusterDim.y = 1;
    attributes[config.numAttrs++].val.clusterDim.z = 1;
  }
  check_cuda(cudaLaunchKernelEx(&config, kernel, a), "ternary_gemm");
}

template <typename T, bool kGeneral>
void launch_for_tokens(const MmaArgs& a, const MmaConfig& c,
                       const DeviceInfo& device) {
#ifdef TERNARY_TUNE
  #define TERNARY_CASE(n, ...)                               \
    if (!kGeneral && c.variant == n) {                       \
      return launch<T, MmaShape<__VA_ARGS__>>(a, c, device); \
    }
#else
  #define TERNARY_CASE(n, ...)
#endif
  // Token tiles, row tiles, warps, k tiles of a granule, granules in the ring.
  if (a.g.M <= 8) {
    if constexpr (kGeneral) {
      launch<T, MmaShape<1, 1, 16, 2, 4, true, 2>>(a, c, device);
    } else {
      TERNARY_CASE(1, 1, 1, 16, 2, 4, false, 2)
      TERNARY_CASE(2, 1, 1, 12, 2, 4, false, 2)
      launch<T, MmaShape<1, 2, 8, 2, 4, false, 2>>(a, c, device);
    }
  } else if (a.g.M <= 16) {
    TERNARY_CASE(1, 2, 1, 16, 2, 4, false, 1)
    launch<T, MmaShape<2, 2, 16, 1, 4, kGeneral, 1>>(a, c, device);
  } else if (a.g.M <= 32) {
    if constexpr (kGeneral) {
      launch<T, MmaShape<4, 2, 8, 1, 4, true, 1>>(a, c, device);
    } else {
      launch<T, MmaShape<4, 1, 16, 1, 4, false, 1>>(a, c, device);
    }
  } else {
    launch<T, MmaShape<8, 1, 8, 1, 4, kGeneral, 1>>(a, c, device);
  }
}

}  // namespace vllm::ternary
