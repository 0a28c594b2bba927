// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
#include <algorithm>

#include "mma_utils.cuh"
#include "moe_gemm.h"

namespace vllm::ternary {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kRows = 16 * kWarps;  // rows of the weight in one thread block
constexpr int kChunk = 128;         // inputs in one step of the main loop
// Halves in a row of the staged x: shifts each row by four banks, so that a
// fragment is read without conflicts.
constexpr int kStride = kChunk + 8;

__device__ __forceinline__ uint32_t subtract(uint32_t a, uint32_t b, half) {
  const half2 d =
      __hsub2(reinterpret_cast<half2&>(a), reinterpret_cast<half2&>(b));
  return reinterpret_cast<const uint32_t&>(d);
}

__device__ __forceinline__ uint32_t subtract(uint32_t a, uint32_t b,
                                             __nv_bfloat16) {
  const __nv_bfloat162 d = __hsub2(reinterpret_cast<__nv_bfloat162&>(a),
                                   reinterpret_cast<__nv_bfloat162&>(b));
  return reinterpret_cast<const uint32_t&>(d);
}

// Fragments of the weights themselves, -1, 0 or +1, for the word's two k-steps.
template <typename T>
__device__ __forceinline__ void decode_word(uint32_t word,
                                            uint32_t (&a)[2][4]) {
  Mma<T>::decode(word, a);
#pragma unroll
  for (int s = 0; s < 2; ++s) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[s][i] = subtract(a[s][i], i & 1 ? Mma<T>::kOdd : Mma<T>::kEven, T());
    }
  }
}

// Eight values of one row of x from column k on, zero past K.
template <typename T>
__device__ __forceinline__ uint4 load_x(const T* row, int k, int K) {
  uint4 v = make_uint4(0, 0, 0, 0);
  if (row == nullptr) return v;
  if (k + 8 <= K) return *reinterpret_cast<const uint4*>(row + k);
  T* out = reinterpret_cast<T*>(&v);
  for (int i = 0; i < 8 && k + i < K; ++i) out[i] = row[k + i];
  return v;
}

