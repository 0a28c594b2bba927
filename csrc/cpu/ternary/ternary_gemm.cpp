// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// ternary_gemm on the CPU: y = x W^T with 16- or 32-bit activations.

#include <algorithm>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "activation.h"
#include "host.h"
#include "kernels.h"

namespace vllm::ternary::cpu {
namespace {

Tensor ternary_gemm(const Tensor& x, const Tensor& weight, const Tensor& scale,
                    const std::optional<Tensor>& zero_point,
                    const std::optional<Tensor>& bias, int64_t size_n,
                    int64_t size_k, int64_t block_size) {
  const char* op = "ternary_gemm";
  Problem p;
  p.weight =
      make_weight(op, weight, scale, zero_point, size_n, size_k, block_size);
  check_activation(op, x, size_k, /*allow_float32=*/true);
  check_bias(op, bias, size_n, x.scalar_type());
  Tensor y = torch::stable::new_empty(x, {x.size(0), size_n});
  set_output(p, y, bias);
  if (p.size_m == 0) {
    return y;
  }

  const Weight& w = p.weight;
  Scratch<float> padded(p.size_m * w.k_pad);
  Scratch<float> sums(zero_point.has_value() ? p.size_m * w.nblocks : 0);
  torch::stable::parallel_for(
      0, p.size_m, row_grain(w), [&](int64_t begin, int64_t end) {
        Scratch<float> row(w.size_k);
        for (int64_t m = begin; m < end; ++m) {
          widen_row(row_of(x, m), w.size_k, row.data());
          pad_row(w, row.data(), padded.data() + m * w.k_pad);
          if (w.zero_point != nullptr) {
            sum_blocks(w, padded.data() + m * w.k_pad, p.size_m, m,
                       sums.data());
          }
        }
      });
  p.x = padded.data();
  p.x_sum = sums.data();
  torch::stable::parallel_for(
      0, ceil_div(size_n, kLaneRows), 1,
      [&](int64_t begin, int64_t end) { gemm_f32_portable(p, begin, end); });
  return y;
}

}  // namespace
}  // namespace vllm::ternary::cpu

STABLE_TORCH_LIBRARY_IMPL(_C, CPU, ops) {
  ops.impl("ternary_gemm", TORCH_BOX(&vllm::ternary::cpu::ternary_gemm));
}
