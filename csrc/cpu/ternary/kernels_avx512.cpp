// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Kernels for AVX-512 (F, BW, VL, DQ) with VNNI.

#include "kernels.h"
#include "simd.h"

#ifdef TERNARY_X86

TERNARY_TARGET_BEGIN(TERNARY_AVX512)
  #include "avx512_common.h"

namespace vllm::ternary::cpu {
namespace {

constexpr int64_t kPrefetch = 16 * kTileRows;  // words ahead

// M tokens through tables: entry c0 + 4*c1 of table i is what codes c0, c1 of
// weights 2i, 2i+1 contribute, so a permutation by four code bits and an
// addition do two weights of 16 rows. U lane groups share a table.
template <int M, int U>
void lut_tile(const Problem& p, int64_t unit, int64_t m0) {
  const Weight& w = p.weight;
  const uint32_t* words = w.unit_words(unit);
  const float* tables = (const float*)p.x + m0 * w.k_pad * 8;
  __m512 total[M][U];
  for (int m = 0; m < M; ++m) {
    for (int u = 0; u < U; ++u) {
      total[m][u] = _mm512_setzero_ps();
    }
  }
  for (int64_t block = 0; block < w.nblocks; ++block) {
    __m512 even[M][U], odd[M][U];
    for (int m = 0; m < M; ++m) {
      for (int u = 0; u < U; ++u) {
        even[m][u] = odd[m][u] = _mm512_setzero_ps();
      }
    }
    for (int64_t k = w.block_begin(block); k < w.block_end(block);
         k += kWordCodes) {
      const uint32_t* group = words + k / kWordCodes * kTileRows;
      __m512i word[U];
      for (int u = 0; u < U; ++u) {
        word[u] = _mm512_loadu_si512(group + u * kLaneRows);
        _mm_prefetch((const char*)(group + u * kLaneRows + kPrefetch),
                     _MM_HINT_T0);
      }
  #pragma GCC unroll 4
      for (int s = 0; s < 8; s += 2) {
        __m512i low[U], high[U];
        for (int u = 0; u < U; ++u) {
          low[u] = _mm512_srli_epi32(word[u], 4 * s);
          high[u] = _mm512_srli_epi32(word[u], 4 * s + 4);
        }
        for (int m = 0; m < M; ++m) {
          const float* table = tables + m * w.k_pad * 8 + k * 8 + s * 16;
          const __m512 first = _mm512_load_ps(table);
          const __m512 second = _mm512_load_ps(table + 16);
          for (int u = 0; u < U; ++u) {
            even[m][u] =
                _mm512_add_ps(even[m][u], _mm512_permutexvar_ps(low[u], first));
            odd[m][u] = _mm512_add_ps(odd[m][u],
                                      _mm512_permutexvar_ps(high[u], second));
          }
        }
      }
    }
    for (int m = 0; m < M; ++m) {
      for (int u = 0; u < U; ++u) {
        total[m][u] =
            add_block(p, block, unit + u, m0 + m,
                      _mm512_add_ps(even[m][u], odd[m][u]), total[m][u]);
      }
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int u = 0; u < U; ++u) {
      finish(p, unit + u, m0 + m, total[m][u]);
    }
  }
}

template <int U>
void lut_units(const Problem& p, int64_t unit) {
  int64_t m = p.m_begin;
  if constexpr (U <= 2) {
    for (; m + 2 <= p.m_end; m += 2) {
      lut_tile<2, U>(p, unit, m);
    }
  }
  for (; m < p.m_end; ++m) {
    lut_tile<1, U>(p, unit, m);
  }
}

// M tokens, U lane groups: weights decoded to float, x broadcast.
template <int M, int U>
void f32_tile(const Problem& p, int64_t unit, int64_t m0) {
  const Weight& w = p.weight;
  const uint32_t* words = w.unit_words(unit);
  const float* x = (const float*)p.x + m0 * w.k_pad;
  // Two code bits select; the two above them are of the next weight.
  const __m512 table = _mm512_setr_ps(-1.f, 0.f, 1.f, 0.f, -1.f, 0.f, 1.f, 0.f,
                                      -1.f, 0.f, 1.f, 0.f, -1.f, 0.f, 1.f, 0.f);
  __m512 total[M][U];
  for (int m = 0; m < M; ++m) {
    for (int u = 0; u < U; ++u) {
      total[m][u] = _mm512_setzero_ps();
    }
  }
  for (int64_t block = 0; block < w.nblocks; ++block) {
    __m512 sum[M][U];
    for (int m = 0; m < M; ++m) {
      for (int u = 0; u < U; ++u) {
        sum[m][u] = _mm512_setzero_ps();
      }
    }
    for (int64_t k = w.block_begin(block); k < w.block_end(block);
         k += kWordCodes) {
      const uint32_t* group = words + k / kWordCodes * kTileRows;
      __m512i word[U];
      for (int u = 0; u < U; ++u) {
        word[u] = _mm512_loadu_si512(group + u * kLaneRows);
      }
      for (int j = 0; j < kWordCodes; ++j) {
        __m512 t[U];
        for (int u = 0; u < U; ++u) {
          t[u] = _mm512_permutexvar_ps(word[u], table);
          word[u] = _mm512_srli_epi32(word[u], 2);
        }
        for (int m = 0; m < M; ++m) {
          const __m512 xm = _mm512_set1_ps(x[m * w.k_pad + k + j]);
          for (int u = 0; u < U; ++u) {
            sum[m][u] = _mm512_fmadd_ps(xm, t[u], sum[m][u]);
          }
        }
      }
    }
    for (int m = 0; m < M; ++m) {
      for (int u = 0; u < U; ++u) {
        total[m][u] =
            add_block(p, block, unit + u, m0 + m, sum[m][u], total[m][u]);
      }
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int u = 0; u < U; ++u) {
      finish(p, unit + u, m0 + m, total[m][u]);
    }
  }
}

template <int U>
void f32_units(const Problem& p, int64_t unit) {
  int64_t m = p.m_begin;
  for (; m + 6 <= p.m_end; m += 6) {
    f32_tile<6, U>(p, unit, m);
  }
  switch (p.m_end - m) {
    case 5:
      return f32_tile<5, U>(p, unit, m);
    case 4:
      return f32_tile<4, U>(p, unit, m);
    case 3:
      return f32_tile<3, U>(p, unit, m);
    case 2:
      return f32_tile<2, U>(p, unit, m);
    case 1:
      return f32_tile<1, U>(p, unit, m);
  }
}

// M tokens of int8, U lane groups. The codes t + 1 are the unsigned operand;
// what the + 1 adds, the sum of x, is where the accumulator starts.
template <int M, int U>
void int8_tile(const Problem& p, int64_t unit, int64_t m0) {
  const Weight& w = p.weight;
  const uint32_t* words = w.unit_words(unit);
  const int8_t* x = (const int8_t*)p.x + m0 * w.k_pad;
  const __m512i three = _mm512_set1_epi32(0x03030303);
  __m512 total[M][U];
  for (int m = 0; m < M; ++m) {
    for (int u = 0; u < U; ++u) {
      total[m][u] = _mm512_setzero_ps();
    }
  }
  for (int64_t block = 0; block < w.nblocks; ++block) {
    __m512i sum[M][U];
    for (int m = 0; m < M; ++m) {
      for (int u = 0; u < U; ++u) {
        sum[m][u] = _mm512_set1_epi32(-p.xq_sum[block * p.size_m + m0 + m]);
      }
    }
    for (int64_t k = w.block_begin(block); k < w.block_end(block);
         k += kWordCodes) {
      const uint32_t* group = words + k / kWordCodes * kTileRows;
      __m512i word[U];
      for (int u = 0; u < U; ++u) {
        word[u] = _mm512_loadu_si512(group + u * kLaneRows);
        _mm_prefetch((const char*)(group + u * kLaneRows + kPrefetch),
                     _MM_HINT_T0);
      }
  #pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        __m512i code[U];
        for (int u = 0; u < U; ++u) {
          code[u] = _mm512_and_si512(_mm512_srli_epi32(word[u], 2 * j), three);
        }
        for (int m = 0; m < M; ++m) {
          int32_t four;
          __builtin_memcpy(&four, x + m * w.k_pad + k + 4 * j, 4);
          const __m512i xm = _mm512_set1_epi32(four);
          for (int u = 0; u < U; ++u) {
            sum[m][u] = _mm512_dpbusd_epi32(sum[m][u], code[u], xm);
          }
        }
      }
    }
    for (int m = 0; m < M; ++m) {
      for (int u = 0; u < U; ++u) {
        total[m][u] = add_block(p, block, unit + u, m0 + m,
                                _mm512_cvtepi32_ps(sum[m][u]), total[m][u]);
      }
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int u = 0; u < U; ++u) {
      finish(p, unit + u, m0 + m, total[m][u]);
    }
  }
}

template <int U>
void int8_units(const Problem& p, int64_t unit) {
  int64_t m = p.m_begin;
  if constexpr (U <= 2) {
    for (; m + 8 <= p.m_end; m += 8) {
      int8_tile<8, U>(p, unit, m);
    }
    if (p.m_end - m >= 4) {
      int8_tile<4, U>(p, unit, m);
      m += 4;
    }
  }
  switch (p.m_end - m) {
    case 3:
      return int8_tile<3, U>(p, unit, m);
    case 2:
      return int8_tile<2, U>(p, unit, m);
    case 1:
      return int8_tile<1, U>(p, unit, m);
  }
}

}  // namespace

