// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Activations into the form that the kernels read.

#pragma once

#include "ternary_cpu.h"

namespace vllm::ternary::cpu {

// One row of x: element k is data[offset + k * stride].
struct Row {
  const void* data = nullptr;
  Type type = Type::kFloat;
  int64_t offset = 0;
  int64_t stride = 1;
};

struct ActivationOps {
  // out [size_k], float, in the order of x.
  void (*widen_row)(const Row& x, int64_t size_k, float* out);

  // out [k_pad]: row [size_k] in the padded K of the weight, zeros between.
  void (*pad_row)(const Weight& w, const float* row, float* out);

  // out[block * size_m + m]: sums of a padded row over each block.
  void (*sum_blocks)(const Weight& w, const float* padded, int64_t size_m,
                     int64_t m, float* out);

  // 1 / sqrt(mean(x^2) + eps), which the parts of a fused layer share.
  float (*rms_inverse)(const float* row, int64_t size_k, float eps);

  // out = round(round(row * inverse) * weight): the roundings to x's type that
  // transformers' norms do; the outer one not where the weight is float32.
  void (*apply_norm)(const float* row, int64_t size_k, float inverse,
                     const Row& weight, Type x_type, float* out);

  // Per-token symmetric int8, q = round(row * 127 / max|row|), half to even,
  // in the padded K and the byte order of int8_position(); each 64 bytes
  // `line_step` bytes after the last. sums[b * size_m + m] is the sum of q over
  // block b. Returns the factor from q back to x, or NaN if the row holds an
  // infinity or a NaN, so that the result shows it.
  float (*quantize_row)(const Weight& w, const Row& row, int64_t size_m,
                        int64_t m, int8_t* out, int64_t line_step,
                        int32_t* sums);
};

extern const ActivationOps kActivationPortable;
extern const ActivationOps kActivationAvx2;
extern const ActivationOps kActivationAvx512;

}  // namespace vllm::ternary::cpu
