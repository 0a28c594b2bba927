// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// What the int8 kernel for few tokens does before its loop: its columns of
// bytes in shared memory, in the order of int8_position(), and the table of
// offsets from which the sums of a block start, so that codes t + 1 give sums
// of t.
#pragma once

#include <type_traits>

#include "mma_cut.h"
#include "mma_ring.cuh"
#include "mma_s8.h"

namespace vllm::ternary {

// kRow: one scale of any type for a whole row. kTile: float16, one for a whole
// k tile. kGeneral: scales of any type, blocks of any multiple of 32.
enum class S8Scale { kRow, kTile, kGeneral };

// What the columns are made of. kBytes: tokens quantized already. kInside: x,
// quantized by every CTA. kDigits: x, four columns per token.
enum class S8Input { kBytes, kInside, kDigits };

struct S8Args : MmaCut {
  RingSource ring;  // kTile: with the scales
  // kBytes reads xq and its neighbours, the others x; as in W2A8Args, GemmArgs.
  const void* x;
  int64_t ldx;
  const int8_t* xq;
  const float* xs;
  const int32_t *xsum, *xsum_tiles, *part_ends;
  const void* scale;
  DType scale_dtype;
  const void* bias;
  void* y;
  int64_t ldy;
  int parts, M, N, K, N_pad, K_pad, num_blocks;
  uint32_t block_magic;  // kGeneral: ceil(2^31 / (block_size / 32))
  int device;
  cudaStream_t stream;
};

// Where the sums of entry e, column c start: rows 0..7 of a fragment at minus
// the sum of the column, rows 8..15, whose codes count 4 times, at 4 times
// that.
template <int kNT>
__device__ __forceinline__ void put_offset(int* offsets, int e, int c,
                                           int sum) {
  int* to = offsets + ((e * kNT + c / 8) * 4 + (c & 7) / 2) * 4 + (c & 1);
  to[0] = -sum;
  to[2] = -4 * sum;
}

// What staging keeps per token.
struct S8Token {
  float factor;   // what the integers are multiplied by, or NaN
  uint32_t most;  // the largest magnitude so far, as a 16-bit integer
  int sum;        // of the quantized row: here, or (kBytes) all of it
};

// W2A8: tiles [first, first + tiles) of quantized rows.
template <typename S>
__device__ __forceinline__ void stage_int8(uint32_t xs, int* offsets,
                                           S8Token* table, const S8Args& a,
                                           int part, int first_token,
                                           int tokens, int first, int tiles) {
  const int pitch = tiles * 128 + 16;
  const int64_t row = int64_t(part) * a.M + first_token;
  const int8_t* from = a.xq + row * a.K_pad + first * 128;
  const int pieces = tiles * 8;  // of 16 bytes
  int m = threadIdx.x / unsigned(pieces), p = threadIdx.x - m * pieces;
  const int m_step = S::kThreads / unsigned(pieces);
  const int p_step = S::kThreads - m_step * pieces;
  while (m < tokens) {
    cp_async_16(xs + m * pitch + p * 16, from + int64_t(m) * a.K_pad + p * 16);
    m += m_step;
    p += p_step;
    if (p >= pieces) {
      p -= pieces;
      ++m;
    }
  }
  cp_async_commit();
  if (int(threadIdx.x) < tokens) {
    table[threadIdx.x].factor = a.xs[row + threadIdx.x];
    table[threadIdx.x].sum = a.xsum[row + threadIdx.x];
  }
  if constexpr (S::kScale == S8Scale::kTile) {
    const int tile0 = part * (a.K_pad >> 7) + first;
    for (int i = threadIdx.x; i < tiles * tokens; i += S::kThreads) {
      const int t = i / unsigned(tokens), c = i - t * tokens;
      put_offset<S::kNT>(
          offsets, t, c,
          a.xsum_tiles[int64_t(tile0 + t) * a.M + first_token + c]);
    }
  }
  cp_async_wait<0>();
}

// The offsets of every 32 values, from the bytes in shared memory.
template <typename S>
__device__ __forceinline__ void sum_groups(uint32_t xs, int* offsets,
                                           int tokens, int tiles) {
  for (int i = threadIdx.x; i < tiles * 4 * tokens; i += S::kThreads) {
    const int e = i / unsigned(tokens), c = i - e * tokens;
    const uint32_t at = xs + c * (tiles * 128 + 16) + e * 32;
    int sum = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint4 v = load_shared_16(at + h * 16);
      sum = __dp4a(int(v.x), 0x01010101, sum);
      sum = __dp4a(int(v.y), 0x01010101, sum);
      sum = __dp4a(int(v.z), 0x01010101, sum);
      sum = __dp4a(int(v.w), 0x01010101, sum);
    }
    put_offset<S::kNT>(offsets, e, c, sum);
  }
}

