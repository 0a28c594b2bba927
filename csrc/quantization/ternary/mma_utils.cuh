// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Thin wrappers of the instructions that the decode kernels use, and the
// decoding of a word of sixteen ternary codes into tensor core operands.
#pragma once

#include "cuda_common.cuh"

namespace vllm::ternary {

// 16 bytes from global to shared memory, past L1; done when the group they are
// committed to is.
__device__ __forceinline__ void cp_async_16(uint32_t dst, const void* src) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst),
               "l"(src));
}

__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until all but the last `kLater` groups of this thread are done.
template <int kLater>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLater) : "memory");
}

__device__ __forceinline__ uint4 load_shared_16(uint32_t addr) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(addr));
  return v;
}

__device__ __forceinline__ uint32_t load_shared_u32(uint32_t addr) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(addr));
  return v;
}

__device__ __forceinline__ uint32_t load_shared_u16(uint32_t addr) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(addr));
  return v;
}

__device__ __forceinline__ uint32_t smem_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t addr) {
  asm volatile(
      "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
      : "r"(addr));
}

// Programmatic dependent launch: let the next kernel of the stream start, and
// wait for the end of the one before. No-ops where the launch did not ask.
__device__ __forceinline__ void pdl_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_sync() {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "barrier.cluster.arrive.aligned;\n"
      "barrier.cluster.wait.aligned;" ::
          : "memory");
#endif
}

// Reads a float at the same shared address in CTA `rank` of the cluster.
__device__ __forceinline__ float load_cluster(uint32_t addr, int rank) {
  float v = 0.0f;
#if __CUDA_ARCH__ >= 900
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(remote)
               : "r"(addr), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(remote));
#endif
  return v;
}

// (v & mask) | bits in one instruction.
template <uint32_t mask, uint32_t bits>
__device__ __forceinline__ uint32_t and_or(uint32_t v) {
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;"
      : "=r"(r)
      : "r"(v), "n"(mask), "n"(bits));
  return r;
}

// What differs between the two activation types: the product, and the decoding.
//
// A code that sits in the mantissa under a fixed exponent reads as offset +
// code. decode() leaves kEven + t in rows 0..7 of a fragment and kOdd + t in
// rows 8..15 (registers 0, 2 and 1, 3), exactly; the offsets' products, kEven *
// sum(x) and kOdd * sum(x), come off again. The offsets are small, so float32
// sums lose nothing that matters.
template <typename T>
struct Mma;

template <>
struct Mma<half> {
  static constexpr uint32_t kEven = 0x45004500u, kOdd = 0x4C404C40u;  // 5, 17
  static constexpr float kEvenValue = 5.0f, kOddValue = 17.0f;

  // a[s][i]: register i of k-step s, as ternary_layout_cuda.py orders them.
  static __device__ __forceinline__ void decode(uint32_t w,
                                                uint32_t (&a)[2][4]) {
    const uint32_t left8 = w * 256u,
                   left4 = w * 16u;  // on the multiplier's pipe
    const uint32_t right4 = w >> 4, right8 = w >> 8;
    a[0][0] = and_or<0x03000300, 0x44004400>(left8);
    a[0][1] = and_or<0x00C000C0, 0x4C004C00>(left4);
    a[0][2] = and_or<0x03000300, 0x44004400>(left4);
    a[0][3] = and_or<0x00C000C0, 0x4C004C00>(w);
    a[1][0] = and_or<0x03000300, 0x44004400>(w);
    a[1][1] = and_or<0x00C000C0, 0x4C004C00>(right4);
    a[1][2] = and_or<0x03000300, 0x44004400>(right4);
    a[1][3] = and_or<0x00C000C0, 0x4C004C00>(right8);
  }

  static __device__ __forceinline__ void mma(float (&d)[4],
                                             const uint32_t (&a)[4],
                                             uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

// Bit 7 of a bfloat16 is the lowest of the exponent: under an even exponent the
// codes 0, 1, 2 in bits 6 and 7 read as 2, 3, 4, as evenly spaced as in the
// mantissa.
template <>
struct Mma<__nv_bfloat16> {
  static constexpr uint32_t kEven = 0x41104110u, kOdd = 0x40404040u;  // 9, 3
  static constexpr float kEvenValue = 9.0f, kOddValue = 3.0f;

  static __device__ __forceinline__ void decode(uint32_t w,
                                                uint32_t (&a)[2][4]) {
    const uint32_t left4 = w * 16u, right4 = w >> 4, right8 = w >> 8;
    a[0][0] = and_or<0x00300030, 0x41004100>(left4);
    a[0][1] = and_or<0x00C000C0, 0x40004000>(left4);
    a[0][2] = and_or<0x00300030, 0x41004100>(w);
    a[0][3] = and_or<0x00C000C0, 0x40004000>(w);
    a[1][0] = and_or<0x00300030, 0x41004100>(right4);
    a[1][1] = and_or<0x00C000C0, 0x40004000>(right4);
    a[1][2] = and_or<0x00300030, 0x41004100>(right8);
    a[1][3] = and_or<0x00C000C0, 0x40004000>(right8);
  }

  static __device__ __forceinline__ void mma(float (&d)[4],
                                             const uint32_t (&a)[4],
                                             uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

}  // namespace vllm::ternary
