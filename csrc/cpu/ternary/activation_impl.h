// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The bodies of ActivationOps, compiled once for each instruction set: loops
// that the compiler turns into vectors, and F16C where TERNARY_VECTORS says
// that it is there. No standard library, for the reason given in simd.h.

#pragma once

#include "activation.h"
#include "kernels.h"
#include "scalar.h"

namespace vllm::ternary::cpu {
namespace {

void widen_half(const uint16_t* data, int64_t count, float* out) {
  int64_t k = 0;
#ifdef TERNARY_VECTORS
  for (; k + 8 <= count; k += 8) {
    _mm256_storeu_ps(
        out + k, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(data + k))));
  }
#endif
  for (; k < count; ++k) {
    out[k] = half_to_float(data[k]);
  }
}

void widen_row(const Row& x, int64_t size_k, float* out) {
  if (x.stride != 1) {
    for (int64_t k = 0; k < size_k; ++k) {
      out[k] = load_float(x.data, x.type, x.offset + k * x.stride);
    }
  } else if (x.type == Type::kHalf) {
    widen_half((const uint16_t*)x.data + x.offset, size_k, out);
  } else if (x.type == Type::kBFloat16) {
    const uint16_t* data = (const uint16_t*)x.data + x.offset;
    for (int64_t k = 0; k < size_k; ++k) {
      out[k] = bfloat16_to_float(data[k]);
    }
  } else {
    __builtin_memcpy(out, (const float*)x.data + x.offset,
                     size_k * sizeof(float));
  }
}

void pad_row(const Weight& w, const float* row, float* out) {
  const int64_t step = w.nblocks == 1 ? w.size_k : w.block_size;
  for (int64_t b = 0; b < w.nblocks; ++b) {
    const int64_t left = w.size_k - b * step;
    const int64_t count = left < step ? left : step;
    __builtin_memcpy(out + w.block_begin(b), row + b * step,
                     count * sizeof(float));
    for (int64_t k = w.block_begin(b) + count; k < w.block_end(b); ++k) {
      out[k] = 0.0f;
    }
  }
}

void sum_blocks(const Weight& w, const float* padded, int64_t size_m, int64_t m,
                float* out) {
  for (int64_t b = 0; b < w.nblocks; ++b) {
    float part[kWordCodes] = {};
    for (int64_t k = w.block_begin(b); k < w.block_end(b); k += kWordCodes) {
      for (int64_t i = 0; i < kWordCodes; ++i) {
        part[i] += padded[k + i];
      }
    }
    float sum = 0.0f;
    for (const float value : part) {
      sum += value;
    }
    out[b * size_m + m] = sum;
  }
}

float rms_inverse(const float* row, int64_t size_k, float eps) {
  float part[16] = {};
  int64_t k = 0;
  for (; k + 16 <= size_k; k += 16) {
    for (int64_t i = 0; i < 16; ++i) {
      part[i] += row[k + i] * row[k + i];
    }
  }
  float sum = 0.0f;
  for (; k < size_k; ++k) {
    sum += row[k] * row[k];
  }
  for (const float value : part) {
    sum += value;
  }
  return 1.0f / __builtin_sqrtf(sum / (float)size_k + eps);
}

float round_to_bfloat16(float value) {
  return bfloat16_to_float(float_to_bfloat16(value));
}

float round_to_half(float value) { return half_to_float(float_to_half(value)); }

void round_row(Type type, int64_t count, float* row) {
  int64_t k = 0;
  if (type == Type::kBFloat16) {
    for (; k < count; ++k) {
      row[k] = round_to_bfloat16(row[k]);
    }
  } else if (type == Type::kHalf) {
#ifdef TERNARY_VECTORS
    for (; k + 8 <= count; k += 8) {
      _mm256_storeu_ps(
          row + k, _mm256_cvtph_ps(_mm256_cvtps_ph(_mm256_loadu_ps(row + k),
                                                   _MM_FROUND_TO_NEAREST_INT)));
    }
#endif
    for (; k < count; ++k) {
      row[k] = round_to_half(row[k]);
    }
  }
}

