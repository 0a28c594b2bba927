// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// W2A16 for one or two tokens: each value of x in four signed digits, as
// stage_digits() in mma_s8_stage.cuh makes them, but in units of what the
// warp's part of K has as its largest value.
#pragma once

#include "mma_s8_direct.cuh"

namespace vllm::ternary {

// kHeld: k tiles of a warp, if their digits fit in registers, or 0. kRounds:
// times 256 values, what a warp has of x at most.
template <typename T, int kWarps, int kTokens, int kHeld, int kRounds>
__global__ void __launch_bounds__(kWarps * 32, 32 / kWarps)
    direct_digits_kernel(const __grid_constant__ DirectArgs a) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t smem[];
  const DirectWarp w(a, smem_address(smem));
  const int lane = w.lane;
  const uint32_t counter = w.shared + a.counter;
  const int outputs = w.tiles * 16 * kTokens;

  pdl_launch_dependents();
  DirectRing<true> ring(a, w);
  if (elect_lane()) {
    ring.init();
    if (a.split > 1 && w.warp == 0) {
      sm90::mbar_init(counter, 1);
      // Outputs of this rank, from every rank.
      const int own = (outputs + a.split - 1 - w.rank) >> a.split_log2;
      sm90::mbar_expect_tx(counter, (own << a.split_log2) * 4);
    }
    sm90::mbar_init_fence();
    ring.fill_all();
  }
  __syncwarp();
  ring.fetch_scales();
  float2* const rows = reinterpret_cast<float2*>(smem + a.rows);
  fetch_rows<T, false>(a, w, rows);
  if (a.split > 1) sm90::cluster_arrive();
  pdl_wait();
  if (a.split > 1) sm90::cluster_wait();  // the others' counters are ready

  // x is loaded once: even a load that hits L1 would wait behind the weights of
  // the next kernel, which begins now.
  Eight x[kTokens][kRounds];
  DigitUnit unit_of[kTokens];
  #pragma unroll
  for (int m = 0; m < kTokens; ++m) {
  #pragma unroll
    for (int j = 0; j < kRounds; ++j) {
      const int k = w.kt0 * 128 + eight_position(lane) + j * 256;
      x[m][j].load(static_cast<const T*>(a.x) + m * a.ldx, k,
                   j * 2 + (lane >> 4) < w.n && k < a.K);
    }
  }
  #pragma unroll
  for (int m = 0; m < kTokens; ++m) {
    uint32_t top = 0;
  #pragma unroll
    for (int j = 0; j < kRounds; ++j) top = x[m][j].largest(top);
    top = __reduce_max_sync(~0u, max(top & 0xffffu, top >> 16));
    unit_of[m] = digit_unit<T>(top);
  }
  #pragma unroll
  for (int m = 0; m < kTokens; ++m) {
  #pragma unroll
    for (int j = 0; j < kRounds; ++j) {
      // With kHeld, a k tile too many is zero.
      if (j * 2 + (lane >> 4) >= (kHeld ? kHeld : w.n)) continue;
      uint32_t out[4][2];
  #pragma unroll
      for (int t = 0; t < 2; ++t) {
        float values[4];
        x[m][j].template values<T>(t, values);
        uint32_t digits[4];
        digits_of(values, unit_of[m].up, digits);
  #pragma unroll
        for (int d = 0; d < 4; ++d) out[d][t] = digits[d];
      }
      const uint32_t to =
          w.base + a.columns + m * 4 * a.pitch + (lane + j * 32) * 8;
  #pragma unroll
      for (int d = 0; d < 4; ++d) store_shared_8(to + d * a.pitch, out[d]);
    }
  }
  cp_async_wait<0>();
  __syncwarp();

  const uint32_t column = w.base + a.columns +
                          (lane & (kTokens * 4 - 1)) * a.pitch +
                          (lane >> 3) * 16;
  // A lane has two digits of a token, its neighbour the others, at rows lane /
  // 4 and 8 further on.
  const int token = kTokens > 1 ? (lane & 3) >> 1 : 0;
  const bool writes = !(lane & (kTokens > 1 ? 1 : 3));
  const float even = token ? unit_of[kTokens - 1].factor : unit_of[0].factor;
  const float odd = even * 0.25f;
  uint32_t to =
      w.shared + a.sums +
      (w.part * a.part_sums + (w.first * 16 + (lane >> 2)) * kTokens + token) *
          4;
  const int to_step = (64 * kTokens) << a.step_log2;
  const int scale_lane = (lane >> 2) * 2;

  auto unit = [&](const uint32_t (&b)[2][4], const int (&start)[4],
                  uint32_t words, uint32_t scale, float (&acc)[2]) {
    int d[4];
    multiply_tile(d, words + lane * 16, b, start);
  #pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t raw = load_shared_u16(scale + h * 16 + scale_lane);
      acc[h] = fmaf(__half2float(__ushort_as_half(uint16_t(raw))),
                    float(d[2 * h] * 256 + d[2 * h + 1]), acc[h]);
    }
  };
  auto flush = [&](const float (&acc)[2]) {
  #pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float low = __shfl_down_sync(~0u, acc[h], 1) * (1.0f / 32768.0f);
      const float v = fmaf(acc[h], 2.0f, low) * (h ? odd : even);
      if (writes) store_shared_4(to + h * 32 * kTokens, __float_as_uint(v));
    }
    to += to_step;
  };
  multiply_rows<kHeld, float, 2>(a, w, ring, column, unit, flush);
  __syncthreads();

  auto store = [&](int i, float v) {
    const int row = kTokens > 1 ? i >> 1 : i;
    const int n = w.tile0 * 16 + row;
    if (n >= a.N) return;
    if (a.bias) v += rows[row].y;
    static_cast<T*>(a.y)[(kTokens > 1 ? (i & 1) * a.ldy : 0) + n] =
        from_float<T>(v);
  };
  // Eight threads an output, each with every eighth part.
  const int each = threadIdx.x & 7;
  #pragma unroll 1
  for (int i0 = 0; i0 < outputs; i0 += kWarps * 4) {
    const int i = i0 + (threadIdx.x >> 3);
    float v = 0.0f;
    if (i < outputs) {
      const uint32_t at = w.shared + a.sums + (each * a.part_sums + i) * 4;
      if (each < 1 << a.parts_log2) v = __uint_as_float(load_shared_u32(at));
      if (kWarps > 8 && a.parts_log2 == 4) {
        v += __uint_as_float(load_shared_u32(at + 32 * a.part_sums));
      }
    }
  #pragma unroll
    for (int d = 1; d < 8; d *= 2) v += __shfl_xor_sync(~0u, v, d);
    if (each || i >= outputs) continue;
    if (a.split == 1) {
      store(i, v);
    } else {  // output i belongs to CTA i % split
      const int owner = i & (a.split - 1);
      const uint32_t to_owner =
          w.shared + a.received +
          (w.rank * a.rank_sums + (i >> a.split_log2)) * 4;
      sm90::st_async(sm90::map_to_rank(to_owner, owner),
                     sm90::map_to_rank(counter, owner), v);
    }
  }
  if (a.split > 1) {
    sm90::mbar_wait_cluster(counter, 0);
    const float* received = reinterpret_cast<const float*>(smem + a.received);
    for (int i = threadIdx.x; (i << a.split_log2) + w.rank < outputs;
         i += kWarps * 32) {
      float v = 0.0f;
      for (int r = 0; r < a.split; ++r) v += received[r * a.rank_sums + i];
      store((i << a.split_log2) + w.rank, v);
    }
  }
#endif
}

}  // namespace vllm::ternary
