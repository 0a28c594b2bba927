// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Host side of the Hopper int8 kernels: tensor maps and the launch.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <string>

#include "sm90_s8.h"
#include "sm90_s8_kernel.cuh"
#include "sm90_s8_plan.h"

namespace vllm::ternary::s8 {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// The driver's encoder, found at run time so that nothing links libcuda.
inline EncodeTiled encode_tiled() {
  static const EncodeTiled fn = [] {
    void* p = nullptr;
    cudaDriverEntryPointQueryResult found;
    check_cuda(
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &p, 12000,
                                         cudaEnableDefault, &found),
        "cuTensorMapEncodeTiled");
    if (found != cudaDriverEntryPointSuccess) {
      throw std::runtime_error(
          "ternary_gemm_w2a8: the driver has no cuTensorMapEncodeTiled");
    }
    return reinterpret_cast<EncodeTiled>(p);
  }();
  return fn;
}

// A row-major [rows, cols] tensor moved in boxes of [box_rows, box_cols]; what
// lies outside reads as zero and is not written.
inline CUtensorMap make_map(CUtensorMapDataType type, int element_bytes,
                            const void* base, uint64_t rows, uint64_t cols,
                            uint32_t box_rows, uint32_t box_cols,
                            CUtensorMapSwizzle swizzle) {
  CUtensorMap map;
  const cuuint64_t dims[2] = {cols, rows};
  const cuuint64_t strides[1] = {cols * element_bytes};
  const cuuint32_t box[2] = {box_cols, box_rows};
  const cuuint32_t steps[2] = {1, 1};
  const CUresult r = encode_tiled()(
      &map, type, 2, const_cast<void*>(base), dims, strides, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (r != CUDA_SUCCESS) {
    throw std::runtime_error(
        "ternary_gemm_w2a8: cuTensorMapEncodeTiled failed (" +
        std::to_string(int(r)) + ")");
  }
  return map;
}

// Token tiles that are walked before the next group of rows: enough that a wave
// of blocks is about as wide as it is high, few enough to stay in the L2 cache.
constexpr int kTokenGroup = 8;

template <typename C>
void launch(const W2A8Args& a, const Plan& plan, int num_sms) {
  const int scale_bytes = a.scale_dtype == DType::kFloat ? 4 : 2;
  const bool in_parts = a.parts > 1 && a.part_ends != nullptr;
  KernelParams p{};
  p.xs = a.xs;
  p.scale = a.scale;
  p.bias = a.bias;
  p.part_ends = in_parts ? a.part_ends : nullptr;
  p.y = a.y;
  p.parts = a.parts;
  p.M = a.M;
  p.N = a.N;
  p.N_pad = a.N_pad;
  p.stages = (a.K_pad + 255) / 256;
  p.k_blocks = a.K_pad / 128;
  // For parts the most that the kernel may count: a part begins up to 15 rows
  // early and ends in a group of its own.
  const int spare = in_parts ? (a.parts - 1) * (15 + C::kRows - 1) : 0;
  p.row_groups = (a.N + spare + C::kRows - 1) / C::kRows;
  p.token_tiles = (a.M + C::kTokens - 1) / C::kTokens;
  p.token_group = std::min(p.token_tiles, kTokenGroup);
  p.split = plan.split;
  for (int g = C::kTokens / 8 / plan.split; g > 1; g /= 2) ++p.groups_log2;
  const int num_tiles = p.row_groups * p.token_tiles;
  p.num_clusters = plan.split > 1 ? num_tiles : std::min(num_tiles, num_sms);
  p.dtype = a.dtype;
  p.scale_dtype = a.scale_dtype;
  p.blocks_per_scale = a.num_blocks == 1 ? p.k_blocks : a.block_size / 128;
  p.stage_tx_bytes = 2 * C::kHalfBytes + C::kCodeBytes;
  if (C::kMode == ScaleMode::kBlock) {
    p.stage_tx_bytes += 2 * C::kRows * scale_bytes;
  }
  p.tma_store = a.N % 8 == 0 && plan.split == 1;

  const CUtensorMap x_map =
      make_map(CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, a.xq, uint64_t(a.parts) * a.M,
               a.K_pad, C::kTokens, 128, CU_TENSOR_MAP_SWIZZLE_128B);
  const CUtensorMap w_map =
      make_map(CU_TENSOR_MAP_DATA_TYPE_INT32, 4, a.weight, a.N_pad / 16,
               a.K_pad, C::kRows / 16, 256, CU_TENSOR_MAP_SWIZZLE_NONE);
  CUtensorMap s_map = w_map, y_map = w_map;  // where they are not used
  if (C::kMode == ScaleMode::kBlock) {
    s_map = make_map(scale_bytes == 4 ? CU_TENSOR_MAP_DATA_TYPE_INT32
                                      : CU_TENSOR_MAP_DATA_TYPE_UINT16,
                     scale_bytes, a.scale, a.num_blocks, a.N_pad, 1, C::kRows,
                     CU_TENSOR_MAP_SWIZZLE_NONE);
  }
  if (p.tma_store) {
    y_map = make_map(CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, a.y, a.M, a.N, 64, 64,
                     CU_TENSOR_MAP_SWIZZLE_128B);
  }

  auto* kernel = &s8_kernel<C>;
  static std::atomic<uint64_t> prepared{0};
  const uint64_t bit = uint64_t(1) << (a.device & 63);
  if (!(prepared.load(std::memory_order_relaxed) & bit)) {
    check_cuda(
        cudaFuncSetAttribute(
            kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSmemBytes),
        "shared memory");
    prepared.fetch_or(bit, std::memory_order_relaxed);
  }

  cudaLaunchAttribute attrs[2];
  unsigned n = 0;
  if (plan.split > 1) {
    attrs[n].id = cudaLaunchAttributeClusterDimension;
    attrs[n].val.clusterDim.x = plan.split;
    attrs[n].val.clusterDim.y = attrs[n].val.clusterDim.z = 1;
    ++n;
  }
  attrs[n].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attrs[n].val.programmaticStreamSerializationAllowed = 1;
  ++n;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(p.num_clusters * plan.split);
  config.blockDim = dim3(C::kThreads);
  config.dynamicSmemBytes = C::kSmemBytes;
  config.stream = a.stream;
  config.attrs = attrs;
  config.numAttrs = n;
  check_cuda(cudaLaunchKernelEx(&config, kernel, x_map, w_map, s_map, y_map, p),
             "ternary_gemm_w2a8");
}

// Picks the kernel that was built for a plan; false if none was. One
// translation unit per mode.
bool launch_rows(const W2A8Args& a, const Plan& plan, int num_sms);
bool launch_blocks(const W2A8Args& a, const Plan& plan, int num_sms);
// Clusters of `size` blocks that the current device runs at one time.
int max_clusters(int size);

constexpr int plan_key(int warpgroups, int tiles, int tokens, int sets) {
  return ((warpgroups * 10 + tiles) * 1000 + tokens) * 10 + sets;
}

#define TERNARY_S8_VARIANT(mode, w, t, n, s)            \
  case plan_key(w, t, n, s):                            \
    launch<Config<mode, w, t, n, s>>(a, plan, num_sms); \
    return true;

}  // namespace vllm::ternary::s8