// A unit is sixteen values of x that make sixteen successive bytes: k = 0..7
// and 16..23 of a group of 32 for even units, 8..15 and 24..31 for odd ones.
// Unit i of `tokens` rows of `units` units from tile `first`; zeros past the
// last.
struct Unit {
  uint4 v[2];

  template <typename T>
  __device__ __forceinline__ void load(const S8Args& a, int first_token,
                                       int first, int i, int units, int total) {
    v[0] = v[1] = make_uint4(0, 0, 0, 0);
    if (i >= total) return;
    const int m = unsigned(i) / unsigned(units), u = i - m * units;
    const int k = first * 128 + u / 2 * 32 + (u & 1) * 8;
    const T* row =
        static_cast<const T*>(a.x) + int64_t(first_token + m) * a.ldx;
    v[0] = load_eight(row, k, a.K);
    v[1] = load_eight(row, k + 16, a.K);
  }

  // Word c of the first eight values, and word c of the others.
  __device__ __forceinline__ uint32_t word(int c) const {
    const uint4& q = v[c >> 2];
    return (c & 3) == 0 ? q.x : (c & 3) == 1 ? q.y : (c & 3) == 2 ? q.z : q.w;
  }

  // The four values of word t of the bytes, in order.
  template <typename T>
  __device__ __forceinline__ void values(int t, float (&out)[4]) const {
    const float2 p = unpack_two<T>(word(t)), q = unpack_two<T>(word(4 + t));
    out[0] = p.x;
    out[1] = q.x;
    out[2] = p.y;
    out[3] = q.y;
  }

  // Raises *most to the largest magnitude of eight lanes, which share a row.
  __device__ __forceinline__ void largest(uint32_t* most, bool valid) const {
    uint32_t top = 0;
#pragma unroll
    for (int c = 0; c < 8; ++c) top = raise_largest(top, word(c));
    top = larger_half(top);
#pragma unroll
    for (int d = 1; d < 8; d *= 2) {
      top = max(top, __shfl_xor_sync(~0u, top, d));
    }
    if ((threadIdx.x & 7) == 0 && valid) atomicMax(most, top);
  }
};

// The sum of sixteen bytes in each of eight lanes, over these.
__device__ __forceinline__ int sum_of_tile(const uint32_t (&w)[4]) {
  int sum = 0;
#pragma unroll
  for (int t = 0; t < 4; ++t) sum = __dp4a(int(w[t]), 0x01010101, sum);
#pragma unroll
  for (int d = 1; d < 8; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
  return sum;
}

// Calls op(i, unit) for every unit of `tokens` rows of `tiles` k tiles, all
// threads in step; of the first kHeld of a thread, `held` is used if `reuse`.
constexpr int kHeld = 2;

template <typename S, typename Op>
__device__ __forceinline__ void for_units(Unit (&held)[kHeld], bool reuse,
                                          const S8Args& a, int first_token,
                                          int tokens, int first, int tiles,
                                          Op op) {
  using T = typename S::T;
  const int units = tiles * 8, total = units * tokens;
  if (!reuse) {
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      held[j].load<T>(a, first_token, first, threadIdx.x + j * S::kThreads,
                      units, total);
    }
  }
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    if (j * S::kThreads < total) op(threadIdx.x + j * S::kThreads, held[j]);
  }
#pragma unroll 1
  for (int i0 = kHeld * S::kThreads; i0 < total; i0 += S::kThreads) {
    Unit unit;
    unit.load<T>(a, first_token, first, i0 + threadIdx.x, units, total);
    op(i0 + threadIdx.x, unit);
  }
}

// The unit of the digits of a token whose largest magnitude reads as `top`.
struct DigitUnit {
  float up;      // values times 2^15 `up` are integers of 30 bits
  float factor;  // 2^15 times the unit, or NaN
};

template <typename T>
__device__ __forceinline__ DigitUnit digit_unit(uint32_t top) {
  const uint32_t bits =
      __float_as_uint(to_float(reinterpret_cast<const T&>(top)));
  // 2^(e - 1) <= the largest value < 2^e, or e is as low as it may be.
  const int e = max(int(bits >> 23) - 126, -111);
  return {__uint_as_float(uint32_t(15 - e + 127) << 23),
          bits < 0x7f800000u ? __uint_as_float(uint32_t(e - 15 + 127) << 23)
                             : __uint_as_float(0x7fffffffu)};
}

// out[d]: byte 3 - d of each of four words.
__device__ __forceinline__ void bytes_by_place(const uint32_t (&of)[4],
                                               uint32_t (&out)[4]) {
  const uint32_t low01 = __byte_perm(of[0], of[1], 0x5140);
  const uint32_t low23 = __byte_perm(of[2], of[3], 0x5140);
  const uint32_t high01 = __byte_perm(of[0], of[1], 0x7362);
  const uint32_t high23 = __byte_perm(of[2], of[3], 0x7362);
  out[3] = __byte_perm(low01, low23, 0x5410);
  out[2] = __byte_perm(low01, low23, 0x7632);
  out[1] = __byte_perm(high01, high23, 0x5410);
  out[0] = __byte_perm(high01, high23, 0x7632);
}

