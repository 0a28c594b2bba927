// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// y^T = W x^T on Hopper's wgmma for many tokens. docs/kernels_prefill.md tells
// the story; in short:
//
//   * Two warps feed the copy engine: per k-block of 128 one brings the tokens'
//     tile (K-major, swizzled), one the packed weights and the scales of the
//     block's rows into a ring of shared-memory stages.
//   * kWarpgroups warpgroups own kTiles tiles of 64 weight rows each. They
//     decode codes into the A operand in registers while earlier wgmma run, and
//     all read the same B (tokens) from shared memory.
//   * With kSets = 2, each warpgroup has a twin for the same rows; the two take
//     k-blocks in turn, and at the end each finishes one half of the tokens.
//   * `split` blocks of a cluster share one output tile along K and add their
//     parts through distributed shared memory in a fixed order. `multicast`
//     blocks take different rows and share the loads of the tokens' tile.
#pragma once

#include "sm90_prefill_config.cuh"
#include "sm90_prefill_decode.cuh"
#include "sm90_prefill_epilogue.cuh"
#include "sm90_prefill_ptx.cuh"
#include "sm90_prefill_wgmma.cuh"

namespace vllm::ternary::sm90 {

template <int kStages, int kStep = 1>
struct Ring {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    stage += kStep;
    if (kStep == 1 ? stage == kStages : stage >= kStages) {
      stage = kStep == 1 ? 0 : stage - kStages;
      phase ^= 1;
    }
  }
};

struct Maps {
  const CUtensorMap *x, *w, *s, *y;
};

// Shared-memory addresses and this block's place in its cluster.
struct Place {
  uint32_t stages, out, full, empty;
  int cluster, row_part, k_part;
};

// --- Producers
// ----------------------------------------------------------------

// Calls `load` for every k-block of this block's tiles once its stage is free.
template <typename C, typename Load>
__device__ __forceinline__ void produce(const KernelParams& p, const Place& at,
                                        Load load) {
  Ring<C::kStages> ring;
#pragma unroll 1
  for (int i = at.cluster; i < p.num_tiles; i += p.num_clusters) {
    const Tile t = locate<C>(p, i, at.row_part, at.k_part);
#pragma unroll 1
    for (int kb = t.kb_begin; kb < t.kb_end; ++kb) {
      mbar_wait_cluster(at.empty + 8 * ring.stage, ring.phase ^ 1);
      load(t, kb, ring.stage);
      ring.advance();
    }
  }
  // Nobody leaves while a neighbour may still arrive on its barriers.
  if (p.multicast > 1) {
#pragma unroll 1
    for (int s = 0; s < C::kStages; ++s) {
      mbar_wait_cluster(at.empty + 8 * ring.stage, ring.phase ^ 1);
      ring.advance();
    }
  }
}

// Weights and scales do not depend on the previous kernel.
template <typename C>
__device__ __forceinline__ void produce_weights(const KernelParams& p,
                                                const Maps& maps,
                                                const Place& at) {
  produce<C>(p, at, [&](const Tile& t, int kb, int stage) {
    const uint32_t base = at.stages + stage * C::kStageBytes;
    const uint32_t bar = at.full + 8 * stage;
    mbar_expect_tx(bar, p.weight_tx_bytes);
    tma_load(base + C::kCodesAt, maps.w, kb * 128, t.row_tile * 4, bar);
    if constexpr (C::kMode == ScaleMode::kBlock) {
      const int block = C::kGroups > 1            ? kb * p.scales_per_block
                        : p.blocks_per_scale == 1 ? kb
                                                  : kb / p.blocks_per_scale;
      tma_load(base + C::kScalesAt, maps.s, t.row_tile * 64, block, bar);
    }
  });
}

