// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The ring through which a warp streams its granules of weights: `kTiles` k
// tiles of `kR` row tiles, words [row tile][k tile][lane][4] and then, where
// S::kScales, float16 scales [k tile][row]. Filled by bulk copies that one lane
// issues, on sm_90 and later, and by every lane's asynchronous copies before.
#pragma once

#include "mma_utils.cuh"

namespace vllm::ternary {

struct RingSource {
  const int32_t* weight;
  const half* scale;
  int N_pad, K_pad, num_blocks;
  uint32_t block_shift;  // scale block = (k tile) >> block_shift
};

// From k tiles to blocks of scales: RingSource::block_shift.
template <typename Product>
uint32_t block_shift(const Product& g) {
  if (g.num_blocks == 1) return 31;
  uint32_t shift = 0;
  while ((128 << shift) < g.block_size) ++shift;
  return shift;
}

// What a kernel's arguments say of a product's weights and their blocks.
template <typename Args, typename Product>
void set_ring(Args& a, const Product& g) {
  a.ring = {g.weight,     static_cast<const half*>(g.scale),
            g.N_pad,      g.K_pad,
            g.num_blocks, block_shift(g)};
  if (g.num_blocks > 1) {
    const uint32_t d = uint32_t(g.block_size / 32);
    a.block_magic = ((1u << 31) + d - 1) / d;
  }
}

// A phase of a slot ends when its words are there (one arrival and their bytes)
// and, with scales in the ring, each lane's share of these.
template <typename S>
__device__ __forceinline__ void ring_init(uint32_t barriers, int lane) {
#if __CUDA_ARCH__ >= 900
  if (lane == 0) {
    for (int i = 0; i < S::kStages; ++i) {
      asm volatile(
          "mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barriers + i * 8),
          "n"(S::kScales ? 33 : 1));
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncwarp();
#endif
}

// Waits for the granule in a slot; kLater: how many were begun after it.
template <int kLater>
__device__ __forceinline__ void ring_wait(uint32_t barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
#else
  cp_async_wait<kLater>();
  __syncwarp();
#endif
}

// True in one lane; the compiler knows that it is one.
__device__ __forceinline__ bool elect_lane() {
  uint32_t elected = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xFFFFFFFF;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(elected));
#endif
  return elected;
}

__device__ __forceinline__ void bulk_copy(uint32_t dst, const void* src,
                                          uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1], %2, [%3];" ::"r"(dst),
      "l"(src), "r"(bytes), "r"(barrier)
      : "memory");
}

// Begins the copies of a granule of `tiles` k tiles from kt: words [row tile][k
// tile][lane][4], then scales [k tile][row]. Every lane calls it.
template <typename S>
__device__ __forceinline__ void ring_fill(uint32_t dst, uint32_t barrier,
                                          const RingSource& a, int row, int kt,
                                          int tiles, int lane) {
  const int k_tiles = a.K_pad >> 7;
  const uint8_t* words = reinterpret_cast<const uint8_t*>(a.weight) +
                         (int64_t(row >> 4) * k_tiles + kt) * 512;
#if __CUDA_ARCH__ >= 900
  if (elect_lane()) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
        "r"(tiles * S::kR * 512)
        : "memory");
  #pragma unroll
    for (int r = 0; r < S::kR; ++r) {
      bulk_copy(dst + r * S::kTiles * 512, words + r * k_tiles * 512,
                tiles * 512, barrier);
    }
  }
#else
  #pragma unroll
  for (int d = 0; d < S::kTiles; ++d) {
    if (d < tiles) {
  #pragma unroll
      for (int r = 0; r < S::kR; ++r) {
        cp_async_16(dst + (r * S::kTiles + d) * 512 + lane * 16,
                    words + (r * k_tiles + d) * 512 + lane * 16);
      }
    }
  }
#endif
  if constexpr (S::kScales) {
    constexpr int kPieces = S::kR * 2;  // of 16 bytes, per k tile
#pragma unroll
    for (int i = lane; i < S::kTiles * kPieces; i += 32) {
      const int d = i / kPieces;
      if (d < tiles) {
        const uint32_t block =
            min(uint32_t(kt + d) >> a.block_shift, uint32_t(a.num_blocks - 1));
        cp_async_16(dst + S::kWordBytes + i * 16,
                    a.scale + block * a.N_pad + row + i % kPieces * 8);
      }
    }
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier)
        : "memory");
#endif
  }
}

// Ends what ring_fill began, or nothing: one commit per step of the ring.
__device__ __forceinline__ void ring_commit() {
#if __CUDA_ARCH__ < 900
  cp_async_commit();
#endif
}

}  // namespace vllm::ternary
