// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// ternary_gemm on the CPU: y = x W^T with 16- or 32-bit activations.

#include <algorithm>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "host.h"
#include "plan.h"
#include "schedule.h"

namespace vllm::ternary::cpu {
namespace {

// Bytes of all of x in a plan's form.
int64_t form_bytes(const Plan& plan, const Weight& w, int64_t size_m) {
  switch (plan.form) {
    case Form::kTable:
      return size_m * w.k_pad * 8 * 4;
    case Form::kTiles:
      return plan.planes * round_up(size_m, kTileTokens) * w.k_pad *
             plan.element_bytes;
    default:
      return size_m * w.k_pad * plan.element_bytes;
  }
}

// One padded token, float, into the plan's form.
void place_row(const Plan& plan, const Problem& p, int64_t m,
               const float* padded, char* out) {
  const int64_t k_pad = p.weight.k_pad;
#if defined(__x86_64__)
  if (plan.form == Form::kTable) {
    make_lut_avx512(padded, k_pad, (float*)out + m * k_pad * 8);
    return;
  }
  if (plan.form == Form::kTiles) {
    split_row_avx512(padded, k_pad, plan.planes, p.x_plane, kTileBytes,
                     out + tile_offset(m, k_pad * plan.element_bytes));
    return;
  }
  if (plan.element_bytes == 2) {
    split_row_avx512(padded, k_pad, 1, 0, kTileRowBytes, out + m * k_pad * 2);
    return;
  }
#endif
  std::copy(padded, padded + k_pad, (float*)out + m * k_pad);
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
  Tensor y = new_output(x, size_n);
  set_output(p, y, bias);
  if (p.size_m == 0) {
    return y;
  }

  const Weight& w = p.weight;
  const Plan plan = plan_w2a16(select_isa(), p.y_type, p.size_m, w);
  const int64_t bytes = form_bytes(plan, w, p.size_m);
  Scratch<char> placed(bytes);
  Scratch<float> sums(zero_point.has_value() ? p.size_m * w.nblocks : 0);
  p.planes = plan.planes;
  p.x_plane = bytes / plan.planes;
  if (plan.form == Form::kTiles) {
    zero_absent_tokens(placed.data(), bytes / plan.planes, plan.planes,
                       p.size_m, w.k_pad * plan.element_bytes);
  }
  torch::stable::parallel_for(
      0, p.size_m, row_grain(w), [&](int64_t begin, int64_t end) {
        Scratch<float> row(w.size_k);
        Scratch<float> padded(w.k_pad);
        for (int64_t m = begin; m < end; ++m) {
          plan.ops->widen_row(row_of(x, m), w.size_k, row.data());
          plan.ops->pad_row(w, row.data(), padded.data());
          if (w.zero_point != nullptr) {
            plan.ops->sum_blocks(w, padded.data(), p.size_m, m, sums.data());
          }
          place_row(plan, p, m, padded.data(), placed.data());
        }
      });
  p.x = placed.data();
  p.x_sum = sums.data();
  run_parallel({p}, plan.kernel, plan.token_chunk);
  return y;
}

}  // namespace
}  // namespace vllm::ternary::cpu

STABLE_TORCH_LIBRARY_IMPL(_C, CPU, ops) {
  ops.impl("ternary_gemm", TORCH_BOX(&vllm::ternary::cpu::ternary_gemm));
}
