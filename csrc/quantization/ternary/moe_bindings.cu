// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The op ternary_moe_gemm, which exists on CUDA only; moe_gemm.h says what it
// computes.
#include <algorithm>
#include <optional>

#include "cuda_args.h"
#include "moe_gemm.h"

namespace vllm::ternary {
namespace {

constexpr const char* kOp = "ternary_moe_gemm";

void check_int32(const Tensor& t, const char* name) {
  TERNARY_CHECK(
      t.is_cuda() && t.is_contiguous() && t.scalar_type() == ScalarType::Int,
      kOp, ": ", name, " must be contiguous int32 on x's device");
}

// A tensor that holds [experts, blocks, N_pad] values per block of K.
void check_per_block(const Tensor& t, const char* name, int64_t experts,
                     const MoeGemmArgs& a) {
  TERNARY_CHECK(t.is_cuda() && t.is_contiguous() && t.dim() == 3 &&
                    t.size(0) == experts && t.size(1) == a.num_blocks &&
                    t.size(2) == a.N_pad,
                kOp, ": ", name, " has shape ", shape_name(t), "; [", experts,
                ", ", a.num_blocks, ", ", a.N_pad, "] is expected");
}

Tensor ternary_moe_gemm(
    const Tensor& x, const Tensor& weight, const Tensor& scale,
    const std::optional<Tensor>& zero_point, const std::optional<Tensor>& bias,
    const Tensor& sorted_routes, const Tensor& experts, const Tensor& used,
    const std::optional<Tensor>& route_weight, int64_t top_k, int64_t routes,
    int64_t size_n, int64_t size_k, int64_t block_size) {
  check_sizes(kOp, size_n, size_k, block_size);
  TERNARY_CHECK(x.is_cuda() && x.dim() == 2 && x.size(1) == size_k, kOp,
                ": x has shape ", shape_name(x), "; [M, ", size_k,
                "] on a CUDA device is expected");
  TERNARY_CHECK(x.scalar_type() == ScalarType::Half ||
                    x.scalar_type() == ScalarType::BFloat16,
                kOp, ": x must be float16 or bfloat16 (--dtype), not ",
                dtype_name(x.scalar_type()));
  TERNARY_CHECK(x.stride(1) == 1 && x.stride(0) % 8 == 0 &&
                    reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0,
                kOp,
                ": rows of x must be contiguous and 16-byte aligned; pad them");
  TERNARY_CHECK(top_k > 0 && routes == x.size(0) * top_k, kOp,
                ": routes=", routes, " must be the rows of x, ", x.size(0),
                ", times top_k=", top_k);
  MoeGemmArgs a{};
  a.N = int(size_n);
  a.K = int(size_k);
  a.N_pad = int(round_up(size_n, 64));
  a.K_pad = int(round_up(size_k, 128));
  a.block_size = int(block_size < a.K_pad ? block_size : a.K_pad);
  a.num_blocks = int(ceil_div(size_k, a.block_size));
  TERNARY_CHECK(a.block_size % 16 == 0, kOp, ": block_size=", block_size,
                " must be a multiple of 16");
  const int64_t count = weight.size(0);
  TERNARY_CHECK(
      weight.is_cuda() && weight.is_contiguous() &&
          weight.scalar_type() == ScalarType::Int &&
          weight.numel() == count * a.N_pad * (a.K_pad / 16),
      kOp, ": weight has shape ", shape_name(weight),
      "; experts in the layout of ternary_layout_cuda.py are expected");
  check_per_block(scale, "scale", count, a);
  a.scale_dtype = float_type(scale, "scale");
  if (zero_point) {
    check_per_block(*zero_point, "zero_point", count, a);
    TERNARY_CHECK(zero_point->scalar_type() == ScalarType::Float, kOp,
                  ": zero_point must be float32");
    a.zero_point = static_cast<const float*>(zero_point->data_ptr());
  }
  if (bias) {
    TERNARY_CHECK(bias->is_cuda() && bias->is_contiguous() &&
                      bias->scalar_type() == x.scalar_type() &&
                      bias->numel() == count * size_n,
                  kOp, ": bias must be [experts, ", size_n, "] in x's dtype");
    a.bias = bias->data_ptr();
  }
  check_int32(sorted_routes, "sorted_routes");
  check_int32(experts, "experts");
  check_int32(used, "used");
  const int64_t blocks = experts.numel();
  TERNARY_CHECK(sorted_routes.numel() == blocks * kMoeBlock, kOp,
                ": sorted_routes has ", sorted_routes.numel(), " entries for ",
                blocks, " blocks; blocks of ", kMoeBlock, " are expected");
  TERNARY_CHECK(std::max(routes, blocks * kMoeBlock) <= INT32_MAX, kOp, ": ",
                routes, " routes in ", blocks, " blocks of ", kMoeBlock,
                "; their numbers must fit int32: lower "
                "--max-num-batched-tokens");
  a.blocks = int(blocks);
  if (route_weight) {
    TERNARY_CHECK(route_weight->is_cuda() && route_weight->is_contiguous() &&
                      route_weight->scalar_type() == ScalarType::Float &&
                      route_weight->numel() == routes,
                  kOp, ": route_weight must be float32 [routes]");
    a.route_weight = static_cast<const float*>(route_weight->data_ptr());
  }
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  Tensor y = torch::stable::new_empty(x, {routes, size_n});
  if (routes == 0 || a.blocks == 0) return y;
  a.x = x.data_ptr();
  a.ldx = x.stride(0);
  a.dtype = float_type(x, "x");
  a.weight = static_cast<const int32_t*>(weight.data_ptr());
  a.scale = scale.data_ptr();
  a.sorted_routes = static_cast<const int32_t*>(sorted_routes.data_ptr());
  a.experts = static_cast<const int32_t*>(experts.data_ptr());
  a.used = static_cast<const int32_t*>(used.data_ptr());
  a.y = y.data_ptr();
  a.routes = int(routes);
  a.top_k = int(top_k);
  a.stream = current_stream(x);
  moe_gemm(a);
  return y;
}

}  // namespace
}  // namespace vllm::ternary

STABLE_TORCH_LIBRARY_FRAGMENT(_C, m) {
  m.def(
      "ternary_moe_gemm(Tensor x, Tensor weight, Tensor scale, "
      "Tensor? zero_point, Tensor? bias, Tensor sorted_routes, "
      "Tensor experts, Tensor used, Tensor? route_weight, SymInt top_k, "
      "SymInt routes, SymInt size_n, SymInt size_k, SymInt block_size) "
      "-> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(_C, CUDA, m) {
  m.impl("ternary_moe_gemm", TORCH_BOX(&vllm::ternary::ternary_moe_gemm));
}
