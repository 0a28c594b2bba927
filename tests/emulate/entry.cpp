// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// What the tests call: the kernels' own launchers with every choice open. Each
// returns what went wrong, or nullptr.
#include <string>

#include "cuda_common.h"
#include "gemm_dispatch.h"
#include "mma_gemm.h"
#include "mma_s8.h"
#include "moe_gemm.h"
#if __CUDA_ARCH__ >= 900
  #include "sm90_prefill_few_plan.h"
  #include "sm90_prefill_plan.h"
  #include "sm90_s8_plan.h"
#endif

namespace vllm::ternary {

#if __CUDA_ARCH__ >= 900
namespace sm90 {
struct Rows {
  int begin, end;
};
enum class Chain : int { kAlone, kFirst, kSecond };
bool launch_half(const PrefillArgs&, const Plan&, Rows, Chain, int);
bool launch_bfloat16(const PrefillArgs&, const Plan&, Rows, Chain, int);
bool launch_few_half(const PrefillArgs&, const FewPlan&);
bool launch_few_bfloat16(const PrefillArgs&, const FewPlan&);
}  // namespace sm90
namespace s8 {
bool launch_rows(const W2A8Args&, const Plan&, int);
bool launch_blocks(const W2A8Args&, const Plan&, int);
}  // namespace s8
#endif

namespace {

template <typename Call>
const char* guarded(Call call) {
  static std::string message;
  try {
    call();
    return nullptr;
  } catch (const std::exception& e) {
    message = e.what();
    return message.c_str();
  }
}

void found(bool yes) {
  if (!yes) throw std::runtime_error("there is no such kernel");
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// The sizes of the argument structures, which the tests write down again.
void emu_sizes(int* to) {
  const int sizes[] = {sizeof(GemmArgs), sizeof(W2A8Args), sizeof(QuantArgs),
                       sizeof(EmbeddingArgs), sizeof(MoeGemmArgs)};
  for (int s : sizes) *to++ = s;
}
const char* emu_quantize(const QuantArgs* a) {
  return guarded([&] { quantize_tokens(*a); });
}
const char* emu_gather(const EmbeddingArgs* a) {
  return guarded([&] { gather_rows(*a); });
}
const char* emu_copy(const void* src, int64_t ld_src, int64_t inc, void* dst,
                     int64_t ld_dst, int64_t rows, int64_t cols) {
  return guarded(
      [&] { copy_rows(src, ld_src, inc, dst, ld_dst, rows, cols, nullptr); });
}
const char* emu_reference_gemm(const GemmArgs* a) {
  return guarded([&] { reference_gemm(*a); });
}
const char* emu_reference_w2a8(const W2A8Args* a) {
  return guarded([&] { reference_w2a8(*a); });
}
const char* emu_mma_gemm(const GemmArgs* a, const int* cut) {
  return guarded([&] { mma_gemm(*a, {cut[0], cut[1], cut[2]}); });
}
const char* emu_mma_s8_digits(const GemmArgs* a, const int* cut) {
  return guarded([&] { mma_s8_gemm(*a, {cut[0], cut[1], cut[2]}); });
}
const char* emu_mma_s8(const W2A8Args* a, const int* cut, const QuantArgs* q) {
  return guarded([&] { mma_s8_gemm(*a, {cut[0], cut[1], cut[2]}, q); });
}
// Only what the kernels with short chains take; no `q`: tokens are bytes.
const char* emu_mma_s8_direct(const W2A8Args* a, const int* cut,
                              const QuantArgs* q) {
  return guarded(
      [&] { found(mma_s8_direct(*a, MmaConfig{cut[0], cut[1], cut[2]}, q)); });
}
const char* emu_moe(const MoeGemmArgs* a, int most) {
  return guarded([&] { moe_gemm(*a, most); });
}
const char* emu_dispatch_gemm(const GemmArgs* a) {
  return guarded([&] { dispatch_gemm(*a); });
}
const char* emu_dispatch_w2a8(const QuantArgs* q, const W2A8Args* a) {
  return guarded([&] { dispatch_w2a8(*q, *a); });
}

#if __CUDA_ARCH__ >= 900
// warpgroups, tiles, tokens, sets, split
const char* emu_sm90_s8(const W2A8Args* a, const int* p, int processors) {
  return guarded([&] {
    const s8::Plan plan{p[0], p[1], p[2], p[3], p[4]};
    found(a->num_blocks > 1 ? s8::launch_blocks(*a, plan, processors)
                            : s8::launch_rows(*a, plan, processors));
  });
}
// rows, sets, tokens, blocks, split
const char* emu_sm90_few(const GemmArgs* a, const int* p, int clusters) {
  return guarded([&] {
    const sm90::FewPlan plan{p[0], p[1], p[2], p[3], p[4], clusters};
    found(a->dtype == DType::kHalf ? sm90::launch_few_half(*a, plan)
                                   : sm90::launch_few_bfloat16(*a, plan));
  });
}
// warpgroups, tiles, tokens, split, multicast, stagger; first row, last row,
// place in a chain of launches; sets
const char* emu_sm90_many(const GemmArgs* a, const int* p, int processors) {
  return guarded([&] {
    const sm90::Plan plan{p[0], p[1], p[2], p[3], p[4], p[9], p[5]};
    const sm90::Rows rows{p[6], p[7]};
    const auto chain = sm90::Chain(p[8]);
    found(a->dtype == DType::kHalf
              ? launch_half(*a, plan, rows, chain, processors)
              : launch_bfloat16(*a, plan, rows, chain, processors));
  });
}
#endif
}

}  // namespace vllm::ternary
