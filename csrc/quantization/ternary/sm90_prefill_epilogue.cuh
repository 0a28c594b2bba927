// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// From accumulators [64 rows, tokens] to y [tokens, rows]: bias, rounding, the
// transpose through shared memory, and the sum over blocks that split K.
//
// Fragment of wgmma's d in thread (warp w, g = lane / 4, t = lane % 4), for the
// eight tokens of group j: acc[4j + 0, 1] row 16w + g, tokens 8j + 2t, +1;
// acc[4j + 2, 3] row 16w + g + 8, the same tokens.
#pragma once

#include "sm90_prefill_config.cuh"
#include "sm90_prefill_decode.cuh"
#include "sm90_prefill_ptx.cuh"

namespace vllm::ternary::sm90 {

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

// What a row's sum becomes: scale * sum + bias.
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
    r.scale[i] = 1.f;
    if constexpr (C::kMode == ScaleMode::kRow) {
      if (n < p.N_pad) {
        if (p.scale_dtype == DType::kFloat) {
          r.scale[i] = static_cast<const float*>(p.scale)[n];
        } else if (p.scale_dtype == DType::kHalf) {
          r.scale[i] = __half2float(static_cast<const __half*>(p.scale)[n]);
        } else {
          r.scale[i] =
              __bfloat162float(static_cast<const __nv_bfloat16*>(p.scale)[n]);
        }
      }
    }
    r.bias[i] = p.bias != nullptr && n < p.N
                    ? float(static_cast<const typename C::T*>(p.bias)[n])
                    : 0.f;
  }
  return r;
}

template <typename C>
__device__ __forceinline__ float finish(float sum, const RowTerms& r, int i) {
  if constexpr (C::kMode == ScaleMode::kRow) {
    return fmaf(sum, r.scale[i], r.bias[i]);
  } else if constexpr (std::is_same_v<typename C::T, __nv_bfloat16>) {
    return fmaf(sum, float(uint64_t(1) << kShrink), r.bias[i]);
  } else {
    return sum + r.bias[i];
  }
}

// Two neighbouring 8-token groups of this warp's 16 rows into a staging buffer
// [token][64 rows], 128 bytes a token, 16-byte chunks swizzled as the copy
// engine does. v: [group][row g: token pair, row g + 8: token pair].
template <typename T>
__device__ __forceinline__ void stage_groups(uint32_t out, int group, int warp,
                                             int lane, const float (&v)[2][4]) {
  const int matrix = lane / 8, r = lane % 8;
  const int token = 8 * (group + matrix / 2) + r;
  const int chunk = 2 * warp + (matrix & 1);
  stmatrix_x4_trans(out + token * 128 + ((chunk ^ r) << 4),
                    pack2<T>(v[0][0], v[0][1]), pack2<T>(v[0][2], v[0][3]),
                    pack2<T>(v[1][0], v[1][1]), pack2<T>(v[1][2], v[1][3]));
}

// Writes `tokens` (at most 64) of a staging buffer with ordinary stores.
template <typename C>
__device__ __forceinline__ void store_staged(const KernelParams& p,
                                             uint32_t out, int row0, int token0,
                                             int tokens, int thread) {
  using T = typename C::T;
  const int chunk = thread % 8, row = row0 + chunk * 8;
  if (row >= p.N) return;
  const bool wide = row + 8 <= p.N && p.ldy % 8 == 0;
  const int limit = min(tokens, p.M - token0);
  T* dst = static_cast<T*>(p.y) + (token0 + thread / 8) * p.ldy + row;
  if (wide) {
#pragma unroll
    for (int i = 0; i < 64; i += 16) {
      const int token = i + thread / 8;
      if (token < limit) {
        *reinterpret_cast<uint4*>(dst + i * p.ldy) =
            ld_shared_v4(out + token * 128 + ((chunk ^ (token & 7)) << 4));
      }
    }
    return;
  }
#pragma unroll 1
  for (int i = 0; i < 64; i += 16) {
    const int token = i + thread / 8;
    if (token >= limit) break;
    const uint4 v =
        ld_shared_v4(out + token * 128 + ((chunk ^ (token & 7)) << 4));
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
    uint16_t* dst16 = reinterpret_cast<uint16_t*>(dst + i * p.ldy);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      if (row + e < p.N) dst16[e] = uint16_t(words[e / 2] >> (16 * (e & 1)));
    }
  }
}

constexpr int kMeetBarrier = 12;  // named, of all consumers

// The sums of one set, or of both: with two, each leaves the other's half of
// the tokens where its own first stage was and adds what it finds to its own
// half. No stage is read any more once both have met.
template <typename C>
__device__ __forceinline__ void meet_sets(
    uint32_t stages, int set, int thread,
    const float (&acc)[C::kTiles][C::kTokens / 2],
    float (&mine)[C::kTiles][C::kTokens / C::kSets / 2]) {
  if constexpr (C::kSets == 1) {
#pragma unroll
    for (int mt = 0; mt < C::kTiles; ++mt) {
#pragma unroll
      for (int i = 0; i < C::kTokens / 2; ++i) mine[mt][i] = acc[mt][i];
    }
  } else {
    constexpr int kHalf = C::kTokens / 4;  // sums of a thread
    constexpr int kVectors = kHalf / 4;
    const uint32_t here = stages + thread * 16;
    const uint32_t to = here + set * C::kStageBytes;
    const uint32_t from = here + (1 - set) * C::kStageBytes;
    warpgroup_sync(set + 1);  // its other warps' wgmma read the stage, too
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      float v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        mine[0][4 * j + i] =
            set == 0 ? acc[0][4 * j + i] : acc[0][kHalf + 4 * j + i];
        v[i] = set == 0 ? acc[0][kHalf + 4 * j + i] : acc[0][4 * j + i];
      }
      st_shared_float4(to + j * 128 * 16, make_float4(v[0], v[1], v[2], v[3]));
    }
    named_sync<C::kConsumers>(kMeetBarrier);
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const float4 u = ld_shared_float4(from + j * 128 * 16);
      mine[0][4 * j] += u.x;
      mine[0][4 * j + 1] += u.y;
      mine[0][4 * j + 2] += u.z;
      mine[0][4 * j + 3] += u.w;
    }
  }
}

