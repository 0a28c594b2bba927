// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Decoding and products of the Hopper kernels for few tokens.
#pragma once

#include "sm90_prefill_decode.cuh"
#include "sm90_prefill_few_config.cuh"
#include "sm90_prefill_ptx.cuh"
#include "sm90_prefill_wgmma.cuh"

namespace vllm::ternary::sm90 {

// The scales of rows g and g + 8 in float32.
__device__ __forceinline__ void load_row_scales(DType dtype, uint32_t base,
                                                int row, float (&s)[2]) {
  if (dtype == DType::kFloat) {
    s[0] = ld_shared_f32(base + 4 * row);
    s[1] = ld_shared_f32(base + 4 * row + 32);
    return;
  }
  const uint32_t a = ld_shared_u16(base + 2 * row);
  const uint32_t b = ld_shared_u16(base + 2 * row + 16);
  if (dtype == DType::kHalf) {
    s[0] = __half2float(__ushort_as_half(uint16_t(a)));
    s[1] = __half2float(__ushort_as_half(uint16_t(b)));
  } else {
    s[0] = __uint_as_float(a << 16);
    s[1] = __uint_as_float(b << 16);
  }
}

// What the two ways of multiplying need of a stage.
template <typename C>
struct FewStage {
  uint4 codes[C::kPair];
  float scale[C::kPair][2];  // of rows g and g + 8
};

template <typename C, bool kHalfScales>
__device__ __forceinline__ void few_load(const FewParams& p,
                                         const FewConsumer& me, uint32_t base,
                                         int kb, FewStage<C>& s) {
  const uint32_t codes = base + C::kCodesAt +
                         (me.row * 4 + me.warp) * C::kPair * 512 + me.lane * 16;
  const int row = me.row * 64 + me.warp * 16 + me.lane / 4;
  const DType dtype = kHalfScales ? DType::kHalf : p.scale_dtype;
  const int step = C::kRows * 64 * (dtype == DType::kFloat ? 4 : 2);
#pragma unroll
  for (int b = 0; b < C::kPair; ++b) {
    s.codes[b] = ld_shared_v4(codes + b * 512);
    int block = b;  // from the first of the stage
    if (b > 0 && p.blocks_per_scale > 1) {
      const int first = kb * C::kPair;
      block = (first + b) / p.blocks_per_scale - first / p.blocks_per_scale;
    }
    load_row_scales(dtype, base + C::kScalesAt + block * step, row, s.scale[b]);
  }
}

// A block's sums into the tile's, under the block's scales.
template <int kAcc>
__device__ __forceinline__ void few_promote(float (&sum)[kAcc],
                                            const float (&acc)[kAcc],
                                            const float (&scale)[2]) {
#pragma unroll
  for (int i = 0; i < kAcc; ++i) {
    sum[i] = fmaf(acc[i], scale[(i >> 1) & 1], sum[i]);
  }
}

// Walks the k-stages k, k + kSets, ... of this block and calls
// multiply(address, k-stage); then the stage is free again. `pos` counts stages
// from the start of the kernel.
template <typename C, typename Multiply>
__device__ __forceinline__ void few_walk(const FewPlace& at,
                                         const FewConsumer& me, int k,
                                         unsigned pos, Multiply multiply) {
  int stage = pos % C::kStages;
  uint32_t phase = pos / C::kStages & 1;
#pragma unroll 1
  for (; k < at.k_end; k += C::kSets) {
    const uint32_t full = at.full + 8 * stage, empty = at.empty + 8 * stage;
    // Where sets take turns, the stage's last round may have been another
    // set's; only once that round is over (its copies may come in late) do the
    // two parities tell this round from the one before.
    if constexpr (C::kSets > 1) mbar_wait(empty, phase ^ 1);
    mbar_wait(full, phase);
    multiply(at.stages + stage * C::kStageBytes, k, empty);
    stage += C::kSets;
    if (stage >= C::kStages) {
      stage -= C::kStages;
      phase ^= 1;
    }
  }
}

// wgmma: 64 rows by kTokens. A job is one word (32 k) of a block; while it runs
// the next is decoded.
template <typename C, bool kHalfScales>
__device__ __forceinline__ void few_multiply(const FewParams& p,
                                             const FewPlace& at,
                                             const FewConsumer& me, int k,
                                             unsigned pos,
                                             float (&sum)[C::kTokens / 2]) {
  using T = typename C::T;
  constexpr bool kBf16 = std::is_same_v<T, __nv_bfloat16>;
  constexpr int kAcc = C::kTokens / 2, kJobs = 4 * C::kPair;
  uint32_t a[2][8];
  float acc[C::kPair][kAcc];
  few_walk<C>(at, me, k, pos, [&](uint32_t base, int kb, uint32_t empty) {
    const uint64_t desc = smem_desc(base);
    FewStage<C> s;
    few_load<C, kHalfScales>(p, me, base, kb, s);
    auto promote = [&](int b) {
#pragma unroll
      for (int i = 0; i < kAcc; ++i) keep_until_here(acc[b][i]);
      few_promote(sum, acc[b], s.scale[b]);
    };
#pragma unroll
    for (int job = 0; job < kJobs; ++job) {
      const int b = job / 4, j = job % 4;
      const uint32_t w[4] = {s.codes[b].x, s.codes[b].y, s.codes[b].z,
                             s.codes[b].w};
      uint32_t (&frag)[8] = a[job % 2];
      decode_word<T>(w[j], frag);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int step = 2 * j + i;  // of 8 in the block, 16 k each
        wgmma<C::kTokens, kBf16>(
            acc[b], frag + 4 * i,
            desc +
                (((step / 4 + 2 * b) * C::kHalfBytes + (step % 4) * 32) >> 4),
            step > 0);
      }
      wgmma_commit();
      if (job + 1 < kJobs) wgmma_wait<1>();
      if (b > 0 && j == 0) promote(b - 1);
    }
    wgmma_wait<0>();
    if (me.lane == 0) mbar_arrive(empty);
    promote(C::kPair - 1);
  });
}

