// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// bfloat16, every operation rounded once, half to even.
#pragma once

#include "cuda_runtime.h"

struct __nv_bfloat16 {
  uint16_t bits;
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float v) {
    const uint32_t u = __float_as_uint(v);
    bits =
        std::isnan(v) ? 0x7fff : uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
  }
  explicit operator float() const {
    return __uint_as_float(uint32_t(bits) << 16);
  }
};
struct __nv_bfloat162 {
  alignas(4) __nv_bfloat16 x;
  __nv_bfloat16 y;
};

inline float __bfloat162float(__nv_bfloat16 v) { return float(v); }
inline __nv_bfloat16 __float2bfloat16_rn(float v) { return __nv_bfloat16(v); }
inline __nv_bfloat16 __ushort_as_bfloat16(uint16_t v) {
  return std::bit_cast<__nv_bfloat16>(v);
}
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__nv_bfloat16(x), __nv_bfloat16(y)};
}
inline __nv_bfloat162 __hsub2(__nv_bfloat162 a, __nv_bfloat162 b) {
  return {__nv_bfloat16(float(a.x) - float(b.x)),
          __nv_bfloat16(float(a.y) - float(b.y))};
}
