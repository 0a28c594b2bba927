// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// What the CUDA files of the ternary kernels share on the device side.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "cuda_common.h"

namespace vllm::ternary {

__device__ __forceinline__ float to_float(half v) { return __half2float(v); }
__device__ __forceinline__ float to_float(__nv_bfloat16 v) {
  return __bfloat162float(v);
}
__device__ __forceinline__ float to_float(float v) { return v; }

template <typename T>
__device__ __forceinline__ T from_float(float v);
template <>
__device__ __forceinline__ half from_float<half>(float v) {
  return __float2half_rn(v);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float v) {
  return __float2bfloat16_rn(v);
}
template <>
__device__ __forceinline__ float from_float<float>(float v) {
  return v;
}

// Reads element i of an array whose type is known at run time only.
__device__ __forceinline__ float load_as_float(const void* base, DType dtype,
                                               int64_t i) {
  switch (dtype) {
    case DType::kHalf:
      return __half2float(static_cast<const half*>(base)[i]);
    case DType::kBFloat16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(base)[i]);
    default:
      return static_cast<const float*>(base)[i];
  }
}

// The two values of T in a word.
template <typename T>
__device__ __forceinline__ float2 unpack_two(uint32_t w) {
  const T* v = reinterpret_cast<const T*>(&w);
  return make_float2(to_float(v[0]), to_float(v[1]));
}

// The lower or the upper value of a word, in one instruction if it is bfloat16.
template <typename T, int kUpper>
__device__ __forceinline__ float value_of(uint32_t w) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __uint_as_float(kUpper ? w & 0xffff0000u : w << 16);
  } else {
    const float2 v = unpack_two<T>(w);
    return kUpper ? v.y : v.x;
  }
}

// Eight values at column k of a row of T, zero past K.
template <typename T>
__device__ __forceinline__ uint4 load_eight(const T* row, int k, int K) {
  if (k + 8 <= K) return *reinterpret_cast<const uint4*>(row + k);
  uint32_t w[4] = {};
  const uint16_t* tail = reinterpret_cast<const uint16_t*>(row);
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    if (k + c < K) w[c / 2] |= uint32_t(tail[k + c]) << (16 * (c & 1));
  }
  return make_uint4(w[0], w[1], w[2], w[3]);
}

// Where value k of a row of xq lies in it. A word of the weight, shifted right
// by 2 i and masked with 0x03030303, is register i of the A operand of
// mma.m16n8k32 with k in this order.
__host__ __device__ __forceinline__ int int8_position(int k) {
  return (k & ~31) + 2 * (k & 8) + 2 * (k & 6) + ((k >> 4) & 1) + 2 * (k & 1);
}

// v * factor, rounded half to even, in the low byte: it is at most 127 and a
// rounding error in size, so that adding 1.5 * 2^23 leaves the integer there.
__device__ __forceinline__ uint32_t round_to_byte(float v, float factor) {
  return __float_as_uint(__fadd_rn(__fmul_rn(v, factor), 12582912.0f));
}

// The low bytes of four words.
__device__ __forceinline__ uint32_t low_bytes(uint32_t a, uint32_t b,
                                              uint32_t c, uint32_t d) {
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040),
                     0x5410);
}

// The larger of `top` and the magnitudes of two values, in each half of a word;
// as 16-bit integers, among which infinity and NaN are the largest.
__device__ __forceinline__ uint32_t raise_largest(uint32_t top, uint32_t pair) {
  return __vmaxu2(top, pair & 0x7fff7fffu);
}
__device__ __forceinline__ uint32_t larger_half(uint32_t top) {
  return max(top & 0xffffu, top >> 16);
}

// Four values in the bytes of a word.
__device__ __forceinline__ uint32_t quantize_four(const float (&v)[4],
                                                  float factor) {
  uint32_t q[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) q[c] = round_to_byte(v[c], factor);
  return low_bytes(q[0], q[1], q[2], q[3]);
}

// Sixteen values, k ... k + 7 in `low` and k + 16 ... k + 23 in `high`: the
// largest magnitude as in raise_largest(), and what quantize_four() makes of
// them, in the order of an int8 operand.
__device__ __forceinline__ uint32_t raise_largest(uint32_t top,
                                                  const uint4& v) {
  top = raise_largest(top, v.x);
  top = raise_largest(top, v.y);
  top = raise_largest(top, v.z);
  return raise_largest(top, v.w);
}
template <typename T>
__device__ __forceinline__ void quantize_sixteen(const uint4& low,
                                                 const uint4& high,
                                                 float factor,
                                                 uint32_t (&out)[4]) {
  const uint32_t p[4] = {low.x, low.y, low.z, low.w};
  const uint32_t q[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    const float values[4] = {value_of<T, 0>(p[t]), value_of<T, 0>(q[t]),
                             value_of<T, 1>(p[t]), value_of<T, 1>(q[t])};
    out[t] = quantize_four(values, factor);
  }
}

// AutoBitLinear's numbers of a token whose largest magnitude is `largest`: what
// its values are multiplied by, as torch evaluates 127 / bound (a quotient
// rounds differently), and what its integers count, which is NaN with infinity
// or NaN.
__device__ __forceinline__ float token_factor(float largest) {
  return __fmul_rn(127.0f, __frcp_rn(fmaxf(largest, 1e-5f)));
}
__device__ __forceinline__ float token_scale(float largest) {
  if (__float_as_uint(largest) >= 0x7f800000u) {
    return __uint_as_float(0x7fffffffu);
  }
  // bound / 127 with one step of Newton's; rounded as the quotient is, for each
  // float from 1e-5 on.
  const float bound = fmaxf(largest, 1e-5f);
  const float q = __fmul_rn(bound, 1.0f / 127.0f);
  return fmaf(fmaf(q, -127.0f, bound), 1.0f / 127.0f, q);
}

// The weight {-1, 0, +1} at (n, k), by the formula of ternary_layout_cuda.py.
__device__ __forceinline__ int ternary_at(const int32_t* weight, int K_pad,
                                          int n, int k) {
  const int kk = k & 127;
  const int lane = (n & 7) * 4 + ((kk & 7) >> 1);
  const int64_t tile = int64_t(n >> 4) * (K_pad >> 7) + (k >> 7);
  const uint32_t word = weight[(tile * 32 + lane) * 4 + (kk >> 5)];
  const int i = ((n >> 3) & 1) + 2 * ((kk >> 3) & 1);
  const int bit = 2 * (4 * ((kk >> 4) & 1) + i) + 16 * (kk & 1);
  return int((word >> bit) & 3) - 1;
}

}  // namespace vllm::ternary
