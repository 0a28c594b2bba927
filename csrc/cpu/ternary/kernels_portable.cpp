// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Kernels in plain C++, for any processor. The inner loops run over the 16
// rows of a lane group so that a compiler can use what vectors it has.

#include "kernels.h"
#include "scalar.h"

namespace vllm::ternary::cpu {
namespace {

constexpr int64_t kRowsM = 4;  // tokens that share one decoded word group

// Adds one block's sums to the result: total += scale * (sum - zp * x_sum).
void add_block(const Problem& p, int64_t block, int64_t unit, int64_t m,
               const float* sum, float* total) {
  const Weight& w = p.weight;
  const int64_t at = block * w.n_pad + unit * kLaneRows;
  for (int64_t r = 0; r < kLaneRows; ++r) {
    float value = sum[r];
    if (w.zero_point != nullptr) {
      value -= load_float(w.zero_point, w.zero_point_type, at + r) *
               p.x_sum[block * p.size_m + m];
    }
    total[r] += load_float(w.scale, w.scale_type, at + r) * value;
  }
}

void store(const Problem& p, int64_t unit, int64_t m, const float* total) {
  const int64_t first = unit * kLaneRows;
  for (int64_t r = 0; r < kLaneRows; ++r) {
    const int64_t n = first + r;
    if (n < p.row_begin || n >= p.row_end) {
      continue;
    }
    float value = total[r];
    if (p.x_scale != nullptr) {
      value *= p.x_scale[m];
    }
    if (p.bias != nullptr) {
      value += load_float(p.bias, p.bias_type, n);
    }
    store_float(p.y, p.y_type, m * p.weight.size_n + n, value);
  }
}

// Decoded to [16 k][16 rows]; offset 1 gives t, 0 the code t + 1.
template <typename T>
void decode_words(const uint32_t* words, int offset, T* out) {
  for (int64_t k = 0; k < kWordCodes; ++k) {
    for (int64_t r = 0; r < kLaneRows; ++r) {
      out[k * kLaneRows + r] = static_cast<T>(
          static_cast<int32_t>((words[r] >> (2 * k)) & 3u) - offset);
    }
  }
}

}  // namespace

// x: float [size_m][k_pad].
void gemm_f32_portable(const Problem& p, int64_t unit, int64_t unit_end) {
  const Weight& w = p.weight;
  const float* x = static_cast<const float*>(p.x);
  for (; unit < unit_end; ++unit) {
    const uint32_t* words = w.unit_words(unit);
    for (int64_t m0 = p.m_begin; m0 < p.m_end; m0 += kRowsM) {
      const int64_t mcount = p.m_end - m0 < kRowsM ? p.m_end - m0 : kRowsM;
      float total[kRowsM][kLaneRows] = {};
      for (int64_t block = 0; block < w.nblocks; ++block) {
        float sum[kRowsM][kLaneRows] = {};
        for (int64_t k = w.block_begin(block); k < w.block_end(block);
             k += kWordCodes) {
          float t[kWordCodes * kLaneRows];
          decode_words(words + k / kWordCodes * kTileRows, 1, t);
          for (int64_t m = 0; m < mcount; ++m) {
            const float* xm = x + (m0 + m) * w.k_pad + k;
            for (int64_t j = 0; j < kWordCodes; ++j) {
              for (int64_t r = 0; r < kLaneRows; ++r) {
                sum[m][r] += xm[j] * t[j * kLaneRows + r];
              }
            }
          }
        }
        for (int64_t m = 0; m < mcount; ++m) {
          add_block(p, block, unit, m0 + m, sum[m], total[m]);
        }
      }
      for (int64_t m = 0; m < mcount; ++m) {
        store(p, unit, m0 + m, total[m]);
      }
    }
  }
}

// x: int8 [size_m][k_pad], the 16 values of a word in the order of
// kInt8Order.
void gemm_int8_portable(const Problem& p, int64_t unit, int64_t unit_end) {
  const Weight& w = p.weight;
  const int8_t* x = static_cast<const int8_t*>(p.x);
  for (; unit < unit_end; ++unit) {
    const uint32_t* words = w.unit_words(unit);
    for (int64_t m0 = p.m_begin; m0 < p.m_end; m0 += kRowsM) {
      const int64_t mcount = p.m_end - m0 < kRowsM ? p.m_end - m0 : kRowsM;
      float total[kRowsM][kLaneRows] = {};
      for (int64_t block = 0; block < w.nblocks; ++block) {
        int32_t sum[kRowsM][kLaneRows];
        for (int64_t m = 0; m < mcount; ++m) {
          for (int64_t r = 0; r < kLaneRows; ++r) {
            sum[m][r] = -p.xq_sum[block * p.size_m + m0 + m];
          }
        }
        for (int64_t k = w.block_begin(block); k < w.block_end(block);
             k += kWordCodes) {
          int16_t code[kWordCodes * kLaneRows];
          decode_words(words + k / kWordCodes * kTileRows, 0, code);
          for (int64_t m = 0; m < mcount; ++m) {
            const int8_t* xm = x + (m0 + m) * w.k_pad + k;
            int16_t part[kLaneRows] = {};  // at most 16 * 2 * 128
            for (int64_t j = 0; j < kWordCodes; ++j) {
              const int16_t value = xm[int8_position(j)];
              for (int64_t r = 0; r < kLaneRows; ++r) {
                part[r] = static_cast<int16_t>(part[r] +
                                               value * code[j * kLaneRows + r]);
              }
            }
            for (int64_t r = 0; r < kLaneRows; ++r) {
              sum[m][r] += part[r];
            }
          }
        }
        for (int64_t m = 0; m < mcount; ++m) {
          float as_float[kLaneRows];
          for (int64_t r = 0; r < kLaneRows; ++r) {
            as_float[r] = static_cast<float>(sum[m][r]);
          }
          add_block(p, block, unit, m0 + m, as_float, total[m]);
        }
      }
      for (int64_t m = 0; m < mcount; ++m) {
        store(p, unit, m0 + m, total[m]);
      }
    }
  }
}

}  // namespace vllm::ternary::cpu
