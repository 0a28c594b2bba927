// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// From sums [64 rows, tokens] to y [tokens, rows]: scales, bias, rounding, the
// transpose through shared memory, and the sums over blocks that split K.
//
// Fragment of wgmma's d in thread (warp w, g = lane / 4, t = lane % 4), for the
// eight tokens of group j: acc[4j + 0, 1] row 16w + g, tokens 8j + 2t, +1;
// acc[4j + 2, 3] row 16w + g + 8, the same tokens.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "sm90_prefill_ptx.cuh"
#include "sm90_s8_config.cuh"

namespace vllm::ternary::s8 {

using namespace sm90;

template <typename C>
using Sum = std::conditional_t<C::kMode == ScaleMode::kRow, int, float>;

__device__ __forceinline__ float2 ld_shared_f32x2(uint32_t addr) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(v.x), "=f"(v.y)
               : "r"(addr)
               : "memory");
  return v;
}

__device__ __forceinline__ void st_shared_v4(uint32_t addr, int a, int b, int c,
                                             int d) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(addr), "r"(a),
               "r"(b), "r"(c), "r"(d)
               : "memory");
}

template <typename T>
__device__ __forceinline__ uint32_t pack2(float lo, float hi) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 v = __floats2half2_rn(lo, hi);
    return reinterpret_cast<const uint32_t&>(v);
  } else {
    const __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
    return reinterpret_cast<const uint32_t&>(v);
  }
}

// An integer under 2^22 in size, exactly: added to the bits of 1.5 * 2^23 it
// reads as that number plus the integer.
__device__ __forceinline__ float to_float(int v) {
  return __int_as_float(v + 0x4B400000) - 12582912.0f;
}

// As load_as_float, for which ptxas takes one test more.
__device__ __forceinline__ float load_float(const void* base, DType dtype,
                                            int i) {
  if (dtype == DType::kFloat) return static_cast<const float*>(base)[i];
  if (dtype == DType::kHalf) {
    return __half2float(static_cast<const __half*>(base)[i]);
  }
  return __bfloat162float(static_cast<const __nv_bfloat16*>(base)[i]);
}

// What a row's sums become: (scale * sum) * xs + bias.
struct RowTerms {
  float scale[2], bias[2];  // of rows g and g + 8
};

template <typename C>
__device__ __forceinline__ RowTerms load_row_terms(const KernelParams& p,
                                                   int row) {
  RowTerms r;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int n = row + 8 * i;
    r.scale[i] = 1.0f;
    if constexpr (C::kMode == ScaleMode::kRow) {
      r.scale[i] = n < p.N_pad ? load_float(p.scale, p.scale_dtype, n) : 0.0f;
    }
    r.bias[i] =
        p.bias != nullptr && n < p.N ? load_float(p.bias, p.dtype, n) : 0.0f;
  }
  return r;
}

// What a thread needs of its tile's ends, fetched before the products: the
// terms of its rows and its share of the tokens' scales.
template <typename C>
struct Terms {
  RowTerms rows[C::kTiles];
  float xs;
};

template <typename C>
__device__ __forceinline__ Terms<C> load_terms(const KernelParams& p,
                                               const Tile& t, int warpgroup,
                                               int thread) {
  static_assert(C::kTokens <= 128);
  Terms<C> r;
  const int row =
      t.row + warpgroup * C::kTiles * 64 + thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
  for (int mt = 0; mt < C::kTiles; ++mt) {
    r.rows[mt] = load_row_terms<C>(p, row + mt * 64);
  }
  const int token = t.token + thread;
  r.xs = thread < C::kTokens && token < p.M ? p.xs[t.part * p.M + token] : 0.0f;
  return r;
}

template <typename C>
__device__ __forceinline__ float finish(Sum<C> sum, const RowTerms& r, int i,
                                        float xs) {
  if constexpr (C::kMode == ScaleMode::kRow) {
    return fmaf(to_float(sum >> kUnitLog2) * r.scale[i], xs, r.bias[i]);
  } else {
    return fmaf(sum, xs, r.bias[i]);
  }
}

// Two neighbouring 8-token groups of this warp's 16 rows into a staging buffer
// [token][64 rows], 128 bytes a token, 16-byte chunks swizzled as the copy
// engine does. v: [group][row g: token pair, row g + 8: token pair].
__device__ __forceinline__ void stage_groups(DType dtype, uint32_t out,
                                             int group, int warp, int lane,
                                             const float (&v)[2][4]) {
  const int matrix = lane / 8, r = lane % 8;
  const int token = 8 * (group + matrix / 2) + r;
  const int chunk = 2 * warp + (matrix & 1);
  const uint32_t at = out + token * 128 + ((chunk ^ r) << 4);
  if (dtype == DType::kHalf) {
    stmatrix_x4_trans(
        at, pack2<__half>(v[0][0], v[0][1]), pack2<__half>(v[0][2], v[0][3]),
        pack2<__half>(v[1][0], v[1][1]), pack2<__half>(v[1][2], v[1][3]));
  } else {
    using B = __nv_bfloat16;
    stmatrix_x4_trans(at, pack2<B>(v[0][0], v[0][1]),
                      pack2<B>(v[0][2], v[0][3]), pack2<B>(v[1][0], v[1][1]),
                      pack2<B>(v[1][2], v[1][3]));
  }
}

