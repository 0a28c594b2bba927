// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// y^T = W x^T on Hopper's 8-bit wgmma for tokens that were quantized to int8;
// docs/kernels_w2a8.md tells the story. The plan is that of the 16-bit kernel
// (sm90_prefill_kernel.cuh): one warp feeds the copy engine, warpgroups decode
// codes into the A operand in registers and share the tokens as B.
//
// A word of the weight holds 16 codes so that `code << s & 0xC0` in each byte
// is one register of A, for k in the order in which quantize_tokens stores the
// tokens. Two instructions turn the codes 0, 1, 2 of a word into the two's
// complement of -1, 0, 1 first; at the top of a byte these read as -64, 0, 64.
#pragma once

#include "sm90_prefill_ptx.cuh"
#include "sm90_prefill_wgmma.cuh"
#include "sm90_s8_config.cuh"
#include "sm90_s8_epilogue.cuh"
#include "sm90_s8_wgmma.cuh"

namespace vllm::ternary::s8 {

template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance(int by) {
    stage += by;
    if (stage >= kStages) {
      stage -= kStages;
      phase ^= 1;
    }
  }
};

struct Maps {
  const CUtensorMap *x, *w, *s, *y;
};

// Shared-memory addresses and this block's place in its cluster.
struct Place {
  uint32_t stages, out, meet, token_scales, full, empty;
  int cluster, k_part, row_groups, num_tiles;
};

// --- Producer ---------------------------------------------------------------

template <typename C>
__device__ __forceinline__ void produce(const KernelParams& p, const Maps& maps,
                                        const Place& at) {
  auto load_weight = [&](const Tile& t, int s, int stage) {
    const uint32_t base = at.stages + stage * C::kStageBytes;
    const uint32_t bar = at.full + 8 * stage;
    mbar_expect_tx(bar, p.stage_tx_bytes);
    tma_load(base + C::kCodesAt, maps.w, s * 256, t.row / 16, bar);
    if constexpr (C::kMode == ScaleMode::kBlock) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        // Past K there is no block; its scale does not matter, only its bytes.
        const int kb = min(2 * s + h, p.k_blocks - 1);
        tma_load(base + C::kScalesAt + h * C::kScaleRow, maps.s, t.row,
                 kb / p.blocks_per_scale, bar);
      }
    }
  };
  auto load_tokens = [&](const Tile& t, int s, int stage) {
    const uint32_t base = at.stages + stage * C::kStageBytes;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      tma_load(base + h * C::kHalfBytes, maps.x, s * 256 + h * 128,
               t.part * p.M + t.token, at.full + 8 * stage);
    }
  };

  Ring<C::kStages> ring;
  bool first = true;
#pragma unroll 1
  for (int i = at.cluster; i < at.num_tiles; i += p.num_clusters) {
    const Tile t = locate<C>(p, at.row_groups, i, at.k_part);
    int s = t.begin;
    if (first) {
      // Weights do not depend on the previous kernel: fetch them already.
      first = false;
      const int ahead = min(C::kStages, t.end - t.begin);
#pragma unroll 1
      for (int j = 0; j < ahead; ++j) load_weight(t, s + j, j);
      wait_for_previous_kernel();
#pragma unroll 1
      for (int j = 0; j < ahead; ++j, ++s) {
        load_tokens(t, s, j);
        ring.advance(1);
      }
    }
#pragma unroll 1
    for (; s < t.end; ++s) {
      mbar_wait(at.empty + 8 * ring.stage, ring.phase ^ 1);
      load_weight(t, s, ring.stage);
      load_tokens(t, s, ring.stage);
      ring.advance(1);
    }
  }
}

// --- Consumers --------------------------------------------------------------

