// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
#include "mma_s8_direct_operands.cuh"
#include "mma_s8_direct_tokens.cuh"

namespace vllm::ternary {

void mma_s8_digits_half(const S8Args&, const MmaConfig&);
void mma_s8_digits_bfloat16(const S8Args&, const MmaConfig&);
void mma_s8_int8_half(const S8Args&, const MmaConfig&, S8Scale);
void mma_s8_int8_bfloat16(const S8Args&, const MmaConfig&, S8Scale);
bool mma_s8_direct_digits_half(const DigitsArgs&, const MmaConfig&, bool);
bool mma_s8_direct_digits_bfloat16(const DigitsArgs&, const MmaConfig&, bool);
bool mma_s8_tokens_half(const TokenArgs&, const MmaConfig&, bool);
bool mma_s8_tokens_bfloat16(const TokenArgs&, const MmaConfig&, bool);

namespace {

S8Scale scale_of(const W2A8Args& g) {
  if (g.num_blocks == 1) return S8Scale::kRow;
  return g.scale_dtype == DType::kHalf && scales_whole_tiles(g)
             ? S8Scale::kTile
             : S8Scale::kGeneral;
}

// What the arguments of both families of kernels say of both kinds of product.
template <typename Args, typename Product>
Args common(const Product& g) {
  Args a{};
  a.scale = g.scale;
  a.scale_dtype = g.scale_dtype;
  a.bias = g.bias;
  a.y = g.y;
  a.M = g.M;
  a.N = g.N;
  a.K = g.K;
  a.N_pad = g.N_pad;
  a.device = g.device;
  a.stream = g.stream;
  return a;
}

template <typename Product>
S8Args s8(const Product& g) {
  S8Args a = common<S8Args>(g);
  a.K_pad = g.K_pad;
  a.num_blocks = g.num_blocks;
  a.parts = 1;
  set_ring(a, g);
  return a;
}

// What the kernels with short chains take: sm_90 and later, K of whole 32.
template <typename Product>
bool direct_takes(const Product& g, const MmaConfig& config) {
  return config.variant >= kDirect && g.K % 32 == 0 &&
         device_info(g.device).capability >= 90;
}

// `config` for the kernels that have no such variant.
MmaConfig without_direct(MmaConfig config) {
  if (config.variant >= kDirect) config.variant = 0;
  return config;
}

bool direct_digits(const DigitsArgs& a, const MmaConfig& config, DType dtype,
                   bool bytes) {
  return dtype == DType::kHalf
             ? mma_s8_direct_digits_half(a, config, bytes)
             : mma_s8_direct_digits_bfloat16(a, config, bytes);
}

// Tokens as they are, to be quantized, or as bytes.
template <typename Args>
void set_tokens(Args& a, const W2A8Args& g, const QuantArgs* quant) {
  if (quant) {
    a.x = quant->x;
    a.ldx = quant->ldx;
  } else {
    a.xq = g.xq;
    a.xs = g.xs;
  }
}

}  // namespace

bool mma_s8_supported(const W2A8Args& g) {
  // Sums of up to 4 * 2 * 128 * K fit int32 for every K that fits the cut.
  return fits_cut(g, 8) && (g.num_blocks == 1 || g.block_size % 32 == 0);
}

bool mma_s8_quantizes(const QuantArgs& q, const W2A8Args& g) {
  return mma_s8_supported(g) && q.M <= 16 && !q.norm_weight &&
         scale_of(g) != S8Scale::kGeneral;
}

bool mma_s8_direct(const W2A8Args& g, const MmaConfig& config,
                   const QuantArgs* quant) {
  const S8Scale scale = scale_of(g);
  if (!direct_takes(g, config) || !mma_s8_supported(g) || g.parts > 1 ||
      g.M > 16 || scale == S8Scale::kGeneral || (quant && quant->norm_weight)) {
    return false;
  }
  const bool row = scale == S8Scale::kRow;
  MmaConfig c = config;
  if (c.variant >= kDirectOne && quant && g.M == 1 && row) {
    DigitsArgs a = common<DigitsArgs>(g);
    set_weight(a, g);
    a.x = quant->x;
    a.ldx = quant->ldx;
    a.ldy = g.N;
    c.variant += kDirect - kDirectOne;
    return direct_digits(a, c, g.dtype, true);
  }
  if (c.variant >= kDirectOne) c.variant += kDirect + 3 - kDirectOne;
  TokenArgs a = common<TokenArgs>(g);
  set_weight(a, g);
  a.ldy = g.N;
  set_tokens(a, g, quant);
  return g.dtype == DType::kHalf ? mma_s8_tokens_half(a, c, row)
                                 : mma_s8_tokens_bfloat16(a, c, row);
}

void mma_s8_gemm(const W2A8Args& g, const MmaConfig& config,
                 const QuantArgs* quant) {
  if (mma_s8_direct(g, config, quant)) return;
  const MmaConfig c = without_direct(config);
  S8Args a = s8(g);
  set_tokens(a, g, quant);
  if (!quant) {
    a.xsum = g.xsum;
    a.xsum_tiles = g.xsum_tiles;
  }
  a.part_ends = g.part_ends;
  a.parts = g.parts;
  a.ldy = g.N;
  if (g.dtype == DType::kHalf) {
    mma_s8_int8_half(a, c, scale_of(g));
  } else {
    mma_s8_int8_bfloat16(a, c, scale_of(g));
  }
}

bool mma_s8_supported(const GemmArgs& g) {
  return fits_cut(g, 2) && g.scale_dtype == DType::kHalf && !g.zero_point &&
         scales_whole_tiles(g);
}

bool mma_s8_direct(const GemmArgs& g, const MmaConfig& config) {
  if (!direct_takes(g, config) || !mma_s8_supported(g)) return false;
  DigitsArgs a = common<DigitsArgs>(g);
  set_weight(a, g);
  a.x = g.x;
  a.ldx = g.ldx;
  a.ldy = g.ldy;
  return direct_digits(a, config, g.dtype, false);
}

void mma_s8_gemm(const GemmArgs& g, const MmaConfig& config) {
  if (mma_s8_direct(g, config)) return;
  const MmaConfig c = without_direct(config);
  S8Args a = s8(g);
  a.x = g.x;
  a.ldx = g.ldx;
  a.ldy = g.ldy;
  if (g.dtype == DType::kHalf) {
    mma_s8_digits_half(a, c);
  } else {
    mma_s8_digits_bfloat16(a, c);
  }
}

}  // namespace vllm::ternary
