// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
#include "mma_s8_stage.cuh"

namespace vllm::ternary {

void mma_s8_digits_half(const S8Args&, const MmaConfig&);
void mma_s8_digits_bfloat16(const S8Args&, const MmaConfig&);
void mma_s8_int8_half(const S8Args&, const MmaConfig&, S8Scale);
void mma_s8_int8_bfloat16(const S8Args&, const MmaConfig&, S8Scale);

namespace {

// Of block_magic, and so that 4 * 2 * 128 * K fits an int32.
constexpr int kMaxK = 1 << 20;

bool whole_tiles(int block_size, int num_blocks) {
  const int tiles = block_size / 128;
  return num_blocks == 1 || (block_size % 128 == 0 && is_power_of_two(tiles));
}

S8Scale scale_of(const W2A8Args& g) {
  if (g.num_blocks == 1) return S8Scale::kRow;
  return g.scale_dtype == DType::kHalf &&
                 whole_tiles(g.block_size, g.num_blocks)
             ? S8Scale::kTile
             : S8Scale::kGeneral;
}

// What both kinds of arguments have.
template <typename Args>
S8Args common(const Args& g) {
  S8Args a{};
  a.scale = g.scale;
  a.scale_dtype = g.scale_dtype;
  a.bias = g.bias;
  a.y = g.y;
  a.M = g.M;
  a.N = g.N;
  a.K = g.K;
  a.N_pad = g.N_pad;
  a.K_pad = g.K_pad;
  a.num_blocks = g.num_blocks;
  a.parts = 1;
  a.ring = {g.weight,     static_cast<const half*>(g.scale),
            g.N_pad,      g.K_pad,
            g.num_blocks, 31};
  if (g.num_blocks > 1) {
    a.ring.block_shift = 0;
    while ((128 << a.ring.block_shift) < g.block_size) ++a.ring.block_shift;
    const uint32_t d = uint32_t(g.block_size / 32);
    a.block_magic = ((1u << 31) + d - 1) / d;
  }
  a.device = g.device;
  a.stream = g.stream;
  return a;
}

}  // namespace

bool mma_s8_supported(const W2A8Args& g) {
  return g.K <= kMaxK && g.M <= 65535 * 8 && fits_cut(g.N_pad, g.num_blocks) &&
         (g.num_blocks == 1 || g.block_size % 32 == 0);
}

bool mma_s8_quantizes(const QuantArgs& q, const W2A8Args& g) {
  return mma_s8_supported(g) && q.M <= 16 && !q.norm_weight &&
         scale_of(g) != S8Scale::kGeneral;
}

void mma_s8_gemm(const W2A8Args& g, const MmaConfig& config,
                 const QuantArgs* quant) {
  S8Args a = common(g);
  if (quant) {
    a.x = quant->x;
    a.ldx = quant->ldx;
  } else {
    a.xq = g.xq;
    a.xs = g.xs;
    a.xsum = g.xsum;
    a.xsum_tiles = g.xsum_tiles;
  }
  a.part_ends = g.part_ends;
  a.parts = g.parts;
  a.ldy = g.N;
  if (g.dtype == DType::kHalf) {
    mma_s8_int8_half(a, config, scale_of(g));
  } else {
    mma_s8_int8_bfloat16(a, config, scale_of(g));
  }
}

bool mma_s8_supported(const GemmArgs& g) {
  return g.K <= kMaxK && g.M <= 65535 * 2 && fits_cut(g.N_pad, g.num_blocks) &&
         g.scale_dtype == DType::kHalf && !g.zero_point &&
         whole_tiles(g.block_size, g.num_blocks);
}

void mma_s8_gemm(const GemmArgs& g, const MmaConfig& config) {
  S8Args a = common(g);
  a.x = g.x;
  a.ldx = g.ldx;
  a.ldy = g.ldy;
  if (g.dtype == DType::kHalf) {
    mma_s8_digits_half(a, config);
  } else {
    mma_s8_digits_bfloat16(a, config);
  }
}

}  // namespace vllm::ternary
