// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// From the tensors of a CUDA op to the arguments of the kernels: checks,
// alignment, allocation.
#pragma once

#ifndef USE_CUDA
  #define USE_CUDA  // declares the stream accessor in shim.h
#endif
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <optional>

#include "cuda_common.h"
#include "ternary_common.h"

namespace vllm::ternary {

constexpr int64_t kRowAlign = 64, kKAlign = 128;

inline DType float_type(const Tensor& t, const char* name) {
  switch (t.scalar_type()) {
    case ScalarType::Half:
      return DType::kHalf;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Float:
      return DType::kFloat;
    default:
      STD_TORCH_CHECK(false, name,
                      " must be float16, bfloat16 or float32 on CUDA");
  }
  return DType::kFloat;
}

inline bool same_device(const Tensor& a, const Tensor& b) {
  return a.is_cuda() && a.get_device_index() == b.get_device_index();
}

inline cudaStream_t current_stream(const Tensor& t) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

// What the packed weight says about itself, checked once for every op.
struct Weight {
  const int32_t* codes;
  const void* scale;
  DType scale_dtype;
  const float* zero_point;
  int N, K, N_pad, K_pad, block_size, num_blocks;
};

inline Weight check_weight(const Tensor& weight, const Tensor& scale,
                           const std::optional<Tensor>& zero_point,
                           int64_t size_n, int64_t size_k, int64_t block_size) {
  STD_TORCH_CHECK(
      size_n >= 0 && size_k >= 1 && size_n < (1 << 30) && size_k < (1 << 30),
      "size_n ", size_n, " and size_k ", size_k, " must be sizes of a weight");
  STD_TORCH_CHECK(block_size >= 4 && block_size % 4 == 0, "block_size is ",
                  block_size, "; it must be a positive multiple of 4");
  Weight w;
  w.N = int(size_n);
  w.K = int(size_k);
  w.N_pad = int(round_up(size_n, kRowAlign));
  w.K_pad = int(round_up(size_k, kKAlign));
  // A block longer than the row is one scale a row, whatever its length.
  w.block_size = int(block_size < w.K_pad ? block_size : w.K_pad);
  w.num_blocks = (w.K + w.block_size - 1) / w.block_size;
  STD_TORCH_CHECK(
      weight.scalar_type() == ScalarType::Int && weight.is_contiguous() &&
          weight.numel() == int64_t(w.N_pad) * w.K_pad / 16,
      "weight ", shape_name(weight), " is not a [", size_n, ", ", size_k,
      "] weight in the CUDA layout (int32 [N_pad/16, K_pad/128, 32, 4])");
  STD_TORCH_CHECK(scale.is_contiguous() && scale.dim() == 2 &&
                      scale.size(0) == w.num_blocks && scale.size(1) == w.N_pad,
                  "scale ", shape_name(scale), " must be contiguous [",
                  w.num_blocks, ", ", w.N_pad, "] for K = ", size_k,
                  " in blocks of ", block_size);
  STD_TORCH_CHECK(weight.is_cuda() && scale.is_cuda() &&
                      scale.get_device_index() == weight.get_device_index(),
                  "weight and scale must be on one CUDA device");
  w.codes = static_cast<const int32_t*>(weight.data_ptr());
  w.scale = scale.data_ptr();
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(w.codes) % 16 == 0 &&
                      reinterpret_cast<uintptr_t>(w.scale) % 16 == 0,
                  "weight and scale must begin at a multiple of 16 bytes");
  w.scale_dtype = float_type(scale, "scale");
  w.zero_point = nullptr;
  if (zero_point) {
    STD_TORCH_CHECK(
        zero_point->scalar_type() == ScalarType::Float &&
            same_device(*zero_point, weight) && zero_point->is_contiguous() &&
            zero_point->dim() == 2 && zero_point->size(0) == w.num_blocks &&
            zero_point->size(1) == w.N_pad,
        "zero_point ", shape_name(*zero_point), " must be contiguous float32 [",
        w.num_blocks, ", ", w.N_pad, "] on weight's device");
    w.zero_point = static_cast<const float*>(zero_point->data_ptr());
  }
  return w;
}

