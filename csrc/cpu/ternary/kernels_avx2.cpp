// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Kernels for AVX2 with FMA and F16C. A lane group is two vectors.

#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "simd.h"

#ifdef TERNARY_X86

TERNARY_TARGET_BEGIN(TERNARY_AVX2)
  #include "scalar.h"

namespace vllm::ternary::cpu {
namespace {

constexpr int kHalves = 2;
constexpr int64_t kHalfRows = 8;

__m256 load8(const void* data, Type type, int64_t index) {
  switch (type) {
    case Type::kHalf:
      return _mm256_cvtph_ps(
          _mm_loadu_si128((const __m128i*)((const uint16_t*)data + index)));
    case Type::kBFloat16:
      return _mm256_castsi256_ps(_mm256_slli_epi32(
          _mm256_cvtepu16_epi32(
              _mm_loadu_si128((const __m128i*)((const uint16_t*)data + index))),
          16));
    case Type::kInt:
      return _mm256_cvtepi32_ps(
          _mm256_loadu_si256((const __m256i*)((const int32_t*)data + index)));
    default:
      return _mm256_loadu_ps((const float*)data + index);
  }
}

// total += scale * (sum - zero_point * x_sum) for one block of one token.
__m256 add_block(const Problem& p, int64_t block, int64_t row, int64_t m,
                 __m256 sum, __m256 total) {
  const Weight& w = p.weight;
  const int64_t at = block * w.n_pad + row;
  if (w.zero_point != nullptr) {
    sum = _mm256_fnmadd_ps(load8(w.zero_point, w.zero_point_type, at),
                           _mm256_set1_ps(p.x_sum[block * p.size_m + m]), sum);
  }
  return _mm256_fmadd_ps(load8(w.scale, w.scale_type, at), sum, total);
}

void finish(const Problem& p, int64_t row, int64_t m, __m256 total) {
  if (p.x_scale != nullptr) {
    total = _mm256_mul_ps(total, _mm256_set1_ps(p.x_scale[m]));
  }
  const int64_t at = m * p.weight.size_n + row;
  const bool whole = row >= p.row_begin && row + kHalfRows <= p.row_end;
  if (whole && p.bias != nullptr) {
    total = _mm256_add_ps(total, load8(p.bias, p.bias_type, row));
  }
  if (whole && p.y_type == Type::kFloat) {
    _mm256_storeu_ps((float*)p.y + at, total);
    return;
  }
  if (whole && p.y_type == Type::kHalf) {
    _mm_storeu_si128((__m128i*)((uint16_t*)p.y + at),
                     _mm256_cvtps_ph(total, _MM_FROUND_TO_NEAREST_INT));
    return;
  }
  alignas(32) float value[kHalfRows];
  _mm256_store_ps(value, total);
  for (int64_t r = 0; r < kHalfRows; ++r) {
    const int64_t n = row + r;
    if (n < p.row_begin || n >= p.row_end) {
      continue;
    }
    if (!whole && p.bias != nullptr) {
      value[r] += load_float(p.bias, p.bias_type, n);
    }
    store_float(p.y, p.y_type, at + r, value[r]);
  }
}

// M tokens of float, one lane group.
template <int M>
void f32_tile(const Problem& p, int64_t unit, int64_t m0) {
  const Weight& w = p.weight;
  const uint32_t* words = w.unit_words(unit);
  const float* x = (const float*)p.x + m0 * w.k_pad;
  // Two code bits select; the one above them is of the next weight.
  const __m256 table = _mm256_setr_ps(-1.f, 0.f, 1.f, 0.f, -1.f, 0.f, 1.f, 0.f);
  __m256 total[M][kHalves];
  for (int m = 0; m < M; ++m) {
    total[m][0] = total[m][1] = _mm256_setzero_ps();
  }
  for (int64_t block = 0; block < w.nblocks; ++block) {
    __m256 sum[M][kHalves];
    for (int m = 0; m < M; ++m) {
      sum[m][0] = sum[m][1] = _mm256_setzero_ps();
    }
    for (int64_t k = w.block_begin(block); k < w.block_end(block);
         k += kWordCodes) {
      const __m256i* group =
          (const __m256i*)(words + k / kWordCodes * kTileRows);
      __m256i low = _mm256_loadu_si256(group);
      __m256i high = _mm256_loadu_si256(group + 1);
      for (int j = 0; j < kWordCodes; ++j) {
        const __m256 t0 = _mm256_permutevar8x32_ps(table, low);
        const __m256 t1 = _mm256_permutevar8x32_ps(table, high);
        low = _mm256_srli_epi32(low, 2);
        high = _mm256_srli_epi32(high, 2);
        for (int m = 0; m < M; ++m) {
          const __m256 xm = _mm256_broadcast_ss(x + m * w.k_pad + k + j);
          sum[m][0] = _mm256_fmadd_ps(xm, t0, sum[m][0]);
          sum[m][1] = _mm256_fmadd_ps(xm, t1, sum[m][1]);
        }
      }
    }
    for (int m = 0; m < M; ++m) {
      for (int h = 0; h < kHalves; ++h) {
        total[m][h] = add_block(p, block, unit * kLaneRows + h * kHalfRows,
                                m0 + m, sum[m][h], total[m][h]);
      }
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int h = 0; h < kHalves; ++h) {
      finish(p, unit * kLaneRows + h * kHalfRows, m0 + m, total[m][h]);
    }
  }
}

// M tokens of int8, one lane group. Codes t + 1 are the unsigned operand; a
// product of two is at most 2 * 2 * 128, so 16 bits hold 63 of them.
template <int M>
void int8_tile(const Problem& p, int64_t unit, int64_t m0) {
  constexpr int64_t kFlush = 15 * kWordCodes;
  const Weight& w = p.weight;
  const uint32_t* words = w.unit_words(unit);
  const int8_t* x = (const int8_t*)p.x + m0 * w.k_pad;
  const __m256i three = _mm256_set1_epi32(0x03030303);
  const __m256i ones = _mm256_set1_epi16(1);
  __m256 total[M][kHalves];
  for (int m = 0; m < M; ++m) {
    total[m][0] = total[m][1] = _mm256_setzero_ps();
  }
  for (int64_t block = 0; block < w.nblocks; ++block) {
    __m256i sum[M][kHalves];
    for (int m = 0; m < M; ++m) {
      sum[m][0] = sum[m][1] =
          _mm256_set1_epi32(-p.xq_sum[block * p.size_m + m0 + m]);
    }
    const int64_t end = w.block_end(block);
    for (int64_t k0 = w.block_begin(block); k0 < end; k0 += kFlush) {
      const int64_t k1 = k0 + kFlush < end ? k0 + kFlush : end;
      __m256i part[M][kHalves];
      for (int m = 0; m < M; ++m) {
        part[m][0] = part[m][1] = _mm256_setzero_si256();
      }
      for (int64_t k = k0; k < k1; k += kWordCodes) {
        const __m256i* group =
            (const __m256i*)(words + k / kWordCodes * kTileRows);
        __m256i low = _mm256_loadu_si256(group);
        __m256i high = _mm256_loadu_si256(group + 1);
        for (int j = 0; j < 4; ++j) {
          const __m256i c0 = _mm256_and_si256(low, three);
          const __m256i c1 = _mm256_and_si256(high, three);
          low = _mm256_srli_epi32(low, 2);
          high = _mm256_srli_epi32(high, 2);
          for (int m = 0; m < M; ++m) {
            int32_t four;
            __builtin_memcpy(&four, x + m * w.k_pad + k + 4 * j, 4);
            const __m256i xm = _mm256_set1_epi32(four);
            part[m][0] =
                _mm256_add_epi16(part[m][0], _mm256_maddubs_epi16(c0, xm));
            part[m][1] =
                _mm256_add_epi16(part[m][1], _mm256_maddubs_epi16(c1, xm));
          }
        }
      }
      for (int m = 0; m < M; ++m) {
        for (int h = 0; h < kHalves; ++h) {
          sum[m][h] =
              _mm256_add_epi32(sum[m][h], _mm256_madd_epi16(part[m][h], ones));
        }
      }
    }
    for (int m = 0; m < M; ++m) {
      for (int h = 0; h < kHalves; ++h) {
        total[m][h] =
            add_block(p, block, unit * kLaneRows + h * kHalfRows, m0 + m,
                      _mm256_cvtepi32_ps(sum[m][h]), total[m][h]);
      }
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int h = 0; h < kHalves; ++h) {
      finish(p, unit * kLaneRows + h * kHalfRows, m0 + m, total[m][h]);
    }
  }
}

}  // namespace

// x: float [size_m][k_pad].
void gemm_f32_avx2(const Problem& p, int64_t unit, int64_t unit_end) {
  for (; unit < unit_end; ++unit) {
    int64_t m = p.m_begin;
    for (; m + 4 <= p.m_end; m += 4) {
      f32_tile<4>(p, unit, m);
    }
    for (; m < p.m_end; ++m) {
      f32_tile<1>(p, unit, m);
    }
  }
}

// x: int8 [size_m][k_pad] in the order of int8_position().
void gemm_int8_avx2(const Problem& p, int64_t unit, int64_t unit_end) {
  for (; unit < unit_end; ++unit) {
    int64_t m = p.m_begin;
    for (; m + 4 <= p.m_end; m += 4) {
      int8_tile<4>(p, unit, m);
    }
    for (; m < p.m_end; ++m) {
      int8_tile<1>(p, unit, m);
    }
  }
}

}  // namespace vllm::ternary::cpu
TERNARY_TARGET_END

#endif  // TERNARY_X86
