// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// W2A8 for up to eight tokens, which every CTA quantizes for itself: the
// arithmetic of w2a8_quantize.cu.
#pragma once

#include "mma_s8_direct.cuh"

namespace vllm::ternary {

// kRow: one scale of any type for a whole row, else float16 ones of whole k
// tiles. kHeld, kRounds: as in mma_s8_direct_digits.cuh.
template <typename T, bool kRow, int kWarps, int kTokens, int kHeld,
          int kRounds>
__global__ void __launch_bounds__(kWarps * 32, 32 / kWarps)
    direct_int8_kernel(const __grid_constant__ DirectArgs a) {
#if __CUDA_ARCH__ >= 900
  using Sum = std::conditional_t<kRow, int, float>;
  extern __shared__ __align__(128) uint8_t smem[];
  const DirectWarp w(a, smem_address(smem));
  const int lane = w.lane;
  // Of each token, the largest value in each part of K, and in all.
  uint32_t* const most = reinterpret_cast<uint32_t*>(smem + a.tokens);
  uint32_t* const table = most + kWarps * kTokens;

  pdl_launch_dependents();
  DirectRing<!kRow> ring(a, w);
  if (elect_lane()) {
    ring.init();
    sm90::mbar_init_fence();
    ring.fill_all();
  }
  __syncwarp();
  ring.fetch_scales();
  float2* const rows = reinterpret_cast<float2*>(smem + a.rows);
  fetch_rows<T, kRow>(a, w, rows);
  pdl_wait();

  Eight x[kTokens][kRounds];
  #pragma unroll
  for (int m = 0; m < kTokens; ++m) {
  #pragma unroll
    for (int j = 0; j < kRounds; ++j) {
      const int k = w.kt0 * 128 + eight_position(lane) + j * 256;
      x[m][j].load(static_cast<const T*>(a.x) + m * a.ldx, k,
                   m < a.M && j * 2 + (lane >> 4) < w.n && k < a.K);
    }
  }
  uint32_t mine = 0;  // of token `lane`
  #pragma unroll
  for (int m = 0; m < kTokens; ++m) {
    uint32_t top = 0;
  #pragma unroll
    for (int j = 0; j < kRounds; ++j) top = x[m][j].largest(top);
    top = __reduce_max_sync(~0u, max(top & 0xffffu, top >> 16));
    if (lane == m) mine = top;
  }
  if (lane < kTokens && w.first == 0) most[w.part * kTokens + lane] = mine;
  __syncthreads();
  // The largest value of token lane % kTokens.
  uint32_t top = 0;
  #pragma unroll
  for (int p = 0; p < kWarps; p += 32 / kTokens) {
    const int from = p + lane / kTokens;
    if (from < 1 << a.parts_log2) {
      top = max(top, most[from * kTokens + (lane & (kTokens - 1))]);
    }
  }
  #pragma unroll
  for (int d = kTokens; d < 32; d *= 2) {
    top = max(top, __shfl_xor_sync(~0u, top, d));
  }
  if (threadIdx.x < kTokens) table[lane] = top;
  const float up = token_factor(to_float(reinterpret_cast<const T&>(top)));
  #pragma unroll
  for (int m = 0; m < kTokens; ++m) {
    const float factor = __shfl_sync(~0u, up, m);
  #pragma unroll
    for (int j = 0; j < kRounds; ++j) {
      // With kHeld, a k tile too many is zero.
      if (j * 2 + (lane >> 4) >= (kHeld ? kHeld : w.n)) continue;
      uint32_t out[2];
  #pragma unroll
      for (int t = 0; t < 2; ++t) {
        float values[4];
        x[m][j].template values<T>(t, values);
        out[t] = quantize_four(values, factor);
      }
      store_shared_8(w.base + a.columns + m * a.pitch + (lane + j * 32) * 8,
                     out);
    }
  }
  if constexpr (!kRow) cp_async_wait<0>();
  __syncwarp();

  const uint32_t column =
      w.base + a.columns + (lane & (kTokens - 1)) * a.pitch + (lane >> 3) * 16;
  // A lane has two tokens at rows lane / 4 and 8 further on, which count 4
  // times.
  uint32_t to = w.shared + a.sums +
                (w.part * a.part_sums + (w.first * 16 + (lane >> 2)) * kTokens +
                 (kTokens > 1 ? (lane & 3) * 2 : 0)) *
                    4;
  const int to_step = (64 * kTokens) << a.step_log2;
  const int scale_lane = (lane >> 2) * 2;
  auto unit = [&](const uint32_t (&b)[2][4], const int (&start)[4],
                  uint32_t words, uint32_t scale, Sum(&acc)[4]) {
    int d[4];
    multiply_tile(d, words + lane * 16, b, start);
  #pragma unroll
    for (int h = 0; h < 2; ++h) {
      if constexpr (kRow) {
        acc[2 * h] += d[2 * h];
        acc[2 * h + 1] += d[2 * h + 1];
      } else {
        const uint32_t raw = load_shared_u16(scale + h * 16 + scale_lane);
        const float s = __half2float(__ushort_as_half(uint16_t(raw)));
        acc[2 * h] = fmaf(s, float(d[2 * h]), acc[2 * h]);
        acc[2 * h + 1] = fmaf(s, float(d[2 * h + 1]), acc[2 * h + 1]);
      }
    }
  };
  auto flush = [&](const Sum(&acc)[4]) {
  #pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t out[2];
  #pragma unroll
      for (int c = 0; c < 2; ++c) {
        if constexpr (kRow) {
          out[c] = uint32_t(h ? acc[2 + c] >> 2 : acc[c]);
        } else {
          out[c] = __float_as_uint(h ? acc[2 + c] * 0.25f : acc[c]);
        }
      }
      if constexpr (kTokens > 1) {
        store_shared_8(to + h * 32 * kTokens, out);
      } else if (!(lane & 3)) {
        store_shared_4(to + h * 32, out[0]);
      }
    }
    to += to_step;
  };
  multiply_rows<kHeld, Sum, 4>(a, w, ring, column, unit, flush);
  __syncthreads();

