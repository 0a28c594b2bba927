// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// y^T = W x^T on Hopper's wgmma for many tokens. docs/kernels_prefill.md tells
// the story; in short:
//
//   * One warp feeds the copy engine: per k-block of 128 it brings the tokens'
//     tile (K-major, swizzled), the packed weights and the scales of the
//     block's rows into a ring of shared-memory stages.
//   * kWarpgroups warpgroups own kTiles tiles of 64 weight rows each. They
//     decode codes into the A operand in registers while the previous wgmma
//     runs, and all read the same B (tokens) from shared memory.
//   * Scales. Folded: multiplied into A (exact in fp16). Running: the
//     accumulators are kept in units of the current block's scale and are
//     multiplied by old / new scale in between (float32, for any scale dtype).
//   * `split` blocks of a cluster share one output tile along K and add their
//     parts through distributed shared memory in a fixed order. `multicast`
//     blocks take different rows and share the loads of the tokens' tile.
#pragma once

#include <type_traits>

#include "sm90_prefill.h"
#include "sm90_prefill_decode.cuh"
#include "sm90_prefill_ptx.cuh"
#include "sm90_prefill_wgmma.cuh"

namespace vllm::ternary::sm90 {

enum class ScaleMode { kFolded, kRunning };

template <typename T_, ScaleMode kMode_, int kWarpgroups_, int kTiles_,
          int kTokens_, int kGroups_>
struct Config {
  using T = T_;
  static constexpr ScaleMode kMode = kMode_;
  static constexpr int kWarpgroups = kWarpgroups_;  // that multiply
  static constexpr int kTiles = kTiles_;            // of 64 rows, per warpgroup
  static constexpr int kTokens = kTokens_;
  static constexpr int kGroups = kGroups_;  // scales per row and k-block: 1, 4

  static constexpr int kRowTiles = kWarpgroups * kTiles;
  static constexpr int kThreads = (kWarpgroups + 1) * 128;
  // Together what the block was launched with: 168 x 384 or 128 x 512.
  static constexpr int kConsumerRegs = kWarpgroups == 2 ? 232 : 152;
  static constexpr int kProducerRegs = kWarpgroups == 2 ? 40 : 56;

