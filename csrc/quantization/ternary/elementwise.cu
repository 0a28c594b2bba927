// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Kernels around the products: per-token int8 quantization (with an optional
// RMSNorm in front), rows of an embedding table, and the copy that gives
// activations of any strides the rows that the products expect.
#include "cuda_common.cuh"

namespace vllm::ternary {
namespace {

constexpr int kQuantThreads = 256;

// Reduces over the CTA with op; every thread gets the result.
template <typename Op>
__device__ float block_reduce(float v, float* shared, Op op) {
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) v = op(v, __shfl_xor_sync(~0u, v, d));
  __syncthreads();
  if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = v;
  __syncthreads();
  v = shared[threadIdx.x & (kQuantThreads / 32 - 1)];
#pragma unroll
  for (int d = kQuantThreads / 64; d > 0; d >>= 1) {
    v = op(v, __shfl_xor_sync(~0u, v, d));
  }
  return v;
}

// One CTA per (token, part). The order of roundings is that of the models'
// definition: norm in float32, rounded to the activation's type, times the norm
// weight, rounded again; then q = round(v * 127 / max|v|).
template <typename T>
__global__ void __launch_bounds__(kQuantThreads)
    quantize_tokens_kernel(const QuantArgs a) {
  __shared__ float shared[kQuantThreads / 32];
  const int m = blockIdx.x, part = blockIdx.y;
  const T* x = static_cast<const T*>(a.x) + int64_t(m) * a.ldx;
  const int64_t norm_row = int64_t(part) * a.K;

  float rstd = 1.0f;
  if (a.norm_weight) {
    float sum = 0.0f;
    for (int k = threadIdx.x; k < a.K; k += kQuantThreads) {
      const float v = to_float(x[k * a.incx]);
      sum += v * v;
    }
    sum = block_reduce(sum, shared, [](float p, float q) { return p + q; });
    rstd = rsqrtf(sum / float(a.K) + a.eps);
  }
  auto value = [&](int k) {
    float v = to_float(x[k * a.incx]);
    if (a.norm_weight) {
      const float w = load_as_float(a.norm_weight, a.norm_dtype, norm_row + k);
      v = to_float(from_float<T>(to_float(from_float<T>(v * rstd)) * w));
    }
    return v;
  };

  // max of a NaN and a number is the number: keep NaN by comparing the other
  // way.
  auto nan_max = [](float p, float q) { return p >= q || p != p ? p : q; };
  float amax = 0.0f;
  for (int k = threadIdx.x; k < a.K; k += kQuantThreads) {
    amax = nan_max(fabsf(value(k)), amax);
  }
  amax = block_reduce(amax, shared, nan_max);
  const float clamped = amax < 1e-5f ? 1e-5f : amax;
  const float to_q = 127.0f / clamped;

  const int64_t row = int64_t(part) * a.M + m;
  for (int k = threadIdx.x; k < a.K_pad; k += kQuantThreads) {
    int q = 0;
    if (k < a.K) q = max(-128, min(127, __float2int_rn(value(k) * to_q)));
    a.xq[row * a.K_pad + k] = int8_t(q);
  }
  if (threadIdx.x == 0) a.xs[row] = clamped / 127.0f;
}

template <typename T>
__global__ void gather_rows_kernel(const EmbeddingArgs a) {
  for (int64_t i = blockIdx.x; i < a.count; i += gridDim.x) {
    const int64_t n = a.indices_are_int64
                          ? static_cast<const int64_t*>(a.indices)[i]
                          : static_cast<const int32_t*>(a.indices)[i];
    const bool inside = n >= 0 && n < a.N;
    for (int k = threadIdx.x; k < a.K; k += blockDim.x) {
      float v = 0.0f;
      if (inside) {
        const int64_t at = int64_t(k / a.block_size) * a.N_pad + n;
        v = float(ternary_at(a.weight, a.K_pad, int(n), k));
        if (a.zero_point) v -= a.zero_point[at];
        v *= load_as_float(a.scale, a.scale_dtype, at);
      }
      static_cast<T*>(a.out)[i * a.K + k] = from_float<T>(v);
    }
  }
}

__global__ void copy_rows_kernel(const uint16_t* src, int64_t ld_src,
                                 int64_t inc_src, uint16_t* dst, int64_t ld_dst,
                                 int64_t rows, int64_t cols) {
  const int64_t total = rows * ld_dst;
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < total;
       i += step) {
    const int64_t row = i / ld_dst, col = i - row * ld_dst;
    dst[i] = col < cols ? src[row * ld_src + col * inc_src] : uint16_t(0);
  }
}

}  // namespace

void quantize_tokens(const QuantArgs& a) {
  const dim3 grid(unsigned(a.M), unsigned(a.parts));
  if (a.dtype == DType::kHalf) {
    quantize_tokens_kernel<half><<<grid, kQuantThreads, 0, a.stream>>>(a);
  } else {
    quantize_tokens_kernel<__nv_bfloat16>
        <<<grid, kQuantThreads, 0, a.stream>>>(a);
  }
  check_cuda(cudaGetLastError(), "quantize_tokens");
}

void gather_rows(const EmbeddingArgs& a) {
  const unsigned grid = unsigned(a.count < (1 << 20) ? a.count : (1 << 20));
  switch (a.dtype) {
    case DType::kHalf:
      gather_rows_kernel<half><<<grid, 256, 0, a.stream>>>(a);
      break;
    case DType::kBFloat16:
      gather_rows_kernel<__nv_bfloat16><<<grid, 256, 0, a.stream>>>(a);
      break;
    default:
      gather_rows_kernel<float><<<grid, 256, 0, a.stream>>>(a);
  }
  check_cuda(cudaGetLastError(), "ternary_embedding");
}

void copy_rows(const void* src, int64_t ld_src, int64_t inc_src, void* dst,
               int64_t ld_dst, int64_t rows, int64_t cols,
               cudaStream_t stream) {
  const int64_t blocks = (rows * ld_dst + 255) / 256;
  copy_rows_kernel<<<unsigned(blocks < 4096 ? blocks : 4096), 256, 0, stream>>>(
      static_cast<const uint16_t*>(src), ld_src, inc_src,
      static_cast<uint16_t*>(dst), ld_dst, rows, cols);
  check_cuda(cudaGetLastError(), "copy_rows");
}

}  // namespace vllm::ternary
