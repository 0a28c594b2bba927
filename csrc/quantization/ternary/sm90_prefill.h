// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Boundary between the operator (cuda_bindings.cu) and the Hopper kernels for
// few and many tokens (sm90_prefill*.cu, compiled for sm_90a only).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace vllm::ternary {

enum class DType : int { kHalf = 0, kBFloat16 = 1, kFloat = 2 };

// y[M, N] = x[M, K] @ W[N, K]^T (+ bias[N]),
// W[n, k] = scale[k / block_size, n] * (t[n, k] - zero_point[k / block_size,
// n])
//
// What the caller guarantees (it copies or pads x where the user's does not
// fit):
//   x       row m begins at x + m * ldx elements, inner stride 1; the pointer
//   is
//           16-byte aligned and ldx a multiple of 8. Only columns 0..K-1 may be
//           read (K may be ragged).
//   weight  int32 [N_pad/16, K_pad/128, 32, 4], the fragment layout of
//           ternary_layout_cuda.py, 16-byte aligned; padding holds code 1
//           (zero).
//   scale   [num_blocks, N_pad] in scale_dtype, padded with 0.
//   zero_point  float32 [num_blocks, N_pad], or nullptr.
//   bias    [N] in dtype, or nullptr.
//   y       row m begins at y + m * ldy elements, contiguous: ldy == N. 16-byte
//           aligned base; rows are aligned only as far as N allows.
// block_size is a multiple of 4 and at least 4; num_blocks = ceil(K /
// block_size).
struct PrefillArgs {
  const void* x;
  int64_t ldx;
  DType dtype;  // of x, bias and y: kHalf or kBFloat16
  const int32_t* weight;
  const void* scale;
  DType scale_dtype;
  const float* zero_point;
  const void* bias;
  void* y;
  int64_t ldy;
  int M, N, K;
  int N_pad;  // multiple of 64
  int K_pad;  // multiple of 128
  int block_size;
  int num_blocks;
  int device;
  cudaStream_t stream;
};

// True where sm90_prefill_gemm computes this call; false sends it to the
// portable kernel. Looks at sizes and types only, touches no memory, never
// synchronizes.
bool sm90_prefill_supported(const PrefillArgs& args);

// Enqueues the product on args.stream. Called only on a device of compute
// capability 9.0 for which sm90_prefill_supported returned true, with
// args.device current. Throws std::runtime_error on a failed launch.
void sm90_prefill_gemm(const PrefillArgs& args);

// The same under a cut of the caller's, for the tuning script and the tests:
// 0, warpgroups, tiles, tokens, split, multicast, sets; or, for few tokens,
// 1, rows, sets, tokens, blocks, split, resident. Throws std::runtime_error
// where no kernel was built for it.
void sm90_prefill_gemm_cut(const PrefillArgs& args, const int64_t* cut);

// How many clusters of `split` blocks a device runs at one time: of the kernels
// for many tokens (blocks = 0), or for few with `blocks` to a multiprocessor.
int sm90_prefill_clusters(int device, int blocks, int split);

}  // namespace vllm::ternary