  // One stage: tokens in two halves of 64 k (128-byte rows), codes, scales.
  static constexpr int kHalfBytes = kTokens * 128;
  static constexpr int kCodeBytes = kRowTiles * 4 * 512;
  static constexpr int kScaleBytes = kRowTiles * 64 * 4 * kGroups;
  static constexpr int kStageBytes =
      (2 * kHalfBytes + kCodeBytes + kScaleBytes + 1023) / 1024 * 1024;
  // Output staging: 64 tokens x 64 rows per warpgroup.
  static constexpr int kOutBytes = kWarpgroups * 64 * 128;
  static constexpr int kSmemLimit = 227 * 1024;
  static constexpr int kBarBytes = 256;
  static constexpr int kStagesFit =
      (kSmemLimit - 1024 - kOutBytes - kBarBytes) / kStageBytes;
  static constexpr int kStages = kStagesFit < 10 ? kStagesFit : 10;
  static constexpr int kSmemBytes =
      1024 + kStages * kStageBytes + kOutBytes + kBarBytes;
  static_assert(kStages >= 2);
  // The partial sums of a split product lie where the stages were.
  static_assert(kRowTiles * 64 * kTokens * 4 <= kStages * kStageBytes);
};

struct KernelParams {
  const void* bias;
  void* y;
  int64_t ldy;
  int M, N;
  int k_blocks;     // K_pad / 128
  int row_groups;   // ceil(N_pad / 64 / kRowTiles / multicast)
  int token_tiles;  // ceil(M / kTokens)
  int token_group;  // token tiles that are walked before the next row group
  int split, multicast;
  int groups_log2;  // log2 of the 8-token groups per block under `split`
  int num_tiles;  // row_groups * token_tiles
  int num_clusters;
  DType scale_dtype;
  int blocks_per_scale;  // k-blocks under one scale (kGroups == 1)
  int scales_per_block;  // 1; or 2, 4 (kGroups == 4)
  uint32_t stage_tx_bytes;
};

struct Tile {
  int row_tile, token, kb_begin, kb_end;
};

// Where tile `index` of this block's cluster lies. Row groups follow each other
// within a group of token tiles, so that the blocks that run at one time share
// both tokens and weights in the L2 cache.
template <typename C>
__device__ __forceinline__ Tile locate(const KernelParams& p, int index,
                                       int row_part, int k_part) {
  const int group_tiles = p.token_group * p.row_groups;
  const int group = index / group_tiles, rest = index % group_tiles;
  const int first = group * p.token_group;
  const int width = min(p.token_group, p.token_tiles - first);
  Tile t;
  t.token = (first + rest % width) * C::kTokens;
  t.row_tile = ((rest / width) * p.multicast + row_part) * C::kRowTiles;
  t.kb_begin = p.k_blocks * k_part / p.split;
  t.kb_end = p.k_blocks * (k_part + 1) / p.split;
  return t;
}

template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// --- Producer -----------------------------------------------------------------

template <typename C>
__device__ __forceinline__ void produce(const KernelParams& p,
                                        const CUtensorMap* x_map,
                                        const CUtensorMap* w_map,
                                        const CUtensorMap* s_map,
                                        uint32_t stages, uint32_t full,
                                        uint32_t empty, int cluster,
                                        int row_part, int k_part) {
  const int part = C::kTokens / p.multicast;
  const uint16_t mask = uint16_t(((1u << p.multicast) - 1)
                                 << (k_part * p.multicast));

  auto load_weight = [&](const Tile& t, int kb, int stage) {
    const uint32_t base = stages + stage * C::kStageBytes;
    const uint32_t bar = full + 8 * stage;
    mbar_expect_tx(bar, p.stage_tx_bytes);
    tma_load(base + 2 * C::kHalfBytes, w_map, kb * 128, t.row_tile * 4, bar);
    const int block = C::kGroups == 1 ? kb / p.blocks_per_scale
                                      : kb * p.scales_per_block;
    tma_load(base + 2 * C::kHalfBytes + C::kCodeBytes, s_map, t.row_tile * 64,
             block, bar);
  };
  auto load_tokens = [&](const Tile& t, int kb, int stage) {
    const uint32_t base = stages + stage * C::kStageBytes + row_part * part * 128;
    const uint32_t bar = full + 8 * stage;
    const int token = t.token + row_part * part;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (p.multicast == 1) {
        tma_load(base + h * C::kHalfBytes, x_map, kb * 128 + h * 64, token, bar);
      } else {
        tma_load_multicast(base + h * C::kHalfBytes, x_map, kb * 128 + h * 64,
                           token, bar, mask);
      }
    }
  };

  Ring<C::kStages> ring;
  bool first = true;
  for (int i = cluster; i < p.num_tiles; i += p.num_clusters) {
    const Tile t = locate<C>(p, i, row_part, k_part);
    int kb = t.kb_begin;
    if (first) {
      // Weights do not depend on the previous kernel: fetch them already.
      first = false;
      const int ahead = min(C::kStages, t.kb_end - t.kb_begin);
#pragma unroll 1
      for (int s = 0; s < ahead; ++s) load_weight(t, kb + s, s);
      wait_for_previous_kernel();
#pragma unroll 1
      for (int s = 0; s < ahead; ++s, ++kb) {
        load_tokens(t, kb, s);
        ring.advance();
      }
    }
#pragma unroll 1
    for (; kb < t.kb_end; ++kb) {
      mbar_wait_cluster(empty + 8 * ring.stage, ring.phase ^ 1);
      load_weight(t, kb, ring.stage);
      load_tokens(t, kb, ring.stage);
      ring.advance();
    }
  }
}

// --- Consumers ------------------------------------------------------------------

// Two scales that lie eight rows apart, from shared memory.
__device__ __forceinline__ void load_scales(DType dtype, uint32_t base,
                                            int index, float& s0, float& s1) {
  if (dtype == DType::kFloat) {
    s0 = ld_shared_f32(base + 4 * index);
    s1 = ld_shared_f32(base + 4 * index + 32);
    return;
  }
  const uint32_t b0 = ld_shared_u16(base + 2 * index);
  const uint32_t b1 = ld_shared_u16(base + 2 * index + 16);
  if (dtype == DType::kBFloat16) {
    s0 = __uint_as_float(b0 << 16);
    s1 = __uint_as_float(b1 << 16);
  } else {
    s0 = __half2float(__ushort_as_half(uint16_t(b0)));
    s1 = __half2float(__ushort_as_half(uint16_t(b1)));
  }
}

