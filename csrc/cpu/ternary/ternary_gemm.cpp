// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// ternary_gemm on the CPU: y = x W^T with 16- or 32-bit activations.

#include <algorithm>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "host.h"
#include "kernels.h"
#include "scalar.h"

namespace vllm::ternary::cpu {
namespace {

// x[m, :] to float in the padded K.
void widen_row(const Weight& w, const void* x, Type type, int64_t offset,
               int64_t stride, float* out) {
  std::fill(out, out + w.k_pad, 0.0f);
  for (int64_t block = 0; block < w.nblocks; ++block) {
    const int64_t first = w.nblocks == 1 ? 0 : block * w.block_size;
    const int64_t last =
        w.nblocks == 1 ? w.size_k : std::min(w.size_k, first + w.block_size);
    for (int64_t k = first; k < last; ++k) {
      out[w.block_begin(block) + k - first] =
          load_float(x, type, offset + k * stride);
    }
  }
}

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
  p.size_m = x.size(0);
  Tensor y = torch::stable::new_empty(x, {p.size_m, size_n});
  if (p.size_m == 0) {
    return y;
  }
  p.y = y.data_ptr();
  p.y_type = to_type(x.scalar_type());
  if (bias.has_value()) {
    p.bias = bias->data_ptr();
    p.bias_type = to_type(bias->scalar_type());
  }
  p.row_end = size_n;

  const Weight& w = p.weight;
  Scratch<float> widened(p.size_m * w.k_pad);
  Scratch<float> sums(zero_point.has_value() ? p.size_m * w.nblocks : 0);
  const int64_t grain = std::max<int64_t>(1, 16384 / w.k_pad);
  torch::stable::parallel_for(
      0, p.size_m, grain, [&](int64_t begin, int64_t end) {
        for (int64_t m = begin; m < end; ++m) {
          float* row = widened.data() + m * w.k_pad;
          widen_row(w, x.data_ptr(), p.y_type, m * x.stride(0), x.stride(1),
                    row);
          for (int64_t b = 0; w.zero_point != nullptr && b < w.nblocks; ++b) {
            float sum = 0.0f;
            for (int64_t k = w.block_begin(b); k < w.block_end(b); ++k) {
              sum += row[k];
            }
            sums.data()[b * p.size_m + m] = sum;
          }
        }
      });
  p.x = widened.data();
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