// Tokens do. Each block brings its part of them to all that share its loads.
template <typename C>
__device__ __forceinline__ void produce_tokens(const KernelParams& p,
                                               const Maps& maps,
                                               const Place& at) {
  const int part = C::kTokens >> p.multicast_log2;
  const uint16_t mask =
      uint16_t(((1u << p.multicast) - 1) << (at.k_part * p.multicast));
  if (p.chain != Chain::kSecond) wait_for_previous_kernel();
  if (p.chain == Chain::kFirst) let_next_kernel_start();
  produce<C>(p, at, [&](const Tile& t, int kb, int stage) {
    const uint32_t dst =
        at.stages + stage * C::kStageBytes + at.row_part * part * 128;
    const uint32_t bar = at.full + 8 * stage;
    const int token = t.token + at.row_part * part;
    mbar_expect_tx(bar, 2 * C::kHalfBytes);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (p.multicast == 1) {
        tma_load(dst + h * C::kHalfBytes, maps.x, kb * 128 + h * 64, token,
                 bar);
      } else {
        tma_load_multicast(dst + h * C::kHalfBytes, maps.x, kb * 128 + h * 64,
                           token, bar, mask);
      }
    }
  });
}

// --- Consumers
// ------------------------------------------------------------------

// The scales of rows g and g + 8, as the two halves of a register of type T.
template <typename T>
__device__ __forceinline__ uint32_t load_scale_pair(DType dtype, uint32_t base,
                                                    int row) {
  if constexpr (std::is_same_v<T, __half>) {
    // The host lets fp16 activations have fp16 scales only under kBlock.
    return ld_shared_u16(base + 2 * row) |
           (ld_shared_u16(base + 2 * row + 16) << 16);
  } else if (dtype == DType::kFloat) {
    return pack2<T>(ld_shared_f32(base + 4 * row),
                    ld_shared_f32(base + 4 * row + 32));
  } else {
    const uint32_t s0 = ld_shared_u16(base + 2 * row);
    const uint32_t s1 = ld_shared_u16(base + 2 * row + 16);
    if (dtype == DType::kBFloat16) return s0 | (s1 << 16);
    return pack2<T>(__half2float(__ushort_as_half(uint16_t(s0))),
                    __half2float(__ushort_as_half(uint16_t(s1))));
  }
}

// Named barriers: 1.. of a warpgroup, these between neighbours, and one of all.
constexpr int kFirstPairBarrier = 8;
constexpr int kSetupBarrier = 15;

// A warp's place among the consumers; all but `lane` are the same in a warp.
struct Consumer {
  int warpgroup, set, warp, lane;
};

// Accumulates one tile. Returns with all wgmma finished and all stages
// released.
template <typename C, typename Release>
__device__ __forceinline__ void multiply(
    const KernelParams& p, const Tile& t, const Place& at, const Consumer& me,
    Ring<C::kStages, C::kSets>& ring, float (&acc)[C::kTiles][C::kTokens / 2],
    int signal_at, Release release) {
  using T = typename C::T;
  constexpr bool kBf16 = std::is_same_v<T, __nv_bfloat16>;
  constexpr bool kScaled = C::kMode == ScaleMode::kBlock;
  constexpr int kJobs = 4 / C::kJobWords;  // per tile and k-block
  uint32_t a[C::kBuffers][8 * C::kJobWords];

  const uint32_t code_offset = C::kCodesAt +
                               (me.warpgroup * C::kTiles * 4 + me.warp) * 512 +
                               me.lane * 16;
  const int scale_row =
      me.warpgroup * C::kTiles * 64 + me.warp * 16 + me.lane / 4;

#pragma unroll 1
  for (int kb = t.kb_begin + me.set; kb < t.kb_end; kb += C::kSets) {
    const uint32_t base = at.stages + ring.stage * C::kStageBytes;
    const uint64_t desc = smem_desc(base);
    const bool add = kb > t.kb_begin + me.set;
    mbar_wait(at.full + 8 * ring.stage, ring.phase);

    uint32_t w[C::kTiles][4];
    RowScales<T> scale[C::kTiles];
#pragma unroll
    for (int mt = 0; mt < C::kTiles; ++mt) {
      const uint4 v = ld_shared_v4(base + code_offset + mt * 4 * 512);
      w[mt][0] = v.x;
      w[mt][1] = v.y;
      w[mt][2] = v.z;
      w[mt][3] = v.w;
    }

#pragma unroll
    for (int j = 0; j < kJobs; ++j) {
#pragma unroll
      for (int mt = 0; mt < C::kTiles; ++mt) {
        const int job = j * C::kTiles + mt;
        const int word = j * C::kJobWords;
        uint32_t (&frag)[8 * C::kJobWords] = a[job % C::kBuffers];
#pragma unroll
        for (int i = 0; i < C::kJobWords; ++i) {
          if constexpr (kScaled) {
            if ((word + i) % (4 / C::kGroups) == 0) {
              const int group =
                  C::kGroups == 1
                      ? 0
                      : (word + i) * p.scales_per_block / C::kGroups;
              scale[mt].set(load_scale_pair<T>(
                  p.scale_dtype, base + C::kScalesAt,
                  scale_row + (group * C::kRowTiles + mt) * 64));
            }
            scale[mt].decode(w[mt][word + i], frag + 8 * i);
          } else {
            decode_word<T>(w[mt][word + i], frag + 8 * i);
          }
        }
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 2 * C::kJobWords; ++i) {
          const int step = 2 * word + i;  // of 8 in the k-block, 16 k each
          wgmma<C::kTokens, kBf16>(
              acc[mt], frag + 4 * i,
              desc + (((step / 4) * C::kHalfBytes + (step % 4) * 32) >> 4),
              step > 0 || add);
        }
        wgmma_commit();
        // The buffer that the next job decodes into is free again. At this job
        // so is the previous k-block's stage.
        wgmma_wait<C::kPending>();
        if (job == 2 * C::kPending - 2 && add) release(ring.stage);
      }
    }
    ring.advance();
    if (kb == signal_at) pair_arrive(kFirstPairBarrier + me.warpgroup);
  }
  wgmma_wait<0>();