// Scales of rows g and g + 8 of one row tile under the running mode.
struct RunningScale {
  float current[2], ratio[2];
  uint32_t kept;

  __device__ __forceinline__ void reset() { current[0] = current[1] = 1.f; }

  // Below this a scale counts as zero: nothing near it can be told from zero
  // in a 16-bit result, and old / new stays far from overflow.
  static constexpr float kTiny = 1.26e-29f;  // 2^-96

  __device__ __forceinline__ void next(float s0, float s1) {
    const bool keep0 = !(fabsf(s0) < kTiny), keep1 = !(fabsf(s1) < kTiny);
    s0 = keep0 ? s0 : current[0];
    s1 = keep1 ? s1 : current[1];
    ratio[0] = __fdividef(current[0], s0);
    ratio[1] = __fdividef(current[1], s1);
    current[0] = s0;
    current[1] = s1;
    kept = rows_kept(keep0, keep1);
  }
};

// Accumulates one tile. Returns with all wgmma finished and all stages released.
template <typename C, typename Release>
__device__ __forceinline__ void multiply(
    const KernelParams& p, const Tile& t, uint32_t stages, uint32_t full,
    Ring<C::kStages>& ring, int warpgroup, int warp, int lane,
    float (&acc)[C::kTiles][C::kTokens / 2], RunningScale (&scale)[C::kTiles],
    Release release) {
  using T = typename C::T;
  constexpr bool kBf16 = std::is_same_v<T, __nv_bfloat16>;
  constexpr bool kRunning = C::kMode == ScaleMode::kRunning;
  // A job is a run of wgmma committed together, over one or two words.
  constexpr int kJobWords = C::kGroups == 1 ? 2 : 1;
  constexpr int kJobs = 4 / C::kGroups / kJobWords;  // per group and tile
  uint32_t a[2][8 * kJobWords];

#pragma unroll
  for (int mt = 0; mt < C::kTiles; ++mt) scale[mt].reset();

  const int row_in_tile = warp * 16 + lane / 4;
  for (int kb = t.kb_begin; kb < t.kb_end; ++kb) {
    const uint32_t base = stages + ring.stage * C::kStageBytes;
    const uint32_t codes =
        base + 2 * C::kHalfBytes +
        (warpgroup * C::kTiles * 4 + warp) * 512 + lane * 16;
    const uint32_t scales = base + 2 * C::kHalfBytes + C::kCodeBytes;
    const uint64_t desc = smem_desc(base);
    uint32_t w[C::kTiles][4];
    uint32_t folded[C::kTiles][2];

#pragma unroll
    for (int g = 0; g < C::kGroups; ++g) {
#pragma unroll
      for (int mt = 0; mt < C::kTiles; ++mt) {
#pragma unroll
        for (int j = 0; j < kJobs; ++j) {
          constexpr int kPerGroup = C::kTiles * kJobs;
          const int job = g * kPerGroup + mt * kJobs + j;
          uint32_t(&frag)[8 * kJobWords] = a[job & 1];

          if (job == 1 && kb > t.kb_begin) release(ring.stage);
          if (job == 0) {
            mbar_wait(full + 8 * ring.stage, ring.phase);
#pragma unroll
            for (int m = 0; m < C::kTiles; ++m) {
              const uint4 v = ld_shared_v4(codes + m * 4 * 512);
              w[m][0] = v.x;
              w[m][1] = v.y;
              w[m][2] = v.z;
              w[m][3] = v.w;
            }
          }
          if (j == 0) {
            const int g_index =
                C::kGroups == 1 ? 0 : g * p.scales_per_block / C::kGroups;
            const int index = (g_index * C::kRowTiles + warpgroup * C::kTiles +
                               mt) * 64 + row_in_tile;
            float s0, s1;
            load_scales(p.scale_dtype, scales, index, s0, s1);
            if constexpr (kRunning) {
              scale[mt].next(s0, s1);
            } else if constexpr (kBf16) {
              const __nv_bfloat162 v0 = __float2bfloat162_rn(s0),
                                   v1 = __float2bfloat162_rn(s1);
              folded[mt][0] = reinterpret_cast<const uint32_t&>(v0);
              folded[mt][1] = reinterpret_cast<const uint32_t&>(v1);
            } else {
              const __half2 v0 = __float2half2_rn(s0), v1 = __float2half2_rn(s1);
              folded[mt][0] = reinterpret_cast<const uint32_t&>(v0);
              folded[mt][1] = reinterpret_cast<const uint32_t&>(v1);
            }
          }

          constexpr int kWordsPerGroup = 4 / C::kGroups;
          const int word0 = g * kWordsPerGroup + j * kJobWords;
#pragma unroll
          for (int i = 0; i < kJobWords; ++i) {
            if constexpr (kRunning) {
              decode_word<T>(mask_word(w[mt][word0 + i], scale[mt].kept),
                             frag + 8 * i);
            } else {
              decode_word_scaled<T>(w[mt][word0 + i], folded[mt], frag + 8 * i);
            }
          }

          if (kRunning && j == 0) {
            // This tile's previous job must be done. With one tile it is the
            // job just issued; the other warpgroups keep the tensor cores busy.
            if constexpr (C::kTiles == 1) {
#pragma unroll
              for (int i = 0; i < 8 * kJobWords; ++i) keep_until_here(frag[i]);
              wgmma_wait<0>();
            }
#pragma unroll
            for (int i = 0; i < C::kTokens / 2; ++i) {
              acc[mt][i] *= scale[mt].ratio[(i >> 1) & 1];
            }
          }
          wgmma_fence();
#pragma unroll
          for (int i = 0; i < 2 * kJobWords; ++i) {
            const int step = 2 * word0 + i;  // of 16, within the k-block
            const int half = step / 4;
            wgmma<C::kTokens, kBf16>(
                acc[mt], frag + 4 * i,
                desc + ((half * C::kHalfBytes + (step % 4) * 32) >> 4),
                step > 0 || kb > t.kb_begin);
          }
          wgmma_commit();
          // All jobs but this one are done: the other registers are free, and
          // after the first job so is the previous k-block's stage.
          wgmma_wait<1>();
        }
      }
    }
    ring.advance();
  }
  wgmma_wait<0>();
#pragma unroll
  for (int mt = 0; mt < C::kTiles; ++mt) {
#pragma unroll
    for (int i = 0; i < C::kTokens / 2; ++i) keep_until_here(acc[mt][i]);
  }
  if (t.kb_end > t.kb_begin) release(ring.stage);
  if constexpr (kRunning) {
#pragma unroll
    for (int mt = 0; mt < C::kTiles; ++mt) {
#pragma unroll
      for (int i = 0; i < C::kTokens / 2; ++i) {
        acc[mt][i] *= scale[mt].current[(i >> 1) & 1];
      }
    }
  }
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

template <typename T>
__device__ __forceinline__ float load_bias(const KernelParams& p, int row) {
  if (p.bias == nullptr || row >= p.N) return 0.f;
  return float(static_cast<const T*>(p.bias)[row]);
}

// Writes 64 rows x `tokens` (a multiple of 8, at most 64) of the output from a
// warpgroup's staging buffer [token][64 rows], whose 16-byte chunks are swizzled.
template <typename C>
__device__ __forceinline__ void store_staged(const KernelParams& p,
                                             uint32_t out, int row0, int token0,
                                             int tokens, int thread) {
  using T = typename C::T;
  const int chunk = thread % 8, row = row0 + chunk * 8;
  if (row >= p.N) return;
  const bool wide = row + 8 <= p.N && p.ldy % 8 == 0;
#pragma unroll 2
  for (int i = thread / 8; i < tokens; i += 16) {
    const int token = token0 + i;
    if (token >= p.M) break;
    const uint4 v = ld_shared_v4(out + i * 128 + ((chunk ^ (i & 7)) << 4));
    T* dst = static_cast<T*>(p.y) + token * p.ldy + row;
    if (wide) {
      *reinterpret_cast<uint4*>(dst) = v;
    } else {
      const uint32_t words[4] = {v.x, v.y, v.z, v.w};
      uint16_t* dst16 = reinterpret_cast<uint16_t*>(dst);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (row + e < p.N) dst16[e] = uint16_t(words[e / 2] >> (16 * (e & 1)));
      }
    }
  }
}

