// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Written by scripts/lib/bench/tune_sm90.py.
// NVIDIA H200, 2026-11-30, CUDA 13.0.
//
// The tiles that the Hopper kernels are built for and what they cost, in
// microseconds: `unit` for 64 rows of a step along K (128 k; int8: 256 k) in
// a thread block, `wave` for the ends of a tile. Where blocks split K,
// `meeting` for their meeting, `exchange` for each KiB of partial sums that
// a block sends (few tokens: `token` for each of a tile).
#pragma once

namespace vllm::ternary::sm90 {

// Many tokens.
struct Variant {
  int warpgroups, tiles, tokens, sets, multicast;
  float unit, wave;
};
struct SplitCost {
  float meeting, exchange;
};
// clang-format off
constexpr Variant kVariants[] = {
    {2, 1, 64, 1, 1, 0.2208f, 1.7500f},
    {3, 1, 64, 1, 1, 0.2081f, 1.4846f},
    {2, 2, 64, 1, 1, 0.1983f, 1.6641f},
    {2, 1, 128, 1, 1, 0.3352f, 1.3952f},
    {3, 1, 128, 1, 1, 0.3332f, 1.2845f},
    {2, 2, 128, 1, 1, 0.3143f, 2.6982f},
    {2, 1, 256, 1, 1, 0.6606f, 2.3495f},
    {1, 1, 128, 2, 1, 0.3352f, 2.2027f},
    {1, 1, 128, 2, 2, 0.3614f, 2.3393f},
};
constexpr SplitCost kSplit = {0.0226f, 0.0793f};
// clang-format on

// Few tokens. `blocks`: thread blocks that a multiprocessor can hold;
// `resident`: that it gets.
struct FewVariant {
  int rows, sets, tokens, blocks, resident;
  float unit, wave;
};
struct FewCost {
  float launch, meeting, token;
};
// clang-format off
constexpr FewVariant kFewVariants[] = {
    {3, 2, 8, 1, 1, 0.1120f, 0.4500f},
    {1, 3, 8, 2, 1, 0.1800f, 0.1000f},
    {1, 3, 8, 2, 2, 0.1110f, 0.4500f},
    {3, 2, 16, 1, 1, 0.1300f, 0.7300f},
    {1, 3, 16, 2, 1, 0.1900f, 0.3500f},
    {1, 3, 16, 2, 2, 0.1240f, 0.7300f},
    {3, 1, 32, 1, 1, 0.1710f, 1.0600f},
    {1, 3, 32, 2, 1, 0.2700f, 1.0600f},
    {1, 3, 32, 2, 2, 0.1730f, 1.0600f},
    {3, 1, 64, 1, 1, 0.2450f, 0.8000f},
    {2, 2, 64, 1, 1, 0.2420f, 0.8000f},
    {1, 4, 64, 1, 1, 0.3100f, 0.8000f},
};
constexpr FewCost kFewCost = {1.4500f, 0.3200f, 0.0060f};
// clang-format on

}  // namespace vllm::ternary::sm90

namespace vllm::ternary::s8 {

// 8-bit activations, one scale a row (kRow) or one per block of k (kBlock).
struct Variant {
  int warpgroups, tiles, tokens, sets;
  float unit, wave;
};
struct SplitCost {
  float meeting, exchange;
};
// clang-format off
constexpr Variant kRowVariants[] = {
    {2, 2, 128, 1, 0.2996f, 3.1400f},
    {3, 1, 128, 1, 0.2981f, 2.3000f},
    {2, 1, 128, 1, 0.3021f, 1.9200f},
    {3, 2, 64, 1, 0.1531f, 2.8900f},
    {2, 2, 64, 1, 0.1632f, 2.3300f},
    {4, 1, 64, 1, 0.1567f, 1.6100f},
    {3, 1, 64, 1, 0.1906f, 1.4300f},
    {2, 1, 64, 2, 0.1714f, 1.3700f},
    {2, 1, 64, 1, 0.2055f, 1.1100f},
};
constexpr SplitCost kRowSplit = {1.8000f, 0.0500f};
constexpr Variant kBlockVariants[] = {
    {2, 1, 128, 1, 0.5231f, 1.9800f},
    {3, 1, 64, 1, 0.2919f, 1.3900f},
    {2, 1, 64, 1, 0.3316f, 0.9600f},
};
constexpr SplitCost kBlockSplit = {2.8000f, 0.0160f};
// clang-format on

}  // namespace vllm::ternary::s8
