// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Helpers of the 512-bit kernels. Include after simd.h and ternary_cpu.h,
// between TERNARY_TARGET_BEGIN and TERNARY_TARGET_END; all static, for the
// reason given in simd.h.

#pragma once

namespace vllm::ternary::cpu {

// 16 values of any storage type, as float.
static inline __m512 load16(const void* data, Type type, int64_t index) {
  switch (type) {
    case Type::kHalf:
      return _mm512_cvtph_ps(
          _mm256_loadu_si256((const __m256i*)((const uint16_t*)data + index)));
    case Type::kBFloat16:
      return _mm512_castsi512_ps(_mm512_slli_epi32(
          _mm512_cvtepu16_epi32(_mm256_loadu_si256(
              (const __m256i*)((const uint16_t*)data + index))),
          16));
    case Type::kInt:
      return _mm512_cvtepi32_ps(
          _mm512_loadu_si512((const int32_t*)data + index));
    default:
      return _mm512_loadu_ps((const float*)data + index);
  }
}

// The same where only the lanes of `mask` may be touched; the rest is 0.
static inline __m512 load16_masked(const void* data, Type type, int64_t index,
                                   __mmask16 mask) {
  switch (type) {
    case Type::kHalf:
      return _mm512_cvtph_ps(
          _mm256_maskz_loadu_epi16(mask, (const uint16_t*)data + index));
    case Type::kBFloat16:
      return _mm512_castsi512_ps(
          _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(
                                mask, (const uint16_t*)data + index)),
                            16));
    default:
      return _mm512_maskz_loadu_ps(mask, (const float*)data + index);
  }
}

// To nearest even in integers, so that no AVX512-BF16 is needed; NaN stays.
static inline __m256i to_bfloat16(__m512 value) {
  const __m512i bits = _mm512_castps_si512(value);
  const __m512i odd =
      _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded =
      _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
  rounded =
      _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}

static inline void store16_masked(void* data, Type type, int64_t index,
                                  __m512 value, __mmask16 mask) {
  switch (type) {
    case Type::kHalf:
      _mm256_mask_storeu_epi16(
          (uint16_t*)data + index, mask,
          _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
      break;
    case Type::kBFloat16:
      _mm256_mask_storeu_epi16((uint16_t*)data + index, mask,
                               to_bfloat16(value));
      break;
    default:
      _mm512_mask_storeu_ps((float*)data + index, mask, value);
  }
}

// The lanes of a lane group that are rows of [row_begin, row_end).
static inline __mmask16 row_mask(const Problem& p, int64_t unit) {
  const int64_t first = unit * kLaneRows;
  uint32_t mask = 0xffffu;
  if (first < p.row_begin) {
    mask &= 0xffffu << (p.row_begin - first);
  }
  if (first + kLaneRows > p.row_end) {
    mask &= 0xffffu >> (first + kLaneRows - p.row_end);
  }
  return (__mmask16)mask;
}

// total += scale * (sum - zero_point * x_sum) for one block of one token.
static inline __m512 add_block(const Problem& p, int64_t block, int64_t unit,
                               int64_t m, __m512 sum, __m512 total) {
  const Weight& w = p.weight;
  const int64_t at = block * w.n_pad + unit * kLaneRows;
  if (w.zero_point != nullptr) {
    sum = _mm512_fnmadd_ps(load16(w.zero_point, w.zero_point_type, at),
                           _mm512_set1_ps(p.x_sum[block * p.size_m + m]), sum);
  }
  return _mm512_fmadd_ps(load16(w.scale, w.scale_type, at), sum, total);
}

// y = total (* x_scale) (+ bias) for one token of one lane group.
static inline void finish(const Problem& p, int64_t unit, int64_t m,
                          __m512 total) {
  const int64_t n = unit * kLaneRows;
  const __mmask16 mask = row_mask(p, unit);
  if (p.x_scale != nullptr) {
    total = _mm512_mul_ps(total, _mm512_set1_ps(p.x_scale[m]));
  }
  if (p.bias != nullptr) {
    total = _mm512_add_ps(total, load16_masked(p.bias, p.bias_type, n, mask));
  }
  store16_masked(p.y, p.y_type, m * p.weight.size_n + n, total, mask);
}

// Entry c0 + 4*c1: the weights of two codes, as a pair of bfloat16.
static inline __m512i bfloat16_pairs() {
  const int minus = 0xbf80, one = 0x3f80;
  const auto pair = [](int first, int second) {
    return (int)((unsigned)first | (unsigned)second << 16);
  };
  return _mm512_setr_epi32(pair(minus, minus), pair(0, minus), pair(one, minus),
                           0, pair(minus, 0), 0, pair(one, 0), 0,
                           pair(minus, one), pair(0, one), pair(one, one), 0, 0,
                           0, 0, 0);
}

// Lane groups that can go together from `unit` on, within one memory tile.
static inline int64_t units_together(int64_t unit, int64_t unit_end) {
  const int64_t left = unit_end - unit;
  const int64_t in_tile = 4 - unit % 4;
  return left < in_tile ? left : in_tile;
}

}  // namespace vllm::ternary::cpu
