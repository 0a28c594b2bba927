// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Kernels around the products: rows of an embedding table, and the copy that
// gives activations of any strides the rows that the products expect.
#include "cuda_common.cuh"

namespace vllm::ternary {
namespace {

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
