// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// What the CUDA files of the ternary kernels share on the host side.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "sm90_prefill.h"

namespace vllm::ternary {

// Of 1 and more.
inline int floor_log2(int v) {
  int log2 = 0;
  while ((2 << log2) <= v) ++log2;
  return log2;
}

// The arguments of every 16-bit product; sm90_prefill.h states what they
// promise.
using GemmArgs = PrefillArgs;

// x[M, K] int8 times the packed weight: y = xs * sum_b scale_b * (integers of
// block b) + bias, in float32. Rows of xq have K_pad values, zero past K, and
// within each 32 the order in which the bytes of a weight word stand (see
// int8_position in cuda_common.cuh). Codes are t + 1, so that a product of
// codes is too large by the sum of xq, which is given in two forms.
struct W2A8Args {
  const int8_t* xq;     // [parts, M, K_pad], permuted
  const float* xs;      // [parts, M]; NaN for a token with NaN or infinity
  const int32_t* xsum;  // [parts, M]: sum of the whole row of xq
  // Sums of 128 values: [parts, K_pad / 128, M]; nullptr if num_blocks == 1.
  const int32_t* xsum_tiles;
  const int32_t* weight;  // as in PrefillArgs
  const void* scale;      // [num_blocks, N_pad]
  DType scale_dtype;
  const void* bias;  // [N] in dtype, or nullptr
  const int32_t*
      part_ends;  // [parts], end row of each part, or nullptr when parts == 1
  void* y;        // [M, N] in dtype
  DType dtype;
  int parts, M, N, K, N_pad, K_pad, block_size, num_blocks;
  int device;
  cudaStream_t stream;
};

// Per-token quantization to int8, with an optional RMSNorm in front. The last
// four pointers are those of W2A8Args.
struct QuantArgs {
  const void* x;  // row m begins at x + m * ldx, 16-byte aligned
  int64_t ldx;
  DType dtype;
  const void* norm_weight;  // [parts, K] in norm_dtype, or nullptr
  DType norm_dtype;
  float eps;
  int8_t* xq;
  float* xs;
  int32_t *xsum, *xsum_tiles;
  int parts, M, K, K_pad;
  int device;
  cudaStream_t stream;
};

struct EmbeddingArgs {
  const void* indices;  // int64 or int32 [count]
  bool indices_are_int64;
  int64_t count;
  const int32_t* weight;
  const void* scale;
  DType scale_dtype;
  const float* zero_point;  // or nullptr
  void* out;                // [count, K] in dtype
  DType dtype;
  int N, K, N_pad, K_pad, block_size;
  cudaStream_t stream;
};

inline void check_cuda(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": " +
                             cudaGetErrorString(status));
  }
}

// Each enqueues on args.stream and throws std::runtime_error on a failed
// launch.
void reference_gemm(const GemmArgs& args);
void reference_w2a8(const W2A8Args& args);
void quantize_tokens(const QuantArgs& args);
void gather_rows(const EmbeddingArgs& args);

// Copies rows of 16-bit values with any strides (in elements) into
// dst[rows, ld_dst], zero past cols.
void copy_rows(const void* src, int64_t ld_src, int64_t inc_src, void* dst,
               int64_t ld_dst, int64_t rows, int64_t cols, cudaStream_t stream);

}  // namespace vllm::ternary