// out[d]: digit d of the integers of four values, highest first.
__device__ __forceinline__ void digits_of(const float (&values)[4], float up,
                                          uint32_t (&out)[4]) {
  uint32_t of[4];  // of each value, the lowest in the lowest byte
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const int n = __float2int_rn(values[c] * up * 32768.0f);
    of[c] = (uint32_t(n) + 0x00808080u) ^ 0x00808080u;
  }
  bytes_by_place(of, out);
}

// W2A16: every value as a signed integer of 30 bits in units of 2^(e - 30),
// with 2^e above the token's largest value here, in four signed bytes, highest
// first. That is exact for values within 2^19 (float16) or 2^22 (bfloat16) of
// the largest. token.most must be zero before; token.factor becomes 2^(e - 15).
template <typename S>
__device__ __forceinline__ void stage_digits(uint8_t* xs, int* offsets,
                                             S8Token* table, const S8Args& a,
                                             int first_token, int tokens,
                                             int first, int tiles) {
  using T = typename S::T;
  const int pitch = tiles * 128 + 16, units = tiles * 8;
  const int total = units * tokens;
  Unit held[kHeld];
  for_units<S>(held, false, a, first_token, tokens, first, tiles,
               [&](int i, const Unit& unit) {
                 unit.largest(&table[unsigned(i) / unsigned(units)].most,
                              i < total);
               });
  __syncthreads();
  auto convert = [&](int i, const Unit& unit) {
    const int m = unsigned(min(i, total - 1)) / unsigned(units);
    const int u = i - m * units;
    const DigitUnit digit = digit_unit<T>(table[m].most);
    if (u == 0 && i < total) table[m].factor = digit.factor;
    uint32_t out[4][4];  // [digit][word]
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      float values[4];
      unit.values<T>(t, values);
      uint32_t digits[4];
      digits_of(values, digit.up, digits);
#pragma unroll
      for (int d = 0; d < 4; ++d) out[d][t] = digits[d];
    }
#pragma unroll
    for (int d = 0; d < 4; ++d) {
      const int sum = sum_of_tile(out[d]);
      const int column = m * 4 + d;
      if (i < total) {
        if ((u & 7) == 0) put_offset<S::kNT>(offsets, u >> 3, column, sum);
        *reinterpret_cast<uint4*>(xs + column * pitch + u * 16) =
            make_uint4(out[d][0], out[d][1], out[d][2], out[d][3]);
      }
    }
  };
  for_units<S>(held, true, a, first_token, tokens, first, tiles, convert);
}

// W2A8 straight from x, without a norm: the arithmetic of w2a8_quantize.cu.
// With `begin` the largest value of the whole row is found first; token.most
// and token.sum must be zero before.
template <typename S>
__device__ __forceinline__ void stage_quantized(uint8_t* xs, int* offsets,
                                                S8Token* table, const S8Args& a,
                                                int first_token, int tokens,
                                                int first, int tiles,
                                                bool begin) {
  using T = typename S::T;
  const int pitch = tiles * 128 + 16, units = tiles * 8;
  const int total = units * tokens;
  Unit held[kHeld];
  bool reuse = false;
  if (begin) {
    const int all = a.K_pad >> 7;
    for_units<S>(held, false, a, first_token, tokens, 0, all,
                 [&](int i, const Unit& unit) {
                   unit.largest(&table[unsigned(i) / unsigned(all * 8)].most,
                                i < all * 8 * tokens);
                 });
    reuse = tiles == all;
    __syncthreads();
  }
  auto convert = [&](int i, const Unit& unit) {
    const int m = unsigned(min(i, total - 1)) / unsigned(units);
    const int u = i - m * units;
    const uint32_t top = table[m].most;
    const float largest = to_float(reinterpret_cast<const T&>(top));
    const float factor = token_factor(largest);
    if (begin && u == 0 && i < total) table[m].factor = token_scale(largest);
    uint32_t out[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      float values[4];
      unit.values<T>(t, values);
      out[t] = quantize_four(values, factor);
    }
    const int sum = sum_of_tile(out);
    if (i < total) {
      if ((u & 7) == 0) {
        if (S::kScale == S8Scale::kTile) {
          put_offset<S::kNT>(offsets, u >> 3, m, sum);
        } else if (S::kScale == S8Scale::kRow) {
          atomicAdd(&table[m].sum, sum);
        }
      }
      *reinterpret_cast<uint4*>(xs + m * pitch + u * 16) =
          make_uint4(out[0], out[1], out[2], out[3]);
    }
  };
  for_units<S>(held, reuse, a, first_token, tokens, first, tiles, convert);
}

}  // namespace vllm::ternary
