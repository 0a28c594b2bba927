// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Written by scripts/lib/bench/tune.py from dispatch_table.json.
// NVIDIA H200, 2026-11-30, CUDA 13.0.
#pragma once

namespace vllm::ternary {

// The fastest way measured for a product of up to M tokens (more than the
// entry before has). kernel 0: mma_gemm with `split` and `waves` CTAs per
// multiprocessor; 1: the Hopper kernel for many tokens.
struct DispatchEntry {
  int M, N, K;
  unsigned char kernel, split, waves;
};

inline constexpr DispatchEntry kDispatchTable[] = {
    // clang-format off
    {1, 1024, 3072, 0, 4, 1},  // 3.4 us
    {1, 4096, 12288, 0, 2, 1},  // 10.7 us
    {1, 6144, 1024, 0, 1, 1},  // 2.8 us
    {1, 6144, 4096, 0, 2, 1},  // 6.3 us
    {1, 24576, 4096, 0, 1, 2},  // 14.7 us
    {1, 34816, 5120, 0, 1, 2},  // 23.8 us
    {8, 1024, 3072, 0, 4, 1},  // 4.0 us
    {8, 4096, 12288, 0, 2, 1},  // 11.9 us
    {8, 6144, 1024, 0, 1, 2},  // 3.0 us
    {8, 6144, 4096, 0, 1, 1},  // 7.0 us
    {8, 24576, 4096, 0, 1, 1},  // 17.2 us
    {8, 34816, 5120, 0, 1, 1},  // 28.8 us
    {16, 1024, 3072, 0, 2, 1},  // 4.8 us
    {16, 4096, 12288, 1, 1, 1},  // 20.9 us
    {16, 6144, 1024, 0, 1, 1},  // 4.2 us
    {16, 6144, 4096, 0, 2, 1},  // 10.0 us
    {16, 24576, 4096, 1, 1, 1},  // 25.3 us
    {16, 34816, 5120, 1, 1, 1},  // 46.8 us
    {32, 1024, 3072, 1, 1, 1},  // 5.6 us
    {32, 4096, 12288, 1, 1, 1},  // 20.9 us
    {32, 6144, 1024, 1, 1, 1},  // 5.5 us
    {32, 6144, 4096, 1, 1, 1},  // 11.8 us
    {32, 24576, 4096, 1, 1, 1},  // 25.3 us
    {32, 34816, 5120, 1, 1, 1},  // 46.8 us
    {64, 1024, 3072, 1, 1, 1},  // 5.6 us
    {64, 4096, 12288, 1, 1, 1},  // 20.9 us
    {64, 6144, 1024, 1, 1, 1},  // 5.5 us
    {64, 6144, 4096, 1, 1, 1},  // 11.8 us
    {64, 24576, 4096, 1, 1, 1},  // 25.3 us
    {64, 34816, 5120, 1, 1, 1},  // 46.8 us
    // clang-format on
};

}  // namespace vllm::ternary
