// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Host-side argument checks shared by the CPU and CUDA ops. A message names
// the op, the argument, the value found and the remedy.

#pragma once

#include <cstdint>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

namespace vllm::ternary {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename... Args>
[[noreturn]] void fail(const Args&... args) {
  std::ostringstream message;
  ((message << args), ...);
  throw std::runtime_error(message.str());
}

// Like STD_TORCH_CHECK, without the source location in front: the reader is a
// user of a model, not of this file.
#define TERNARY_CHECK(condition, ...)     \
  do {                                    \
    if (!(condition)) [[unlikely]] {      \
      ::vllm::ternary::fail(__VA_ARGS__); \
    }                                     \
  } while (false)

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Number of scales along K. A block that reaches over the row is the row.
inline int64_t num_blocks(int64_t size_k, int64_t block_size) {
  return block_size >= size_k ? 1 : ceil_div(size_k, block_size);
}

inline const char* dtype_name(ScalarType type) {
  return torch::headeronly::toString(type);
}

inline std::string shape_name(const Tensor& tensor) {
  std::ostringstream out;
  out << "[";
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    out << (i ? ", " : "") << tensor.size(i);
  }
  out << "]";
  return out.str();
}

inline void check_sizes(const char* op, int64_t size_n, int64_t size_k,
                        int64_t block_size) {
  TERNARY_CHECK(size_n > 0 && size_k > 0, op, ": size_n=", size_n,
                " and size_k=", size_k,
                " must be positive; pass the layer's output and input size");
  TERNARY_CHECK(block_size > 0 && block_size % 4 == 0, op,
                ": block_size=", block_size,
                " must be a positive multiple of 4; for one scale per row pass "
                "size_k rounded up to a multiple of 4");
}

// x [M, K] in any strides. allow_float32: the CPU takes float32, CUDA not.
inline void check_activation(const char* op, const Tensor& x, int64_t size_k,
                             bool allow_float32) {
  TERNARY_CHECK(x.dim() == 2, op, ": x has shape ", shape_name(x),
                "; flatten its leading dimensions to [M, size_k]");
  TERNARY_CHECK(x.size(1) == size_k, op, ": x has ", x.size(1),
                " columns but size_k=", size_k,
                "; the activation must have the layer's input size");
  const ScalarType type = x.scalar_type();
  TERNARY_CHECK(type == ScalarType::Half || type == ScalarType::BFloat16 ||
                    (allow_float32 && type == ScalarType::Float),
                op, ": x has dtype ", dtype_name(type),
                allow_float32
                    ? "; convert it to float16, bfloat16 or float32"
                    : "; convert it to float16 or bfloat16 (--dtype)");
}

inline void check_weight(const char* op, const Tensor& weight) {
  TERNARY_CHECK(weight.scalar_type() == ScalarType::Int, op,
                ": weight has dtype ", dtype_name(weight.scalar_type()),
                " but the device layout is int32; encode the packed weight "
                "with utils/ternary_layout_*.py first");
  TERNARY_CHECK(weight.is_contiguous(), op,
                ": weight is not contiguous; call .contiguous() after encode");
}

// scale [nblocks, n_padded], contiguous.
inline void check_scale(const char* op, const Tensor& scale, int64_t nblocks,
                        int64_t n_padded) {
  const ScalarType type = scale.scalar_type();
  TERNARY_CHECK(type == ScalarType::Half || type == ScalarType::BFloat16 ||
                    type == ScalarType::Float,
                op, ": scale has dtype ", dtype_name(type),
                "; store it as float16, bfloat16 or float32");
  TERNARY_CHECK(scale.dim() == 2 && scale.size(0) == nblocks &&
                    scale.size(1) == n_padded && scale.is_contiguous(),
                op, ": scale has shape ", shape_name(scale),
                " but the device layout asks for contiguous [", nblocks, ", ",
                n_padded, "]; encode it together with the weight");
}

// zero_point [nblocks, n_padded], float32 or int32, contiguous.
inline void check_zero_point(const char* op,
                             const std::optional<Tensor>& zero_point,
                             int64_t nblocks, int64_t n_padded) {
  if (!zero_point.has_value()) {
    return;
  }
  const ScalarType type = zero_point->scalar_type();
  TERNARY_CHECK(type == ScalarType::Float || type == ScalarType::Int, op,
                ": zero_point has dtype ", dtype_name(type),
                "; store it as float32 or int32");
  TERNARY_CHECK(
      zero_point->dim() == 2 && zero_point->size(0) == nblocks &&
          zero_point->size(1) == n_padded && zero_point->is_contiguous(),
      op, ": zero_point has shape ", shape_name(*zero_point),
      " but must have the scale's, contiguous [", nblocks, ", ", n_padded, "]");
}

// bias [size_n] in x's dtype or float32, contiguous.
inline void check_bias(const char* op, const std::optional<Tensor>& bias,
                       int64_t size_n, ScalarType x_type) {
  if (!bias.has_value()) {
    return;
  }
  TERNARY_CHECK(
      bias->dim() == 1 && bias->size(0) == size_n && bias->is_contiguous(), op,
      ": bias has shape ", shape_name(*bias), " but must be contiguous [",
      size_n, "]");
  TERNARY_CHECK(
      bias->scalar_type() == x_type || bias->scalar_type() == ScalarType::Float,
      op, ": bias has dtype ", dtype_name(bias->scalar_type()), " and x has ",
      dtype_name(x_type), "; convert the bias to x's dtype or float32");
}

// norm_weight [P, K] (x's dtype or float32) and part_ends int32 [P]. Without
// part_ends there is one part. Returns P.
inline int64_t check_norm(const char* op,
                          const std::optional<Tensor>& norm_weight,
                          const std::optional<Tensor>& part_ends,
                          int64_t size_k, ScalarType x_type) {
  int64_t parts = 1;
  if (part_ends.has_value()) {
    TERNARY_CHECK(part_ends->dim() == 1 && part_ends->size(0) > 0 &&
                      part_ends->scalar_type() == ScalarType::Int &&
                      part_ends->is_contiguous(),
                  op, ": part_ends has shape ", shape_name(*part_ends),
                  " and dtype ", dtype_name(part_ends->scalar_type()),
                  "; pass a contiguous int32 [P], the end row of each part");
    parts = part_ends->size(0);
  }
  if (norm_weight.has_value()) {
    TERNARY_CHECK(norm_weight->dim() == 2 && norm_weight->size(0) == parts &&
                      norm_weight->size(1) == size_k &&
                      norm_weight->is_contiguous(),
                  op, ": norm_weight has shape ", shape_name(*norm_weight),
                  " but must be contiguous [", parts, ", ", size_k,
                  "], one row for each entry of part_ends");
    TERNARY_CHECK(norm_weight->scalar_type() == x_type ||
                      norm_weight->scalar_type() == ScalarType::Float,
                  op, ": norm_weight has dtype ",
                  dtype_name(norm_weight->scalar_type()), " and x has ",
                  dtype_name(x_type), "; convert it to x's dtype or float32");
  }
  return parts;
}

}  // namespace vllm::ternary
