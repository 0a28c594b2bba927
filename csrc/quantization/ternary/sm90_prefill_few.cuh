// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// y^T = W x^T for up to 64 tokens, on wgmma with tiles of 8, 16, 32 or 64
// tokens. docs/kernels_prefill.md tells the story; in short:
//
//   * Two warps feed the copy engine: codes and scales, and tokens, in stages
//   of
//     one or two k-blocks of 128.
//   * kRows x kSets warpgroups multiply: kRows tiles of 64 rows share the
//     tokens, kSets sets take stages in turn. With few tokens the tensor
//     cores are idle most of the time, and many warps hide each other's waits.
//   * A block's sum is multiplied by its scale in float32: exact for every type
//     of scale.
//   * Sums of the sets meet in shared memory, those of the `split` blocks of a
//     cluster in distributed shared memory, both in a fixed order.
#pragma once

#include "sm90_prefill_epilogue.cuh"
#include "sm90_prefill_few_multiply.cuh"

namespace vllm::ternary::sm90 {

// Calls load(tile, k-block, stage) for every stage in turn, as they become
// free. Two warps do: one brings codes and scales, which do not depend on the
// kernel ahead in the stream, and one the tokens, which do.
template <typename C, typename Load>
__device__ __forceinline__ void few_produce(const FewParams& p,
                                            const FewPlace& at, Load load) {
  int stage = 0;
  uint32_t phase = 1;
#pragma unroll 1
  for (int g = at.cluster; g < p.num_tiles; g += p.num_clusters) {
#pragma unroll 1
    for (int kb = at.k_begin; kb < at.k_end; ++kb) {
      mbar_wait(at.empty + 8 * stage, phase);
      load(g, kb, stage);
      if (++stage == C::kStages) {
        stage = 0;
        phase ^= 1;
      }
    }
  }
}

template <typename C>
__device__ __forceinline__ void few_produce_weights(const FewParams& p,
                                                    const FewMaps& maps,
                                                    const FewPlace& at) {
  few_produce<C>(p, at, [&](int g, int kb, int stage) {
    const uint32_t base = at.stages + stage * C::kStageBytes;
    const uint32_t bar = at.full + 8 * stage;
    mbar_expect_tx(bar, p.stage_tx_bytes);
    const int row_tile = g / p.token_tiles * C::kRows;
    kb *= C::kPair;
    tma_load(base + C::kCodesAt, maps.w, kb * 128, row_tile * 4, bar);
    const int block = p.blocks_per_scale == 1 ? kb : kb / p.blocks_per_scale;
    tma_load(base + C::kScalesAt, maps.s, row_tile * 64, block, bar);
  });
}

template <typename C>
__device__ __forceinline__ void few_produce_tokens(const FewParams& p,
                                                   const FewMaps& maps,
                                                   const FewPlace& at) {
  wait_for_previous_kernel();
  few_produce<C>(p, at, [&](int g, int kb, int stage) {
    const int token = g % p.token_tiles * C::kTokens;
    const uint32_t base = at.stages + stage * C::kStageBytes;
    const uint32_t bar = at.full + 8 * stage;
#pragma unroll
    for (int h = 0; h < 2 * C::kPair; ++h) {
      tma_load(base + h * C::kHalfBytes, maps.x, (kb * C::kPair * 2 + h) * 64,
               token, bar);
    }
  });
}

// Four rows of one token: bias, rounding, store.
template <typename C>
__device__ __forceinline__ void few_store(const FewParams& p, int token,
                                          int row, float4 v) {
  using T = typename C::T;
  if (token >= p.M || row >= p.N) return;
  const float in[4] = {v.x, v.y, v.z, v.w};
  float out[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out[i] = in[i];
    if (p.bias != nullptr && row + i < p.N) {
      out[i] += float(static_cast<const T*>(p.bias)[row + i]);
    }
  }
  T* dst = static_cast<T*>(p.y) + int64_t(token) * p.ldy + row;
  if (p.ldy % 4 == 0) {
    *reinterpret_cast<uint2*>(dst) =
        make_uint2(pack2<T>(out[0], out[1]), pack2<T>(out[2], out[3]));
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (row + i < p.N) dst[i] = T(out[i]);
    }
  }
}

