// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
#include "mma_gemm.cuh"

namespace vllm::ternary {

void mma_gemm_half(const MmaArgs&, const MmaConfig&, bool general);
void mma_gemm_bfloat16(const MmaArgs&, const MmaConfig&, bool general);

namespace {

// One exact fp16 scale for a whole k tile, and no zero point.
bool is_fast(const GemmArgs& g) {
  return scales_whole_tiles(g) && g.scale_dtype == DType::kHalf &&
         !g.zero_point;
}

}  // namespace

bool mma_supported(const GemmArgs& g) {
  return fits_cut(g, 8) && (g.num_blocks == 1 || g.block_size % 32 == 0);
}

void mma_gemm(const GemmArgs& g, const MmaConfig& config) {
  MmaArgs a{};
  a.g = g;
  set_ring(a, g);
  if (g.dtype == DType::kHalf) {
    mma_gemm_half(a, config, !is_fast(g));
  } else {
    mma_gemm_bfloat16(a, config, !is_fast(g));
  }
}

}  // namespace vllm::ternary
