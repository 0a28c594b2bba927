// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Activations, for AVX-512.

#include <cstdint>
#include <cstring>

#include "activation.h"
#include "kernels.h"
#include "simd.h"

#ifdef TERNARY_X86

  #define TERNARY_VECTORS
TERNARY_TARGET_BEGIN(TERNARY_AVX512)
  #include "activation_impl.h"
  #include "avx512_common.h"

namespace vllm::ternary::cpu {

namespace {

// max|x| as the bits of a float.
uint32_t largest_bits(const Row& x, int64_t size_k) {
  __m512i most = _mm512_setzero_si512();
  if (x.type == Type::kFloat) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    const float* data = (const float*)x.data + x.offset;
    for (int64_t k = 0; k < size_k; k += 16) {
      const int64_t left = size_k - k;
      const __mmask16 mask = left >= 16 ? 0xffff : (1u << left) - 1;
      most = _mm512_max_epu32(
          most, _mm512_and_si512(_mm512_maskz_loadu_epi32(mask, data + k),
                                 magnitude));
    }
    return _mm512_reduce_max_epu32(most);
  }
  const __m512i magnitude = _mm512_set1_epi16(0x7fff);
  const uint16_t* data = (const uint16_t*)x.data + x.offset;
  for (int64_t k = 0; k < size_k; k += 32) {
    const int64_t left = size_k - k;
    const __mmask32 mask = left >= 32 ? 0xffffffffu : (1u << left) - 1;
    most = _mm512_max_epu16(
        most,
        _mm512_and_si512(_mm512_maskz_loadu_epi16(mask, data + k), magnitude));
  }
  most = _mm512_max_epu16(_mm512_and_si512(most, _mm512_set1_epi32(0xffff)),
                          _mm512_srli_epi32(most, 16));
  const uint32_t bits = _mm512_reduce_max_epu32(most);
  return x.type == Type::kBFloat16 ? bits << 16
                                   : float_bits(half_to_float((uint16_t)bits));
}

// 64 values of x from k on, 0 beyond size_k, times factor, as int8.
template <bool kWhole>
__m512i quantize_line(const Row& x, int64_t size_k, int64_t k, __m512 factor) {
  __m512i q[4];
  for (int i = 0; i < 4; ++i) {
    const int64_t at = k + 16 * i;
    const int64_t left = size_k - at;
    const __mmask16 mask = left >= 16 ? 0xffff
                           : left > 0 ? (1u << left) - 1
                                      : 0;
    const __m512 value =
        kWhole ? load16(x.data, x.type, x.offset + at)
               : load16_masked(x.data, x.type, x.offset + at, mask);
    q[i] = _mm512_cvtps_epi32(_mm512_mul_ps(value, factor));
  }
  const __m512i packed = _mm512_packs_epi16(_mm512_packs_epi32(q[0], q[1]),
                                            _mm512_packs_epi32(q[2], q[3]));
  // Bytes 4i..4i+3 of 128-bit lane l hold values 16i + 4l + 0..3: word i's
  // into lane i, then in the order of int8_position().
  const __m512i gathered = _mm512_permutexvar_epi32(
      _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15),
      packed);
  return _mm512_shuffle_epi8(
      gathered, _mm512_broadcast_i32x4(_mm_setr_epi8(
                    0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)));
}

template <Type kType>
void quantize_lines(const Weight& w, Row x, float to_int8, int64_t size_m,
                    int64_t m, int8_t* out, int64_t line_step, int32_t* sums) {
  x.type = kType;  // known to the loops below
  const __m512 factor = _mm512_set1_ps(to_int8);
  const __m512i ones = _mm512_set1_epi8(1);
  int64_t k = 0;
  for (int64_t b = 0; b < w.nblocks; ++b) {
    __m512i sum = _mm512_setzero_si512();
    for (const int64_t end = w.block_end(b); k < end; k += kLine) {
      const __m512i q = k + kLine <= w.size_k
                            ? quantize_line<true>(x, w.size_k, k, factor)
                            : quantize_line<false>(x, w.size_k, k, factor);
      sum = _mm512_dpbusd_epi32(sum, ones, q);
      _mm512_storeu_si512(out, q);
      out += line_step;
    }
    sums[b * size_m + m] = _mm512_reduce_add_epi32(sum);
  }
}

// quantize_row, faster for finite rows of whole lines.
float quantize_row_avx512(const Weight& w, const Row& row, int64_t size_m,
                          int64_t m, int8_t* out, int64_t line_step,
                          int32_t* sums) {
  const bool lines = w.nblocks == 1 ||
                     (w.block_pad == w.block_size && w.block_pad % kLine == 0);
  if (!lines || row.stride != 1) {
    return quantize_row(w, row, size_m, m, out, line_step, sums);
  }
  const Factors factors(largest_bits(row, w.size_k));
  if (!factors.finite) {
    return quantize_row(w, row, size_m, m, out, line_step, sums);
  }
  const auto run = row.type == Type::kBFloat16
                       ? &quantize_lines<Type::kBFloat16>
                   : row.type == Type::kHalf ? &quantize_lines<Type::kHalf>
                                             : &quantize_lines<Type::kFloat>;
  run(w, row, factors.to_int8, size_m, m, out, line_step, sums);
  return factors.from_int8;
}

}  // namespace

const ActivationOps kActivationAvx512 = {widen_row,  pad_row,
                                         sum_blocks, rms_inverse,
                                         apply_norm, quantize_row_avx512};

}  // namespace vllm::ternary::cpu
TERNARY_TARGET_END

#endif  // TERNARY_X86