template <typename C>
__device__ __forceinline__ void few_consume(const FewParams& p,
                                            const FewPlace& at,
                                            const FewConsumer& me) {
  constexpr int kVectors = C::kRows * C::kTokens * 16;  // of four rows
  const int k_count = at.k_end - at.k_begin;
  const int first_token = at.rank * p.share;  // that this block finishes
  const int tokens = max(0, min(p.share, C::kTokens - first_token));
  unsigned pos = 0;
  int pass = 0;
#pragma unroll 1
  for (int g = at.cluster; g < p.num_tiles; g += p.num_clusters, ++pass) {
    float sum[C::kTokens / 2] = {};
    if (p.split > 1 && me.thread == 0) {
      mbar_expect_tx(at.sums_in, p.split * C::kRows * tokens * 256);
    }
    if constexpr (C::kSync) {
      if (p.scale_dtype == DType::kHalf) {
        few_multiply_sync<C, true>(p, at, me, at.k_begin + me.set, pos + me.set,
                                   sum);
      } else {
        few_multiply_sync<C, false>(p, at, me, at.k_begin + me.set,
                                    pos + me.set, sum);
      }
    } else if (p.scale_dtype == DType::kHalf) {
      few_multiply<C, true>(p, at, me, at.k_begin + me.set, pos + me.set, sum);
    } else {
      few_multiply<C, false>(p, at, me, at.k_begin + me.set, pos + me.set, sum);
    }
    pos += k_count;
    const uint32_t slot =
        at.slots + (me.set * C::kRows + me.row) * C::kSlotBytes +
        ((me.lane % 4) * 2 * C::kPitch + me.warp * 16 + me.lane / 4) * 4;
#pragma unroll
    for (int i = 0; i < C::kTokens / 2; ++i) {
      const int token = i / 4 * 8 + (i & 1), row = (i >> 1 & 1) * 8;
      st_shared_float(slot + (token * C::kPitch + row) * 4, sum[i]);
    }
    if (pass == 0) {
      wait_for_previous_kernel();
      if (p.split > 1) cluster_wait();
    } else if (p.split > 1) {
      mbar_wait_cluster(at.sums_read, (pass - 1) & 1);
    }
    named_sync<C::kConsumers>(1);
    const int row0 = g / p.token_tiles * C::kRows * 64;
    const int token0 = g % p.token_tiles * C::kTokens;
    const bool more = g + p.num_clusters < p.num_tiles;

#pragma unroll 1
    for (int e = me.thread; e < kVectors; e += C::kConsumers) {
      const int row4 = e % 16, token = e / 16 % C::kTokens,
                tile = e / (16 * C::kTokens);
      const uint32_t from =
          at.slots + tile * C::kSlotBytes + (token * C::kPitch + row4 * 4) * 4;
      float4 v = ld_shared_float4(from);
#pragma unroll
      for (int s = 1; s < C::kSets; ++s) {
        const float4 u = ld_shared_float4(from + s * C::kRows * C::kSlotBytes);
        v.x += u.x;
        v.y += u.y;
        v.z += u.z;
        v.w += u.w;
      }
      if (p.split == 1) {
        few_store<C>(p, token0 + token, row0 + tile * 64 + row4 * 4, v);
      } else {
        const int owner = unsigned(token) / unsigned(p.share);
        const int local = token - owner * p.share;
        const int index =
            ((at.rank * p.share + local) * C::kRows + tile) * 16 + row4;
        st_async_v4(map_to_rank(at.exchange + index * 16, owner),
                    map_to_rank(at.sums_in, owner), v);
      }
    }
    if (p.split > 1) {
      mbar_wait_cluster(at.sums_in, pass & 1);
      const int step = p.share * C::kRows * 256;  // from block to block
#pragma unroll 1
      for (int e = me.thread; e < tokens * C::kRows * 16; e += C::kConsumers) {
        const int row4 = e % 16, tile = e / 16 % C::kRows,
                  local = e / (16 * C::kRows);
        const uint32_t from = at.exchange + e * 16;
        float4 v = ld_shared_float4(from);
#pragma unroll 1
        for (int s = 1; s < p.split; ++s) {
          const float4 u = ld_shared_float4(from + s * step);
          v.x += u.x;
          v.y += u.y;
          v.z += u.z;
          v.w += u.w;
        }
        few_store<C>(p, token0 + first_token + local,
                     row0 + tile * 64 + row4 * 4, v);
      }
    }
    if (more) {
      // Both kinds of sums have been read and may be overwritten.
      named_sync<C::kConsumers>(1);
      if (p.split > 1 && me.thread < p.split) {
        mbar_arrive_remote(at.sums_read, me.thread);
      }
    }
  }
}

