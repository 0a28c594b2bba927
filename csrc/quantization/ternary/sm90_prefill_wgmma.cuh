// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// wgmma with the 64-row operand in registers: d[64, n] += A[64, 16] B[16, n],
// A 16-bit in the fragment order of mma.m16n8k16 (warp w of the warpgroup holds
// rows 16w..16w+15), B 16-bit, K-major in shared memory, d float32.
#pragma once

#include <cstdint>

namespace vllm::ternary::sm90 {

// The operand lists of the three widths. PTX numbers operands in one sequence:
// n/2 accumulators, then four registers of A and the descriptor of B.
#define TERNARY_ACC8(d, i)                                                    \
  "+f"((d)[(i)]), "+f"((d)[(i) + 1]), "+f"((d)[(i) + 2]), "+f"((d)[(i) + 3]), \
      "+f"((d)[(i) + 4]), "+f"((d)[(i) + 5]), "+f"((d)[(i) + 6]),             \
      "+f"((d)[(i) + 7])
#define TERNARY_ACC32(d, i)                                                \
  TERNARY_ACC8(d, i), TERNARY_ACC8(d, (i) + 8), TERNARY_ACC8(d, (i) + 16), \
      TERNARY_ACC8(d, (i) + 24)
#define TERNARY_REGS_0_3 "%0,%1,%2,%3"
#define TERNARY_REGS_0_7 "%0,%1,%2,%3,%4,%5,%6,%7"
#define TERNARY_REGS_0_15 \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define TERNARY_REGS_0_31                                  \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
  "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define TERNARY_REGS_32_63                                           \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
  "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define TERNARY_REGS_64_127                                                  \
  "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"         \
  "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"         \
  "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%" \
  "111,"                                                                     \
  "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%"  \
  "126,%127"

#define TERNARY_WGMMA(shape, type, regs, tail, flag, ...)                  \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " flag                \
               ", 0;\n"                                                    \
               "wgmma.mma_async.sync.aligned." shape ".f32." type "." type \
               " {" regs "}, " tail ", add, 1, 1, 0;\n}"                   \
               : __VA_ARGS__                                               \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(desc),    \
                 "r"(int(add)))

