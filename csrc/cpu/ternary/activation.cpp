// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project

#include "activation.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels.h"
#include "scalar.h"

namespace vllm::ternary::cpu {
namespace {

// Calls f(first k, count, first padded k) for every block.
template <typename F>
void for_each_block(const Weight& w, const F& f) {
  const int64_t step = w.nblocks == 1 ? w.size_k : w.block_size;
  for (int64_t b = 0; b < w.nblocks; ++b) {
    const int64_t first = b * step;
    f(first, std::min(w.size_k - first, step), w.block_begin(b));
  }
}

float round_to(Type type, float value) {
  switch (type) {
    case Type::kHalf:
      return half_to_float(float_to_half(value));
    case Type::kBFloat16:
      return bfloat16_to_float(float_to_bfloat16(value));
    default:
      return value;
  }
}

}  // namespace

void widen_row(const Row& x, int64_t size_k, float* out) {
  for (int64_t k = 0; k < size_k; ++k) {
    out[k] = load_float(x.data, x.type, x.offset + k * x.stride);
  }
}

void pad_row(const Weight& w, const float* row, float* out) {
  std::fill(out, out + w.k_pad, 0.0f);
  for_each_block(w, [&](int64_t first, int64_t count, int64_t padded) {
    std::copy(row + first, row + first + count, out + padded);
  });
}

void sum_blocks(const Weight& w, const float* padded, int64_t size_m, int64_t m,
                float* out) {
  for (int64_t b = 0; b < w.nblocks; ++b) {
    float sum = 0.0f;
    for (int64_t k = w.block_begin(b); k < w.block_end(b); ++k) {
      sum += padded[k];
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
  return 1.0f / std::sqrt(sum / static_cast<float>(size_k) + eps);
}

void apply_norm(const float* row, int64_t size_k, float inverse,
                const void* weight, Type weight_type, int64_t weight_offset,
                Type x_type, float* out) {
  const Type result = weight_type == Type::kFloat ? Type::kFloat : x_type;
  for (int64_t k = 0; k < size_k; ++k) {
    const float normed = round_to(x_type, row[k] * inverse);
    const float factor = load_float(weight, weight_type, weight_offset + k);
    out[k] = round_to(result, normed * factor);
  }
}

float quantize_row(const Weight& w, const float* row, int64_t size_m, int64_t m,
                   int8_t* out, int32_t* sums) {
  // As integers, so that infinity and NaN compare above every number.
  uint32_t largest = 0;
  for (int64_t k = 0; k < w.size_k; ++k) {
    largest = std::max(largest, float_bits(row[k]) & 0x7fffffffu);
  }
  std::fill(out, out + w.k_pad, int8_t{0});
  if (largest >= 0x7f800000u) {
    for (int64_t b = 0; b < w.nblocks; ++b) {
      sums[b * size_m + m] = 0;
    }
    return std::numeric_limits<float>::quiet_NaN();
  }
  const float bound = std::max(bits_float(largest), 1e-5f);
  // As torch evaluates 127 / bound: a quotient rounds differently.
  const float factor = 127.0f * (1.0f / bound);
  int64_t block = 0;
  for_each_block(w, [&](int64_t first, int64_t count, int64_t padded) {
    int32_t sum = 0;
    for (int64_t i = 0; i < count; ++i) {
      // Adding and taking away 1.5 * 2^23 rounds to nearest, ties to even.
      const float value = row[first + i] * factor + 12582912.0f - 12582912.0f;
      const int32_t q = static_cast<int32_t>(value);
      const int64_t at = padded + i;
      out[at / 16 * 16 + int8_position(at % 16)] =
          static_cast<int8_t>(std::clamp(q, -128, 127));
      sum += q;
    }
    sums[block++ * size_m + m] = sum;
  });
  return bound / 127.0f;
}

}  // namespace vllm::ternary::cpu
