// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// W2A16 for one or two tokens: each value of x in four signed digits, as
// stage_digits() in mma_s8_stage.cuh makes them, but in units of what the
// warp's part of K has as its largest value. And W2A8 for one token with a
// scale per row, which the CTAs quantize by the arithmetic of w2a8_quantize.cu:
// one column instead of four, and nothing but integers until the end.
//
// Few instructions: what a multiprocessor issues before the activations are
// there is taken from the kernel ahead, which runs beside it. One warp fetches
// the row tiles that fit for all; those after them, each warp its part.
#pragma once

#include "mma_s8_direct_operands.cuh"

namespace vllm::ternary {

// kHeld: k tiles of a warp, if their columns fit in registers, or 0. kRounds:
// times 256 values, what a warp has of x at most; an odd k tile of kHeld comes
// on top. kAll: all warps are along K. kBytes: W2A8.
template <typename T, int kTokens, int kHeld, int kRounds, bool kAll,
          bool kBytes = false>
__global__ void __launch_bounds__(kDigitsWarps * 32, 2)
    direct_digits_kernel(const __grid_constant__ DigitsArgs a) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t smem[];
  constexpr int kThreads = kDigitsWarps * 32;
  constexpr int kColumns = kTokens * (kBytes ? 1 : 4);
  using Sum = std::conditional_t<kBytes, int, float>;
  static_assert(!kBytes || kTokens == 1);
  const uint32_t shared = smem_address(smem);
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);  // uniform
  const int lane = threadIdx.x & 31;
  const int rank = blockIdx.x, group = blockIdx.y;
  const int tile0 = group * a.tiles + min(group, a.tiles_rest);
  const int tiles = a.tiles + (group < a.tiles_rest);
  const int outputs = tiles * 16 * kTokens;
  const int parts_log2 = kAll ? 4 : a.parts_log2;
  const int step_log2 = kAll ? 0 : a.step_log2;
  const int parts = 1 << parts_log2, step = 1 << step_log2;
  const int part = warp & (parts - 1), first = warp >> parts_log2;
  auto begin_of = [&](int place) {
    return place * a.k_tiles + min(place, a.k_rest);
  };
  const int cta_kt0 = begin_of(rank << parts_log2);
  const int cta_n = begin_of((rank + 1) << parts_log2) - cta_kt0;
  const int kt0 = begin_of((rank << parts_log2) + part);
  const int n = begin_of((rank << parts_log2) + part + 1) - kt0;
  // Barriers: of the slots as first filled, of the scales, of what the cluster
  // sends, and of each warp's part of the slots from then on.
  const uint32_t full = shared + a.barriers_at;
  // With kBytes `scales_full` counts the largest values of a cluster.
  const uint32_t scales_full = full + a.slots * 8, counter = scales_full + 8;
  const uint32_t again = counter + 8 + warp * a.slots * 8;
  const bool refills = tiles > a.slots;
  const uint8_t* const row0 = reinterpret_cast<const uint8_t*>(a.weight) +
                              (int64_t(tile0) * a.all_k_tiles + cta_kt0) * 512;
  const int64_t row_bytes = int64_t(a.all_k_tiles) * 512;

  pdl_launch_dependents();
  if (warp == 0 && elect_lane()) {
    sm90::mbar_init(scales_full, kBytes ? 1 : kScaleWarps);
    sm90::mbar_init(counter, 1);
  #pragma unroll 1
    for (int s = 0; s < a.slots; ++s) sm90::mbar_init(full + s * 8, 1);
    if (a.split > 1) {
      // Outputs of this rank, from every rank.
      const int own = (outputs + a.split - 1 - rank) >> a.split_log2;
      sm90::mbar_expect_tx(counter, (own << a.split_log2) * 4);
      if (kBytes) {
        sm90::mbar_expect_tx(scales_full, (kDigitsWarps << a.split_log2) * 4);
      }
    }
    sm90::mbar_init_fence();
  }
  if (refills && elect_lane()) {
  #pragma unroll 1
    for (int s = 0; s < a.slots; ++s) sm90::mbar_init(again + s * 8, 1);
    sm90::mbar_init_fence();
  }
  __syncthreads();  // the barriers are ready
  auto fetch = [&] {
    const uint8_t* row = row0;
    uint32_t slot = shared, bar = full;
  #pragma unroll 1
    for (int t = min(a.slots, tiles); t > 0; --t) {
      sm90::mbar_expect_tx(bar, cta_n * 512);
      bulk_copy(slot, row, cta_n * 512, bar);
      row += row_bytes;
      slot += a.slot_bytes;
      bar += 8;
    }
  };
  if (!kBytes && warp == 0 && elect_lane()) fetch();
  if (!kBytes && warp > 0 && warp <= kScaleWarps && elect_lane()) {
    const int mine = (cta_n - warp + kScaleWarps) / kScaleWarps;
    sm90::mbar_expect_tx(scales_full, mine * tiles * 32);
  #pragma unroll 1
    for (int d = warp - 1; d < cta_n; d += kScaleWarps) {
      const int block = min((cta_kt0 + d) >> a.block_shift, a.last_block);
      bulk_copy(shared + a.scale_at + d * a.scale_bytes,
                static_cast<const half*>(a.scale) +
                    uint32_t(block) * uint32_t(a.N_pad) + tile0 * 16,
                tiles * 32, scales_full);
    }
  }
  float* const row_scales = reinterpret_cast<float*>(smem + a.scale_at);
  if (kBytes) {
    // By the last warps: the first one has something else to do.
  #pragma unroll 1
    for (int i = kThreads - 1 - threadIdx.x; i < tiles * 16; i += kThreads) {
      row_scales[i] = load_as_float(a.scale, a.scale_dtype, tile0 * 16 + i);
    }
  }
  float* const biases = reinterpret_cast<float*>(smem + a.bias_at);
  if (a.bias) {
  #pragma unroll 1
    for (int i = threadIdx.x; i < tiles * 16; i += kThreads) {
      const int row = tile0 * 16 + i;
      biases[i] =
          row < a.N ? to_float(static_cast<const T*>(a.bias)[row]) : 0.0f;
    }
  }

  // Where everything is, from x on.
  constexpr bool kOdd = kHeld & 1;
  const int k = kt0 * 128 + eight_position(lane);
  int k_left = min(a.K, (kt0 + n) * 128) - k;
  const T* from = static_cast<const T*>(a.x) + k;
  // The odd k tile, relative to these.
  int odd_k = kRounds * 256 + four_position(lane) - eight_position(lane);
  const int pitch = kHeld ? column_pitch(kHeld) : a.pitch;
  uint32_t columns = shared + a.columns_at + warp * a.warp_bytes + lane * 8;
  uint32_t column = shared + a.columns_at + warp * a.warp_bytes +
                    (lane & (kColumns - 1)) * pitch + (lane >> 3) * 16;
  // A lane has two digits of a token, its neighbour the others, at rows lane /
  // 4 and 8 further on.
  const int token = kTokens > 1 ? (lane & 3) >> 1 : 0;
  int reads = lane & (kTokens > 1 ? 1 : 3);  // the others' sums, or zero
  uint32_t to = shared + a.sums_at + part * 4 +
                ((first * 16 + (lane >> 2)) * kTokens + token) * kSumPitch;
  // Where a warp has a k tile less, its last stands in for it: x is zero.
  const int last = kHeld > 1 ? n - 1 : 0;
  const uint32_t own = (kt0 - cta_kt0) * 512;  // bytes of a slot
  uint32_t words = shared + first * a.slot_bytes + own + lane * 16;
  uint32_t words_last = words + last * 512;
  uint32_t scale = shared + a.scale_at + (kt0 - cta_kt0) * a.scale_bytes +
                   first * 32 + (lane >> 2) * 2;
  uint32_t scale_last = scale + last * a.scale_bytes;
  uint32_t sums = shared + a.sums_at + threadIdx.x * kSumPitch;
  const int row = tile0 * 16 + threadIdx.x / kTokens;
  T* y = static_cast<T*>(a.y) + row;
  if (kTokens > 1 && threadIdx.x & 1) y += a.ldy;
  int y_left = a.N - row;
  pin(k_left);
  pin(from);
  if (kOdd) pin(odd_k);
  pin(columns);
  pin(column);
  pin(reads);
  pin(to);
  pin(words);
  pin(words_last);
  pin(scale);
  pin(scale_last);
  if (kHeld < 3) {  // else there are no registers for these
    pin(sums);
    pin(y);
    pin(y_left);
  }

  // This prologue is short: fetched at once, the weights would be ahead of the
  // x of the kernel that runs beside it.
  if (kBytes && warp == 0 && elect_lane()) fetch();
  if (a.split > 1) sm90::cluster_arrive_relaxed();
  pdl_wait();
  if (a.split > 1) sm90::cluster_wait();  // the others' counters are ready

  // x is loaded once: even a load that hits L1 would wait behind the weights of
  // the next kernel, which begins now.
  Eight x[kTokens][kRounds ? kRounds : 1];
  Four rest[kTokens];
  DigitUnit unit_of[kTokens] = {};
  uint32_t largest = 0;  // kBytes: of the whole token
  #pragma unroll
  for (int m = 0; m < kTokens; ++m) {
  #pragma unroll
    for (int j = 0; j < kRounds; ++j) {
      x[m][j].load(from + (m ? a.ldx : 0), j * 256, k_left > j * 256);
    }
    if (kOdd) rest[m].load(from + (m ? a.ldx : 0) + odd_k, k_left > odd_k);
  }
  #pragma unroll
  for (int m = 0; m < kTokens; ++m) {
    uint32_t top = 0;
  #pragma unroll
    for (int j = 0; j < kRounds; ++j) top = x[m][j].largest(top);
    if (kOdd) top = rest[m].largest(top);
    top = __reduce_max_sync(~0u, larger_half(top));
    if constexpr (kBytes) {
      largest = top;
    } else {
      unit_of[m] = digit_unit<T>(top);
    }
  }
  float byte_factor = 0.0f;
  int byte_sum = 0;  // of the lane's
  if constexpr (kBytes) {
    largest = share_largest(largest, shared + a.most_at, warp, kDigitsWarps,
                            rank, a.split, scales_full, true);
    byte_factor = token_factor(to_float(reinterpret_cast<const T&>(largest)));
  }
  #pragma unroll
  for (int m = 0; m < kTokens; ++m) {
  #pragma unroll
    for (int j = 0; j < kRounds; ++j) {
      // With kHeld, a k tile too many is zero.
      if (!kHeld && j * 2 + (lane >> 4) >= n) continue;
      uint32_t out[4][2];
  #pragma unroll
      for (int t = 0; t < 2; ++t) {
        float values[4];
        x[m][j].template values<T>(t, values);
        if constexpr (kBytes) {
          out[0][t] = quantize_four(values, byte_factor);
          byte_sum = __dp4a(int(out[0][t]), 0x01010101, byte_sum);
        } else {
          uint32_t digits[4];
          magic_digits_of(values, unit_of[m].up * 0.5f, digits);
  #pragma unroll
          for (int d = 0; d < 4; ++d) out[d][t] = digits[d];
        }
      }
  #pragma unroll
      for (int d = 0; d < kColumns / kTokens; ++d) {
        store_shared_8(columns + (m * 4 + d) * pitch + j * 256, out[d]);
      }
    }
    if constexpr (kOdd) {
      float values[4];
      uint32_t digits[4];
      rest[m].template values<T>(values);
      if constexpr (kBytes) {
        digits[0] = quantize_four(values, byte_factor);
        byte_sum = __dp4a(int(digits[0]), 0x01010101, byte_sum);
      } else {
        magic_digits_of(values, unit_of[m].up * 0.5f, digits);
      }
  #pragma unroll
      for (int d = 0; d < kColumns / kTokens; ++d) {
        store_shared_4(columns - lane * 4 + (m * 4 + d) * pitch + kRounds * 256,
                       digits[d]);
      }
    }
  }
  __syncwarp();

  const float even = (token ? unit_of[kTokens - 1].factor : unit_of[0].factor) *
                     (lane & 1 ? 1.0f / 16384.0f / 16.0f : 2.0f / 16.0f);
  const float odd = even * 0.25f;

  // Adds a product of 16 x 128, whose words are w, under its scales.
  auto unit = [&](const uint32_t (&b)[2][4], int excess, const uint4& w,
                  const uint32_t (&raw)[2], Sum(&acc)[2]) {
    int d[4] = {};
    uint32_t codes[4];
    decode_high(w.x, codes);
    mma_s8(d, codes, b[0][0], b[0][1]);
    decode_high(w.y, codes);
    mma_s8(d, codes, b[0][2], b[0][3]);
    decode_high(w.z, codes);
    mma_s8(d, codes, b[1][0], b[1][1]);
    decode_high(w.w, codes);
    mma_s8(d, codes, b[1][2], b[1][3]);
  #pragma unroll
    for (int h = 0; h < 2; ++h) {
      if constexpr (kBytes) {
        acc[h] += d[2 * h];
        continue;
      }
      acc[h] =
          fmaf(__half2float(__ushort_as_half(uint16_t(raw[h]))),
               float(d[2 * h] * 256 + d[2 * h + 1] - (h ? 4 * excess : excess)),
               acc[h]);
    }
  };

  uint32_t held[kHeld ? kHeld : 1][2][4];
  int excess[kHeld ? kHeld : 1] = {};
  #pragma unroll
  for (int h = 0; h < kHeld; ++h) load_columns(column, h, held[h]);
  #pragma unroll
  for (int h = 0; h < (kBytes ? 0 : kHeld); ++h) excess[h] = excess_of(held[h]);
  // Of all k tiles of the warp; comes off once a row tile.
  const int byte_excess = kBytes ? __reduce_add_sync(~0u, byte_sum) * 16 : 0;
  // Else in shared memory, [k tile][lane % 4], behind the columns.
  const uint32_t excesses = column +
                            (kColumns - (lane & (kColumns - 1))) * pitch -
                            (lane >> 3) * 16 + (lane & 3) * 4;
  if constexpr (kHeld == 0 && !kBytes) {
  #pragma unroll 2
    for (int d = 0; d < n; ++d) {
      uint32_t b[2][4];
      load_columns(column, d, b);
      const uint32_t v = excess_of(b);
      if (lane < 4) store_shared_4(excesses + d * 16, v);
    }
    __syncwarp();
  }

  auto words_of = [&](int d) {  // of one of kHeld k tiles
    return load_shared_16(d < kHeld - 1 ? words + d * 512 : words_last);
  };
  auto move = [&](int bytes) {
    words += bytes;
    words_last += bytes;
  };
  // A row tile. Where registers are left for them, the next one's words are on
  // their way meanwhile; ahead() moves to them.
  constexpr bool kAhead = kHeld == 1 || kHeld == 2;
  uint4 next[kAhead ? kHeld : 1];
  auto row_tile = [&](bool fetched, auto ahead) {
    Sum acc[2] = {};
    if constexpr (kHeld > 0) {
      uint32_t raw[kHeld][2];
      uint4 w[kHeld];
      auto scales_of = [&](int d) {
        raw[d][0] = raw[d][1] = 0;
        if (kBytes) return;
        const uint32_t at =
            d < kHeld - 1 ? scale + d * a.scale_bytes : scale_last;
        raw[d][0] = load_shared_u16(at);
        raw[d][1] = load_shared_u16(at + 16);
      };
      if constexpr (kAhead) {
  #pragma unroll
        for (int d = 0; d < kHeld; ++d) {
          scales_of(d);
          w[d] = fetched ? next[d] : words_of(d);
        }
        ahead();
      }
  #pragma unroll
      for (int d = 0; d < kHeld; ++d) {
        if constexpr (!kAhead) {
          w[d] = words_of(d);
          scales_of(d);
        }
        unit(held[d], excess[d], w[d], raw[d], acc);
      }
      if constexpr (!kAhead) ahead();
    } else {
  #pragma unroll 1
      for (int d = 0; d < n; ++d) {
        uint32_t b[2][4];
        load_columns(column, d, b);
        uint32_t raw[2] = {}, v = 0;
        if constexpr (!kBytes) {
          const uint32_t at = scale + d * a.scale_bytes;
          raw[0] = load_shared_u16(at);
          raw[1] = load_shared_u16(at + 16);
          v = load_shared_u32(excesses + d * 16);
        }
        unit(b, v, load_shared_16(words + d * 512), raw, acc);
      }
      ahead();
    }
  #pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t sum;
      if constexpr (kBytes) {
        sum = h ? (acc[1] - 4 * byte_excess) >> 6 : (acc[0] - byte_excess) >> 4;
      } else {
        float v = acc[h] * (h ? odd : even);
        v += __shfl_down_sync(~0u, v, 1);
        sum = __float_as_uint(v);
      }
      if (!reads) store_shared_4(to + h * 8 * kTokens * kSumPitch, sum);
    }
    to += (16 * kTokens * kSumPitch) << step_log2;
    scale += 32 << step_log2;
    scale_last += 32 << step_log2;
  };
  if (!kBytes) ring_wait<0>(scales_full, 0);
  if (!refills) {
    uint32_t bar = full + first * 8;
  #pragma unroll 1
    for (int left = tiles - first; left > 0; left -= step) {
      ring_wait<0>(bar, 0);
      bar += 8 << step_log2;
    }
    if constexpr (kAhead) {
  #pragma unroll
      for (int d = 0; d < kHeld; ++d) next[d] = words_of(d);
    }
  #pragma unroll 1
    for (int left = tiles - first; left > 0; left -= step) {
      row_tile(true, [&] {
        // The last row tile's words are fetched twice.
        move(left > step ? a.slot_bytes << step_log2 : 0);
        if constexpr (kAhead) {
  #pragma unroll
          for (int d = 0; d < kHeld; ++d) next[d] = words_of(d);
        }
      });
    }
  } else {
    int slot = first, round = 0;
  #pragma unroll 1
    for (int t = first; t < tiles; t += step) {
      ring_wait<0>((round ? again : full) + slot * 8,
                   round ? (round - 1) & 1 : 0);
      row_tile(false, [] {});
      if (t + a.slots < tiles) {
        __syncwarp();  // the words have been read
        if (elect_lane()) {
          sm90::mbar_expect_tx(again + slot * 8, n * 512);
          bulk_copy(words - lane * 16, row0 + (t + a.slots) * row_bytes + own,
                    n * 512, again + slot * 8);
        }
      }
      slot += step;
      int by = step;
      if (slot >= a.slots) {
        slot -= a.slots;
        by -= a.slots;
        ++round;
      }
      move(by * a.slot_bytes);
    }
  }
  __syncthreads();

  const float token_unit =
      kBytes ? token_scale(to_float(reinterpret_cast<const T&>(largest)))
             : 1.0f;
  auto store = [&](T* to, int i, Sum sum) {
    float v = float(sum);
    if constexpr (kBytes) {
      v = __fmul_rn(__fmul_rn(v, row_scales[i]), token_unit);
    }
    if (a.bias) v += biases[i / kTokens];
    *to = from_float<T>(v);
  };
  #pragma unroll 1
  for (int i = threadIdx.x; i < outputs; i += kThreads) {
    Sum v = 0;
  #pragma unroll
    for (int p = 0; p < kDigitsWarps; p += 4) {
      if (p >= parts) break;
      const uint4 w = load_shared_16(sums + p * 4);
      v += reinterpret_cast<const Sum&>(w.x);
      if (parts > 1) v += reinterpret_cast<const Sum&>(w.y);
      if (parts > 2) {
        v += reinterpret_cast<const Sum&>(w.z) +
             reinterpret_cast<const Sum&>(w.w);
      }
    }
    if (a.split > 1) {  // output i belongs to CTA i % split
      const int owner = i & (a.split - 1);
      const uint32_t to_owner = shared + a.received_at +
                                (rank * a.rank_sums + (i >> a.split_log2)) * 4;
      sm90::st_async(sm90::map_to_rank(to_owner, owner),
                     sm90::map_to_rank(counter, owner),
                     reinterpret_cast<const float&>(v));
    } else if (y_left > 0) {
      store(y, i, v);
    }
    sums += kThreads * kSumPitch;
    y += kThreads / kTokens;
    y_left -= kThreads / kTokens;
  }
  if (a.split > 1) {
    sm90::mbar_wait_cluster(counter, 0);
    const Sum* received = reinterpret_cast<const Sum*>(smem + a.received_at);
  #pragma unroll 1
    for (int j = threadIdx.x; (j << a.split_log2) + rank < outputs;
         j += kThreads) {
      const int i = (j << a.split_log2) + rank;
      const int at = tile0 * 16 + i / kTokens;
      Sum v = 0;
  #pragma unroll 1
      for (int r = 0; r < a.split; ++r) v += received[r * a.rank_sums + j];
      if (at < a.N) {
        store(static_cast<T*>(a.y) + (kTokens > 1 ? (i & 1) * a.ldy : 0) + at,
              i, v);
      }
    }
  }
#endif
}

}  // namespace vllm::ternary