#pragma unroll
  for (int mt = 0; mt < C::kTiles; ++mt) {
#pragma unroll
    for (int i = 0; i < C::kTokens / 2; ++i) keep_until_here(acc[mt][i]);
  }
  release(ring.stage);
}

template <typename C>
__device__ __forceinline__ void consume(const KernelParams& p, const Maps& maps,
                                        const Place& at, const Consumer& me) {
  const int thread = threadIdx.x % 128;
  const int team = me.set * C::kWarpgroups + me.warpgroup;
  const uint32_t out = at.out + team * C::kOutBuffers * 8192;
  Ring<C::kStages, C::kSets> ring;
  ring.stage = me.set;
  // Gives back the stage before `next` (the ring moves by one per k-block).
  auto release = [&](int next) {
    const int stage =
        next == me.set ? C::kStages - C::kSets + me.set : next - C::kSets;
    if (p.multicast == 1) {
      if (me.lane == 0) mbar_arrive(at.empty + 8 * stage);
    } else if (me.lane < p.multicast) {
      mbar_arrive_remote(at.empty + 8 * stage,
                         at.k_part * p.multicast + me.lane);
    }
  };

  float acc[C::kTiles][C::kTokens / 2];
  bool first = true;
#pragma unroll 1
  for (int i = at.cluster; i < p.num_tiles; i += p.num_clusters) {
    const Tile t = locate<C>(p, i, at.row_part, at.k_part);
    // Warpgroups start one after another, so that later on one writes its
    // output while its neighbour multiplies.
    int signal_at = -1;
    if (first && p.stagger > 0) {
      if (me.warpgroup > 0) pair_wait(kFirstPairBarrier + me.warpgroup - 1);
      if (me.warpgroup + 1 < C::kWarpgroups) {
        signal_at = t.kb_begin + p.stagger - 1;
      }
    }
    TERNARY_TRACE(2);
    multiply<C>(p, t, at, me, ring, acc, signal_at, release);
    TERNARY_TRACE(3);
    if (first && p.chain != Chain::kSecond) wait_for_previous_kernel();
    first = false;
    TERNARY_TRACE(4);
    // What this warpgroup finishes: all tokens, or its set's half of them.
    constexpr int kMine = C::kTokens / C::kSets;
    float mine[C::kTiles][kMine / 2];
    const int first_token = me.set * kMine;
    meet_sets<C>(at.stages, me.set, thread, acc, mine);
    if (p.split == 1) {
      store_tile<C>(p, maps.y, t, out, me.warpgroup, team, thread, first_token,
                    mine);
    } else {
      // One tile per cluster. No block of it reads a stage any more.
      cluster_sync();
      TERNARY_TRACE(5);
      send_partials<C>(p, at.stages, at.row_part, at.k_part, me.warpgroup,
                       thread, first_token / 8, mine);
      cluster_sync();
      TERNARY_TRACE(6);
      store_split<C>(p, t, at.stages, out, at.k_part, me.warpgroup, team,
                     me.set, thread);
    }
    if constexpr (C::kSets > 1) break;  // a block has one tile
  }
  // Nobody leaves while the copy engine reads its shared memory.
  if (thread == 0) bulk_wait_read<0>();
  // The end of the second of two launches means the end of both.
  if (p.chain == Chain::kSecond) wait_for_previous_kernel();
  TERNARY_TRACE(7);
}