// Two neighbouring 8-token groups of this warp's 16 rows into the staging buffer.
// v: [group][row g: token pair, row g + 8: token pair].
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

template <typename C>
__device__ __forceinline__ void store_tile(const KernelParams& p, const Tile& t,
                                           uint32_t out, int warpgroup,
                                           int thread,
                                           float (&acc)[C::kTiles][C::kTokens / 2]) {
  using T = typename C::T;
  const int warp = thread / 32, lane = thread % 32;
#pragma unroll
  for (int mt = 0; mt < C::kTiles; ++mt) {
    const int row0 = (t.row_tile + warpgroup * C::kTiles + mt) * 64;
    const int row = row0 + warp * 16 + lane / 4;
    const float b0 = load_bias<T>(p, row), b1 = load_bias<T>(p, row + 8);
#pragma unroll
    for (int part = 0; part < C::kTokens / 64; ++part) {
      if (mt + part > 0) warpgroup_sync(warpgroup + 1);
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        float v[2][4];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          v[i / 4][i % 4] =
              acc[mt][(part * 8 + j) * 4 + i] + ((i & 2) ? b1 : b0);
        }
        stage_groups<T>(out, j, warp, lane, v);
      }
      warpgroup_sync(warpgroup + 1);
      store_staged<C>(p, out, row0, t.token + part * 64, 64, thread);
    }
  }
}