// x: tables [size_m][k_pad / 2][16] of make_lut_avx512.
void gemm_lut_avx512(const Problem& p, int64_t unit, int64_t unit_end) {
  while (unit < unit_end) {
    const int64_t together = units_together(unit, unit_end);
    if (together == 4 && p.m_end - p.m_begin == 1) {
      lut_units<4>(p, unit);
      unit += 4;
    } else if (together >= 2) {
      lut_units<2>(p, unit);
      unit += 2;
    } else {
      lut_units<1>(p, unit);
      unit += 1;
    }
  }
}

// x: float [size_m][k_pad].
void gemm_f32_avx512(const Problem& p, int64_t unit, int64_t unit_end) {
  while (unit < unit_end) {
    if (units_together(unit, unit_end) >= 2) {
      f32_units<2>(p, unit);
      unit += 2;
    } else {
      f32_units<1>(p, unit);
      unit += 1;
    }
  }
}

// x: int8 [size_m][k_pad] in the order of int8_position().
void gemm_int8_avx512(const Problem& p, int64_t unit, int64_t unit_end) {
  while (unit < unit_end) {
    const int64_t together = units_together(unit, unit_end);
    if (together == 4 && p.m_end - p.m_begin < 4) {
      int8_units<4>(p, unit);
      unit += 4;
    } else if (together >= 2) {
      int8_units<2>(p, unit);
      unit += 2;
    } else {
      int8_units<1>(p, unit);
      unit += 1;
    }
  }
}

