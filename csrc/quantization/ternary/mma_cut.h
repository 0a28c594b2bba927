// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// How a product of few tokens is cut among CTAs, and the launch of a kernel
// that is cut this way. Both tensor core kernels (mma_gemm.cuh and mma_s8.cuh)
// use it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "device_info.h"
#include "mma_gemm.h"

namespace vllm::ternary {

struct MmaCut {
  int split;  // CTAs along K, one cluster
  int group_units,
      group_rest;       // row units per CTA; the first `rest` have one more
  int k_tiles, k_rest;  // k tiles per CTA of a cluster, likewise
  int chunk;            // k tiles of x in shared memory at once
  int units;            // most row units of a CTA
  int segments;         // row units that one warp may touch in one chunk
  int tokens_log2;      // of the tokens of a CTA, rounded up
};

inline bool is_power_of_two(int v) { return (v & (v - 1)) == 0; }

// Whether the kernels' numbers are large enough for a product whose CTAs have
// up to `tokens` tokens at least: the reach of block_magic for K; a grid's z
// for the CTAs along M, and its y for those along N even where shared memory
// lets each have a single row unit; 32 bits for an index of a scale.
template <typename Product>
bool fits_cut(const Product& g, int tokens) {
  return g.K <= 1 << 20 && g.M <= 65535 * tokens && g.N_pad <= 65535 * 16 &&
         int64_t(g.num_blocks) * g.N_pad <= UINT32_MAX;
}

// Whether every scale is one of whole k tiles, a power of two of them.
template <typename Product>
bool scales_whole_tiles(const Product& g) {
  return g.num_blocks == 1 ||
         (g.block_size % 128 == 0 && is_power_of_two(g.block_size / 128));
}

// Sets the cut of a.N_pad / rows row units and K_pad / 128 k tiles; `bytes()`
// says how much shared memory the cut in `a` takes. Returns that, or 0 where no
// cut fits, and leaves the number of CTAs along N in `groups`.
template <typename Bytes>
int fit_cut(MmaCut& a, const MmaConfig& c, const DeviceInfo& device,
            int row_units, int k_tiles, int warps, int granule, int tokens,
            int& groups, Bytes bytes_of) {
  groups = std::max(1, std::min(c.groups, row_units));
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
    a.segments = a.units / warps + 2;
    a.chunk = a.k_tiles + (a.k_rest > 0);
    int bytes = bytes_of();
    while (bytes > device.shared_memory && a.chunk > 1) {
      a.chunk = (a.chunk + 1) / 2;
      if (a.chunk > granule && a.chunk % granule) {
        a.chunk += granule - a.chunk % granule;
      }
      const int now = bytes_of();
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
    return 0;
  }
  return bytes;
}

template <typename Args>
void launch_cut(void (*kernel)(Args), const Args& a, bool pdl,
                const DeviceInfo& device, int device_index,
                std::atomic<bool>* raised, dim3 grid, int threads, int bytes,
                cudaStream_t stream) {
  // Raising the limit once is enough; doing it again does no harm.
  if (!raised[device_index]) {
    check_cuda(cudaFuncSetAttribute(kernel,
                                    cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    device.shared_memory),
               "ternary_gemm");
    raised[device_index] = true;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(unsigned(threads));
  config.dynamicSmemBytes = size_t(bytes);
  config.stream = stream;
  cudaLaunchAttribute attributes[2];
  config.attrs = attributes;
  if (pdl && device.capability >= 90) {
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

}  // namespace vllm::ternary
