// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// What the int8 kernels with short chains of latencies share (sm_90 and later).
//
// A warp has a part of K to itself, for all rows of its CTA or every so many
// of them: its piece of x, which goes from registers to columns of bytes, its
// ring of weights, its sums. Warps meet once, to add these up; the CTAs of a
// cluster, which share K as well, by remote stores that a barrier counts.
#pragma once

#include "mma_s8.cuh"
#include "sm90_prefill_ptx.cuh"

namespace vllm::ternary {

struct DirectArgs {
  const int32_t* weight;
  const void* scale;  // float16 in the ring, or of scale_dtype, one per row
  DType scale_dtype;
  const void* x;
  int64_t ldx;
  const void* bias;
  void* y;
  int64_t ldy;
  int M, N, K, N_pad;
  int all_k_tiles, block_shift, last_block;  // scale block = tile >> shift
  int split, split_log2;                     // CTAs along K, one cluster
  int tiles, tiles_rest;      // row tiles of 16 per CTA; `rest` have one more
  int parts_log2, step_log2;  // warps along K, and along rows
  int k_tiles, k_rest;        // k tiles per warp, likewise
  int slots;                  // row tiles in a warp's ring
  int rows_most;              // most row tiles of a warp
  // Bytes. Of a warp's shared memory, with a slot of its ring, and where scales
  // [k tile][row tile][16], columns [column][pitch], starts of sums [k tile]
  // and barriers begin; then of what the CTA has.
  int warp_bytes, slot_bytes, scales, columns, pitch, starts, barriers;
  int rows, sums, tokens, counter, received;
  int part_sums;  // of a part: [row][token]
  int rank_sums;  // from one CTA of the cluster
  int device;
  cudaStream_t stream;
};

// Which part of the product a warp computes.
struct DirectWarp {
  int warp, lane, rank;
  int part, first;   // along K; its first row tile within the CTA
  int tile0, tiles;  // of the CTA
  int mine;          // row tiles: first, first + step, ...
  int kt0, n;        // k tiles
  uint32_t shared, base;

  __device__ __forceinline__ DirectWarp(const DirectArgs& a, uint32_t smem) {
    warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);  // uniform
    lane = threadIdx.x & 31;
    rank = blockIdx.x;
    const int group = blockIdx.y;
    part = warp & ((1 << a.parts_log2) - 1);
    first = warp >> a.parts_log2;
    tile0 = group * a.tiles + min(group, a.tiles_rest);
    tiles = a.tiles + (group < a.tiles_rest);
    mine = (tiles - first + (1 << a.step_log2) - 1) >> a.step_log2;
    const int place = (rank << a.parts_log2) + part;
    kt0 = place * a.k_tiles + min(place, a.k_rest);
    n = a.k_tiles + (place < a.k_rest);
    shared = smem;
    base = smem + warp * a.warp_bytes;
  }
};

// The scale (where kRow) and the bias of each row of the CTA into shared
// memory, while the kernel ahead still runs.
template <typename T, bool kRow>
__device__ __forceinline__ void fetch_rows(const DirectArgs& a,
                                           const DirectWarp& w, float2* rows) {
  if (!kRow && !a.bias) return;
  for (int i = threadIdx.x; i < w.tiles * 16; i += blockDim.x) {
    const int n = w.tile0 * 16 + i;
    float2 row = {};
    if (kRow) row.x = load_as_float(a.scale, a.scale_dtype, n);
    if (a.bias && n < a.N) row.y = to_float(static_cast<const T*>(a.bias)[n]);
    rows[i] = row;
  }
}

// A warp's ring: a slot holds a row tile's words of its k tiles. kScales: with
// float16 scales beside it, all of which are fetched at once.
template <bool kScales>
struct DirectRing {
  const DirectArgs& a;
  const DirectWarp& w;
  const uint8_t* from;  // what the next fill copies
  uint32_t slot, barrier, parity = 0;
  uint32_t scales;  // of the row tile in `slot`
  int until_wrap;

  __device__ __forceinline__ DirectRing(const DirectArgs& args,
                                        const DirectWarp& of)
      : a(args), w(of) {
    slot = w.base;
    barrier = w.base + a.barriers;
    scales = w.base + a.scales;
    until_wrap = a.slots;
    from = reinterpret_cast<const uint8_t*>(a.weight) +
           (int64_t(w.tile0 + w.first) * a.all_k_tiles + w.kt0) * 512;
  }

  // One lane begins the next copy.
  __device__ __forceinline__ void fill(uint32_t to, uint32_t at) {
    sm90::mbar_expect_tx(at, w.n * 512);
    bulk_copy(to, from, w.n * 512, at);
    from += int64_t(a.all_k_tiles * 512) << a.step_log2;
  }