void make_lut_avx512(const float* padded, int64_t k_pad, float* out) {
  const __m512 low = _mm512_setr_ps(-1.f, 0.f, 1.f, 0.f, -1.f, 0.f, 1.f, 0.f,
                                    -1.f, 0.f, 1.f, 0.f, -1.f, 0.f, 1.f, 0.f);
  const __m512 high = _mm512_setr_ps(-1.f, -1.f, -1.f, -1.f, 0.f, 0.f, 0.f, 0.f,
                                     1.f, 1.f, 1.f, 1.f, 0.f, 0.f, 0.f, 0.f);
  for (int64_t k = 0; k < k_pad; k += 2) {
    const __m512 second = _mm512_mul_ps(high, _mm512_set1_ps(padded[k + 1]));
    _mm512_store_ps(out + k * 8,
                    _mm512_fmadd_ps(low, _mm512_set1_ps(padded[k]), second));
  }
}

void split_row_avx512(const float* padded, int64_t k_pad, int64_t planes,
                      int64_t plane_bytes, int64_t tile_bytes, char* out) {
  const __m512i upper = _mm512_set1_epi32((int)0xffff0000u);
  const __m512i quiet = _mm512_set1_epi32(0x00400000);
  constexpr int kNan = 0x81, kInfinity = 0x18;
  for (int64_t k = 0; k < k_pad; k += 32, out += tile_bytes) {
    __m512 low = _mm512_loadu_ps(padded + k);
    __m512 high = _mm512_loadu_ps(padded + k + 16);
    for (int64_t plane = 0; plane < planes; ++plane) {
      const auto take = [&](__m512& value) __attribute__((always_inline)) {
        __m512i bits = _mm512_castps_si512(value);
        // A NaN whose payload is cut off must not turn into an infinity.
        bits = _mm512_mask_or_epi32(bits, _mm512_fpclass_ps_mask(value, kNan),
                                    bits, quiet);
        bits = _mm512_and_si512(bits, upper);
        const __m512 taken = _mm512_castsi512_ps(bits);
        // What is left of an infinity or a NaN is nothing, not another NaN.
        value = _mm512_maskz_sub_ps(
            (__mmask16)~_mm512_fpclass_ps_mask(taken, kNan | kInfinity), value,
            taken);
        return _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16));
      };
      char* to = out + plane * plane_bytes;
      _mm256_storeu_si256((__m256i*)to, take(low));
      _mm256_storeu_si256((__m256i*)(to + 32), take(high));
    }
  }
}

}  // namespace vllm::ternary::cpu
TERNARY_TARGET_END

#endif  // TERNARY_X86
