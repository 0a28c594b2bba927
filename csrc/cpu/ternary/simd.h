// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Compiling parts of a file for a newer instruction set, with no flags on the
// command line. Include every header before TERNARY_TARGET_BEGIN, and call
// nothing inline from the standard library within: its copy might be the one
// that the linker keeps for all.

#pragma once

#if defined(__x86_64__)
  #define TERNARY_X86 1
  #include <immintrin.h>
#endif

#define TERNARY_PRAGMA(text) _Pragma(#text)

#if defined(__clang__)
  #define TERNARY_TARGET_BEGIN(isa)                                   \
    TERNARY_PRAGMA(clang attribute push(__attribute__((target(isa))), \
                                        apply_to = function))
  #define TERNARY_TARGET_END TERNARY_PRAGMA(clang attribute pop)
#else
  #define TERNARY_TARGET_BEGIN(isa)  \
    TERNARY_PRAGMA(GCC push_options) \
    TERNARY_PRAGMA(GCC target(isa))
  #define TERNARY_TARGET_END TERNARY_PRAGMA(GCC pop_options)
#endif

#define TERNARY_AVX2 "avx2,fma,f16c,bmi2"
#define TERNARY_AVX512 \
  "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,bmi2"
#define TERNARY_AVX512BF16 TERNARY_AVX512 ",avx512bf16"
#define TERNARY_AMX TERNARY_AVX512BF16 ",amx-tile,amx-int8,amx-bf16"
