// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// W2A8 for up to sixteen tokens with short chains of latencies. The warps of a
// CTA share the work on its part of x evenly: each has one token, of which they
// find the largest value (in all of K, so that the CTAs of a cluster tell each
// other) and then write bytes by the arithmetic of w2a8_quantize.cu. Or the
// bytes are there already. All weights of a CTA are in shared memory, where a
// warp multiplies one or two k tiles of every so many row tiles.
#pragma once

#include "mma_s8_direct.cuh"

namespace vllm::ternary {

constexpr int kTokenWarps = 16;
constexpr int kTokenRounds =
    4;  // of 512 values of a token that a warp may have

struct TokenArgs {
  const int32_t* weight;
  const void*
      scale;  // float16 of whole k tiles, or of scale_dtype, one per row
  DType scale_dtype;
  const void* x;
  int64_t ldx;
  const int8_t* xq;  // quantized before, as in W2A8Args
  const float* xs;
  const void* bias;
  void* y;
  int64_t ldy;
  int M, N, K, N_pad;
  int all_k_tiles, block_shift, last_block;  // scale block = tile >> shift
  int split, split_log2;                     // CTAs along K, one cluster
  int k_tiles, k_rest;     // k tiles per CTA; the first `rest` have one more
  int groups;              // CTAs along N that have rows
  int tiles, tiles_rest;   // row tiles of 16 per CTA, likewise
  int parts_log2;          // warps along K, four at least; others along rows
  int tokens_log2;         // of M, rounded up: so many warps have a chunk of K
  int sum_rows, own_rows;  // rows of a CTA at most; and whose sums it receives
  // Bytes, from the start of shared memory, where the weights are: [row
  // tile][k tile]. scales [k tile][row tile][16], columns [token][pitch], sums
  // [two tokens or one][row][part], largest values [token][CTA of the
  // cluster][warp].
  int row_bytes, scales, scale_pitch, columns, pitch, rows, sums, factors, most;
  int barriers;  // of largest values, received sums, scales, then weights
  int received;
  int device;
  cudaStream_t stream;
};

// Where the sums of a k tile start: codes t + 1 add the sum of each column,
// rows 8..15 at 4 times the code.
__device__ __forceinline__ void start_of(const uint32_t (&b)[2][4],
                                         int (&start)[4]) {
  int sums[2];
  sum_columns(b, sums);
  start[0] = -sums[0];
  start[1] = -sums[1];
  start[2] = 4 * start[0];
  start[3] = 4 * start[1];
}

// d = start + the product of a lane's words of a tile of 16 x 128 codes and
// kSets times eight columns.
template <int kSets>
__device__ __forceinline__ void multiply_words(int (&d)[kSets][4],
                                               const uint4& w,
                                               const uint32_t (&b)[kSets][2][4],
                                               const int (&start)[kSets][4]) {
  uint32_t codes[4];
  decode_s8(w.x, codes);
#pragma unroll
  for (int s = 0; s < kSets; ++s) {
    mma_s8(d[s], codes, b[s][0][0], b[s][0][1], start[s]);
  }
  decode_s8(w.y, codes);
#pragma unroll
  for (int s = 0; s < kSets; ++s) {
    mma_s8(d[s], codes, b[s][0][2], b[s][0][3]);
  }
  decode_s8(w.z, codes);
#pragma unroll
  for (int s = 0; s < kSets; ++s) {
    mma_s8(d[s], codes, b[s][1][0], b[s][1][1]);
  }
  decode_s8(w.w, codes);
#pragma unroll
  for (int s = 0; s < kSets; ++s) {
    mma_s8(d[s], codes, b[s][1][2], b[s][1][3]);
  }
}

// kInside: quantizes. kRow: one scale of any type for a whole row, else float16
// ones of whole k tiles. kTiles: most k tiles of a warp. kRounds: of 512
// values, what a warp quantizes of its token at most.
template <typename T, bool kInside, bool kRow, int kTokens, int kTiles,
          int kRounds>
__global__ void __launch_bounds__(kTokenWarps * 32, kInside ? 2 : 1)
    direct_tokens_kernel(const __grid_constant__ TokenArgs a) {
#if __CUDA_ARCH__ >= 900
  using Sum = std::conditional_t<kRow, int, float>;
  constexpr int kWarps = kTokenWarps;
  constexpr int kSets = kTokens / 8, kPairs = kTokens / 2;
  extern __shared__ __align__(128) uint8_t smem[];
  const uint32_t shared = smem_address(smem);
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);  // uniform
  const int lane = threadIdx.x & 31;
  const int rank = blockIdx.x, group = blockIdx.y;
  // Sixteen tokens are two CTAs' of eight each where they are quantized.
  const int first_token = kTokens == 8 ? blockIdx.z * 8 : 0;
  const int count = min(kTokens, a.M - first_token);

