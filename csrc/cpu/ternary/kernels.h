// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The kernels, one file per instruction set.

#pragma once

#include "ternary_cpu.h"

namespace vllm::ternary::cpu {

// Where the int8 value of k (0..15 of a word) stands among the word's 16
// bytes: four values that one shift by 2*(k%4) exposes stand together.
static inline int64_t int8_position(int64_t k) { return (k % 4) * 4 + k / 4; }

void gemm_f32_portable(const Problem& p, int64_t unit_begin, int64_t unit_end);
void gemm_int8_portable(const Problem& p, int64_t unit_begin, int64_t unit_end);

}  // namespace vllm::ternary::cpu
