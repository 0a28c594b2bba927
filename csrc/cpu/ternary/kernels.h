// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The kernels, one file per instruction set. Each computes lane groups
// [unit, unit_end) of the tokens [p.m_begin, p.m_end).

#pragma once

#include "ternary_cpu.h"

namespace vllm::ternary::cpu {

// Where the int8 value of k (0..15 of a word) stands among the word's 16
// bytes: four values that one shift by 2*(k%4) exposes stand together.
static inline int64_t int8_position(int64_t k) { return (k % 4) * 4 + k / 4; }

// x: float [size_m][k_pad].
void gemm_f32_portable(const Problem& p, int64_t unit, int64_t unit_end);
void gemm_f32_avx2(const Problem& p, int64_t unit, int64_t unit_end);
void gemm_f32_avx512(const Problem& p, int64_t unit, int64_t unit_end);

// x: int8 [size_m][k_pad], each word's 16 values in the order of
// int8_position().
void gemm_int8_portable(const Problem& p, int64_t unit, int64_t unit_end);
void gemm_int8_avx2(const Problem& p, int64_t unit, int64_t unit_end);
void gemm_int8_avx512(const Problem& p, int64_t unit, int64_t unit_end);

// x: tables of make_lut_avx512, float [size_m][k_pad / 2][16], aligned.
void gemm_lut_avx512(const Problem& p, int64_t unit, int64_t unit_end);
void make_lut_avx512(const float* padded, int64_t k_pad, float* out);

// x: bfloat16 [size_m][k_pad].
void gemm_bf16_avx512(const Problem& p, int64_t unit, int64_t unit_end);

// Tiles: rows of x of up to so many bytes pass over a band of weights, 32
// tokens at a time in L1. Longer ones pass over 64 rows of weights, from L2.
constexpr int64_t kBandRow = 2048;

// x: tiles [planes][ceil(size_m/16)][k_pad/32][16][32] of bfloat16, absent
// tokens 0; block_pad a multiple of 32, m_begin of 16.
void gemm_bf16_amx(const Problem& p, int64_t unit, int64_t unit_end);
// x: tiles [ceil(size_m/16)][k_pad/64][16][64] of int8; block_pad a multiple
// of 64.
void gemm_int8_amx(const Problem& p, int64_t unit, int64_t unit_end);

// A padded token as a sum of bfloat16 (one plane holds a bfloat16 exactly, two
// a float16, three a float32), 64 bytes to each tile.
void split_row_avx512(const float* padded, int64_t k_pad, int64_t planes,
                      int64_t plane_bytes, int64_t tile_bytes, char* out);

}  // namespace vllm::ternary::cpu
