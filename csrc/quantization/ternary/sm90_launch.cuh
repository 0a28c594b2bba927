// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Host side that the Hopper kernels share: tensor maps, clusters, launches.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "cuda_common.h"
#include "device_info.h"

namespace vllm::ternary {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// The driver's encoder, found at run time so that nothing links libcuda.
inline EncodeTiled encode_tiled() {
  static const EncodeTiled fn = [] {
    void* p = nullptr;
    cudaDriverEntryPointQueryResult found;
    check_cuda(
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &p, 12000,
                                         cudaEnableDefault, &found),
        "ternary kernels: cuTensorMapEncodeTiled");
    if (found != cudaDriverEntryPointSuccess) {
      throw std::runtime_error(
          "ternary kernels: the driver has no cuTensorMapEncodeTiled; it must "
          "be one for CUDA 12 or newer");
    }
    return reinterpret_cast<EncodeTiled>(p);
  }();
  return fn;
}

// A row-major [rows, cols] tensor, `row_stride` elements from row to row, moved
// in boxes of [box_rows, box_cols]; what lies outside reads as zero and is not
// written.
inline CUtensorMap make_map(CUtensorMapDataType type, int element_bytes,
                            const void* base, uint64_t rows, uint64_t cols,
                            uint64_t row_stride, uint32_t box_rows,
                            uint32_t box_cols, CUtensorMapSwizzle swizzle) {
  CUtensorMap map;
  const cuuint64_t dims[2] = {cols, rows};
  const cuuint64_t strides[1] = {row_stride * element_bytes};
  const cuuint32_t box[2] = {box_cols, box_rows};
  const cuuint32_t steps[2] = {1, 1};
  const CUresult r = encode_tiled()(
      &map, type, 2, const_cast<void*>(base), dims, strides, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (r != CUDA_SUCCESS) {
    throw std::runtime_error(
        "ternary kernels: cuTensorMapEncodeTiled failed (" +
        std::to_string(int(r)) + ")");
  }
  return map;
}

// Token tiles that are walked before the next group of rows: enough that a wave
// of blocks is about as wide as it is high, few enough to stay in the L2 cache.
constexpr int kTokenGroup = 8;

template <auto kKernel, typename C>
void allow_shared_memory() {
  check_cuda(
      cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           C::kSmemBytes),
      "ternary kernels: shared memory");
}

inline cudaLaunchAttribute cluster_attribute(int size) {
  cudaLaunchAttribute attr;
  attr.id = cudaLaunchAttributeClusterDimension;
  attr.val.clusterDim.x = size;
  attr.val.clusterDim.y = attr.val.clusterDim.z = 1;
  return attr;
}

// Clusters of `size` blocks of a kernel that the current device runs at a time.
template <auto kKernel, typename C>
int max_active_clusters(int size) {
  allow_shared_memory<kKernel, C>();
  cudaLaunchAttribute attr = cluster_attribute(size);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(size);
  config.blockDim = dim3(C::kThreads);
  config.dynamicSmemBytes = C::kSmemBytes;
  config.attrs = &attr;
  config.numAttrs = 1;
  int clusters = 0;
  check_cuda(cudaOccupancyMaxActiveClusters(&clusters, kKernel, &config),
             "ternary kernels: cluster occupancy");
  return clusters;
}

// Launches `clusters` clusters of `size` blocks, which may begin before the
// kernel ahead in the stream has ended.
template <auto kKernel, typename C, typename... Args>
void launch_clusters(int device, cudaStream_t stream, int clusters, int size,
                     const Args&... args) {
  // Once per device; setting it twice does no harm.
  static std::atomic<bool> prepared[kMaxDevices] = {};
  if (!prepared[device].load(std::memory_order_relaxed)) {
    allow_shared_memory<kKernel, C>();
    prepared[device].store(true, std::memory_order_relaxed);
  }
  cudaLaunchAttribute attrs[2];
  unsigned n = 0;
  if (size > 1) attrs[n++] = cluster_attribute(size);
  attrs[n].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attrs[n].val.programmaticStreamSerializationAllowed = 1;
  ++n;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(clusters * size);
  config.blockDim = dim3(C::kThreads);
  config.dynamicSmemBytes = C::kSmemBytes;
  config.stream = stream;
  config.attrs = attrs;
  config.numAttrs = n;
  check_cuda(cudaLaunchKernelEx(&config, kKernel, args...),
             "ternary kernels: launch");
}

}  // namespace vllm::ternary