// Writes rows [lo, hi) of `tokens` (at most 64) of a staging buffer with
// ordinary stores.
__device__ __forceinline__ void store_staged(const KernelParams& p,
                                             uint32_t out, const Tile& t,
                                             int row0, int token0, int tokens,
                                             int thread) {
  const int chunk = thread % 8, row = row0 + chunk * 8;
  if (row >= t.hi || row + 8 <= t.lo) return;
  const bool wide = row >= t.lo && row + 8 <= t.hi && p.N % 8 == 0;
  const int limit = min(tokens, p.M - token0);
  uint16_t* dst =
      static_cast<uint16_t*>(p.y) + int64_t(token0 + thread / 8) * p.N + row;
#pragma unroll 1
  for (int i = 0; i < 64; i += 16) {
    const int token = i + thread / 8;
    if (token >= limit) break;
    const uint4 v =
        ld_shared_v4(out + token * 128 + ((chunk ^ (token & 7)) << 4));
    uint16_t* to = dst + int64_t(i) * p.N;
    if (wide) {
      *reinterpret_cast<uint4*>(to) = v;
      continue;
    }
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      if (row + e >= t.lo && row + e < t.hi) {
        to[e] = uint16_t(words[e / 2] >> (16 * (e & 1)));
      }
    }
  }
}

// One warpgroup's tiles of an unsplit product. The copy engine takes the staged
// tokens away while the next ones are staged.
template <typename C>
__device__ __forceinline__ void store_tile(
    const KernelParams& p, const CUtensorMap* y_map, const Tile& t,
    uint32_t out, uint32_t token_scales, int warpgroup, int thread,
    const Terms<C>& terms, const Sum<C> (&acc)[C::kTiles][C::kTokens / 2]) {
  const int warp = thread / 32, lane = thread % 32;
  if (thread < C::kTokens) st_shared_float(token_scales + thread * 4, terms.xs);
#pragma unroll
  for (int mt = 0; mt < C::kTiles; ++mt) {
    const int row0 = t.row + (warpgroup * C::kTiles + mt) * 64;
    const bool whole =
        p.tma_store && row0 >= t.lo && (row0 + 64 <= t.hi || t.hi == p.N);
#pragma unroll
    for (int part = 0; part < C::kTokens / 64; ++part) {
      const int slot = (mt * (C::kTokens / 64) + part) % C::kOutBuffers;
      const uint32_t buffer = out + slot * 8192;
      const int token0 = t.token + part * 64;
      // Free the buffer: all but the latest kOutBuffers - 1 stores have read.
      if (thread == 0) bulk_wait_read<C::kOutBuffers - 1>();
      warpgroup_sync(warpgroup + 1);
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        float v[2][4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int group = part * 8 + j + h;
          const float2 xs =
              ld_shared_f32x2(token_scales + group * 32 + lane % 4 * 8);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            v[h][i] = finish<C>(acc[mt][group * 4 + i], terms.rows[mt], i / 2,
                                i % 2 ? xs.y : xs.x);
          }
        }
        stage_groups(p.dtype, buffer, j, warp, lane, v);
      }
      if (whole) {
        fence_async_proxy();
        warpgroup_sync(warpgroup + 1);
        if (thread == 0) {
          if (row0 < t.hi && token0 < p.M) {
            tma_store(y_map, buffer, row0, token0);
          }
          bulk_commit();
        }
      } else {
        warpgroup_sync(warpgroup + 1);
        store_staged(p, buffer, t, row0, token0, 64, thread);
        if (thread == 0) bulk_commit();
      }
    }
  }
}

// --- Sums over the sets of warpgroups ---------------------------------------

template <typename C>
__device__ __forceinline__ uint32_t meet_offset(int warpgroup, int mt, int j,
                                                int thread) {
  return (((warpgroup * C::kTiles + mt) * (C::kTokens / 8) + j) * 128 +
          thread) *
         16;
}

template <typename C>
__device__ __forceinline__ void leave_sums(
    uint32_t meet, int warpgroup, int thread,
    const int (&acc)[C::kTiles][C::kTokens / 2]) {
#pragma unroll
  for (int mt = 0; mt < C::kTiles; ++mt) {
#pragma unroll
    for (int j = 0; j < C::kTokens / 8; ++j) {
      st_shared_v4(meet + meet_offset<C>(warpgroup, mt, j, thread),
                   acc[mt][4 * j], acc[mt][4 * j + 1], acc[mt][4 * j + 2],
                   acc[mt][4 * j + 3]);
    }
  }
}