// With add == false d is overwritten: never clear accumulators by other means,
// or ptxas waits after every single wgmma (its note C7515).
template <int kTokens, bool kBFloat16>
__device__ __forceinline__ void wgmma(float (&d)[kTokens / 2],
                                      const uint32_t* a, uint64_t desc,
                                      bool add) {
  static_assert(kTokens == 8 || kTokens == 16 || kTokens == 32 ||
                kTokens == 64 || kTokens == 128 || kTokens == 256);
  if constexpr (kTokens == 8 && kBFloat16) {
    TERNARY_WGMMA("m64n8k16", "bf16", TERNARY_REGS_0_3, "{%4,%5,%6,%7}, %8",
                  "%9", "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]));
  } else if constexpr (kTokens == 8 && !kBFloat16) {
    TERNARY_WGMMA("m64n8k16", "f16", TERNARY_REGS_0_3, "{%4,%5,%6,%7}, %8",
                  "%9", "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]));
  } else if constexpr (kTokens == 16 && kBFloat16) {
    TERNARY_WGMMA("m64n16k16", "bf16", TERNARY_REGS_0_7, "{%8,%9,%10,%11}, %12",
                  "%13", TERNARY_ACC8(d, 0));
  } else if constexpr (kTokens == 16 && !kBFloat16) {
    TERNARY_WGMMA("m64n16k16", "f16", TERNARY_REGS_0_7, "{%8,%9,%10,%11}, %12",
                  "%13", TERNARY_ACC8(d, 0));
  } else if constexpr (kTokens == 32 && kBFloat16) {
    TERNARY_WGMMA("m64n32k16", "bf16", TERNARY_REGS_0_15,
                  "{%16,%17,%18,%19}, %20", "%21", TERNARY_ACC8(d, 0),
                  TERNARY_ACC8(d, 8));
  } else if constexpr (kTokens == 32 && !kBFloat16) {
    TERNARY_WGMMA("m64n32k16", "f16", TERNARY_REGS_0_15,
                  "{%16,%17,%18,%19}, %20", "%21", TERNARY_ACC8(d, 0),
                  TERNARY_ACC8(d, 8));
  } else if constexpr (kTokens == 64 && kBFloat16) {
    TERNARY_WGMMA("m64n64k16", "bf16", TERNARY_REGS_0_31,
                  "{%32,%33,%34,%35}, %36", "%37", TERNARY_ACC32(d, 0));
  } else if constexpr (kTokens == 64 && !kBFloat16) {
    TERNARY_WGMMA("m64n64k16", "f16", TERNARY_REGS_0_31,
                  "{%32,%33,%34,%35}, %36", "%37", TERNARY_ACC32(d, 0));
  } else if constexpr (kTokens == 128 && kBFloat16) {
    TERNARY_WGMMA("m64n128k16", "bf16",
                  TERNARY_REGS_0_31 "," TERNARY_REGS_32_63,
                  "{%64,%65,%66,%67}, %68", "%69", TERNARY_ACC32(d, 0),
                  TERNARY_ACC32(d, 32));
  } else if constexpr (kTokens == 128 && !kBFloat16) {
    TERNARY_WGMMA("m64n128k16", "f16", TERNARY_REGS_0_31 "," TERNARY_REGS_32_63,
                  "{%64,%65,%66,%67}, %68", "%69", TERNARY_ACC32(d, 0),
                  TERNARY_ACC32(d, 32));
  } else if constexpr (kTokens == 256 && kBFloat16) {
    TERNARY_WGMMA(
        "m64n256k16", "bf16",
        TERNARY_REGS_0_31 "," TERNARY_REGS_32_63 "," TERNARY_REGS_64_127,
        "{%128,%129,%130,%131}, %132", "%133", TERNARY_ACC32(d, 0),
        TERNARY_ACC32(d, 32), TERNARY_ACC32(d, 64), TERNARY_ACC32(d, 96));
  } else if constexpr (kTokens == 256 && !kBFloat16) {
    TERNARY_WGMMA(
        "m64n256k16", "f16",
        TERNARY_REGS_0_31 "," TERNARY_REGS_32_63 "," TERNARY_REGS_64_127,
        "{%128,%129,%130,%131}, %132", "%133", TERNARY_ACC32(d, 0),
        TERNARY_ACC32(d, 32), TERNARY_ACC32(d, 64), TERNARY_ACC32(d, 96));
  }
}

#undef TERNARY_WGMMA
#undef TERNARY_REGS_64_127
#undef TERNARY_REGS_32_63
#undef TERNARY_REGS_0_31
#undef TERNARY_REGS_0_15
#undef TERNARY_REGS_0_7
#undef TERNARY_REGS_0_3
#undef TERNARY_ACC32
#undef TERNARY_ACC8

// The same product for one warp and eight tokens, at once: d[16, 8] += A[16,
// 16] B[16, 8], B in registers.
template <bool kBf16>
__device__ __forceinline__ void mma_16816(float* d, const uint32_t* a,
                                          uint32_t b0, uint32_t b1) {
  if constexpr (kBf16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// Orders earlier register writes (A, accumulators) before the next wgmma.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Returns when at most kPending committed groups are still running.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Tells the compiler that a register in use by a running wgmma stays in use up
// to here, so that it neither moves nor reuses it.
__device__ __forceinline__ void keep_until_here(float& v) {
  asm volatile("" : "+f"(v)::"memory");
}
__device__ __forceinline__ void keep_until_here(uint32_t& v) {
  asm volatile("" : "+r"(v)::"memory");
}

// Descriptor of a K-major tile whose rows are 128 bytes, swizzled by 128 bytes
// (as the tensor map writes it): 8 rows are 1024 bytes apart. Moving 16
// elements along K inside the 128 bytes adds 32 bytes to the address, i.e. 2.
__device__ __forceinline__ uint64_t smem_desc(uint32_t addr) {
  constexpr uint64_t kFixed =
      (uint64_t(1) << 62) | (uint64_t(1024 >> 4) << 32) | (uint64_t(1) << 16);
  return kFixed | ((addr & 0x3FFFF) >> 4);
}

}  // namespace vllm::ternary::sm90
