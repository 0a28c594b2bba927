// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project

#include "isa.h"

#include <cstdlib>
#include <cstring>

#include "../../quantization/ternary/ternary_common.h"

#if defined(__x86_64__)
  #include <cpuid.h>
  #include <sys/syscall.h>
  #include <unistd.h>
#endif

namespace vllm::ternary::cpu {
namespace {

constexpr const char* kNames[] = {"portable", "avx2", "avx512vnni",
                                  "avx512bf16", "amx"};

#if defined(__x86_64__)

// The register state that the system saves (XCR0).
uint64_t saved_state() {
  uint32_t low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low | static_cast<uint64_t>(high) << 32;
}

// Linux gives tile registers only to a process that asks.
bool request_tiles() {
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

Isa detect() {
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) {
    return Isa::kPortable;
  }
  constexpr uint32_t kFma = 1u << 12, kXsave = 1u << 27, kF16c = 1u << 29;
  const uint32_t first = c;
  if ((first & kXsave) == 0) {
    return Isa::kPortable;
  }
  const uint64_t state = saved_state();
  uint32_t b7, c7, d7;
  if (!__get_cpuid_count(7, 0, &a, &b7, &c7, &d7) || (state & 0x6) != 0x6 ||
      (first & kFma) == 0 || (first & kF16c) == 0 || (b7 >> 5 & 1) == 0) {
    return Isa::kPortable;
  }
  // F, DQ, BW, VL in ebx; VNNI in ecx.
  constexpr uint32_t kAvx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;
  if ((state & 0xe0) != 0xe0 || (b7 & kAvx512) != kAvx512 ||
      (c7 >> 11 & 1) == 0) {
    return Isa::kAvx2;
  }
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || (a >> 5 & 1) == 0) {
    return Isa::kAvx512Vnni;
  }
  constexpr uint32_t kTiles = 1u << 22 | 1u << 24 | 1u << 25;
  if ((state & 0x60000) != 0x60000 || (d7 & kTiles) != kTiles ||
      !request_tiles()) {
    return Isa::kAvx512Bf16;
  }
  return Isa::kAmx;
}

#else

Isa detect() { return Isa::kPortable; }

#endif

}  // namespace

Isa select_isa() {
  static const Isa best = detect();
  const char* wanted = std::getenv("VLLM_TERNARY_CPU_ISA");
  if (wanted == nullptr || wanted[0] == '\0') {
    return best;
  }
  for (int i = 0; i <= static_cast<int>(Isa::kAmx); ++i) {
    if (std::strcmp(wanted, kNames[i]) == 0) {
      TERNARY_CHECK(
          i <= static_cast<int>(best), "VLLM_TERNARY_CPU_ISA=", wanted,
          " but this processor goes up to ", kNames[static_cast<int>(best)],
          "; unset it or name that one");
      return static_cast<Isa>(i);
    }
  }
  fail("VLLM_TERNARY_CPU_ISA=", wanted,
       " is none of portable, avx2, avx512vnni, avx512bf16, amx");
}

}  // namespace vllm::ternary::cpu