// --- Sums over the blocks that share a tile along K ----------------------------

// Every block takes kTokens / split of the tokens. Each thread sends its partial
// sums of a token group to that group's block, slot = sender; the block then adds
// the slots in order.
template <typename C>
__device__ __forceinline__ void send_partials(
    const KernelParams& p, uint32_t slots, int row_part, int k_part,
    int warpgroup, int thread, const float (&acc)[C::kTiles][C::kTokens / 2]) {
  constexpr int kTokenGroups = C::kTokens / 8;
  const int groups = 1 << p.groups_log2;
#pragma unroll
  for (int mt = 0; mt < C::kTiles; ++mt) {
#pragma unroll
    for (int j = 0; j < kTokenGroups; ++j) {
      const int owner = j >> p.groups_log2, local = j & (groups - 1);
      const int slot =
          ((k_part * groups + local) * C::kWarpgroups + warpgroup) * C::kTiles +
          mt;
      const uint32_t remote =
          map_to_rank(slots + (slot * 128 + thread) * 16,
                      owner * p.multicast + row_part);
      st_cluster_v4(remote, make_float4(acc[mt][4 * j], acc[mt][4 * j + 1],
                                        acc[mt][4 * j + 2], acc[mt][4 * j + 3]));
    }
  }
}

template <typename C>
__device__ __forceinline__ float4 add_partials(const KernelParams& p,
                                               uint32_t slots, int groups,
                                               int local, int warpgroup, int mt,
                                               int thread) {
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  for (int part = 0; part < p.split; ++part) {
    const int slot =
        ((part * groups + local) * C::kWarpgroups + warpgroup) * C::kTiles + mt;
    const uint4 v = ld_shared_v4(slots + (slot * 128 + thread) * 16);
    sum.x += __uint_as_float(v.x);
    sum.y += __uint_as_float(v.y);
    sum.z += __uint_as_float(v.z);
    sum.w += __uint_as_float(v.w);
  }
  return sum;
}

template <typename C>
__device__ __forceinline__ void store_split(const KernelParams& p,
                                            const Tile& t, uint32_t slots,
                                            uint32_t out, int k_part,
                                            int warpgroup, int thread) {
  using T = typename C::T;
  const int groups = 1 << p.groups_log2;
  const int warp = thread / 32, lane = thread % 32;
#pragma unroll
  for (int mt = 0; mt < C::kTiles; ++mt) {
    const int row0 = (t.row_tile + warpgroup * C::kTiles + mt) * 64;
    const int row = row0 + warp * 16 + lane / 4;
    const float b0 = load_bias<T>(p, row), b1 = load_bias<T>(p, row + 8);
    for (int first = 0; first < groups; first += 8) {
      const int count = min(8, groups - first);
      if (mt + first > 0) warpgroup_sync(warpgroup + 1);
      for (int j = 0; j < count; j += 2) {
        float v[2][4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          // An odd group out writes its neighbour's place with rubbish that
          // store_staged does not read.
          const int local = min(first + j + h, groups - 1);
          const float4 s =
              add_partials<C>(p, slots, groups, local, warpgroup, mt, thread);
          v[h][0] = s.x + b0;
          v[h][1] = s.y + b0;
          v[h][2] = s.z + b1;
          v[h][3] = s.w + b1;
        }
        stage_groups<T>(out, j, warp, lane, v);
      }
      warpgroup_sync(warpgroup + 1);
      store_staged<C>(p, out, row0,
                      t.token + (k_part * groups + first) * 8, count * 8,
                      thread);
    }
  }
}

