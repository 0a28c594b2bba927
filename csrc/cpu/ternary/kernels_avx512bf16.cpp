// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Kernel for AVX512-BF16: pairs of bfloat16, float32 accumulation.

#include "kernels.h"
#include "simd.h"

#ifdef TERNARY_X86

TERNARY_TARGET_BEGIN(TERNARY_AVX512BF16)
  #include "avx512_common.h"

namespace vllm::ternary::cpu {
namespace {

template <int M, int U>
void bf16_tile(const Problem& p, int64_t unit, int64_t m0) {
  const Weight& w = p.weight;
  const uint32_t* words = w.unit_words(unit);
  const uint16_t* x = (const uint16_t*)p.x + m0 * w.k_pad;
  const __m512i table = bfloat16_pairs();
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
      for (int s = 0; s < 8; ++s) {
        __m512bh t[U];
        for (int u = 0; u < U; ++u) {
          t[u] = (__m512bh)_mm512_permutexvar_epi32(word[u], table);
          word[u] = _mm512_srli_epi32(word[u], 4);
        }
        for (int m = 0; m < M; ++m) {
          int32_t two;
          __builtin_memcpy(&two, x + m * w.k_pad + k + 2 * s, 4);
          const __m512bh xm = (__m512bh)_mm512_set1_epi32(two);
          for (int u = 0; u < U; ++u) {
            sum[m][u] = _mm512_dpbf16_ps(sum[m][u], t[u], xm);
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
void bf16_units(const Problem& p, int64_t unit) {
  int64_t m = p.m_begin;
  for (; m + 6 <= p.m_end; m += 6) {
    bf16_tile<6, U>(p, unit, m);
  }
  switch (p.m_end - m) {
    case 5:
      return bf16_tile<5, U>(p, unit, m);
    case 4:
      return bf16_tile<4, U>(p, unit, m);
    case 3:
      return bf16_tile<3, U>(p, unit, m);
    case 2:
      return bf16_tile<2, U>(p, unit, m);
    case 1:
      return bf16_tile<1, U>(p, unit, m);
  }
}

}  // namespace

void gemm_bf16_avx512(const Problem& p, int64_t unit, int64_t unit_end) {
  while (unit < unit_end) {
    if (units_together(unit, unit_end) >= 2) {
      bf16_units<2>(p, unit);
      unit += 2;
    } else {
      bf16_units<1>(p, unit);
      unit += 1;
    }
  }
}

}  // namespace vllm::ternary::cpu
TERNARY_TARGET_END

#endif  // TERNARY_X86
