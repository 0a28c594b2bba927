// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// wgmma on 8-bit integers with the 64-row operand in registers:
// d[64, n] += A[64, 32] B[32, n], A in the fragment order of mma.m16n8k32 (warp
// w of the warpgroup holds rows 16w..16w+15), B K-major in shared memory, d
// int32.
#pragma once

#include <cstdint>

namespace vllm::ternary::s8 {

#define TERNARY_ACC8(d, i)                                                    \
  "+r"((d)[(i)]), "+r"((d)[(i) + 1]), "+r"((d)[(i) + 2]), "+r"((d)[(i) + 3]), \
      "+r"((d)[(i) + 4]), "+r"((d)[(i) + 5]), "+r"((d)[(i) + 6]),             \
      "+r"((d)[(i) + 7])
#define TERNARY_ACC32(d, i)                                                \
  TERNARY_ACC8(d, i), TERNARY_ACC8(d, (i) + 8), TERNARY_ACC8(d, (i) + 16), \
      TERNARY_ACC8(d, (i) + 24)
#define TERNARY_REGS_0_31                                  \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
  "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define TERNARY_REGS_32_63                                           \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
  "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"

#define TERNARY_WGMMA(shape, regs, tail, flag, ...)                      \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " flag              \
               ", 0;\n"                                                  \
               "wgmma.mma_async.sync.aligned." shape ".s32.s8.s8 {" regs \
               "}, " tail ", add;\n}"                                    \
               : __VA_ARGS__                                             \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(desc),  \
                 "r"(int(add)))

// With add == false d is overwritten: the way to clear sums that ptxas follows.
template <int kTokens>
__device__ __forceinline__ void wgmma(int (&d)[kTokens / 2], const uint32_t* a,
                                      uint64_t desc, bool add) {
  static_assert(kTokens == 64 || kTokens == 128);
  if constexpr (kTokens == 64) {
    TERNARY_WGMMA("m64n64k32", TERNARY_REGS_0_31, "{%32,%33,%34,%35}, %36",
                  "%37", TERNARY_ACC32(d, 0));
  } else {
    TERNARY_WGMMA("m64n128k32", TERNARY_REGS_0_31 "," TERNARY_REGS_32_63,
                  "{%64,%65,%66,%67}, %68", "%69", TERNARY_ACC32(d, 0),
                  TERNARY_ACC32(d, 32));
  }
}

#undef TERNARY_WGMMA
#undef TERNARY_REGS_32_63
#undef TERNARY_REGS_0_31
#undef TERNARY_ACC32
#undef TERNARY_ACC8

__device__ __forceinline__ void keep_until_here(int& v) {
  asm volatile("" : "+r"(v)::"memory");
}

}  // namespace vllm::ternary::s8