  // kEach threads an output, each with every kEach-th part; tokens fastest.
  constexpr int kEach = kTokens > 1 ? 1 : 8;
  const int each = threadIdx.x % kEach;
  const int outputs = w.tiles * 16 * kTokens;
  #pragma unroll 1
  for (int i0 = 0; i0 < outputs; i0 += kWarps * 32 / kEach) {
    const int i = i0 + threadIdx.x / kEach;
    const int m = i % kTokens, n = w.tile0 * 16 + i / kTokens;
    const bool valid = i < outputs && m < a.M && n < a.N;
    Sum sum = 0;
    float scale = 1.0f, bias = 0.0f;
    if (valid) {
      scale = rows[i / kTokens].x;
      bias = rows[i / kTokens].y;
  #pragma unroll
      for (int p = 0; p < kWarps; p += kEach) {
        if (p + each < 1 << a.parts_log2) {
          const uint32_t v = load_shared_u32(
              w.shared + a.sums + ((p + each) * a.part_sums + i) * 4);
          sum += reinterpret_cast<const Sum&>(v);
        }
      }
    }
  #pragma unroll
    for (int d = 1; d < kEach; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
    if (!valid || each) continue;
    const uint32_t top_m = table[m];
    const float factor =
        token_scale(to_float(reinterpret_cast<const T&>(top_m)));
    float v = float(sum);
    if constexpr (kRow) v = __fmul_rn(v, scale);
    v = __fmul_rn(v, factor);
    if (a.bias) v += bias;
    static_cast<T*>(a.y)[int64_t(m) * a.ldy + n] = from_float<T>(v);
  }
#endif
}

}  // namespace vllm::ternary