  // One lane makes the slots' barriers; after a fence it fills them all.
  __device__ __forceinline__ void init() {
#pragma unroll 1
    for (int i = 0; i < a.slots; ++i) sm90::mbar_init(barrier + i * 8, 1);
  }

  __device__ __forceinline__ void fill_all() {
    uint32_t to = slot, at = barrier;
#pragma unroll 1
    for (int i = min(a.slots, w.mine); i > 0; --i) {
      fill(to, at);
      to += a.slot_bytes;
      at += 8;
    }
  }

  // All lanes: two k tiles and eight row tiles at a time.
  __device__ __forceinline__ void fetch_scales() {
    if constexpr (kScales) {
#pragma unroll 1
      for (int d = w.lane >> 4; d < w.n; d += 2) {
        const int block = min((w.kt0 + d) >> a.block_shift, a.last_block);
        const half* row = static_cast<const half*>(a.scale) +
                          uint32_t(block) * uint32_t(a.N_pad) +
                          (w.tile0 + w.first) * 16 + (w.lane & 1) * 8;
        const uint32_t to = scales + d * a.rows_most * 32 + (w.lane & 1) * 16;
#pragma unroll 1
        for (int r = (w.lane >> 1) & 7; r < w.mine; r += 8) {
          cp_async_16(to + r * 32, row + (r << a.step_log2) * 16);
        }
      }
      cp_async_commit();
    }
  }

  // Two row tiles can be taken together: `left` are, both before the ring ends.
  __device__ __forceinline__ bool has_two(int left) const {
    return left > 1 && until_wrap > 1;
  }

  __device__ __forceinline__ void wait(int count) const {
    ring_wait<0>(barrier, parity);
    if (count > 1) ring_wait<0>(barrier + 8, parity);
  }

  // Gives back `count` slots, of `left` row tiles that were left.
  __device__ __forceinline__ void advance(int count, int left) {
    if (left > a.slots) {
      __syncwarp();  // they have been read
      if (elect_lane()) {
        fill(slot, barrier);
        if (count > 1 && left > a.slots + 1) {
          fill(slot + a.slot_bytes, barrier + 8);
        }
      }
    }
    slot += count * a.slot_bytes;
    barrier += count * 8;
    scales += count * 32;
    until_wrap -= count;
    if (until_wrap == 0) {
      until_wrap = a.slots;
      slot = w.base;
      barrier = w.base + a.barriers;
      parity ^= 1;
    }
  }
};

// Eight values of x, k .. k + 3 and k + 16 .. k + 19, whose bytes are eight in
// a row. A lane's are at k0 = kt0 * 128 + this, and every 256 further on.
__device__ __forceinline__ int eight_position(int lane) {
  return (lane >> 2) * 32 + (lane & 3) * 4;
}

struct Eight {
  uint2 v[2];

  template <typename T>
  __device__ __forceinline__ void load(const T* row, int k, bool valid) {
    v[0] = v[1] = make_uint2(0, 0);
    if (!valid) return;
    v[0] = *reinterpret_cast<const uint2*>(row + k);
    v[1] = *reinterpret_cast<const uint2*>(row + k + 16);
  }

  // The larger of `top` and the magnitudes here, in each half of a word, as
  // 16-bit integers, among which infinity and NaN are the largest.
  __device__ __forceinline__ uint32_t largest(uint32_t top) const {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      top = __vmaxu2(top, v[c].x & 0x7fff7fffu);
      top = __vmaxu2(top, v[c].y & 0x7fff7fffu);
    }
    return top;
  }

  // The values of word t, in the order of its bytes.
  template <typename T>
  __device__ __forceinline__ void values(int t, float (&out)[4]) const {
    const float2 p = unpack_two<T>(t ? v[0].y : v[0].x);
    const float2 q = unpack_two<T>(t ? v[1].y : v[1].x);
    out[0] = p.x;
    out[1] = q.x;
    out[2] = p.y;
    out[3] = q.y;
  }
};

__device__ __forceinline__ void store_shared_8(uint32_t at,
                                               const uint32_t (&v)[2]) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(at), "r"(v[0]),
               "r"(v[1])
               : "memory");
}

__device__ __forceinline__ void store_shared_4(uint32_t at, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory");
}

// The columns of a k tile as B operands; `column` is the lane's address in
// them.
__device__ __forceinline__ void load_columns(uint32_t column, int kt,
                                             uint32_t (&b)[2][4]) {
  ldmatrix_x4(b[0], column + kt * 128);
  ldmatrix_x4(b[1], column + kt * 128 + 64);
}

