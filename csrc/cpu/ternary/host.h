// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// From torch tensors to the plain structs of ternary_cpu.h, with the checks.

#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>

#include <torch/csrc/stable/ops.h>

#include "../../quantization/ternary/ternary_common.h"
#include "activation.h"
#include "host_memory.h"
#include "ternary_cpu.h"

namespace vllm::ternary::cpu {

inline Type to_type(ScalarType type) {
  switch (type) {
    case ScalarType::Half:
      return Type::kHalf;
    case ScalarType::BFloat16:
      return Type::kBFloat16;
    case ScalarType::Int:
      return Type::kInt;
    default:
      return Type::kFloat;
  }
}

// Checks weight, scale and zero point against the sizes.
inline Weight make_weight(const char* op, const Tensor& weight,
                          const Tensor& scale,
                          const std::optional<Tensor>& zero_point,
                          int64_t size_n, int64_t size_k, int64_t block_size) {
  check_sizes(op, size_n, size_k, block_size);
  check_weight(op, weight);
  Weight w;
  w.size_n = size_n;
  w.size_k = size_k;
  w.block_size = block_size;
  w.n_pad = round_up(size_n, kTileRows);
  w.nblocks = num_blocks(size_k, block_size);
  w.k_pad = round_up(size_k, kAlignK);
  w.block_pad = w.k_pad;
  if (w.nblocks > 1) {
    w.block_pad = round_up(block_size, kWordCodes);
    w.k_pad = round_up(w.nblocks * w.block_pad, kAlignK);
  }
  TERNARY_CHECK(
      weight.dim() == 3 && weight.size(0) == w.n_pad / kTileRows &&
          weight.size(1) == w.k_pad / kWordCodes && weight.size(2) == kTileRows,
      op, ": weight has shape ", shape_name(weight), " but size_n=", size_n,
      ", size_k=", size_k, ", block_size=", block_size, " ask for [",
      w.n_pad / kTileRows, ", ", w.k_pad / kWordCodes, ", ", kTileRows,
      "]; encode it with utils/ternary_layout_cpu.py");
  check_scale(op, scale, w.nblocks, w.n_pad);
  check_zero_point(op, zero_point, w.nblocks, w.n_pad);
  w.words = static_cast<const uint32_t*>(weight.data_ptr());
  w.scale = scale.data_ptr();
  w.scale_type = to_type(scale.scalar_type());
  if (zero_point.has_value()) {
    w.zero_point = zero_point->data_ptr();
    w.zero_point_type = to_type(zero_point->scalar_type());
  }
  return w;
}

// From so many bytes on the allocator takes memory from the system anew with
// every call: 4 KiB at a time, that takes as long as the product.
constexpr int64_t kLargeBuffer = 8 << 20;

// An uninitialized output [M, N] for x.
inline Tensor new_output(const Tensor& x, int64_t size_n) {
  Tensor y = torch::stable::new_empty(x, {x.size(0), size_n});
  const int64_t bytes = y.numel() * y.element_size();
  if (bytes >= kLargeBuffer) prefer_large_pages(y.data_ptr(), bytes);
  return y;
}

// y [M, N] and what is added to it.
inline void set_output(Problem& p, const Tensor& y,
                       const std::optional<Tensor>& bias) {
  p.size_m = y.size(0);
  p.y = y.data_ptr();
  p.y_type = to_type(y.scalar_type());
  p.row_end = p.weight.size_n;
  if (bias.has_value()) {
    p.bias = bias->data_ptr();
    p.bias_type = to_type(bias->scalar_type());
  }
}

inline Row row_of(const Tensor& x, int64_t m) {
  return {x.data_ptr(), to_type(x.scalar_type()), m * x.stride(0), x.stride(1)};
}

// Rows of x below which a second thread does not pay.
inline int64_t row_grain(const Weight& w) {
  return std::max<int64_t>(1, 16384 / w.k_pad);
}

// x in the tiles of the AMX kernels: [tokens / 16][k / tile][16][64 bytes].
constexpr int64_t kTileTokens = 16;
constexpr int64_t kTileRowBytes = 64;
constexpr int64_t kTileBytes = kTileTokens * kTileRowBytes;

// Where token m begins; its next 64 bytes are one tile further.
inline int64_t tile_offset(int64_t m, int64_t row_bytes) {
  return m / kTileTokens * kTileTokens * row_bytes +
         m % kTileTokens * kTileRowBytes;
}

// Clears the rows of the last tiles that have no token, in `count` arrays.
inline void zero_absent_tokens(char* data, int64_t array_bytes, int64_t count,
                               int64_t size_m, int64_t row_bytes) {
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t m = size_m; m % kTileTokens != 0; ++m) {
      char* row = data + i * array_bytes + tile_offset(m, row_bytes);
      for (int64_t k = 0; k < row_bytes; k += kTileRowBytes) {
        std::memset(row + k * kTileTokens, 0, kTileRowBytes);
      }
    }
  }
}

// Uninitialized scratch, aligned to a cache line.
template <typename T>
class Scratch {
 public:
  explicit Scratch(int64_t count)
      : storage_(new char[count * sizeof(T) + kLine]) {
    const auto address = reinterpret_cast<uintptr_t>(storage_.get());
    data_ = reinterpret_cast<T*>((address + kLine - 1) / kLine * kLine);
    const int64_t bytes = count * sizeof(T);
    if (bytes >= kLargeBuffer) prefer_large_pages(data_, bytes);
  }
  T* data() const { return data_; }

 private:
  static constexpr uintptr_t kLine = 64;
  std::unique_ptr<char[]> storage_;
  T* data_;
};

}  // namespace vllm::ternary::cpu
