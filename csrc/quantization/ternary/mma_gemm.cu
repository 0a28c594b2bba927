// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
#include "mma_gemm.cuh"

namespace vllm::ternary {

void mma_gemm_half(const MmaArgs&, const MmaConfig&, bool general);
void mma_gemm_bfloat16(const MmaArgs&, const MmaConfig&, bool general);

namespace {

constexpr int kMaxK = 1 << 20;  // the reach of block_magic

// One exact fp16 scale for a whole k tile, and no zero point.
bool is_fast(const GemmArgs& g) {
  const int tiles = g.block_size / 128;
  return (g.num_blocks == 1 ||
          (g.block_size % 128 == 0 && (tiles & (tiles - 1)) == 0)) &&
         g.scale_dtype == DType::kHalf && !g.zero_point;
}

}  // namespace

bool mma_supported(const GemmArgs& g) {
  return g.K <= kMaxK && g.M <= 65535 * 8 && fits_cut(g.N_pad, g.num_blocks) &&
         (g.num_blocks == 1 || g.block_size % 32 == 0);
}

void mma_gemm(const GemmArgs& g, const MmaConfig& config) {
  MmaArgs a{};
  a.g = g;
  a.ring = {g.weight,     static_cast<const half*>(g.scale),
            g.N_pad,      g.K_pad,
            g.num_blocks, 31};
  if (g.num_blocks > 1) {
    a.ring.block_shift = 0;
    while ((128 << a.ring.block_shift) < g.block_size) ++a.ring.block_shift;
    const uint32_t d = uint32_t(g.block_size / 32);
    a.block_magic = ((1u << 31) + d - 1) / d;
  }
  if (g.dtype == DType::kHalf) {
    mma_gemm_half(a, config, !is_fast(g));
  } else {
    mma_gemm_bfloat16(a, config, !is_fast(g));
  }
}

}  // namespace vllm::ternary
