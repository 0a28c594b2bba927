// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// What the int8 kernels with short chains of latencies share (sm_90 and later):
// warps with a part of K each for rows of their CTA, sums that warps, and CTAs
// of a cluster, exchange once.
#pragma once

#include "mma_s8.cuh"
#include "sm90_prefill_ptx.cuh"

namespace vllm::ternary {

// What their arguments say of the weight.
template <typename Args, typename Product>
void set_weight(Args& a, const Product& g) {
  a.weight = g.weight;
  a.all_k_tiles = g.K_pad / 128;
  a.block_shift = int(block_shift(g));
  a.last_block = g.num_blocks - 1;
}

// Bytes of shared memory that a CTA may have. Variant kDirect lets two CTAs
// share a multiprocessor, so that the next kernel's may begin, the two after it
// three and one, and so on.
inline int direct_budget(const DeviceInfo& device, int variant) {
  constexpr int kShare[] = {2, 3, 1};
  // A kilobyte per CTA is the system's.
  return (device.shared_memory + 1024) / kShare[(variant - kDirect) % 3] - 1024;
}

// Keeps a value in a register from here on, instead of made anew where it is
// used: what was computed while the kernel ahead ran stays computed.
__device__ __forceinline__ void pin(uint32_t& v) { asm volatile("" : "+r"(v)); }
__device__ __forceinline__ void pin(int& v) { asm volatile("" : "+r"(v)); }
template <typename P>
__device__ __forceinline__ void pin(P*& v) {  // into global memory
  asm volatile("" : "+l"(v));
#ifdef __CUDACC__
  __builtin_assume(__isGlobal(v));  // else loads and stores are generic ones
#endif
}

__device__ __forceinline__ void store_shared_8(uint32_t at,
                                               const uint32_t (&v)[2]) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(at), "r"(v[0]),
               "r"(v[1])
               : "memory");
}

__device__ __forceinline__ void store_shared_4(uint32_t at, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory");
}

__device__ __forceinline__ void store_shared_16(uint32_t at,
                                                const uint32_t (&v)[4]) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v[0]),
               "r"(v[1]), "r"(v[2]), "r"(v[3])
               : "memory");
}

// The largest of what warps have found, all of those CTAs of a cluster that
// work on a token: each writes its own at `place` of `places`, of `rank` of
// them. No more than 32 in all. Every thread of the CTA calls it; `counts`: the
// warp has a token. `split` CTAs of a cluster count what they get by `arrived`.
__device__ __forceinline__ uint32_t share_largest(uint32_t largest,
                                                  uint32_t most, int place,
                                                  int places, int rank,
                                                  int split, uint32_t arrived,
                                                  bool counts) {
  const int lane = threadIdx.x & 31;
  if (split == 1) {
    if (lane == 0) store_shared_4(most + place * 4, largest);
    __syncthreads();
  } else {
    if (lane < split && counts) {
      sm90::st_async(
          sm90::map_to_rank(most + (rank * places + place) * 4, lane),
          sm90::map_to_rank(arrived, lane), __uint_as_float(largest));
    }
    sm90::mbar_wait_cluster(arrived, 0);
  }
  uint32_t top = 0;
  if (lane < places * split && counts) top = load_shared_u32(most + lane * 4);
  return __reduce_max_sync(~0u, top);
}

// The columns of a k tile as B operands; `column` is the lane's address in
// them.
__device__ __forceinline__ void load_columns(uint32_t column, int kt,
                                             uint32_t (&b)[2][4]) {
  ldmatrix_x4(b[0], column + kt * 128);
  ldmatrix_x4(b[1], column + kt * 128 + 64);
}

// The sums of a lane's two columns over a k tile, made by the tensor cores.
__device__ __forceinline__ void sum_columns(const uint32_t (&b)[2][4],
                                            int (&sums)[2]) {
  const uint32_t ones[4] = {0x01010101u, 0x01010101u, 0x01010101u, 0x01010101u};
  int d[4] = {}, e[4] = {};
  mma_s8(d, ones, b[0][0], b[0][1]);
  mma_s8(e, ones, b[0][2], b[0][3]);
  mma_s8(d, ones, b[1][0], b[1][1]);
  mma_s8(e, ones, b[1][2], b[1][3]);
  sums[0] = d[0] + e[0];
  sums[1] = d[1] + e[1];
}

}  // namespace vllm::ternary