inline void check_activation(const Tensor& x, const Tensor& weight,
                             int64_t size_k) {
  STD_TORCH_CHECK(
      x.is_cuda() && x.get_device_index() == weight.get_device_index(),
      "x and weight must be on one CUDA device");
  STD_TORCH_CHECK(x.dim() == 2 && x.size(1) == size_k, "x ", shape_name(x),
                  " must be [M, ", size_k, "]");
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Half ||
                      x.scalar_type() == ScalarType::BFloat16,
                  "x must be float16 or bfloat16 on CUDA (--dtype), not ",
                  dtype_name(x.scalar_type()));
  STD_TORCH_CHECK(x.size(0) < (1 << 30), "x has too many rows: ", x.size(0));
}

// The bias in x's dtype, contiguous; `keep` owns it if it had to be converted.
inline const void* check_bias(const std::optional<Tensor>& bias,
                              const Tensor& x, int64_t size_n, Tensor& keep) {
  if (!bias) return nullptr;
  STD_TORCH_CHECK(bias->numel() == size_n, "bias ", shape_name(*bias),
                  " must hold ", size_n, " values");
  STD_TORCH_CHECK(same_device(*bias, x), "bias must be on x's device");
  keep = *bias;
  if (keep.scalar_type() != x.scalar_type()) {
    keep = torch::stable::to(keep, x.scalar_type());
  }
  if (!keep.is_contiguous()) keep = torch::stable::contiguous(keep);
  return keep.data_ptr();
}

// What the arguments of every kernel say of the weight.
template <typename Args>
void set_weight(Args& a, const Weight& w) {
  a.weight = w.codes;
  a.scale = w.scale;
  a.scale_dtype = w.scale_dtype;
  a.N = w.N;
  a.K = w.K;
  a.N_pad = w.N_pad;
  a.K_pad = w.K_pad;
  a.block_size = w.block_size;
}

inline GemmArgs gemm_args(const Tensor& x, const Weight& w) {
  GemmArgs a{};
  set_weight(a, w);
  a.dtype = float_type(x, "x");
  a.zero_point = w.zero_point;
  a.M = int(x.size(0));
  a.num_blocks = w.num_blocks;
  a.ldy = w.N;
  a.device = x.get_device_index();
  a.stream = current_stream(x);
  return a;
}

// Rows of K values as the kernels want them: inner stride 1, 16-byte aligned.
// Sets a.x and a.ldx; returns the copy that was needed, if one was.
template <typename Args>
std::optional<Tensor> align_rows(const Tensor& x, Args& a) {
  const void* base = x.data_ptr();
  const int64_t ld = x.stride(0), inc = x.stride(1);
  const bool one_row = x.size(0) == 1;
  const bool unit = inc == 1 || x.size(1) == 1;
  if (unit && (one_row || (ld % 8 == 0 && ld >= 0)) &&
      reinterpret_cast<uintptr_t>(base) % 16 == 0) {
    a.x = base;
    a.ldx = one_row ? round_up(a.K, 8) : ld;
    return std::nullopt;
  }
  const int64_t width = round_up(a.K, 8);
  Tensor copy = torch::stable::new_empty(x, {x.size(0), width});
  copy_rows(base, ld, inc, copy.data_ptr(), width, x.size(0), a.K, a.stream);
  a.x = copy.data_ptr();
  a.ldx = width;
  return copy;
}

template <typename Launch>
Tensor run_gemm(const Tensor& x, const Tensor& weight, const Tensor& scale,
                const std::optional<Tensor>& zero_point,
                const std::optional<Tensor>& bias, int64_t size_n,
                int64_t size_k, int64_t block_size, Launch launch) {
  check_activation(x, weight, size_k);
  const Weight w =
      check_weight(weight, scale, zero_point, size_n, size_k, block_size);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  Tensor y = torch::stable::new_empty(x, {x.size(0), size_n});
  if (x.size(0) == 0 || size_n == 0) return y;
  GemmArgs a = gemm_args(x, w);
  Tensor bias_keep = y;
  a.bias = check_bias(bias, x, size_n, bias_keep);
  a.y = y.data_ptr();
  const std::optional<Tensor> x_keep = align_rows(x, a);
  launch(a);
  return y;
}

