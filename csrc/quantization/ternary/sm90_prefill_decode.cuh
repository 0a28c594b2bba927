// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// From 2-bit codes to the 16-bit A operand of wgmma, in registers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace vllm::ternary::sm90 {

// (a & b) | c in one instruction.
__device__ __forceinline__ uint32_t and_or(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// A code sits at bits 2i, 2i+1 of each half of a word. Under the exponent at
// which those bits are worth 1 and 2, the half reads as base + code, so that
// register i needs no shift: fp16 has 10 mantissa bits (bases 1024, 256, 64,
// 16); bf16 has 7 (bases 128, 32, 8), and its fourth field straddles mantissa
// and exponent, where 2, 3, 4 are evenly spaced too. Subtracting base + 1 is
// exact and leaves t = code - 1.
template <typename T>
__host__ __device__ constexpr uint32_t magic_base(int i) {
  if constexpr (std::is_same_v<T, __half>) {
    return 0x6400 - 0x0800 * i;
  } else {
    return 0x4300 - 0x0100 * i;
  }
}

template <typename T>
__device__ __forceinline__ uint32_t sub2(uint32_t a, uint32_t b) {
  uint32_t d;
  if constexpr (std::is_same_v<T, __half>) {
    asm("sub.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  } else {
    asm("sub.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  }
  return d;
}

template <typename T>
__device__ __forceinline__ uint32_t mul2(uint32_t a, uint32_t b) {
  uint32_t d;
  if constexpr (std::is_same_v<T, __half>) {
    asm("mul.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  } else {
    asm("mul.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  }
  return d;
}

__device__ __forceinline__ uint32_t fma2_bf16(uint32_t a, uint32_t b,
                                              uint32_t c) {
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// The two k16-steps (eight registers) of one word, as -1, 0, +1.
template <typename T>
__device__ __forceinline__ void decode_word(uint32_t word, uint32_t* a) {
#pragma unroll
  for (int s = 0; s < 2; ++s) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      constexpr uint32_t kBoth = 0x00010001;
      const uint32_t base = magic_base<T>(i) * kBoth;
      const uint32_t field = (3u << (2 * i)) * kBoth;
      const uint32_t one = (1u << (2 * i)) * kBoth;
      a[4 * s + i] = sub2<T>(and_or(word, field, base), base | one);
    }
    word >>= 8;
  }
}

// The scales of rows g and g + 8, and the two k16-steps of a word times the one
// (registers 0, 2) and the other (1, 3). Exact: the product of a scale and -1,
// 0 or +1.
template <typename T>
struct RowScales {
  uint32_t scale[2];  // each twice in a register

  // `pair`: the two in the halves of a register.
  __device__ __forceinline__ void set(uint32_t pair) {
    scale[0] = __byte_perm(pair, 0, 0x1010);
    scale[1] = __byte_perm(pair, 0, 0x3232);
  }
  __device__ __forceinline__ void decode(uint32_t word, uint32_t* a) const {
    decode_word<T>(word, a);
#pragma unroll
    for (int i = 0; i < 8; ++i) a[i] = mul2<T>(a[i], scale[i & 1]);
  }
};

// In bf16 two instructions a register do, as exactly: alone in its half, field
// i reads as code * 2^(2i - 133), subnormal (or the least normal number), and
// one fma makes it (code - 1) * scale. The factors fit into bf16 for weights
// that are 2^kShrink times too small: then any fp16 scale does, and those of
// wider types from 2^(kShrink - 126) to below 2^(kShrink - 6).
constexpr int kShrink = 40;

template <>
struct RowScales<__nv_bfloat16> {
  uint32_t factor[4], minus[2];

  __host__ __device__ static constexpr uint32_t both(int exponent) {
    return uint32_t(127 + exponent) * 0x00800080;
  }
  __device__ __forceinline__ void set(uint32_t pair) {
    const uint32_t scale[2] = {__byte_perm(pair, 0, 0x1010),
                               __byte_perm(pair, 0, 0x3232)};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      factor[i] =
          mul2<__nv_bfloat16>(scale[i & 1], both(133 - 2 * i - kShrink));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      minus[i] = mul2<__nv_bfloat16>(scale[i], both(-kShrink) | 0x80008000);
    }
  }
  __device__ __forceinline__ void decode(uint32_t word, uint32_t* a) const {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t field = (3u << (2 * i)) * 0x00010001;
        a[4 * s + i] = fma2_bf16(word & field, factor[i], minus[i & 1]);
      }
      word >>= 8;
    }
  }
};

}  // namespace vllm::ternary::sm90
