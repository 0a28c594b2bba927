// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project

#include "plan.h"

#include <algorithm>

#include <torch/csrc/stable/ops.h>

namespace vllm::ternary::cpu {
namespace {

#if defined(__x86_64__)

// Up to here a table for each token beats decoded weights.
constexpr int64_t kTableTokens = 3;
// From here on tiles beat vectors.
constexpr int64_t kAmxTokensW2A16 = 2;
constexpr int64_t kAmxTokensW2A8 = 4;

// Tokens at a time, in equal chunks. Each chunk decodes all weights once more,
// and its x is read once for every band of weights: from L2 or little further,
// or ahead of time where x is one plane. Less where threads would idle.
int64_t tile_chunk(const Weight& w, int64_t planes, int64_t token_bytes,
                   int64_t size_m) {
  constexpr int64_t kFew = 64, kStep = 32;
  const bool band = planes == 1 && w.k_pad * token_bytes <= kBandRow;
  const int64_t bytes = (band ? 4 : 1) * 1024 * 1024;
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t row_items = (w.size_n + kTileRows - 1) / kTileRows;
  int64_t fit = std::max(kFew, bytes / (w.k_pad * token_bytes) / kStep * kStep);
  const auto chunks = [&] { return (size_m + fit - 1) / fit; };
  while (fit > 4 * kFew && row_items * chunks() < 3 * threads) {
    fit = std::max(4 * kFew, fit / 2 / kStep * kStep);
  }
  const int64_t even = (size_m + chunks() - 1) / chunks();
  return (even + kStep - 1) / kStep * kStep;
}

bool whole_blocks(const Weight& w, int64_t step) {
  return w.nblocks == 1 || w.block_pad % step == 0;
}

#endif

}  // namespace

Plan plan_w2a16(Isa isa, Type x_type, int64_t size_m, const Weight& w) {
#if defined(__x86_64__)
  if (isa >= Isa::kAmx && size_m >= kAmxTokensW2A16 && whole_blocks(w, 32)) {
    const int64_t planes = x_type == Type::kBFloat16 ? 1
                           : x_type == Type::kHalf   ? 2
                                                     : 3;
    return {gemm_bf16_amx,
            Form::kTiles,
            2,
            planes,
            tile_chunk(w, planes, 2 * planes, size_m),
            &kActivationAvx512};
  }
  if (isa >= Isa::kAvx512Vnni) {
    if (size_m <= kTableTokens) {
      return {gemm_lut_avx512, Form::kTable, 4, 1, size_m, &kActivationAvx512};
    }
    if (isa >= Isa::kAvx512Bf16 && x_type == Type::kBFloat16) {
      return {gemm_bf16_avx512, Form::kRows, 2, 1, size_m, &kActivationAvx512};
    }
    return {gemm_f32_avx512, Form::kRows, 4, 1, size_m, &kActivationAvx512};
  }
  if (isa >= Isa::kAvx2) {
    return {gemm_f32_avx2, Form::kRows, 4, 1, size_m, &kActivationAvx2};
  }
#endif
  return {gemm_f32_portable, Form::kRows, 4, 1, size_m, &kActivationPortable};
}

Plan plan_w2a8(Isa isa, int64_t size_m, const Weight& w) {
#if defined(__x86_64__)
  if (isa >= Isa::kAmx && size_m >= kAmxTokensW2A8 && whole_blocks(w, 64)) {
    return {gemm_int8_amx,     Form::kTiles, 1, 1, tile_chunk(w, 1, 1, size_m),
            &kActivationAvx512};
  }
  if (isa >= Isa::kAvx512Vnni) {
    return {gemm_int8_avx512, Form::kRows, 1, 1, size_m, &kActivationAvx512};
  }
  if (isa >= Isa::kAvx2) {
    return {gemm_int8_avx2, Form::kRows, 1, 1, size_m, &kActivationAvx2};
  }
#endif
  return {gemm_int8_portable, Form::kRows, 1, 1, size_m, &kActivationPortable};
}

}  // namespace vllm::ternary::cpu