// --- Kernel ---------------------------------------------------------------------

template <typename C>
__global__ void __launch_bounds__(C::kThreads, 1)
    prefill_kernel(const __grid_constant__ CUtensorMap x_map,
                   const __grid_constant__ CUtensorMap w_map,
                   const __grid_constant__ CUtensorMap s_map,
                   const __grid_constant__ KernelParams p) {
  extern __shared__ uint8_t smem_raw[];
  const uint32_t stages = (smem_addr(smem_raw) + 1023) & ~1023u;
  const uint32_t out = stages + C::kStages * C::kStageBytes;
  const uint32_t full = out + C::kOutBytes;
  const uint32_t empty = full + 8 * C::kStages;

  const int cluster_size = p.split * p.multicast;
  const int rank = cluster_size == 1 ? 0 : int(cluster_rank());
  const int row_part = rank % p.multicast, k_part = rank / p.multicast;
  const int cluster = blockIdx.x / cluster_size;
  const int group = threadIdx.x / 128;

  if (threadIdx.x == 0) {
    prefetch_map(&x_map);
    prefetch_map(&w_map);
    prefetch_map(&s_map);
    for (int i = 0; i < C::kStages; ++i) {
      mbar_init(full + 8 * i, 1);
      mbar_init(empty + 8 * i, 4 * C::kWarpgroups * p.multicast);
    }
    mbar_init_fence();
  }
  let_next_kernel_start();
  if (cluster_size > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }

  if (group == C::kWarpgroups) {
    registers_down<C::kProducerRegs>();
    if (threadIdx.x == C::kWarpgroups * 128) {
      produce<C>(p, &x_map, &w_map, &s_map, stages, full, empty, cluster,
                 row_part, k_part);
    }
    if (cluster_size > 1) {
      __syncwarp();
      if (p.split > 1) cluster_sync();
      cluster_sync();
    }
  } else {
    registers_up<C::kConsumerRegs>();
    const int thread = threadIdx.x % 128;
    const int warp = thread / 32, lane = thread % 32;
    Ring<C::kStages> ring;
    // Gives back the stage before `next` (the ring moves by one per k-block).
    auto release = [&](int next) {
      const int stage = next == 0 ? C::kStages - 1 : next - 1;
      if (p.multicast == 1) {
        if (lane == 0) mbar_arrive(empty + 8 * stage);
      } else if (lane < p.multicast) {
        mbar_arrive_remote(empty + 8 * stage, k_part * p.multicast + lane);
      }
    };
    const uint32_t my_out = out + group * 64 * 128;
    float acc[C::kTiles][C::kTokens / 2];
    RunningScale scale[C::kTiles];
    bool first = true;
    for (int i = cluster; i < p.num_tiles; i += p.num_clusters) {
      const Tile t = locate<C>(p, i, row_part, k_part);
      multiply<C>(p, t, stages, full, ring, group, warp, lane, acc, scale,
                  release);
      if (first) {
        first = false;
        wait_for_previous_kernel();
      }
      if (p.split == 1) {
        // The staging buffer may still be read for the tile before.
        if (i != cluster) warpgroup_sync(group + 1);
        store_tile<C>(p, t, my_out, group, thread, acc);
      } else {
        // One tile per cluster. No block of it reads a stage any more.
        cluster_sync();
        send_partials<C>(p, stages, row_part, k_part, group, thread, acc);
        cluster_sync();
        store_split<C>(p, t, stages, my_out, k_part, group, thread);
      }
    }
    // Nobody leaves while a neighbour may still arrive on its barriers.
    if (p.split == 1 && cluster_size > 1) cluster_sync();
  }
}

}  // namespace vllm::ternary::sm90
