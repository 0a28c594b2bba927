// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// What the int8 kernels with short chains of latencies share (sm_90 and later):
// warps with a part of K each for rows of their CTA, sums that warps, and CTAs
// of a cluster, exchange once.
#pragma once

#include "mma_s8.cuh"
#include "sm90_prefill_ptx.cuh"

namespace vllm::ternary {

inline int floor_log2(int v) {
  int log2 = 0;
  while ((2 << log2) <= v) ++log2;
  return log2;
}

// Keeps a value in a register from here on, instead of made anew where it is
// used: what was computed while the kernel ahead ran stays computed.
__device__ __forceinline__ void pin(uint32_t& v) { asm volatile("" : "+r"(v)); }
__device__ __forceinline__ void pin(int& v) { asm volatile("" : "+r"(v)); }
template <typename P>
__device__ __forceinline__ void pin(P*& v) {  // into global memory
  asm volatile("" : "+l"(v));
#ifdef __CUDACC__
  __builtin_assume(__isGlobal(v));  // else loads and stores are generic ones
#endif
}

// Eight values of x, k .. k + 3 and k + 16 .. k + 19, whose bytes are eight in
// a row. A lane's are at k0 = kt0 * 128 + this, and every 256 further on.
__device__ __forceinline__ int eight_position(int lane) {
  return (lane >> 2) * 32 + (lane & 3) * 4;
}

struct Eight {
  uint2 v[2];

  template <typename T>
  __device__ __forceinline__ void load(const T* row, int k, bool valid) {
    v[0] = v[1] = make_uint2(0, 0);
    if (!valid) return;
    v[0] = *reinterpret_cast<const uint2*>(row + k);
    v[1] = *reinterpret_cast<const uint2*>(row + k + 16);
  }

  // The larger of `top` and the magnitudes here, in each half of a word, as
  // 16-bit integers, among which infinity and NaN are the largest.
  __device__ __forceinline__ uint32_t largest(uint32_t top) const {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      top = __vmaxu2(top, v[c].x & 0x7fff7fffu);
      top = __vmaxu2(top, v[c].y & 0x7fff7fffu);
    }
    return top;
  }

  // The values of word t, in the order of its bytes.
  template <typename T>
  __device__ __forceinline__ void values(int t, float (&out)[4]) const {
    const float2 p = unpack_two<T>(t ? v[0].y : v[0].x);
    const float2 q = unpack_two<T>(t ? v[1].y : v[1].x);
    out[0] = p.x;
    out[1] = q.x;
    out[2] = p.y;
    out[3] = q.y;
  }
};

__device__ __forceinline__ void store_shared_8(uint32_t at,
                                               const uint32_t (&v)[2]) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(at), "r"(v[0]),
               "r"(v[1])
               : "memory");
}

__device__ __forceinline__ void store_shared_4(uint32_t at, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory");
}

// The columns of a k tile as B operands; `column` is the lane's address in
// them.
__device__ __forceinline__ void load_columns(uint32_t column, int kt,
                                             uint32_t (&b)[2][4]) {
  ldmatrix_x4(b[0], column + kt * 128);
  ldmatrix_x4(b[1], column + kt * 128 + 64);
}

// The sums of a lane's two columns over a k tile, made by the tensor cores.
__device__ __forceinline__ void sum_columns(const uint32_t (&b)[2][4],
                                            int (&sums)[2]) {
  const uint32_t ones[4] = {0x01010101u, 0x01010101u, 0x01010101u, 0x01010101u};
  int d[4] = {}, e[4] = {};
  mma_s8(d, ones, b[0][0], b[0][1]);
  mma_s8(e, ones, b[0][2], b[0][3]);
  mma_s8(d, ones, b[1][0], b[1][1]);
  mma_s8(e, ones, b[1][2], b[1][3]);
  sums[0] = d[0] + e[0];
  sums[1] = d[1] + e[1];
}

// Where the sums of a k tile start: codes t + 1 add the sum of each column,
// rows 8..15 at 4 times the code.
__device__ __forceinline__ void start_of(const uint32_t (&b)[2][4],
                                         int (&start)[4]) {
  int sums[2];
  sum_columns(b, sums);
  start[0] = -sums[0];
  start[1] = -sums[1];
  start[2] = 4 * start[0];
  start[3] = 4 * start[1];
}

}  // namespace vllm::ternary