// Where the sums of a k tile start: codes t + 1 add the sum of each column,
// rows 8..15 at 4 times the code. Made by the tensor cores.
__device__ __forceinline__ void start_of(const uint32_t (&b)[2][4],
                                         int (&start)[4]) {
  const uint32_t ones[4] = {0x01010101u, 0x01010101u, 0x01010101u, 0x01010101u};
  int d[4] = {}, e[4] = {};
  mma_s8(d, ones, b[0][0], b[0][1]);
  mma_s8(e, ones, b[0][2], b[0][3]);
  mma_s8(d, ones, b[1][0], b[1][1]);
  mma_s8(e, ones, b[1][2], b[1][3]);
  start[0] = -(d[0] + e[0]);
  start[1] = -(d[1] + e[1]);
  start[2] = 4 * start[0];
  start[3] = 4 * start[1];
}

// The same of a warp's n k tiles into shared memory, four lanes' each.
__device__ __forceinline__ void put_starts(uint32_t to, uint32_t column, int n,
                                           int lane) {
#pragma unroll 2
  for (int kt = 0; kt < n; ++kt) {
    uint32_t b[2][4];
    int s[4];
    load_columns(column, kt, b);
    start_of(b, s);
    if (lane < 4) {
      asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(
                       to + kt * 64 + lane * 16),
                   "r"(s[0]), "r"(s[1]), "r"(s[2]), "r"(s[3])
                   : "memory");
    }
  }
  __syncwarp();
}

// d = start + the product of a tile of 16 x 128 codes and its columns.
__device__ __forceinline__ void multiply_tile(int (&d)[4], uint32_t words,
                                              const uint32_t (&b)[2][4],
                                              const int (&start)[4]) {
  const uint4 w = load_shared_16(words);
  uint32_t codes[4];
  decode_s8(w.x, codes);
  mma_s8(d, codes, b[0][0], b[0][1], start);
  decode_s8(w.y, codes);
  mma_s8(d, codes, b[0][2], b[0][3]);
  decode_s8(w.z, codes);
  mma_s8(d, codes, b[1][0], b[1][1]);
  decode_s8(w.w, codes);
  mma_s8(d, codes, b[1][2], b[1][3]);
}

// All row tiles of a warp. kHeld: its k tiles, if their columns fit in
// registers, or 0. `unit` adds the product of a k tile to kSums sums, given its
// columns, where sums start, and the addresses of its words and scales; `flush`
// takes the sums of the next row tile.
template <int kHeld, typename Sum, int kSums, typename Ring, typename Unit,
          typename Flush>
__device__ __forceinline__ void multiply_rows(const DirectArgs& a,
                                              const DirectWarp& w, Ring& ring,
                                              uint32_t column, Unit unit,
                                              Flush flush) {
  const int scale_step = a.rows_most * 32;
  if constexpr (kHeld > 0) {
    uint32_t held[kHeld][2][4];
    int start[kHeld][4];
#pragma unroll
    for (int h = 0; h < kHeld; ++h) load_columns(column, h, held[h]);
#pragma unroll
    for (int h = 0; h < kHeld; ++h) start_of(held[h], start[h]);
    // Where a warp has a k tile less, its last stands in for it: x is zero.
    const int last = kHeld > 1 ? w.n - 1 : 0;
#pragma unroll 1
    for (int left = w.mine; left > 0; --left) {
      Sum acc[kSums] = {};
      ring.wait(1);
      unit(held[0], start[0], ring.slot, ring.scales, acc);
      if constexpr (kHeld > 1) {
        unit(held[1], start[1], ring.slot + last * 512,
             ring.scales + last * scale_step, acc);
      }
      flush(acc);
      ring.advance(1, left);
    }
  } else {
    put_starts(w.base + a.starts, column, w.n, w.lane);
#pragma unroll 1
    for (int left = w.mine; left > 0;) {
      Sum acc[2][kSums] = {};
      const bool two = ring.has_two(left);
      ring.wait(two ? 2 : 1);
      uint32_t words = ring.slot, scale = ring.scales;
      uint32_t start_at = w.base + a.starts + (w.lane & 3) * 16;
#pragma unroll 1
      for (int kt = 0; kt < w.n; ++kt) {
        uint32_t b[2][4];
        load_columns(column, kt, b);
        const uint4 v = load_shared_16(start_at);
        const int start[4] = {int(v.x), int(v.y), int(v.z), int(v.w)};
        unit(b, start, words, scale, acc[0]);
        if (two) unit(b, start, words + a.slot_bytes, scale + 32, acc[1]);
        words += 512;
        scale += scale_step;
        start_at += 64;
      }
      flush(acc[0]);
      if (two) flush(acc[1]);
      ring.advance(two ? 2 : 1, left);
      left -= two ? 2 : 1;
    }
  }
}

}  // namespace vllm::ternary
