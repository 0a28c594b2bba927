// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// What the CPU ops and their kernels share: the weight's layout, the problem a
// kernel is given, and the table of kernels of one instruction set.
//
// Layout (utils/ternary_layout_cpu.py): weight words [n_pad/64][k_pad/16][64],
// a word is 16 codes t + 1 of one row, low bits first; scale and zero_point
// [nblocks][n_pad]. Block b of K is [b*block_pad, (b+1)*block_pad), the last
// one reaching to k_pad.

#pragma once

#include <cstdint>

namespace vllm::ternary::cpu {

constexpr int64_t kTileRows = 64;   // rows interleaved in memory
constexpr int64_t kLaneRows = 16;   // rows of one 512-bit vector: a work unit
constexpr int64_t kWordCodes = 16;  // codes in one word
constexpr int64_t kAlignK = 64;     // k_pad is a multiple of this

enum class Type : int { kFloat, kHalf, kBFloat16, kInt };

struct Weight {
  const uint32_t* words = nullptr;
  const void* scale = nullptr;
  const void* zero_point = nullptr;  // null: none
  Type scale_type = Type::kHalf;
  Type zero_point_type = Type::kFloat;
  int64_t size_n = 0, size_k = 0, block_size = 0;
  int64_t n_pad = 0, k_pad = 0, nblocks = 0, block_pad = 0;

  // Words of lane group `unit` (rows 16*unit ..): stride kTileRows per 16 k.
  const uint32_t* unit_words(int64_t unit) const {
    return words + (unit / 4) * (k_pad / kWordCodes) * kTileRows +
           (unit % 4) * kLaneRows;
  }
  int64_t block_begin(int64_t block) const { return block * block_pad; }
  int64_t block_end(int64_t block) const {
    return block + 1 == nblocks ? k_pad : (block + 1) * block_pad;
  }
};

// y[m, n] for n in [row_begin, row_end) and m in [m_begin, m_end). x is in the
// padded K, in the form that the kernel asks for.
struct Problem {
  Weight weight;
  int64_t size_m = 0;
  const void* x = nullptr;
  int64_t planes = 1, x_plane = 0;  // AMX only: x is a sum, bytes apart
  // AMX only: block_pad and nblocks of scales that are part of the weights.
  int64_t folded_block = 0, folded_count = 0;
  const float* x_sum = nullptr;     // [nblocks][size_m], with a zero point only
  const int32_t* xq_sum = nullptr;  // [nblocks][size_m], W2A8 only
  const float* x_scale = nullptr;   // [size_m]: y = x_scale * sum, W2A8 only
  const void* bias = nullptr;       // null: none
  Type bias_type = Type::kFloat;
  void* y = nullptr;  // [size_m, size_n], contiguous
  Type y_type = Type::kFloat;
  int64_t row_begin = 0, row_end = 0;
  int64_t m_begin = 0, m_end = 0;
};

// Computes lane groups [unit_begin, unit_end); called from several threads.
using Kernel = void (*)(const Problem& problem, int64_t unit_begin,
                        int64_t unit_end);

}  // namespace vllm::ternary::cpu
