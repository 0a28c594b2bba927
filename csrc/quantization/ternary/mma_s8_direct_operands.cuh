// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The arguments and operands of mma_s8_direct_digits.cuh: codes of weights,
// values of x as signed digits, and what the former add to the products of the
// latter.
#pragma once

#include "mma_s8_direct.cuh"

namespace vllm::ternary {

constexpr int kDigitsWarps = 16;
constexpr int kScaleWarps = 4;  // that fetch scales

struct DigitsArgs {
  const int32_t* weight;
  const void* scale;  // float16 of whole k tiles; W2A8: one per row
  DType scale_dtype;
  const void* x;
  int64_t ldx;
  const void* bias;
  void* y;
  int64_t ldy;
  int N, K, N_pad;
  int all_k_tiles, block_shift, last_block;  // scale block = tile >> shift
  int split, split_log2;                     // CTAs along K, one cluster
  int tiles, tiles_rest;      // row tiles of 16 per CTA; `rest` have one more
  int parts_log2, step_log2;  // warps along K, and along rows
  int k_tiles, k_rest;        // k tiles per warp, likewise
  int slots, slot_bytes;      // row tiles in the ring
  // Bytes: the scales of a k tile; where scales, columns, sums, the bias, what
  // the cluster sends, largest values and barriers begin.
  int scale_bytes;
  int scale_at, columns_at, sums_at, bias_at, received_at, most_at, barriers_at;
  int warp_bytes, pitch;  // columns of a warp [column][pitch]
  int rank_sums;          // from one CTA of the cluster
  int M;                  // of the launch
  int device;
  cudaStream_t stream;
};

// A row of sums has one of each part of K, and pads: rows of neighbouring
// threads lie in different banks.
constexpr int kSumPitch = (kDigitsWarps + 4) * 4;

// Columns of n k tiles: a multiple of 128 and 16, so that neighbours lie in
// different banks.
__host__ __device__ constexpr int column_pitch(int n) { return n * 128 + 16; }

// Sixteen codes of a word as the operand of sixteen rows: 16 times the code in
// rows 0..7, 64 times in rows 8..15. The multiplier's pipe shifts.
__device__ __forceinline__ void decode_high(uint32_t w, uint32_t (&a)[4]) {
  const uint32_t left = w * 16u;
  a[0] = left & 0x30303030u;
  a[1] = left & 0xC0C0C0C0u;
  a[2] = w & 0x30303030u;
  a[3] = w & 0xC0C0C0C0u;
}

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

  // As raise_largest().
  __device__ __forceinline__ uint32_t largest(uint32_t top) const {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      top = raise_largest(top, v[c].x);
      top = raise_largest(top, v[c].y);
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

// Four values of x, k, k + 1, k + 16 and k + 17, whose bytes are a word.
__device__ __forceinline__ int four_position(int lane) {
  return (lane >> 3) * 32 + ((lane >> 1) & 3) * 4 + (lane & 1) * 2;
}

struct Four {
  uint32_t v[2];

  template <typename T>
  __device__ __forceinline__ void load(const T* at, bool valid) {
    v[0] = v[1] = 0;
    if (!valid) return;
    v[0] = *reinterpret_cast<const uint32_t*>(at);
    v[1] = *reinterpret_cast<const uint32_t*>(at + 16);
  }

  // As raise_largest().
  __device__ __forceinline__ uint32_t largest(uint32_t top) const {
    return raise_largest(raise_largest(top, v[0]), v[1]);
  }

  template <typename T>
  __device__ __forceinline__ void values(float (&out)[4]) const {
    const float2 p = unpack_two<T>(v[0]), q = unpack_two<T>(v[1]);
    out[0] = p.x;
    out[1] = q.x;
    out[2] = p.y;
    out[3] = q.y;
  }
};

// Digits of four values as in digits_of(), by additions to 1.5 * 2^23 instead
// of conversions: n = rint(x * 2^(29 - e)) = hi * 2^15 + lo, each of two
// digits. `up`: 2^(14 - e).
__device__ __forceinline__ void magic_digits_of(const float (&values)[4],
                                                float up, uint32_t (&out)[4]) {
  // 128 makes the lower of two digits round, and comes off again below.
  constexpr float kMagic = 12582912.0f + 128.0f;
  uint32_t of[4];  // of each value, the lowest in the lowest byte
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const float hi = fmaf(values[c], up, kMagic);
    const float rest = fmaf(values[c], up, kMagic - hi);
    const float lo = fmaf(rest, 32768.0f, kMagic);
    of[c] = __byte_perm(__float_as_uint(lo), __float_as_uint(hi), 0x5410);
  }
  bytes_by_place(of, out);
  out[3] ^= 0x80808080u;
  out[1] ^= 0x80808080u;
}

// What the sums of a k tile have too much under decode_high(), for codes are t
// + 1: 16 times the sums of the lane's two columns, in units of the second.
__device__ __forceinline__ int excess_of(const uint32_t (&b)[2][4]) {
  int sums[2];
  sum_columns(b, sums);
  return sums[0] * 4096 + sums[1] * 16;
}

}  // namespace vllm::ternary
