// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// ternary_embedding on the CPU: gather rows of a weight and decode them.

#include <algorithm>
#include <atomic>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "host.h"
#include "scalar.h"

namespace vllm::ternary::cpu {
namespace {

void decode_row(const Weight& w, int64_t n, Type type, void* out,
                int64_t offset) {
  const uint32_t* words = w.unit_words(n / kLaneRows) + n % kLaneRows;
  for (int64_t b = 0; b < w.nblocks; ++b) {
    const float scale = load_float(w.scale, w.scale_type, b * w.n_pad + n);
    const float zero =
        w.zero_point == nullptr
            ? 0.0f
            : load_float(w.zero_point, w.zero_point_type, b * w.n_pad + n);
    float value[4];  // by code t + 1; 3 never occurs
    for (int code = 0; code < 4; ++code) {
      value[code] = scale * (static_cast<float>(code - 1) - zero);
    }
    const int64_t first = w.nblocks == 1 ? 0 : b * w.block_size;
    const int64_t last =
        w.nblocks == 1 ? w.size_k : std::min(w.size_k, first + w.block_size);
    for (int64_t k = first; k < last; ++k) {
      const int64_t at = w.block_begin(b) + k - first;
      const uint32_t word = words[at / kWordCodes * kTileRows];
      store_float(out, type, offset + k,
                  value[(word >> (2 * (at % kWordCodes))) & 3u]);
    }
  }
}

Tensor ternary_embedding(const Tensor& indices, const Tensor& weight,
                         const Tensor& scale,
                         const std::optional<Tensor>& zero_point,
                         int64_t size_n, int64_t size_k, int64_t block_size,
                         ScalarType dtype) {
  const char* op = "ternary_embedding";
  const Weight w =
      make_weight(op, weight, scale, zero_point, size_n, size_k, block_size);
  TERNARY_CHECK(dtype == ScalarType::Half || dtype == ScalarType::BFloat16 ||
                    dtype == ScalarType::Float,
                op, ": dtype is ", dtype_name(dtype),
                "; ask for float16, bfloat16 or float32");
  const bool is_long = indices.scalar_type() == ScalarType::Long;
  TERNARY_CHECK(is_long || indices.scalar_type() == ScalarType::Int, op,
                ": indices has dtype ", dtype_name(indices.scalar_type()),
                "; convert it to int64 or int32");

  const Tensor flat = torch::stable::contiguous(indices);
  std::vector<int64_t> shape(indices.sizes().begin(), indices.sizes().end());
  shape.push_back(size_k);
  Tensor y = torch::stable::new_empty(weight, shape, dtype);
  const int64_t count = flat.numel();
  if (count == 0) {
    return y;
  }
  const auto index_at = [&](int64_t i) {
    return is_long ? static_cast<const int64_t*>(flat.data_ptr())[i]
                   : static_cast<const int32_t*>(flat.data_ptr())[i];
  };
  for (int64_t i = 0; i < count; ++i) {
    TERNARY_CHECK(index_at(i) >= 0 && index_at(i) < size_n, op, ": index ",
                  index_at(i), " at position ", i, " is outside of [0, ",
                  size_n, "); check the token ids against the vocabulary");
  }
  void* out = y.data_ptr();
  const int64_t grain = std::max<int64_t>(1, 8192 / size_k);
  torch::stable::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      decode_row(w, index_at(i), to_type(dtype), out, i * size_k);
    }
  });
  return y;
}

}  // namespace
}  // namespace vllm::ternary::cpu

STABLE_TORCH_LIBRARY_IMPL(_C, CPU, ops) {
  ops.impl("ternary_embedding",
           TORCH_BOX(&vllm::ternary::cpu::ternary_embedding));
}