// The four k32 steps of a lane's codes of 128 k, as -64, 0, 64.
__device__ __forceinline__ void decode(const uint4& codes, uint32_t (&a)[16]) {
  const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    uint32_t t;  // ~(w | (w << 1 & 0xAAAAAAAA)): two bits of -1, 0, 1
    asm("lop3.b32 %0, %1, %2, 0xAAAAAAAA, 0x07;"
        : "=r"(t)
        : "r"(words[j]), "r"(words[j] << 1));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[4 * j + i] = (t << (6 - 2 * i)) & 0xC0C0C0C0u;
    }
  }
}

// Multiplies 128 k of one row tile; `add` says whether to keep what d holds.
template <int kTokens>
__device__ __forceinline__ void multiply_half(int (&d)[kTokens / 2],
                                              const uint32_t (&a)[16],
                                              uint64_t desc, bool add) {
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    wgmma<kTokens>(d, a + 4 * i, desc + ((i * 32) >> 4), i > 0 || add);
  }
  wgmma_commit();
}

// A warp's place among the consumers; all but `lane` are the same in a warp.
struct Consumer {
  int set, warpgroup, warp, lane;
};

template <typename C>
__device__ __forceinline__ uint32_t code_offset(const Consumer& me) {
  return C::kCodesAt + (me.warpgroup * C::kTiles * 4 + me.warp) * 1024 +
         me.lane * 16;
}

// Sums `count` stages of a tile, all of K in int32. Returns with all wgmma
// finished and all stages released.
template <typename C, typename Release>
__device__ __forceinline__ void multiply_rows(
    const Place& at, const Consumer& me, int count, Ring<C::kStages>& ring,
    int (&acc)[C::kTiles][C::kTokens / 2], Release release) {
  uint32_t a[2][16];
  int previous = 0;
#pragma unroll 1
  for (int n = 0; n < count; ++n) {
    const uint32_t base = at.stages + ring.stage * C::kStageBytes;
    const uint64_t desc = smem_desc(base);
    mbar_wait(at.full + 8 * ring.stage, ring.phase);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint4 codes[C::kTiles];
#pragma unroll
      for (int mt = 0; mt < C::kTiles; ++mt) {
        codes[mt] =
            ld_shared_v4(base + code_offset<C>(me) + mt * 4096 + h * 512);
      }
#pragma unroll
      for (int mt = 0; mt < C::kTiles; ++mt) {
        const int job = h * C::kTiles + mt;
        decode(codes[mt], a[job % 2]);
        multiply_half<C::kTokens>(acc[mt], a[job % 2],
                                  desc + ((h * C::kHalfBytes) >> 4),
                                  h > 0 || n > 0);
        // The registers that the next job decodes into are free again; at the
        // first job, so is the previous stage.
        wgmma_wait<1>();
        if (job == 0 && n > 0) release(previous);
      }
    }
    previous = ring.stage;
    ring.advance(C::kSets);
  }
  wgmma_wait<0>();
#pragma unroll
  for (int mt = 0; mt < C::kTiles; ++mt) {
#pragma unroll
    for (int i = 0; i < C::kTokens / 2; ++i) keep_until_here(acc[mt][i]);
  }
  release(previous);
}

// The scales of rows g and g + 8 of this warp from a stage.
__device__ __forceinline__ void load_scales(DType dtype, uint32_t base, int row,
                                            float (&scale)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int n = row + 8 * i;
    if (dtype == DType::kFloat) {
      scale[i] = ld_shared_f32(base + 4 * n) * kUnit;
    } else {
      const uint16_t bits = uint16_t(ld_shared_u16(base + 2 * n));
      scale[i] = (dtype == DType::kHalf
                      ? __half2float(__ushort_as_half(bits))
                      : __bfloat162float(__ushort_as_bfloat16(bits))) *
                 kUnit;
    }
  }
}

// Named barriers: 1.. of a warpgroup, these between neighbours and between
// sets.
constexpr int kFirstTurn = 4, kSumsLeft = 8, kSumsTaken = 12;