template <typename C>
__device__ __forceinline__ void add_sums(
    uint32_t meet, int warpgroup, int thread,
    int (&acc)[C::kTiles][C::kTokens / 2]) {
#pragma unroll
  for (int mt = 0; mt < C::kTiles; ++mt) {
#pragma unroll
    for (int j = 0; j < C::kTokens / 8; ++j) {
      const uint4 v =
          ld_shared_v4(meet + meet_offset<C>(warpgroup, mt, j, thread));
      acc[mt][4 * j] += int(v.x);
      acc[mt][4 * j + 1] += int(v.y);
      acc[mt][4 * j + 2] += int(v.z);
      acc[mt][4 * j + 3] += int(v.w);
    }
  }
}

// --- Sums over the blocks that share a tile along K -------------------------

__device__ __forceinline__ float as_payload(int v) { return __int_as_float(v); }
__device__ __forceinline__ float as_payload(float v) { return v; }

// Every block takes kTokens / split of the tokens. Each thread sends its
// partial sums of a token group to that group's block, slot = sender; the block
// then adds the slots in order, so that the result does not depend on timing.
template <typename C>
__device__ __forceinline__ uint32_t slot_offset(int part, int groups, int local,
                                                int warpgroup, int mt,
                                                int thread) {
  const int slot =
      ((part * groups + local) * C::kWarpgroups + warpgroup) * C::kTiles + mt;
  return (slot * 128 + thread) * 16;
}

template <typename C>
__device__ __forceinline__ void send_partials(
    const KernelParams& p, uint32_t slots, int k_part, int warpgroup,
    int thread, const Sum<C> (&acc)[C::kTiles][C::kTokens / 2]) {
  const int groups = 1 << p.groups_log2;
#pragma unroll
  for (int j = 0; j < C::kTokens / 8; ++j) {
    const int owner = j >> p.groups_log2, local = j & (groups - 1);
    const uint32_t base = map_to_rank(slots, owner);
#pragma unroll
    for (int mt = 0; mt < C::kTiles; ++mt) {
      st_cluster_v4(
          base + slot_offset<C>(k_part, groups, local, warpgroup, mt, thread),
          make_float4(
              as_payload(acc[mt][4 * j]), as_payload(acc[mt][4 * j + 1]),
              as_payload(acc[mt][4 * j + 2]), as_payload(acc[mt][4 * j + 3])));
    }
  }
}

template <typename C>
__device__ __forceinline__ void store_split(const KernelParams& p,
                                            const Tile& t, uint32_t slots,
                                            uint32_t out, uint32_t token_scales,
                                            int k_part, int warpgroup,
                                            int thread, const Terms<C>& terms) {
  const int groups = 1 << p.groups_log2;
  const int warp = thread / 32, lane = thread % 32;
  if (thread < C::kTokens) st_shared_float(token_scales + thread * 4, terms.xs);
  warpgroup_sync(warpgroup + 1);
#pragma unroll
  for (int mt = 0; mt < C::kTiles; ++mt) {
    const int row0 = t.row + (warpgroup * C::kTiles + mt) * 64;
#pragma unroll 1
    for (int first = 0; first < groups; first += 8) {
      const int count = min(8, groups - first);
      if (mt + first > 0) warpgroup_sync(warpgroup + 1);
#pragma unroll 1
      for (int j = 0; j < count; j += 2) {
        // A lone last group is summed twice; its twin lands behind the tokens
        // that are stored.
        float v[2][4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int local = min(first + j + h, groups - 1);
          Sum<C> sum[4] = {};
#pragma unroll 4
          for (int part = 0; part < p.split; ++part) {
            const uint4 u =
                ld_shared_v4(slots + slot_offset<C>(part, groups, local,
                                                    warpgroup, mt, thread));
            if constexpr (C::kMode == ScaleMode::kRow) {
              sum[0] += int(u.x);
              sum[1] += int(u.y);
              sum[2] += int(u.z);
              sum[3] += int(u.w);
            } else {
              sum[0] += __uint_as_float(u.x);
              sum[1] += __uint_as_float(u.y);
              sum[2] += __uint_as_float(u.z);
              sum[3] += __uint_as_float(u.w);
            }
          }
          const float2 xs = ld_shared_f32x2(
              token_scales + (k_part * groups + local) * 32 + lane % 4 * 8);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            v[h][i] =
                finish<C>(sum[i], terms.rows[mt], i / 2, i % 2 ? xs.y : xs.x);
          }
        }
        stage_groups(p.dtype, out, j, warp, lane, v);
      }
      warpgroup_sync(warpgroup + 1);
      store_staged(p, out, t, row0, t.token + (k_part * groups + first) * 8,
                   count * 8, thread);
    }
  }
}

}  // namespace vllm::ternary::s8
