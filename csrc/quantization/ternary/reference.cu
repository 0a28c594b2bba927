// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The naive kernels: one thread computes one output by the definition of the
// format. They are the tests' second opinion, and take what no other kernel
// does (scale blocks that are no multiple of 32).
#include "cuda_common.cuh"

namespace vllm::ternary {
namespace {

template <typename T>
__global__ void reference_gemm_kernel(const GemmArgs a) {
  const int n = blockIdx.x * blockDim.x + threadIdx.x;
  if (n >= a.N) return;
  for (int m = blockIdx.y; m < a.M; m += gridDim.y) {
    const T* x = static_cast<const T*>(a.x) + int64_t(m) * a.ldx;
    float total = 0.0f;
    for (int b = 0; b < a.num_blocks; ++b) {
      const int64_t begin = int64_t(b) * a.block_size;
      const int end = int(min(begin + a.block_size, int64_t(a.K)));
      float sum_tx = 0.0f, sum_x = 0.0f;
      for (int k = int(begin); k < end; ++k) {
        const float v = to_float(x[k]);
        sum_tx += v * float(ternary_at(a.weight, a.K_pad, n, k));
        sum_x += v;
      }
      const int64_t at = int64_t(b) * a.N_pad + n;
      const float s = load_as_float(a.scale, a.scale_dtype, at);
      const float zp = a.zero_point ? a.zero_point[at] : 0.0f;
      total += s * (sum_tx - zp * sum_x);
    }
    if (a.bias) total += to_float(static_cast<const T*>(a.bias)[n]);
    static_cast<T*>(a.y)[int64_t(m) * a.ldy + n] = from_float<T>(total);
  }
}

template <typename T>
__global__ void reference_w2a8_kernel(const W2A8Args a) {
  const int n = blockIdx.x * blockDim.x + threadIdx.x;
  if (n >= a.N) return;
  int part = 0;
  while (a.part_ends && part + 1 < a.parts && n >= a.part_ends[part]) ++part;
  for (int m = blockIdx.y; m < a.M; m += gridDim.y) {
    const int64_t row = int64_t(part) * a.M + m;
    const int8_t* x = a.xq + row * a.K_pad;
    float total = 0.0f;
    for (int b = 0; b < a.num_blocks; ++b) {
      const int64_t begin = int64_t(b) * a.block_size;
      const int end = int(min(begin + a.block_size, int64_t(a.K)));
      int sum = 0;
      for (int k = int(begin); k < end; ++k) {
        sum += int(x[int8_position(k)]) * ternary_at(a.weight, a.K_pad, n, k);
      }
      total += load_as_float(a.scale, a.scale_dtype, int64_t(b) * a.N_pad + n) *
               float(sum);
    }
    total = __fmul_rn(total, a.xs[row]);
    if (a.bias) total += to_float(static_cast<const T*>(a.bias)[n]);
    static_cast<T*>(a.y)[int64_t(m) * a.N + n] = from_float<T>(total);
  }
}

dim3 reference_grid(int N, int M) {
  return dim3(unsigned((N + 127) / 128), unsigned(M < 65535 ? M : 65535));
}

}  // namespace

void reference_gemm(const GemmArgs& a) {
  if (a.dtype == DType::kHalf) {
    reference_gemm_kernel<half>
        <<<reference_grid(a.N, a.M), 128, 0, a.stream>>>(a);
  } else {
    reference_gemm_kernel<__nv_bfloat16>
        <<<reference_grid(a.N, a.M), 128, 0, a.stream>>>(a);
  }
  check_cuda(cudaGetLastError(), "ternary_gemm_reference");
}

void reference_w2a8(const W2A8Args& a) {
  if (a.dtype == DType::kHalf) {
    reference_w2a8_kernel<half>
        <<<reference_grid(a.N, a.M), 128, 0, a.stream>>>(a);
  } else {
    reference_w2a8_kernel<__nv_bfloat16>
        <<<reference_grid(a.N, a.M), 128, 0, a.stream>>>(a);
  }
  check_cuda(cudaGetLastError(), "ternary_gemm_w2a8");
}

}  // namespace vllm::ternary
