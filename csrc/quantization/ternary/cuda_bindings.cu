// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The CUDA implementations of the ternary ops: argument checks, allocation and
// the choice of kernel. Schemas are in torch_bindings.cpp, except for the
// reference op, which only tests and benchmarks call.
#ifndef USE_CUDA
  #define USE_CUDA  // declares the stream accessor in shim.h
#endif
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <string>
#include <vector>

#include "cuda_common.h"
#include "gemm_dispatch.h"
#include "mma_gemm.h"
#include "mma_s8.h"

namespace vllm::ternary {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kRowAlign = 64, kKAlign = 128;

int64_t round_up(int64_t v, int64_t m) { return (v + m - 1) / m * m; }

std::string shape_of(const Tensor& t) {
  std::string s = "[";
  for (int64_t i = 0; i < t.dim(); ++i) {
    s += (i ? ", " : "") + std::to_string(t.size(i));
  }
  return s + "]";
}

DType float_type(const Tensor& t, const char* name) {
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

bool same_device(const Tensor& a, const Tensor& b) {
  return a.is_cuda() && a.get_device_index() == b.get_device_index();
}

cudaStream_t current_stream(const Tensor& t) {
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

Weight check_weight(const Tensor& weight, const Tensor& scale,
                    const std::optional<Tensor>& zero_point, int64_t size_n,
                    int64_t size_k, int64_t block_size) {
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
      "weight ", shape_of(weight), " is not a [", size_n, ", ", size_k,
      "] weight in the CUDA layout (int32 [N_pad/16, K_pad/128, 32, 4])");
  STD_TORCH_CHECK(scale.is_contiguous() && scale.dim() == 2 &&
                      scale.size(0) == w.num_blocks && scale.size(1) == w.N_pad,
                  "scale ", shape_of(scale), " must be contiguous [",
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
        "zero_point ", shape_of(*zero_point), " must be contiguous float32 [",
        w.num_blocks, ", ", w.N_pad, "] on weight's device");
    w.zero_point = static_cast<const float*>(zero_point->data_ptr());
  }
  return w;
}

void check_activation(const Tensor& x, const Tensor& weight, int64_t size_k) {
  STD_TORCH_CHECK(
      x.is_cuda() && x.get_device_index() == weight.get_device_index(),
      "x and weight must be on one CUDA device");
  STD_TORCH_CHECK(x.dim() == 2 && x.size(1) == size_k, "x ", shape_of(x),
                  " must be [M, ", size_k, "]");
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Half ||
                      x.scalar_type() == ScalarType::BFloat16,
                  "x must be float16 or bfloat16 on CUDA");
  STD_TORCH_CHECK(x.size(0) < (1 << 30), "x has too many rows: ", x.size(0));
}

// The bias in x's dtype, contiguous; `keep` owns it if it had to be converted.
const void* check_bias(const std::optional<Tensor>& bias, const Tensor& x,
                       int64_t size_n, Tensor& keep) {
  if (!bias) return nullptr;
  STD_TORCH_CHECK(bias->numel() == size_n, "bias ", shape_of(*bias),
                  " must hold ", size_n, " values");
  STD_TORCH_CHECK(same_device(*bias, x), "bias must be on x's device");
  keep = *bias;
  if (keep.scalar_type() != x.scalar_type()) {
    keep = torch::stable::to(keep, x.scalar_type());
  }
  if (!keep.is_contiguous()) keep = torch::stable::contiguous(keep);
  return keep.data_ptr();
}