// mma.sync: each warp its 16 rows.
template <typename C, bool kHalfScales>
__device__ __forceinline__ void few_multiply_sync(
    const FewParams& p, const FewPlace& at, const FewConsumer& me, int k,
    unsigned pos, float (&sum)[C::kTokens / 2]) {
  using T = typename C::T;
  constexpr bool kBf16 = std::is_same_v<T, __nv_bfloat16>;
  constexpr int kAcc = C::kTokens / 2;
  // A lane gives ldmatrix the address of token lane % 8, chunk lane / 8.
  const uint32_t x_offset =
      (me.lane % 8) * 128 + (((me.lane / 8) ^ (me.lane % 8)) << 4);
  few_walk<C>(at, me, k, pos, [&](uint32_t base, int kb, uint32_t empty) {
    FewStage<C> s;
    few_load<C, kHalfScales>(p, me, base, kb, s);
    const uint32_t x0 = base + x_offset, x1 = base + (x_offset ^ 64);
#pragma unroll
    for (int b = 0; b < C::kPair; ++b) {
      float acc[kAcc] = {};
      const uint32_t w[4] = {s.codes[b].x, s.codes[b].y, s.codes[b].z,
                             s.codes[b].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t a[8];
        decode_word<T>(w[j], a);
#pragma unroll
        for (int n = 0; n < C::kTokens / 8; ++n) {
          uint32_t x[4];
          ldmatrix_x4(x, (j % 2 ? x1 : x0) + (2 * b + j / 2) * C::kHalfBytes +
                             n * 1024);
          mma_16816<kBf16>(acc + 4 * n, a, x[0], x[1]);
          mma_16816<kBf16>(acc + 4 * n, a + 4, x[2], x[3]);
        }
      }
      few_promote(sum, acc, s.scale[b]);
    }
    __syncwarp();
    if (me.lane == 0) mbar_arrive(empty);
  });
}

}  // namespace vllm::ternary::sm90