  pdl_launch_dependents();
  if (group >= a.groups) {
    pdl_wait();
    return;
  }
  const int tile0 = group * a.tiles + min(group, a.tiles_rest);
  const int tiles = a.tiles + (group < a.tiles_rest), rows = tiles * 16;
  const int kt0 = rank * a.k_tiles + min(rank, a.k_rest);
  const int k_tiles = a.k_tiles + (rank < a.k_rest);
  const int parts = 1 << a.parts_log2, step = kWarps >> a.parts_log2;
  // The token of this warp, and which chunks of it: slot, slot + slots, ...
  const int token = warp & ((1 << a.tokens_log2) - 1);
  const int slot = warp >> a.tokens_log2, slots = kWarps >> a.tokens_log2;
  const uint32_t arrived = shared + a.barriers, counter = arrived + 8;
  const uint32_t scales_there = arrived + 16;
  uint32_t weights_there = arrived + 24;

  // What does not depend on x, each by one lane of another warp.
  if (warp == 0 && elect_lane()) {
    uint32_t to = shared, at = weights_there;
  #pragma unroll 1
    for (int left = tiles; left > 0; left -= step, at += 8) {
      sm90::mbar_init(at, 1);
    }
    sm90::mbar_init_fence();
    const uint8_t* from = reinterpret_cast<const uint8_t*>(a.weight) +
                          (int64_t(tile0) * a.all_k_tiles + kt0) * 512;
    at = weights_there;
  #pragma unroll 1
    for (int left = tiles; left > 0; left -= step, at += 8) {
      const int count = min(left, step);
      sm90::mbar_expect_tx(at, count * k_tiles * 512);
  #pragma unroll 1
      for (int i = 0; i < count; ++i) {
        bulk_copy(to, from, k_tiles * 512, at);
        to += a.row_bytes;
        from += a.all_k_tiles * 512;
      }
    }
  }
  if (!kRow && warp == 1 && elect_lane()) {
    sm90::mbar_init(scales_there, 1);
    sm90::mbar_init_fence();
    sm90::mbar_expect_tx(scales_there, k_tiles * tiles * 32);
    const half* from = static_cast<const half*>(a.scale) + tile0 * 16;
  #pragma unroll 1
    for (int d = 0; d < k_tiles; ++d) {
      const int block = min((kt0 + d) >> a.block_shift, a.last_block);
      bulk_copy(shared + a.scales + d * a.scale_pitch,
                from + uint32_t(block) * uint32_t(a.N_pad), tiles * 32,
                scales_there);
    }
  }
  if (a.split > 1 && warp == 2 && elect_lane()) {
    sm90::mbar_init(counter, 1);
    if (kInside) sm90::mbar_init(arrived, 1);
    sm90::mbar_init_fence();
    // Of each row tile that this rank has, sums of two tokens from the others.
    const int own = (tiles + a.split - 1 - rank) >> a.split_log2;
    sm90::mbar_expect_tx(counter,
                         own * ((count + 1) / 2) * (a.split - 1) * 128);
    if (kInside) {
      sm90::mbar_expect_tx(arrived, (count * slots << a.split_log2) * 4);
    }
  }
  float2* const row_table = reinterpret_cast<float2*>(smem + a.rows);
  if (kRow || a.bias) {
    // The last warps, which have nothing else to do.
  #pragma unroll 1
    for (int i = kWarps * 32 - 1 - threadIdx.x; i < rows; i += kWarps * 32) {
      const int n = tile0 * 16 + i;
      float2 row = {};
      if (kRow) row.x = load_as_float(a.scale, a.scale_dtype, n);
      if (a.bias && n < a.N) row.y = to_float(static_cast<const T*>(a.bias)[n]);
      row_table[i] = row;
    }
  }
  if (a.split > 1) sm90::cluster_arrive_relaxed();