// One warpgroup's tiles of an unsplit product, from token `first` of the tile
// on. The copy engine takes the staged tokens away while the next ones are
// staged. `team`: the warpgroup's number among all.
template <typename C, int kSums>
__device__ __forceinline__ void store_tile(
    const KernelParams& p, const CUtensorMap* y_map, const Tile& t,
    uint32_t out, int warpgroup, int team, int thread, int first,
    const float (&acc)[C::kTiles][kSums]) {
  using T = typename C::T;
  const int warp = thread / 32, lane = thread % 32;
#pragma unroll
  for (int mt = 0; mt < C::kTiles; ++mt) {
    const int row0 = (t.row_tile + warpgroup * C::kTiles + mt) * 64;
    const RowTerms r = load_row_terms<C>(p, row0 + warp * 16 + lane / 4);
#pragma unroll
    for (int part = 0; part < kSums / 32; ++part) {
      const int slot = (mt * (kSums / 32) + part) % C::kOutBuffers;
      const uint32_t buffer = out + slot * 8192;
      const int token0 = t.token + first + part * 64;
      // Free the buffer: all but the latest kOutBuffers - 1 stores have read.
      if (thread == 0) bulk_wait_read<C::kOutBuffers - 1>();
      warpgroup_sync(team + 1);
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        float v[2][4];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          v[i / 4][i % 4] =
              finish<C>(acc[mt][(part * 8 + j) * 4 + i], r, (i >> 1) & 1);
        }
        stage_groups<T>(buffer, j, warp, lane, v);
      }
      if (p.tma_store) {
        fence_async_proxy();
        warpgroup_sync(team + 1);
        if (thread == 0) {
          if (row0 < p.N && token0 < p.M) {
            tma_store(y_map, buffer, row0, token0);
          }
          bulk_commit();
        }
      } else {
        warpgroup_sync(team + 1);
        store_staged<C>(p, buffer, row0, token0, 64, thread);
      }
    }
  }
}

// --- Sums over the blocks that share a tile along K
// ----------------------------

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

// `acc` begins with token group `first`.
template <typename C, int kSums>
__device__ __forceinline__ void send_partials(
    const KernelParams& p, uint32_t slots, int row_part, int k_part,
    int warpgroup, int thread, int first,
    const float (&acc)[C::kTiles][kSums]) {
  const int groups = 1 << p.groups_log2;
#pragma unroll
  for (int j = 0; j < kSums / 4; ++j) {
    const int owner = (first + j) >> p.groups_log2;
    const int local = (first + j) & (groups - 1);
    const uint32_t base = map_to_rank(slots, owner * p.multicast + row_part);
#pragma unroll
    for (int mt = 0; mt < C::kTiles; ++mt) {
      st_cluster_v4(
          base + slot_offset<C>(k_part, groups, local, warpgroup, mt, thread),
          make_float4(acc[mt][4 * j], acc[mt][4 * j + 1], acc[mt][4 * j + 2],
                      acc[mt][4 * j + 3]));
    }
  }
}

template <typename C>
__device__ __forceinline__ void store_split(const KernelParams& p,
                                            const Tile& t, uint32_t slots,
                                            uint32_t out, int k_part,
                                            int warpgroup, int team, int set,
                                            int thread) {
  using T = typename C::T;
  const int groups = 1 << p.groups_log2;
  const int begin = groups * set / C::kSets;
  const int end = groups * (set + 1) / C::kSets;
  const int warp = thread / 32, lane = thread % 32;
#pragma unroll
  for (int mt = 0; mt < C::kTiles; ++mt) {
    const int row0 = (t.row_tile + warpgroup * C::kTiles + mt) * 64;
    const RowTerms r = load_row_terms<C>(p, row0 + warp * 16 + lane / 4);
#pragma unroll 1
    for (int first = begin; first < end; first += 8) {
      const int count = min(8, end - first);
      if (mt > 0 || first > begin) warpgroup_sync(team + 1);
#pragma unroll 1
      for (int j = 0; j < count; j += 2) {
        // A lone last group is summed twice; its twin lands behind the tokens
        // that are stored.
        const int l0 = first + j, l1 = min(l0 + 1, end - 1);
        float v[2][4] = {};
#pragma unroll 4
        for (int part = 0; part < p.split; ++part) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const uint4 u =
                ld_shared_v4(slots + slot_offset<C>(part, groups, h ? l1 : l0,
                                                    warpgroup, mt, thread));
            v[h][0] += __uint_as_float(u.x);
            v[h][1] += __uint_as_float(u.y);
            v[h][2] += __uint_as_float(u.z);
            v[h][3] += __uint_as_float(u.w);
          }
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          v[i / 4][i % 4] = finish<C>(v[i / 4][i % 4], r, (i >> 1) & 1);
        }
        stage_groups<T>(out, j, warp, lane, v);
      }
      warpgroup_sync(team + 1);
      store_staged<C>(p, out, row0, t.token + (k_part * groups + first) * 8,
                      count * 8, thread);
    }
  }
}

}  // namespace vllm::ternary::sm90
