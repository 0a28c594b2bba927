// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Conversions between storage types and float, for any processor. Everything
// is static: a file compiled for a newer instruction set must not lend its
// copy to the others at link time.

#pragma once

#include <cstdint>
#include <cstring>

#include "ternary_cpu.h"

namespace vllm::ternary::cpu {

static inline uint32_t float_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

static inline float bits_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

static inline float bfloat16_to_float(uint16_t bits) {
  return bits_float(static_cast<uint32_t>(bits) << 16);
}

// To nearest, ties to even; a NaN stays one.
static inline uint16_t float_to_bfloat16(float value) {
  const uint32_t bits = float_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return static_cast<uint16_t>((bits >> 16) | 0x40u);
  }
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t rest = half & 0x7fffu;
  if (rest >= 0x7c00u) {  // infinity, NaN
    return bits_float(sign | 0x7f800000u | ((rest & 0x3ffu) << 13));
  }
  if (rest >= 0x0400u) {
    return bits_float(sign | ((rest << 13) + (112u << 23)));
  }
  const float tiny = static_cast<float>(rest) * 0x1p-24f;  // subnormal or zero
  return sign ? -tiny : tiny;
}

// To nearest, ties to even; a NaN stays one.
static inline uint16_t float_to_half(float value) {
  const uint32_t bits = float_bits(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) {
    return sign | 0x7e00u;
  }
  if (rest >= 0x477ff000u) {  // rounds to infinity
    return sign | 0x7c00u;
  }
  if (rest >= 0x38800000u) {
    const uint32_t odd = (rest >> 13) & 1u;
    return sign |
           static_cast<uint16_t>((rest - 0x38000000u + 0xfffu + odd) >> 13);
  }
  // Subnormal: adding 0.5 leaves the rounded multiple of 2^-24 in the low bits.
  const float shifted = bits_float(rest) + 0.5f;
  return sign | static_cast<uint16_t>(float_bits(shifted) - 0x3f000000u);
}

static inline float load_float(const void* data, Type type, int64_t index) {
  switch (type) {
    case Type::kHalf:
      return half_to_float(static_cast<const uint16_t*>(data)[index]);
    case Type::kBFloat16:
      return bfloat16_to_float(static_cast<const uint16_t*>(data)[index]);
    case Type::kInt:
      return static_cast<float>(static_cast<const int32_t*>(data)[index]);
    default:
      return static_cast<const float*>(data)[index];
  }
}

static inline void store_float(void* data, Type type, int64_t index,
                               float value) {
  switch (type) {
    case Type::kHalf:
      static_cast<uint16_t*>(data)[index] = float_to_half(value);
      break;
    case Type::kBFloat16:
      static_cast<uint16_t*>(data)[index] = float_to_bfloat16(value);
      break;
    default:
      static_cast<float*>(data)[index] = value;
  }
}

}  // namespace vllm::ternary::cpu