// --- Kernel
// ---------------------------------------------------------------------

template <typename C>
__global__ void __launch_bounds__(C::kThreads, 1)
    prefill_kernel(const __grid_constant__ CUtensorMap x_map,
                   const __grid_constant__ CUtensorMap w_map,
                   const __grid_constant__ CUtensorMap s_map,
                   const __grid_constant__ CUtensorMap y_map,
                   const __grid_constant__ KernelParams p) {
  extern __shared__ uint8_t smem_raw[];
  const Maps maps{&x_map, &w_map, &s_map, &y_map};
  const int cluster_log2 = p.split_log2 + p.multicast_log2;
  const int rank = cluster_log2 == 0 ? 0 : int(cluster_rank());
  Place at;
  at.stages = (smem_addr(smem_raw) + 1023) & ~1023u;
  at.out = at.stages + C::kOutAt;
  at.full = at.stages + C::kStages * C::kStageBytes + C::kOutBytes;
  at.empty = at.full + 8 * C::kStages;
  at.row_part = rank & (p.multicast - 1);
  at.k_part = rank >> p.multicast_log2;
  at.cluster = blockIdx.x >> cluster_log2;
  // Shuffled so that the compiler knows it to be the same in the whole warp.
  const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);

  if (warp == C::kConsumers / 32) {
    const int i = threadIdx.x - C::kConsumers;
    if (i < C::kStages) {
      mbar_init(at.full + 8 * i, 2);
      mbar_init(at.empty + 8 * i, 4 * C::kWarpgroups * p.multicast);
      mbar_init_fence();
    } else if (i == 31) {
      prefetch_map(maps.w);
      if constexpr (C::kMode == ScaleMode::kBlock) prefetch_map(maps.s);
    }
    __syncwarp();
  } else if (threadIdx.x == C::kConsumers + 32) {
    prefetch_map(maps.x);
    prefetch_map(maps.y);
  }
  TERNARY_TRACE(0);
  if (p.chain != Chain::kFirst) let_next_kernel_start();
  if (p.multicast > 1) {  // neighbours arrive on each other's barriers
    cluster_meet();
  } else if (warp == C::kConsumers / 32) {
    // Who set up the barriers goes on at once.
    named_arrive<C::kThreads>(kSetupBarrier);
  } else {
    named_sync<C::kThreads>(kSetupBarrier);
  }

  if (warp >= C::kConsumers / 32) {
    registers_down<C::kProducerRegs>();
    if (threadIdx.x == C::kConsumers) produce_weights<C>(p, maps, at);
    if (threadIdx.x == C::kConsumers + 32) produce_tokens<C>(p, maps, at);
    if (p.split > 1) {
      __syncwarp();
      cluster_sync();
      cluster_sync();
    }
  } else {
    registers_up<C::kConsumerRegs>();
    TERNARY_TRACE(1);
    const int team = warp / 4;
    const int set = C::kSets == 1 ? 0 : team / C::kWarpgroups;
    consume<C>(
        p, maps, at,
        {team - set * C::kWarpgroups, set, warp % 4, int(threadIdx.x % 32)});
  }
}

}  // namespace vllm::ternary::sm90
