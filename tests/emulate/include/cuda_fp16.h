// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// float16, every operation rounded once, half to even.
#pragma once

#include "cuda_runtime.h"

namespace emu {

extern const float* const half_values;  // of the 65536 bit patterns

inline uint16_t half_bits(float v) {
  const uint32_t u = __float_as_uint(v), sign = u >> 16 & 0x8000;
  const uint32_t magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fff;
  if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00);
  if (magnitude < 0x38800000u) {  // subnormal: units of 2^-24
    const float scaled = __uint_as_float(magnitude) * 16777216.0f;
    return uint16_t(sign | uint32_t(std::nearbyint(scaled)));
  }
  const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
  return uint16_t(sign | ((rounded >> 13) - (112 << 10)));
}

}  // namespace emu

struct __half {
  uint16_t bits;
  __half() = default;
  explicit __half(float v) : bits(emu::half_bits(v)) {}
  explicit operator float() const { return emu::half_values[bits]; }
};
using half = __half;
struct __half2 {
  alignas(4) __half x;
  __half y;
};
using half2 = __half2;

inline float __half2float(__half v) { return float(v); }
inline __half __float2half_rn(float v) { return __half(v); }
inline __half __ushort_as_half(uint16_t v) { return std::bit_cast<__half>(v); }
inline __half2 __floats2half2_rn(float x, float y) {
  return {__half(x), __half(y)};
}
inline __half2 __hsub2(__half2 a, __half2 b) {
  return {__half(float(a.x) - float(b.x)), __half(float(a.y) - float(b.y))};
}