// pair_arrive without a branch, which ptxas would not follow.
__device__ __forceinline__ void pair_arrive_if(bool yes, int id) {
  asm volatile(
      "{\n.reg .pred yes;\nsetp.ne.b32 yes, %0, 0;\n"
      "@yes bar.arrive %1, 256;\n}" ::"r"(int(yes)),
      "r"(id)
      : "memory");
}

template <int kCount>
__device__ __forceinline__ void add_scaled(float (&sum)[kCount],
                                           const int (&acc)[kCount],
                                           const float (&scale)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    sum[i] = fmaf(__int2float_rn(acc[i]), scale[i / 2 % 2], sum[i]);
  }
}

// The same with a scale per 128 k: int32 sums of 128 k, scaled into the float32
// sum when they are complete. Other warpgroups keep the tensor cores busy
// meanwhile. (With two int32 sums in turn ptxas waits after every single wgmma:
// its note C7514.)
template <typename C, typename Release>
__device__ __forceinline__ void multiply_blocks(const KernelParams& p,
                                                const Place& at,
                                                const Consumer& me, int count,
                                                Ring<C::kStages>& ring,
                                                float (&sum)[1][C::kTokens / 2],
                                                bool first, Release release) {
  uint32_t a[2][16];
  int acc[C::kTokens / 2];
  const int scale_row = me.warpgroup * 64 + me.warp * 16 + me.lane / 4;
#pragma unroll
  for (int i = 0; i < C::kTokens / 2; ++i) sum[0][i] = 0.0f;
  // Warpgroups start one after another and stay so: together they would share
  // the tensor cores until all finish, and leave them idle while all scale.
  if (first && me.warpgroup > 0) pair_wait(kFirstTurn + me.warpgroup);
  first = first && me.warpgroup + 1 < C::kWarpgroups;
#pragma unroll 1
  for (int n = 0; n < count; ++n) {
    const uint32_t base = at.stages + ring.stage * C::kStageBytes;
    const uint64_t desc = smem_desc(base);
    mbar_wait(at.full + 8 * ring.stage, ring.phase);
    float scale[2][2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      load_scales(p.scale_dtype, base + C::kScalesAt + h * C::kScaleRow,
                  scale_row, scale[h]);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      decode(ld_shared_v4(base + code_offset<C>(me) + h * 512), a[h]);
      multiply_half<C::kTokens>(acc, a[h], desc + ((h * C::kHalfBytes) >> 4),
                                false);
      wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < C::kTokens / 2; ++i) keep_until_here(acc[i]);
      if (h == 0)
        pair_arrive_if(first && n == 0, kFirstTurn + me.warpgroup + 1);
      if (h == 1) release(ring.stage);
      add_scaled(sum[0], acc, scale[h]);
    }
    ring.advance(1);
  }
}