void apply_norm(const float* row, int64_t size_k, float inverse,
                const Row& weight, Type x_type, float* out) {
  for (int64_t k = 0; k < size_k; ++k) {
    out[k] = row[k] * inverse;
  }
  round_row(x_type, size_k, out);
  constexpr int64_t kFactors = 256;
  float factor[kFactors];
  for (int64_t k = 0; k < size_k; k += kFactors) {
    const int64_t count = size_k - k < kFactors ? size_k - k : kFactors;
    widen_row({weight.data, weight.type, weight.offset + k, 1}, count, factor);
    for (int64_t i = 0; i < count; ++i) {
      out[k + i] *= factor[i];
    }
  }
  if (weight.type != Type::kFloat) {
    round_row(x_type, size_k, out);
  }
}

// 16 values into the order of int8_position().
void permute_word(const int8_t* in, int8_t* out) {
#ifdef TERNARY_VECTORS
  const __m128i order =
      _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm_storeu_si128(
      (__m128i*)out,
      _mm_shuffle_epi8(_mm_loadu_si128((const __m128i*)in), order));
#else
  for (int64_t i = 0; i < kWordCodes; ++i) {
    out[int8_position(i)] = in[i];
  }
#endif
}

constexpr int64_t kChunk = 256;  // values of a row at a time
constexpr int64_t kLine = 64;

void widen_part(const Row& x, int64_t k, int64_t count, float* out) {
  widen_row({x.data, x.type, x.offset + k * x.stride, x.stride}, count, out);
}

// The factors from x to q and back, from the bits of max|x|.
struct Factors {
  bool finite;
  float to_int8, from_int8;

  explicit Factors(uint32_t largest) : finite(largest < 0x7f800000u) {
    const float magnitude = bits_float(largest);
    const float bound = magnitude > 1e-5f ? magnitude : 1e-5f;
    // As torch evaluates 127 / bound: a quotient rounds differently.
    to_int8 = finite ? 127.0f * (1.0f / bound) : 0.0f;
    from_int8 = finite ? bound / 127.0f : __builtin_nanf("");
  }
};

float quantize_row(const Weight& w, const Row& row, int64_t size_m, int64_t m,
                   int8_t* out, int64_t line_step, int32_t* sums) {
  float value[kChunk];
  // As integers, so that infinity and NaN compare above every number.
  uint32_t largest = 0;
  for (int64_t k = 0; k < w.size_k; k += kChunk) {
    const int64_t count = w.size_k - k < kChunk ? w.size_k - k : kChunk;
    widen_part(row, k, count, value);
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t bits = float_bits(value[i]) & 0x7fffffffu;
      largest = bits > largest ? bits : largest;
    }
  }
  const Factors factors(largest);
  const int64_t step = w.nblocks == 1 ? w.size_k : w.block_size;
  int8_t q[kChunk];
  for (int64_t b = 0; b < w.nblocks; ++b) {
    int32_t sum = 0;
    const int64_t left = w.size_k - b * step;
    const int64_t valid = left < step ? left : step;
    const int64_t padded = w.block_end(b) - w.block_begin(b);
    for (int64_t k = 0; k < padded; k += kChunk) {
      const int64_t room = padded - k < kChunk ? padded - k : kChunk;
      const int64_t most = valid - k < room ? valid - k : room;
      const int64_t count = factors.finite && most > 0 ? most : 0;
      widen_part(row, b * step + k, count, value);
      for (int64_t i = 0; i < count; ++i) {
        // |value * factor| is at most 127 and a rounding error.
        const int32_t rounded =
            (int32_t)__builtin_rintf(value[i] * factors.to_int8);
        q[i] = (int8_t)(rounded > 127 ? 127 : rounded);
        sum += q[i];
      }
      for (int64_t i = count; i < room; ++i) {
        q[i] = 0;
      }
      for (int64_t i = 0; i < room; i += kWordCodes) {
        const int64_t at = w.block_begin(b) + k + i;
        permute_word(q + i, out + at / kLine * line_step + at % kLine);
      }
    }
    sums[b * size_m + m] = sum;
  }
  return factors.from_int8;
}

}  // namespace
}  // namespace vllm::ternary::cpu
