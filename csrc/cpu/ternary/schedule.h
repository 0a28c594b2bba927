// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Work over torch's own thread pool.

#pragma once

#include <vector>

#include "ternary_cpu.h"

namespace vllm::ternary::cpu {

// Runs the kernel over all rows [row_begin, row_end) and tokens of each
// problem, `token_chunk` of them at a time, in one parallel region.
void run_parallel(const std::vector<Problem>& problems, Kernel kernel,
                  int64_t token_chunk);

}  // namespace vllm::ternary::cpu
