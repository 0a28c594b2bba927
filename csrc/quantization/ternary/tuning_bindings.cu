// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Ops that name their kernel and its cut, for the tuning scripts, benchmarks
// and tests. The product chooses for itself: cuda_bindings.cu.
#include <vector>

#include "cuda_args.h"
#include "gemm_dispatch.h"
#include "mma_gemm.h"
#include "mma_s8.h"

namespace vllm::ternary {
namespace {

Tensor ternary_gemm_reference(const Tensor& x, const Tensor& weight,
                              const Tensor& scale,
                              const std::optional<Tensor>& zero_point,
                              const std::optional<Tensor>& bias, int64_t size_n,
                              int64_t size_k, int64_t block_size) {
  return run_gemm(x, weight, scale, zero_point, bias, size_n, size_k,
                  block_size, [](const GemmArgs& a) { reference_gemm(a); });
}

// One kernel with one explicit cut, for the tuning script and the tests.
Tensor ternary_gemm_tuned(const Tensor& x, const Tensor& weight,
                          const Tensor& scale,
                          const std::optional<Tensor>& zero_point,
                          const std::optional<Tensor>& bias, int64_t size_n,
                          int64_t size_k, int64_t block_size, int64_t variant,
                          int64_t groups, int64_t split, bool pdl) {
  return run_gemm(x, weight, scale, zero_point, bias, size_n, size_k,
                  block_size, [&](const GemmArgs& a) {
                    STD_TORCH_CHECK(mma_supported(a),
                                    "the tensor core kernel needs scale blocks "
                                    "of a multiple of 32");
                    mma_gemm(a, {int(variant), int(groups), int(split), pdl});
                  });
}

// The same for the int8 kernel for few tokens.
Tensor ternary_gemm_s8(const Tensor& x, const Tensor& weight,
                       const Tensor& scale,
                       const std::optional<Tensor>& zero_point,
                       const std::optional<Tensor>& bias, int64_t size_n,
                       int64_t size_k, int64_t block_size, int64_t variant,
                       int64_t groups, int64_t split, bool pdl) {
  return run_gemm(x, weight, scale, zero_point, bias, size_n, size_k,
                  block_size, [&](const GemmArgs& a) {
                    STD_TORCH_CHECK(mma_s8_supported(a),
                                    "the int8 kernel needs float16 scales of "
                                    "whole k tiles and no zero points");
                    mma_s8_gemm(a,
                                {int(variant), int(groups), int(split), pdl});
                  });
}

// A cut of sm90_prefill.h or sm90_s8.h, which has so many numbers; nullptr for
// none.
const int64_t* cut_of(const std::vector<int64_t>& cut, size_t count) {
  STD_TORCH_CHECK(cut.empty() || cut.size() == count, "cut has ", cut.size(),
                  " numbers; give ", count);
  return cut.empty() ? nullptr : cut.data();
}

// The Hopper kernel for many tokens, whatever the dispatch table says.
Tensor ternary_gemm_sm90(const Tensor& x, const Tensor& weight,
                         const Tensor& scale,
                         const std::optional<Tensor>& zero_point,
                         const std::optional<Tensor>& bias, int64_t size_n,
                         int64_t size_k, int64_t block_size,
                         std::vector<int64_t> cut) {
  return run_gemm(x, weight, scale, zero_point, bias, size_n, size_k,
                  block_size, [&](const GemmArgs& a) {
                    STD_TORCH_CHECK(
                        sm90_gemm_supported(a),
                        "the Hopper kernel does not take this call");
                    sm90_gemm(a, cut_of(cut, 7));
                  });
}

int64_t ternary_sm90_clusters(const Tensor& x, int64_t kernel, int64_t split) {
  return sm90_clusters(x.get_device_index(), int(kernel), int(split));
}

// The same with one product kernel, for the tuning script and the tests: 0 the
// naive one, 1 int8 tensor cores for few tokens, 2 the Hopper kernel for many,
// 3 as 1 with the quantization inside; 4 more: only what a kernel with short
// chains takes. 16 times the variant is added.
Tensor ternary_gemm_w2a8_tuned(
    const Tensor& x, const Tensor& weight, const Tensor& scale,
    const std::optional<Tensor>& bias, const std::optional<Tensor>& norm_weight,
    const std::optional<Tensor>& part_ends, double norm_eps, int64_t size_n,
    int64_t size_k, int64_t block_size, int64_t kernel, int64_t groups,
    int64_t split, std::vector<int64_t> cut) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const W2A8Call c = w2a8_call(x, weight, scale, bias, norm_weight, part_ends,
                               norm_eps, size_n, size_k, block_size);
  if (x.size(0) == 0 || size_n == 0) return c.y;
  const MmaConfig config{int(kernel >> 4), int(groups), int(split)};
  if (kernel & 4) {
    const bool inside = (kernel & 3) == 3;
    if (!inside) quantize_tokens(c.quant);
    STD_TORCH_CHECK(mma_s8_direct(c.gemm, config, inside ? &c.quant : nullptr),
                    "the kernel with short chains does not take this call");
    return c.y;
  }
  if ((kernel & 15) == 3) {
    STD_TORCH_CHECK(mma_s8_quantizes(c.quant, c.gemm),
                    "the int8 kernel does not quantize these activations");
    mma_s8_gemm(c.gemm, config, &c.quant);
    return c.y;
  }
  quantize_tokens(c.quant);
  if (kernel == 0) {
    reference_w2a8(c.gemm);
  } else if ((kernel & 15) == 1) {
    STD_TORCH_CHECK(mma_s8_supported(c.gemm),
                    "the int8 kernel needs scale blocks of a multiple of 32");
    mma_s8_gemm(c.gemm, config);
  } else {
    STD_TORCH_CHECK(kernel == 2 && sm90_w2a8_supported(c.gemm),
                    "the Hopper kernel does not take this call");
    sm90_w2a8(c.gemm, cut_of(cut, 5));
  }
  return c.y;
}

// The workspace that quantization leaves: xq [parts, M, K_pad] int8, then xs
// and xsum [parts, M], then the sums of tiles [parts, K_pad / 128, M], as
// bytes.
Tensor ternary_quantize_tokens(const Tensor& x, const Tensor& weight,
                               const Tensor& scale,
                               const std::optional<Tensor>& norm_weight,
                               const std::optional<Tensor>& part_ends,
                               double norm_eps, int64_t size_n, int64_t size_k,
                               int64_t block_size) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const W2A8Call c = w2a8_call(x, weight, scale, std::nullopt, norm_weight,
                               part_ends, norm_eps, size_n, size_k, block_size);
  if (x.size(0) > 0) quantize_tokens(c.quant);
  return c.workspace;
}

}  // namespace
}  // namespace vllm::ternary

