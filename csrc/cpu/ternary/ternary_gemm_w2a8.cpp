// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// ternary_gemm_w2a8 on the CPU: an optional RMSNorm, int8 activations per
// token, an exact int32 sum per block, scales in float32.

#include <cstring>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "host.h"
#include "plan.h"
#include "schedule.h"

namespace vllm::ternary::cpu {
namespace {

// Rows at which the parts of a fused layer end; one part without part_ends.
std::vector<int64_t> read_part_ends(const char* op,
                                    const std::optional<Tensor>& part_ends,
                                    int64_t size_n) {
  if (!part_ends.has_value()) {
    return {size_n};
  }
  const int32_t* data = static_cast<const int32_t*>(part_ends->data_ptr());
  std::vector<int64_t> ends(data, data + part_ends->size(0));
  for (size_t i = 0; i < ends.size(); ++i) {
    TERNARY_CHECK(ends[i] >= (i ? ends[i - 1] : 0), op, ": part_ends[", i,
                  "]=", ends[i], " is below the part before it");
  }
  TERNARY_CHECK(ends.back() == size_n, op, ": part_ends ends at ", ends.back(),
                " but size_n=", size_n,
                "; the last part must end at the layer's last row");
  return ends;
}

Tensor ternary_gemm_w2a8(const Tensor& x, const Tensor& weight,
                         const Tensor& scale, const std::optional<Tensor>& bias,
                         const std::optional<Tensor>& norm_weight,
                         const std::optional<Tensor>& part_ends,
                         double norm_eps, int64_t size_n, int64_t size_k,
                         int64_t block_size) {
  const char* op = "ternary_gemm_w2a8";
  Problem p;
  p.weight =
      make_weight(op, weight, scale, std::nullopt, size_n, size_k, block_size);
  check_activation(op, x, size_k, /*allow_float32=*/true);
  check_bias(op, bias, size_n, x.scalar_type());
  check_norm(op, norm_weight, part_ends, size_k, x.scalar_type());
  std::vector<int64_t> ends = read_part_ends(op, part_ends, size_n);
  if (!norm_weight.has_value()) {
    ends = {size_n};  // without a norm all parts see the same activation
  }
  Tensor y = new_output(x, size_n);
  set_output(p, y, bias);
  if (p.size_m == 0) {
    return y;
  }

  const Weight& w = p.weight;
  const Plan plan = plan_w2a8(select_isa(), p.size_m, w);
  const bool tiles = plan.form == Form::kTiles;
  const int64_t parts = static_cast<int64_t>(ends.size());
  const int64_t part_bytes =
      (tiles ? round_up(p.size_m, kTileTokens) : p.size_m) * w.k_pad;
  Scratch<char> quantized(parts * part_bytes);
  Scratch<int32_t> sums(parts * p.size_m * w.nblocks);
  Scratch<float> factors(parts * p.size_m);
  if (tiles) {
    zero_absent_tokens(quantized.data(), part_bytes, parts, p.size_m, w.k_pad);
  }
  torch::stable::parallel_for(
      0, p.size_m, row_grain(w), [&](int64_t begin, int64_t end) {
        Scratch<float> wide(norm_weight.has_value() ? w.size_k : 0);
        Scratch<float> normed(norm_weight.has_value() ? w.size_k : 0);
        for (int64_t m = begin; m < end; ++m) {
          Row row = row_of(x, m);
          float inverse = 0.0f;
          if (norm_weight.has_value()) {
            plan.ops->widen_row(row, w.size_k, wide.data());
            inverse = plan.ops->rms_inverse(wide.data(), w.size_k,
                                            static_cast<float>(norm_eps));
            row = {normed.data(), Type::kFloat, 0, 1};
          }
          for (int64_t part = 0; part < parts; ++part) {
            if (norm_weight.has_value()) {
              plan.ops->apply_norm(wide.data(), w.size_k, inverse,
                                   row_of(*norm_weight, part), p.y_type,
                                   normed.data());
            }
            char* out = quantized.data() + part * part_bytes +
                        (tiles ? tile_offset(m, w.k_pad) : m * w.k_pad);
            factors.data()[part * p.size_m + m] = plan.ops->quantize_row(
                w, row, p.size_m, m, reinterpret_cast<int8_t*>(out),
                tiles ? kTileBytes : kTileRowBytes,
                sums.data() + part * p.size_m * w.nblocks);
          }
        }
      });

  std::vector<Problem> problems;
  for (int64_t part = 0; part < parts; ++part) {
    Problem q = p;
    q.row_begin = part == 0 ? 0 : ends[part - 1];
    q.row_end = ends[part];
    q.x = quantized.data() + part * part_bytes;
    q.xq_sum = sums.data() + part * p.size_m * w.nblocks;
    q.x_scale = factors.data() + part * p.size_m;
    if (q.row_begin < q.row_end) {
      problems.push_back(q);
    }
  }
  run_parallel(problems, plan.kernel, plan.token_chunk);
  return y;
}

}  // namespace
}  // namespace vllm::ternary::cpu

STABLE_TORCH_LIBRARY_IMPL(_C, CPU, ops) {
  ops.impl("ternary_gemm_w2a8",
           TORCH_BOX(&vllm::ternary::cpu::ternary_gemm_w2a8));
}
