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

// The same times the scales of rows g (registers 0, 2) and g + 8 (1, 3), each
// given twice in a register. Exact: the product of a scale and -1, 0 or +1.
template <typename T>
__device__ __forceinline__ void decode_word_scaled(uint32_t word,
                                                   const uint32_t (&scale)[2],
                                                   uint32_t* a) {
  decode_word<T>(word, a);
#pragma unroll
  for (int i = 0; i < 8; ++i) a[i] = mul2<T>(a[i], scale[i & 1]);
}

}  // namespace vllm::ternary::sm90