// One thread block: kMoeBlock routes of one expert times 64 rows of its weight.
// A warp has 16 rows, the A operand of mma.m16n8k16, and all routes, the B
// operand. The launch has the blocks of routes from `first_block` on.
template <typename T, bool kZeroPoint>
__global__ void __launch_bounds__(kThreads)
    moe_gemm_kernel(const MoeGemmArgs a, int first_block) {
  constexpr int kTiles = kMoeBlock / 8;
  constexpr int kLoads = kMoeBlock * kChunk / 8 / kThreads;
  __shared__ __align__(16) T staged[kMoeBlock * kStride];
  __shared__ int routes[kMoeBlock];

  const int block = first_block + blockIdx.y;
  if (block * kMoeBlock >= *a.used) return;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int group = lane / 4, pair = lane % 4;
  const int first_row = blockIdx.x * kRows + 16 * warp;
  const int expert = a.experts[block];
  if (thread < kMoeBlock)
    routes[thread] = a.sorted_routes[block * kMoeBlock + thread];
  __syncthreads();

  T* const y = static_cast<T*>(a.y);
  if (expert < 0) {
    for (int i = thread; i < kMoeBlock * kRows; i += kThreads) {
      const int route = routes[i / kRows], n = blockIdx.x * kRows + i % kRows;
      if (route < a.routes && n < a.N) {
        y[int64_t(route) * a.N + n] = from_float<T>(0.0f);
      }
    }
    return;
  }

  // Where this thread's parts of x come from, and where they are staged.
  const T* x_row[kLoads];
  int x_slot[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int slot = thread + i * kThreads, m = slot / (kChunk / 8);
    const int route = routes[m];
    x_row[i] = route < a.routes ? static_cast<const T*>(a.x) +
                                      int64_t(route / a.top_k) * a.ldx
                                : nullptr;
    x_slot[i] = m * kStride + slot % (kChunk / 8) * 8;
  }
  const int x_column = thread % (kChunk / 8) * 8;

  const int chunks = a.K_pad / kChunk;
  const int64_t scales = int64_t(a.num_blocks) * a.N_pad;
  const uint4* weight =
      reinterpret_cast<const uint4*>(a.weight) +
      (int64_t(expert) * (a.N_pad / 16) + first_row / 16) * chunks * 32 + lane;

  float sum[kTiles][4] = {};    // scaled, of all blocks of K so far
  float part[kTiles][4] = {};   // of the current block of K
  float x_sum[kTiles][4] = {};  // of x in it, for the zero point
  const uint32_t one = sizeof(T) == 2 && Mma<T>::kEven == 0x45004500u
                           ? 0x3C003C00u   // 1.0 in half
                           : 0x3F803F80u;  // and in bfloat16
  const uint32_t ones[4] = {one, one, one, one};

  uint4 next_x[kLoads], next_w = weight[0];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) next_x[i] = load_x(x_row[i], x_column, a.K);

  int scale_block = 0, block_end = a.block_size;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    __syncthreads();  // the last chunk's fragments are read
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      *reinterpret_cast<uint4*>(staged + x_slot[i]) = next_x[i];
    }
    const uint4 w = next_w;
    __syncthreads();
    if (chunk + 1 < chunks) {
      next_w = weight[int64_t(chunk + 1) * 32];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        next_x[i] = load_x(x_row[i], (chunk + 1) * kChunk + x_column, a.K);
      }
    }
    const uint32_t words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t fragment[2][4];
      decode_word<T>(words[j], fragment);
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const int k = 32 * j + 16 * s;
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          const uint32_t* b = reinterpret_cast<const uint32_t*>(
              staged + (8 * t + group) * kStride + k + 2 * pair);
          Mma<T>::mma(part[t], fragment[s], b[0], b[4]);
          if (kZeroPoint) Mma<T>::mma(x_sum[t], ones, b[0], b[4]);
        }
        const int end = chunk * kChunk + k + 16;
        if (end < block_end && end < a.K_pad) continue;
        // The block of K ends: its scale is applied once.
        if (scale_block < a.num_blocks) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int64_t at = expert * scales +
                               int64_t(scale_block) * a.N_pad + first_row +
                               group + 8 * h;
            const float scale = load_as_float(a.scale, a.scale_dtype, at);
            const float zero = kZeroPoint ? a.zero_point[at] : 0.0f;
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
#pragma unroll
              for (int c = 2 * h; c < 2 * h + 2; ++c) {
                const float value =
                    kZeroPoint ? part[t][c] - zero * x_sum[t][c] : part[t][c];
                sum[t][c] += scale * value;
              }
            }
          }
        }
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
#pragma unroll
          for (int c = 0; c < 4; ++c) part[t][c] = x_sum[t][c] = 0.0f;
        }
        ++scale_block;
        block_end += a.block_size;
      }
    }
  }

#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int n = first_row + group + 8 * (c / 2);
      const int route = routes[8 * t + 2 * pair + c % 2];
      if (n >= a.N || route >= a.routes) continue;
      float value = sum[t][c];
      if (a.bias) {
        value +=
            to_float(static_cast<const T*>(a.bias)[int64_t(expert) * a.N + n]);
      }
      if (a.route_weight) value *= a.route_weight[route];
      y[int64_t(route) * a.N + n] = from_float<T>(value);
    }
  }
}

template <typename T>
void launch(const MoeGemmArgs& a, int most) {
  const auto kernel =
      a.zero_point ? moe_gemm_kernel<T, true> : moe_gemm_kernel<T, false>;
  cudaLaunchConfig_t config{};
  config.blockDim = dim3(kThreads);
  config.stream = a.stream;
  for (int first = 0; first < a.blocks; first += config.gridDim.y) {
    config.gridDim = dim3(a.N_pad / kRows, std::min(most, a.blocks - first));
    check_cuda(cudaLaunchKernelEx(&config, kernel, a, first),
               "ternary_moe_gemm");
  }
}

}  // namespace

void moe_gemm(const MoeGemmArgs& a, int most) {
  a.dtype == DType::kHalf ? launch<half>(a, most)
                          : launch<__nv_bfloat16>(a, most);
}

}  // namespace vllm::ternary
