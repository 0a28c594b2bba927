// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Products of few tokens on int8 tensor cores: W2A8, and W2A16 with every
// activation cut into four signed bytes.
#pragma once

#include "mma_gemm.h"

namespace vllm::ternary {

// MmaConfig::variant from here on: the kernels with short chains of latencies,
// where they take the product (mma_s8_direct_*_launch.cuh), else as variant 0.
constexpr int kDirect = 8;
// The same three variants for one token of 8 bits with a scale per row,
// quantized by the kernel for one token of 16 bits; for others as kDirect + 3
// on.
constexpr int kDirectOne = 14;

// W2A8: any block that is a multiple of 32 (or one per row), any scale type.
bool mma_s8_supported(const W2A8Args& args);
// With `quant`, tokens are quantized inside the kernel from its x, and what
// `args` says of them is not read.
void mma_s8_gemm(const W2A8Args& args, const MmaConfig& config,
                 const QuantArgs* quant = nullptr);
bool mma_s8_quantizes(const QuantArgs& quant, const W2A8Args& args);

// W2A16: float16 scales, one for whole k tiles of 128, and no zero points.
bool mma_s8_supported(const GemmArgs& args);
void mma_s8_gemm(const GemmArgs& args, const MmaConfig& config);

// Only what a `config` of variant kDirect or beyond names: false, and nothing
// is launched, where that does not take the product.
bool mma_s8_direct(const GemmArgs& args, const MmaConfig& config);
bool mma_s8_direct(const W2A8Args& args, const MmaConfig& config,
                   const QuantArgs* quant);

}  // namespace vllm::ternary
