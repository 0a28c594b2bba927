// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The CUDA implementations of the ternary ops; torch_bindings.cpp has their
// schemas.
#include <vector>

#include "cuda_args.h"
#include "gemm_dispatch.h"

namespace vllm::ternary {
namespace {

Tensor ternary_gemm(const Tensor& x, const Tensor& weight, const Tensor& scale,
                    const std::optional<Tensor>& zero_point,
                    const std::optional<Tensor>& bias, int64_t size_n,
                    int64_t size_k, int64_t block_size) {
  return run_gemm(x, weight, scale, zero_point, bias, size_n, size_k,
                  block_size, [](const GemmArgs& a) { dispatch_gemm(a); });
}

Tensor ternary_gemm_w2a8(const Tensor& x, const Tensor& weight,
                         const Tensor& scale, const std::optional<Tensor>& bias,
                         const std::optional<Tensor>& norm_weight,
                         const std::optional<Tensor>& part_ends,
                         double norm_eps, int64_t size_n, int64_t size_k,
                         int64_t block_size) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const W2A8Call c = w2a8_call(x, weight, scale, bias, norm_weight, part_ends,
                               norm_eps, size_n, size_k, block_size);
  if (x.size(0) == 0 || size_n == 0) return c.y;
  dispatch_w2a8(c.quant, c.gemm);
  return c.y;
}

Tensor ternary_embedding(const Tensor& indices, const Tensor& weight,
                         const Tensor& scale,
                         const std::optional<Tensor>& zero_point,
                         int64_t size_n, int64_t size_k, int64_t block_size,
                         ScalarType dtype) {
  const Weight w =
      check_weight(weight, scale, zero_point, size_n, size_k, block_size);
  STD_TORCH_CHECK(indices.is_cuda() &&
                      indices.get_device_index() == weight.get_device_index(),
                  "indices and weight must be on one CUDA device");
  STD_TORCH_CHECK(indices.scalar_type() == ScalarType::Long ||
                      indices.scalar_type() == ScalarType::Int,
                  "indices must be int64 or int32");
  const torch::stable::accelerator::DeviceGuard guard(
      indices.get_device_index());
  std::vector<int64_t> shape;
  for (int64_t i = 0; i < indices.dim(); ++i) shape.push_back(indices.size(i));
  shape.push_back(size_k);
  Tensor out = torch::stable::new_empty(weight, shape, dtype);
  EmbeddingArgs a{};
  set_weight(a, w);
  a.dtype = float_type(out, "dtype");
  if (indices.numel() == 0) return out;
  const Tensor flat =
      indices.is_contiguous() ? indices : torch::stable::contiguous(indices);
  a.indices = flat.data_ptr();
  a.indices_are_int64 = indices.scalar_type() == ScalarType::Long;
  a.count = indices.numel();
  a.zero_point = w.zero_point;
  a.out = out.data_ptr();
  a.stream = current_stream(weight);
  gather_rows(a);
  return out;
}

}  // namespace
}  // namespace vllm::ternary

STABLE_TORCH_LIBRARY_IMPL(_C, CUDA, m) {
  m.impl("ternary_gemm", TORCH_BOX(&vllm::ternary::ternary_gemm));
  m.impl("ternary_gemm_w2a8", TORCH_BOX(&vllm::ternary::ternary_gemm_w2a8));
  m.impl("ternary_embedding", TORCH_BOX(&vllm::ternary::ternary_embedding));
}