template <typename C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks)
    few_kernel(const __grid_constant__ CUtensorMap x_map,
               const __grid_constant__ CUtensorMap w_map,
               const __grid_constant__ CUtensorMap s_map,
               const __grid_constant__ FewParams p) {
  extern __shared__ uint8_t smem_raw[];
  const FewMaps maps{&x_map, &w_map, &s_map};
  FewPlace at;
  at.rank = p.split == 1 ? 0 : int(cluster_rank());
  at.cluster = blockIdx.x / p.split;
  at.k_begin = p.k_stages * at.rank / p.split;
  at.k_end = p.k_stages * (at.rank + 1) / p.split;
  at.stages = (smem_addr(smem_raw) + 1023) & ~1023u;
  at.slots = at.stages + C::kStages * C::kStageBytes;
  at.exchange = at.slots + C::kSlotsBytes;
  at.full = at.exchange + C::kExchangeBytes;
  at.empty = at.full + 8 * C::kStages;
  at.sums_in = at.empty + 8 * C::kStages;
  at.sums_read = at.sums_in + 8;
  // Shuffled so that the compiler knows it to be the same in the whole warp.
  const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);

  if (warp == 4 * C::kWarpgroups) {
    if (threadIdx.x == C::kConsumers) {
      prefetch_map(maps.w);
      prefetch_map(maps.s);
      for (int i = 0; i < C::kStages; ++i) {
        mbar_init(at.full + 8 * i, 1);
        mbar_init(at.empty + 8 * i, 4 * C::kRows);
      }
      mbar_init(at.sums_in, 1);
      mbar_init(at.sums_read, p.split);
      mbar_init_fence();
    }
    __syncwarp();
    // Who set up the barriers goes on at once: weights are on the critical
    // path.
    named_arrive<C::kThreads>(2);
  } else {
    if (threadIdx.x == C::kConsumers + 32) prefetch_map(maps.x);
    named_sync<C::kThreads>(2);
  }
  let_next_kernel_start();
  // Nothing is sent to another block before it has set up its barriers.
  if (p.split > 1) cluster_arrive();

  if (warp >= 4 * C::kWarpgroups) {
    if constexpr (C::kGive) registers_down<C::kProducerRegs>();
    if (threadIdx.x == C::kConsumers) few_produce_weights<C>(p, maps, at);
    if (threadIdx.x == C::kConsumers + 32) few_produce_tokens<C>(p, maps, at);
    __syncwarp();
    if (p.split > 1) cluster_wait();
  } else {
    if constexpr (C::kGive) registers_up<C::kConsumerRegs>();
    const int warpgroup = warp / 4;
    few_consume<C>(p, at,
                   {warpgroup % C::kRows, warpgroup / C::kRows, warp % 4,
                    int(threadIdx.x % 32), int(threadIdx.x)});
  }
}

}  // namespace vllm::ternary::sm90