  // Where things are, before the wait: instructions behind it count. A lane has
  // sixteen values of a chunk: k ... k + 7, k + 16 ... k + 23.
  const int k = slot * 512 + (lane >> 1) * 32 + (lane & 1) * 8;
  int to_store = token < count ? k_tiles * 128 - k : 0;
  int to_load = min(to_store, a.K - kt0 * 128 - k);
  int k_step = slots * 512;
  uint32_t to_column =
      shared + a.columns + token * a.pitch + slot * 512 + lane * 16;
  const int entries = slots << a.split_log2;  // largest values of a token
  uint32_t most = shared + a.most + token * entries * 4;
  // The warp's part of K, its first row tile and how many it has.
  const int part = warp & (parts - 1), first = warp >> a.parts_log2;
  const int each = k_tiles >> a.parts_log2, rest = k_tiles & (parts - 1);
  const int tile = part * each + min(part, rest);
  int last = each + (part < rest) - 1;  // of its k tiles
  int mine = (tiles - first + step - 1) >> (4 - a.parts_log2);
  uint32_t words = shared + first * a.row_bytes + tile * 512 + lane * 16;
  uint32_t scale =
      shared + a.scales + tile * a.scale_pitch + first * 32 + (lane >> 2) * 2;
  // ldmatrix: columns past the last token repeat it and are never stored.
  uint32_t column[kSets];
  #pragma unroll
  for (int s = 0; s < kSets; ++s) {
    column[s] = shared + a.columns +
                min((lane & 7) + s * 8, count - 1) * a.pitch + tile * 128 +
                (lane >> 3) * 16;
    pin(column[s]);
  }
  // A lane has two tokens of a set at rows lane / 4 and 8 further on, which
  // count 4 times. Sums of two k tiles fit in 16 bits, so that those of two
  // tokens share a word. Parts are permuted, which spreads rows and, among
  // integers, tokens over the banks.
  const int swizzle_log2 = a.parts_log2 - 2;
  auto swizzle = [&](int row) {
    return ((row & 7) >> (3 - swizzle_log2)) << 2;
  };
  const int token_words = a.sum_rows << a.parts_log2;
  uint32_t to = shared + a.sums +
                ((lane & 3) * (kRow ? 1 : 2) * token_words +
                 ((first * 16 + (lane >> 2)) << a.parts_log2) +
                 (part ^ swizzle(lane >> 2) ^ (kRow ? lane & 3 : 0))) *
                    4;
  if (kInside) pin(to_load), pin(most);
  pin(to_store), pin(k_step), pin(to_column), pin(last), pin(mine);
  pin(words), pin(scale), pin(to), pin(weights_there);
  const T* from = static_cast<const T*>(a.x) + (first_token + token) * a.ldx +
                  kt0 * 128 + k;
  if (a.split > 1) sm90::cluster_wait();  // the others' barriers are ready
  pdl_wait();
  float* const factors = reinterpret_cast<float*>(smem + a.factors);
  uint32_t largest = 0;  // of the token, as a 16-bit integer
  if constexpr (kInside) {
    uint4 x[kRounds][2] = {};
  #pragma unroll
    for (int j = 0; j < kRounds; ++j) {
      if (j * k_step < to_load) {
        x[j][0] = *reinterpret_cast<const uint4*>(from + j * k_step);
        x[j][1] = *reinterpret_cast<const uint4*>(from + j * k_step + 16);
      }
    }
    uint32_t top = 0;
  #pragma unroll
    for (int j = 0; j < kRounds; ++j) {
  #pragma unroll
      for (int h = 0; h < 2; ++h) top = raise_largest(top, x[j][h]);
    }
    largest = __reduce_max_sync(~0u, larger_half(top));
    largest = share_largest(largest, most, slot, slots, rank, a.split, arrived,
                            token < count);
    const float factor =
        token_factor(to_float(reinterpret_cast<const T&>(largest)));
  #pragma unroll
    for (int j = 0; j < kRounds; ++j) {
      if (j * k_step >= to_store) continue;
      uint32_t out[4];
      quantize_sixteen<T>(x[j][0], x[j][1], factor, out);
      store_shared_16(to_column + j * k_step, out);
    }
  } else {
    const int8_t* bytes = a.xq +
                          int64_t(first_token + token) * a.all_k_tiles * 128 +
                          kt0 * 128 + slot * 512 + lane * 16;
  #pragma unroll 1
    for (int left = to_store - (lane & 1) * 8; left > 0; left -= k_step) {
      cp_async_16(to_column, bytes);
      to_column += k_step;
      bytes += k_step;
    }
    cp_async_commit();
    if (threadIdx.x < count) {
      factors[threadIdx.x] = a.xs[first_token + threadIdx.x];
    }
    cp_async_wait<0>();
  }
  __syncthreads();
  uint32_t held[kTiles][kSets][2][4];
  constexpr int kStarts = kRow ? 1 : kTiles;  // of all k tiles together
  int start[kStarts][kSets][4] = {};
  #pragma unroll
  for (int h = 0; h < kTiles; ++h) {
  #pragma unroll
    for (int s = 0; s < kSets; ++s) {
      load_columns(column[s], h > 0 ? last : 0, held[h][s]);
    }
  }
  #pragma unroll
  for (int h = 0; h < kTiles; ++h) {
  #pragma unroll
    for (int s = 0; s < kSets; ++s) {
      // Where a warp has a k tile less, its last stands in for it, x being 0.
  #pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (h > 0 && last == 0) held[h][s][i / 4][i % 4] = 0;
      }
      int of_tile[4];
      start_of(held[h][s], of_tile);
  #pragma unroll
      for (int c = 0; c < 4; ++c) start[kRow ? 0 : h][s][c] += of_tile[c];
    }
  }
  auto flush = [&](const Sum(&acc)[kSets][4]) {
  #pragma unroll
    for (int s = 0; s < kSets; ++s) {
  #pragma unroll
      for (int h = 0; h < 2; ++h) {
        const Sum p = acc[s][2 * h], q = acc[s][2 * h + 1];
        const uint32_t at = to + ((h * 8) << a.parts_log2) * 4;
        if constexpr (kRow) {
          const int low = h ? p >> 2 : p, high = h ? q >> 2 : q;
          store_shared_4(at + s * 4 * token_words * 4,
                         __byte_perm(low, high, 0x5410));
        } else {
          const uint32_t of = at + s * 8 * token_words * 4;
          store_shared_4(of, __float_as_uint(h ? p * 0.25f : p));
          store_shared_4(of + token_words * 4,
                         __float_as_uint(h ? q * 0.25f : q));
        }
      }
    }
    to += (16 * 4) << 4;  // 16 rows of `step` times `parts` words
  };
  // Row tiles at a time: two chains of products.
  constexpr int kTogether = kTiles * kSets == 1 ? 2 : 1;
  const uint32_t words_step = a.row_bytes << (4 - a.parts_log2);
  const uint32_t scale_step = 32 << (4 - a.parts_log2);
  if constexpr (!kRow) sm90::mbar_wait(scales_there, 0);
  #pragma unroll 1
  for (int left = mine; left > 0; left -= kTogether) {
    const bool two = kTogether > 1 && left > 1;
    ring_wait<0>(weights_there, 0);
    if (two) ring_wait<0>(weights_there + 8, 0);
    Sum acc[kTogether][kSets][4] = {};
    // Where there is no second, the first once more.
    const uint32_t other = kTogether > 1 ? (two ? words_step : 0) : last * 512;
    if constexpr (kRow) {
      uint4 v = load_shared_16(words), u = v;
      constexpr bool kSecond = kTogether > 1 || kTiles > 1;
      if (kSecond && kSets == 1) u = load_shared_16(words + other);
      multiply_words<kSets>(acc[0], v, held[0], start[0]);
      if (kSecond && kSets > 1) u = load_shared_16(words + other);
      if constexpr (kTogether > 1) {
        multiply_words<kSets>(acc[1], u, held[0], start[0]);
      } else if constexpr (kTiles > 1 && kSets > 1) {
        multiply_words<kSets>(acc[0], u, held[1], acc[0]);
      } else if constexpr (kTiles > 1) {  // another chain
        int more[kSets][4];
        const int zero[kSets][4] = {};
        multiply_words<kSets>(more, u, held[1], zero);
  #pragma unroll
        for (int c = 0; c < 4; ++c) acc[0][0][c] += more[0][c];
      }
    } else {
  #pragma unroll
      for (int i = 0; i < kTogether * kTiles; ++i) {
        constexpr int kHalf = kTogether > 1 ? 2 : kTiles;
        const int h = kTogether > 1 ? 0 : i;
        const uint32_t of = i == 0           ? 0
                            : kTogether == 1 ? last * a.scale_pitch
                            : two            ? scale_step
                                             : 0;
        static_assert(kHalf <= 2);
        int d[kSets][4];
        multiply_words<kSets>(d, load_shared_16(words + (i ? other : 0)),
                              held[h], start[h]);
  #pragma unroll
        for (int c = 0; c < 4; ++c) {
          const uint32_t raw = load_shared_u16(scale + of + (c >> 1) * 16);
          const float f = __half2float(__ushort_as_half(uint16_t(raw)));
  #pragma unroll
          for (int s = 0; s < kSets; ++s) {
            float& sum = acc[kTogether > 1 ? i : 0][s][c];
            sum = fmaf(f, float(d[s][c]), sum);
          }
        }
      }
    }
    flush(acc[0]);
    if (two) flush(acc[kTogether - 1]);
    words += kTogether * words_step;
    scale += kTogether * scale_step;
    weights_there += kTogether * 8;
  }
  if (kInside && slot == 0 && lane == 0) {
    factors[token] = token_scale(to_float(reinterpret_cast<const T&>(largest)));
  }
  // A thread adds up two tokens of a row; lanes take successive rows.
  const int pair = warp & (kPairs - 1);
  constexpr int kRowStep = kWarps / kPairs * 32;
  int row0 = warp / kPairs * 32 + lane;
  uint32_t sums =
      shared + a.sums +
      (pair * (kRow ? 1 : 2) * token_words + (row0 << a.parts_log2)) * 4;
  uint32_t turn = swizzle(row0) * 4;
  pin(row0), pin(sums), pin(turn);
  __syncthreads();
  if (pair * 2 >= count) return;

  auto store = [&](int row, const Sum(&sum)[2]) {
    const int n = tile0 * 16 + row;
    if (n >= a.N) return;
    const float2 of_row = row_table[row];
    T* y = static_cast<T*>(a.y) + (first_token + pair * 2) * a.ldy + n;
  #pragma unroll
    for (int c = 0; c < 2; ++c) {
      float v = float(sum[c]);
      if constexpr (kRow) v = __fmul_rn(v, of_row.x);
      v = __fmul_rn(v, factors[pair * 2 + c]);
      if (a.bias) v += of_row.y;
      if (c == 0 || pair * 2 + 1 < count) y[c * a.ldy] = from_float<T>(v);
    }
  };
  // Row tile i belongs to CTA i % split; its sums from a rank lie here.
  auto received = [&](int of_rank, int row) {
    const int local = (row >> 4 >> a.split_log2) * 16 + (row & 15);
    return shared + a.received +
           ((of_rank * kPairs + pair) * a.own_rows + local) * 8;
  };
  #pragma unroll 1
  for (int row = row0; row < rows; row += kRowStep) {
    Sum sum[2] = {};
  #pragma unroll 1
    for (int p = 0; p < parts * 4; p += 16) {
      const uint4 v = load_shared_16(sums + (p ^ turn));
      const uint32_t low[4] = {v.x, v.y, v.z, v.w};
      if constexpr (kRow) {
  #pragma unroll
        for (int c = 0; c < 4; ++c) {
          sum[0] = __dp2a_lo(int(low[c]), 0x0001, sum[0]);
          sum[1] = __dp2a_lo(int(low[c]), 0x0100, sum[1]);
        }
      } else {
        const uint4 u = load_shared_16(sums + token_words * 4 + (p ^ turn));
        const uint32_t high[4] = {u.x, u.y, u.z, u.w};
  #pragma unroll
        for (int c = 0; c < 4; ++c) {
          sum[0] += __uint_as_float(low[c]);
          sum[1] += __uint_as_float(high[c]);
        }
      }
    }
    sums += (kRowStep * 4) << a.parts_log2;
    if (a.split == 1) {
      store(row, sum);
      continue;
    }
    const uint32_t to_owner = received(rank, row);
    const uint32_t v[2] = {reinterpret_cast<const uint32_t&>(sum[0]),
                           reinterpret_cast<const uint32_t&>(sum[1])};
    const int owner = (row >> 4) & (a.split - 1);
    if (owner == rank) {
      store_shared_8(to_owner, v);
    } else {
      const uint32_t remote = sm90::map_to_rank(to_owner, owner);
      const uint32_t bar = sm90::map_to_rank(counter, owner);
      sm90::st_async(remote, bar, __uint_as_float(v[0]));
      sm90::st_async(remote + 4, bar, __uint_as_float(v[1]));
    }
  }
  if (a.split > 1) {
    sm90::mbar_wait_cluster(counter, 0);
  #pragma unroll 1
    for (int row = row0; row < rows; row += kRowStep) {
      if (((row >> 4) & (a.split - 1)) != rank) continue;
      Sum sum[2] = {};
  #pragma unroll 1
      for (int r = 0; r < a.split; ++r) {
        const uint32_t at = received(r, row);
        const uint32_t v = load_shared_u32(at), u = load_shared_u32(at + 4);
        sum[0] += reinterpret_cast<const Sum&>(v);
        sum[1] += reinterpret_cast<const Sum&>(u);
      }
      store(row, sum);
    }
  }
#endif
}

}  // namespace vllm::ternary