// What ternary_gemm_w2a8 quantizes and multiplies, and the memory for it.
struct W2A8Call {
  QuantArgs quant{};
  W2A8Args gemm{};
  Tensor y, bias, workspace;
  std::optional<Tensor> x_keep;
};

inline W2A8Call w2a8_call(const Tensor& x, const Tensor& weight,
                          const Tensor& scale,
                          const std::optional<Tensor>& bias,
                          const std::optional<Tensor>& norm_weight,
                          const std::optional<Tensor>& part_ends,
                          double norm_eps, int64_t size_n, int64_t size_k,
                          int64_t block_size) {
  check_activation(x, weight, size_k);
  const Weight w =
      check_weight(weight, scale, std::nullopt, size_n, size_k, block_size);
  const int64_t rows = x.size(0);
  int64_t parts = 1;
  if (norm_weight) {
    STD_TORCH_CHECK(norm_weight->dim() == 2 && norm_weight->is_contiguous() &&
                        same_device(*norm_weight, x) &&
                        norm_weight->size(0) >= 1 &&
                        norm_weight->size(1) == size_k,
                    "norm_weight ", shape_name(*norm_weight),
                    " must be contiguous [parts, ", size_k, "] on x's device");
    parts = norm_weight->size(0);
  }
  if (parts > 1) {
    STD_TORCH_CHECK(part_ends && same_device(*part_ends, x) &&
                        part_ends->scalar_type() == ScalarType::Int &&
                        part_ends->is_contiguous() &&
                        part_ends->numel() == parts,
                    "part_ends must be int32 [", parts,
                    "] on x's device, one end row per row of norm_weight");
    STD_TORCH_CHECK(parts < 65536, "too many parts: ", parts);
  }

  // xq, then xs and xsum, then the sums of tiles.
  const int64_t tokens = parts * rows, k_tiles = w.K_pad / 128;
  const int64_t words = tokens * (2 + (w.num_blocks > 1 ? k_tiles : 0));
  Tensor y = torch::stable::new_empty(x, {rows, size_n});
  W2A8Call c{.y = y,
             .bias = y,
             .workspace = torch::stable::new_empty(
                 x, {tokens * w.K_pad + words * 4}, ScalarType::Char)};
  QuantArgs& q = c.quant;
  q.K = w.K;
  q.K_pad = w.K_pad;
  q.M = int(rows);
  q.parts = int(parts);
  q.dtype = float_type(x, "x");
  q.device = x.get_device_index();
  q.stream = current_stream(x);
  if (norm_weight) {
    q.norm_weight = norm_weight->data_ptr();
    q.norm_dtype = float_type(*norm_weight, "norm_weight");
    q.eps = float(norm_eps);
  }
  q.xq = static_cast<int8_t*>(c.workspace.data_ptr());
  q.xs = reinterpret_cast<float*>(q.xq + tokens * w.K_pad);
  q.xsum = reinterpret_cast<int32_t*>(q.xs + tokens);
  q.xsum_tiles = w.num_blocks > 1 ? q.xsum + tokens : nullptr;
  if (rows > 0) c.x_keep = align_rows(x, q);

  W2A8Args& a = c.gemm;
  set_weight(a, w);
  a.xq = q.xq;
  a.xs = q.xs;
  a.xsum = q.xsum;
  a.xsum_tiles = q.xsum_tiles;
  a.bias = check_bias(bias, x, size_n, c.bias);
  if (parts > 1) {
    a.part_ends = static_cast<const int32_t*>(part_ends->data_ptr());
  }
  a.y = y.data_ptr();
  a.dtype = q.dtype;
  a.parts = q.parts;
  a.M = q.M;
  a.num_blocks = w.num_blocks;
  a.device = q.device;
  a.stream = q.stream;
  return c;
}

}  // namespace vllm::ternary