STABLE_TORCH_LIBRARY_FRAGMENT(_C, m) {
  m.def(
      "ternary_gemm_reference(Tensor x, Tensor weight, Tensor scale, "
      "Tensor? zero_point, Tensor? bias, SymInt size_n, SymInt size_k, "
      "SymInt block_size) -> Tensor");
  m.def(
      "ternary_gemm_sm90(Tensor x, Tensor weight, Tensor scale, "
      "Tensor? zero_point, Tensor? bias, SymInt size_n, SymInt size_k, "
      "SymInt block_size, int[] cut=[]) -> Tensor");
  m.def("ternary_sm90_clusters(Tensor x, int kernel, int split) -> int");
  m.def(
      "ternary_gemm_tuned(Tensor x, Tensor weight, Tensor scale, "
      "Tensor? zero_point, Tensor? bias, SymInt size_n, SymInt size_k, "
      "SymInt block_size, int variant, int groups, int split, bool pdl) -> "
      "Tensor");
  m.def(
      "ternary_gemm_s8(Tensor x, Tensor weight, Tensor scale, "
      "Tensor? zero_point, Tensor? bias, SymInt size_n, SymInt size_k, "
      "SymInt block_size, int variant, int groups, int split, bool pdl) -> "
      "Tensor");
  m.def(
      "ternary_gemm_w2a8_tuned(Tensor x, Tensor weight, Tensor scale, "
      "Tensor? bias, Tensor? norm_weight, Tensor? part_ends, float norm_eps, "
      "SymInt size_n, SymInt size_k, SymInt block_size, int kernel, "
      "int groups, int split, int[] cut=[]) -> Tensor");
  m.def(
      "ternary_quantize_tokens(Tensor x, Tensor weight, Tensor scale, "
      "Tensor? norm_weight, Tensor? part_ends, float norm_eps, "
      "SymInt size_n, SymInt size_k, SymInt block_size) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(_C, CUDA, m) {
  m.impl("ternary_gemm_reference",
         TORCH_BOX(&vllm::ternary::ternary_gemm_reference));
  m.impl("ternary_gemm_sm90", TORCH_BOX(&vllm::ternary::ternary_gemm_sm90));
  m.impl("ternary_sm90_clusters",
         TORCH_BOX(&vllm::ternary::ternary_sm90_clusters));
  m.impl("ternary_gemm_tuned", TORCH_BOX(&vllm::ternary::ternary_gemm_tuned));
  m.impl("ternary_gemm_s8", TORCH_BOX(&vllm::ternary::ternary_gemm_s8));
  m.impl("ternary_gemm_w2a8_tuned",
         TORCH_BOX(&vllm::ternary::ternary_gemm_w2a8_tuned));
  m.impl("ternary_quantize_tokens",
         TORCH_BOX(&vllm::ternary::ternary_quantize_tokens));
}