GemmArgs gemm_args(const Tensor& x, const Weight& w) {
  GemmArgs a{};
  a.dtype = float_type(x, "x");
  a.weight = w.codes;
  a.scale = w.scale;
  a.scale_dtype = w.scale_dtype;
  a.zero_point = w.zero_point;
  a.M = int(x.size(0));
  a.N = w.N;
  a.K = w.K;
  a.N_pad = w.N_pad;
  a.K_pad = w.K_pad;
  a.block_size = w.block_size;
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

Tensor ternary_gemm(const Tensor& x, const Tensor& weight, const Tensor& scale,
                    const std::optional<Tensor>& zero_point,
                    const std::optional<Tensor>& bias, int64_t size_n,
                    int64_t size_k, int64_t block_size) {
  return run_gemm(x, weight, scale, zero_point, bias, size_n, size_k,
                  block_size, [](const GemmArgs& a) { dispatch_gemm(a); });
}

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

// What ternary_gemm_w2a8 quantizes and multiplies, and the memory for it.
struct W2A8Call {
  QuantArgs quant{};
  W2A8Args gemm{};
  Tensor y, bias, workspace;
  std::optional<Tensor> x_keep;
};

W2A8Call w2a8_call(const Tensor& x, const Tensor& weight, const Tensor& scale,
                   const std::optional<Tensor>& bias,
                   const std::optional<Tensor>& norm_weight,
                   const std::optional<Tensor>& part_ends, double norm_eps,
                   int64_t size_n, int64_t size_k, int64_t block_size) {
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
                    "norm_weight ", shape_of(*norm_weight),
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
  a.xq = q.xq;
  a.xs = q.xs;
  a.xsum = q.xsum;
  a.xsum_tiles = q.xsum_tiles;
  a.weight = w.codes;
  a.scale = w.scale;
  a.scale_dtype = w.scale_dtype;
  a.bias = check_bias(bias, x, size_n, c.bias);
  if (parts > 1) {
    a.part_ends = static_cast<const int32_t*>(part_ends->data_ptr());
  }
  a.y = y.data_ptr();
  a.dtype = q.dtype;
  a.parts = q.parts;
  a.M = q.M;
  a.N = w.N;
  a.K = w.K;
  a.N_pad = w.N_pad;
  a.K_pad = w.K_pad;
  a.block_size = w.block_size;
  a.num_blocks = w.num_blocks;
  a.device = q.device;
  a.stream = q.stream;
  return c;
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

// The same with one product kernel, for the tuning script and the tests: 0 the
// naive one, 1 int8 tensor cores for few tokens, 2 the Hopper kernel for many,
// 3 as 1 with the quantization inside.
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
  a.dtype = float_type(out, "dtype");
  if (indices.numel() == 0) return out;
  const Tensor flat =
      indices.is_contiguous() ? indices : torch::stable::contiguous(indices);
  a.indices = flat.data_ptr();
  a.indices_are_int64 = indices.scalar_type() == ScalarType::Long;
  a.count = indices.numel();
  a.weight = w.codes;
  a.scale = w.scale;
  a.scale_dtype = w.scale_dtype;
  a.zero_point = w.zero_point;
  a.out = out.data_ptr();
  a.N = w.N;
  a.K = w.K;
  a.N_pad = w.N_pad;
  a.K_pad = w.K_pad;
  a.block_size = w.block_size;
  a.stream = current_stream(weight);
  gather_rows(a);
  return out;
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
  m.impl("ternary_gemm", TORCH_BOX(&vllm::ternary::ternary_gemm));
  m.impl("ternary_gemm_reference",
         TORCH_BOX(&vllm::ternary::ternary_gemm_reference));
  m.impl("ternary_gemm_sm90", TORCH_BOX(&vllm::ternary::ternary_gemm_sm90));
  m.impl("ternary_sm90_clusters",
         TORCH_BOX(&vllm::ternary::ternary_sm90_clusters));
  m.impl("ternary_gemm_tuned", TORCH_BOX(&vllm::ternary::ternary_gemm_tuned));
  m.impl("ternary_gemm_w2a8", TORCH_BOX(&vllm::ternary::ternary_gemm_w2a8));
  m.impl("ternary_gemm_s8", TORCH_BOX(&vllm::ternary::ternary_gemm_s8));
  m.impl("ternary_gemm_w2a8_tuned",
         TORCH_BOX(&vllm::ternary::ternary_gemm_w2a8_tuned));
  m.impl("ternary_quantize_tokens",
         TORCH_BOX(&vllm::ternary::ternary_quantize_tokens));
  m.impl("ternary_embedding", TORCH_BOX(&vllm::ternary::ternary_embedding));
}