template <typename C>
__device__ __forceinline__ void consume(const KernelParams& p, const Maps& maps,
                                        const Place& at, const Consumer& me) {
  const int thread = threadIdx.x % 128;
  const uint32_t out = at.out + me.warpgroup * C::kOutBuffers * 8192;
  const uint32_t token_scales = at.token_scales + me.warpgroup * C::kTokens * 4;
  auto release = [&](int stage) {
    if (me.lane == 0) mbar_arrive(at.empty + 8 * stage);
  };

  Ring<C::kStages> ring;
  ring.advance(me.set);
  Sum<C> acc[C::kTiles][C::kTokens / 2];
  int earlier = 0;  // stages of earlier tiles
  if (me.set == 0) wait_for_previous_kernel();
#pragma unroll 1
  for (int i = at.cluster; i < at.num_tiles; i += p.num_clusters) {
    const Tile t = locate<C>(p, at.row_groups, i, at.k_part);
    int count = t.end - t.begin;
    Terms<C> terms;
    if (me.set == 0) terms = load_terms<C>(p, t, me.warpgroup, thread);
    if constexpr (C::kSets == 2) {
      // Stages alternate between the sets across tiles as well.
      const int skip = (earlier ^ me.set) & 1;
      earlier += count;
      count = (count - skip + 1) / 2;
    }
    if constexpr (C::kMode == ScaleMode::kRow) {
      multiply_rows<C>(at, me, count, ring, acc, release);
    } else {
      multiply_blocks<C>(p, at, me, count, ring, acc, i == at.cluster, release);
    }
    if constexpr (C::kSets == 2) {
      if (me.set == 1) {
        if (i != at.cluster) pair_wait(kSumsTaken + me.warpgroup);
        leave_sums<C>(at.meet, me.warpgroup, thread, acc);
        pair_arrive(kSumsLeft + me.warpgroup);
        continue;
      }
      pair_wait(kSumsLeft + me.warpgroup);
      add_sums<C>(at.meet, me.warpgroup, thread, acc);
      if (i + p.num_clusters < at.num_tiles) {
        pair_arrive(kSumsTaken + me.warpgroup);
      }
    }
    if (p.split == 1) {
      store_tile<C>(p, maps.y, t, out, token_scales, me.warpgroup, thread,
                    terms, acc);
    } else {
      // One tile per cluster. No block of it reads a stage any more.
      cluster_sync();
      send_partials<C>(p, at.stages, at.k_part, me.warpgroup, thread, acc);
      cluster_sync();
      store_split<C>(p, t, at.stages, out, token_scales, at.k_part,
                     me.warpgroup, thread, terms);
    }
  }
  // Nobody leaves while the copy engine reads its shared memory.
  if (me.set == 0 && thread == 0) bulk_wait_read<0>();
}

// --- Kernel -----------------------------------------------------------------

template <typename C>
__global__ void __launch_bounds__(C::kThreads, 1)
    s8_kernel(const __grid_constant__ CUtensorMap x_map,
              const __grid_constant__ CUtensorMap w_map,
              const __grid_constant__ CUtensorMap s_map,
              const __grid_constant__ CUtensorMap y_map,
              const __grid_constant__ KernelParams p) {
  extern __shared__ uint8_t smem_raw[];
  const Maps maps{&x_map, &w_map, &s_map, &y_map};
  Place at;
  at.stages = (smem_addr(smem_raw) + 1023) & ~1023u;
  at.out = at.stages + C::kStages * C::kStageBytes;
  at.meet = at.out + C::kOutBytes;
  at.token_scales = at.meet + C::kMeetBytes;
  at.full = at.token_scales + C::kTokenScaleBytes;
  at.empty = at.full + 8 * C::kStages;
  at.k_part = p.split == 1 ? 0 : int(cluster_rank());
  at.cluster = blockIdx.x / p.split;
  at.row_groups = count_row_groups<C>(p);
  at.num_tiles = at.row_groups * p.token_tiles;
  // Shuffled so that the compiler knows it to be the same in the whole warp.
  const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);

  if (threadIdx.x == 0) {
    for (int i = 0; i < C::kStages; ++i) {
      mbar_init(at.full + 8 * i, 1);
      mbar_init(at.empty + 8 * i, 4 * C::kWarpgroups);
    }
    mbar_init_fence();
  } else if (threadIdx.x == C::kConsumers * 128) {
    prefetch_map(maps.w);
    prefetch_map(maps.x);
    if constexpr (C::kMode == ScaleMode::kBlock) prefetch_map(maps.s);
  }
  let_next_kernel_start();
  // Later cluster barriers count the threads that have not left: the producer
  // and the second set leave when their work is done.
  if (p.split > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }

  if (warp >= 4 * C::kConsumers) {
    registers_down<C::kProducerRegs>();
    if (threadIdx.x == C::kConsumers * 128) produce<C>(p, maps, at);
  } else {
    registers_up<C::kConsumerRegs>();
    const int warpgroup = warp / 4;
    consume<C>(p, maps, at,
               {warpgroup / C::kWarpgroups, warpgroup % C::kWarpgroups,
                warp % 4, int(threadIdx.x % 32)});
  }
}

}  // namespace vllm::ternary::s8
