// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Per-token int8 quantization in front of the W2A8 products, with an optional
// RMSNorm before it: x is read once, whatever the number of parts.
//
// The order of roundings is that of the models' definition: norm in float32,
// rounded to the activation's type, times the norm weight, rounded again unless
// that weight is float32; then q = rint(v * (127 * (1 / max|v|))).
#include <algorithm>

#include "device_info.h"
#include "mma_utils.cuh"

namespace vllm::ternary {
namespace {

// Threads of a CTA at most, by the units that each keeps in registers.
constexpr int max_threads(int units) {
  return units == 0 ? 1024 : units == 1 ? 512 : 768;
}

// Eight values of a norm weight, whose rows start anywhere; zero past K.
__device__ __forceinline__ void load_norm(float (&v)[8], const QuantArgs& a,
                                          int64_t row, int k) {
  const bool vectors = k + 8 <= a.K && a.K % 8 == 0 &&
                       reinterpret_cast<uintptr_t>(a.norm_weight) % 16 == 0;
  if (vectors && a.norm_dtype == DType::kFloat) {
    const float4* from = reinterpret_cast<const float4*>(
        static_cast<const float*>(a.norm_weight) + row + k);
    const float4 p = from[0], q = from[1];
    v[0] = p.x, v[1] = p.y, v[2] = p.z, v[3] = p.w;
    v[4] = q.x, v[5] = q.y, v[6] = q.z, v[7] = q.w;
  } else if (vectors) {
    const uint4 raw = *reinterpret_cast<const uint4*>(
        static_cast<const uint16_t*>(a.norm_weight) + row + k);
    const uint32_t w[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 p = a.norm_dtype == DType::kHalf
                           ? unpack_two<half>(w[i])
                           : unpack_two<__nv_bfloat16>(w[i]);
      v[2 * i] = p.x;
      v[2 * i + 1] = p.y;
    }
  } else {
    for (int c = 0; c < 8; ++c) {
      v[c] = k + c < a.K
                 ? load_as_float(a.norm_weight, a.norm_dtype, row + k + c)
                 : 0.0f;
    }
  }
}

// Combines `v`, which is alike in all lanes of a warp, over the warps of the
// CTA in a fixed order. Uses of one `shared` need another's barrier in between.
template <typename V, typename Op>
__device__ __forceinline__ V across_warps(V v, V* shared, Op op) {
  if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = v;
  __syncthreads();
  const int warps = blockDim.x >> 5;
  v = shared[0];
  for (int i = 1; i < warps; ++i) v = op(v, shared[i]);
  return v;
}

// Every grid.x-th token and grid.y-th part. A unit is sixteen values: k = 0..7
// and 16..23 of a group of 32 for even units, 8..15 and 24..31 for odd ones,
// which is what sixteen successive bytes of xq hold. kUnits: units of a token
// that a thread keeps in registers, while those of its next token are on their
// way; 0: any number, read again in each pass.
template <typename T, bool kNorm, int kUnits>
__global__ void __launch_bounds__(max_threads(kUnits), kUnits == 1 ? 2 : 1)
    quantize_kernel(const __grid_constant__ QuantArgs a) {
  __shared__ float shared_float[32];
  __shared__ uint32_t shared_max[32];
  __shared__ int shared_sum[32];
  pdl_launch_dependents();
  pdl_wait();
  const int units = a.K_pad / 16;
  const int count = kUnits ? kUnits : (units + blockDim.x - 1) / blockDim.x;
  constexpr int kHeld = kUnits ? kUnits : 1;

  uint4 held[kHeld][2], next[kHeld][2];
  auto load = [&](int m, int i, uint4(&to)[2]) {
    const T* x = static_cast<const T*>(a.x) + int64_t(m) * a.ldx;
    const int u = threadIdx.x + i * blockDim.x;
    to[0] = to[1] = make_uint4(0, 0, 0, 0);
    if (u < units && m < a.M) {
      const int k = u / 2 * 32 + (u & 1) * 8;
      to[0] = load_eight(x, k, a.K);
      to[1] = load_eight(x, k + 16, a.K);
    }
  };
#pragma unroll
  for (int i = 0; i < kUnits; ++i) load(blockIdx.x, i, next[i]);

  for (int m = blockIdx.x; m < a.M; m += gridDim.x) {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      held[i][0] = next[i][0];
      held[i][1] = next[i][1];
      load(m + gridDim.x, i, next[i]);
    }
    // The two runs of eight values of this thread's unit i.
    auto words = [&](int i, uint32_t (&w)[8]) {
      uint4(&v)[2] = held[kUnits ? i : 0];
      if (!kUnits) load(m, i, v);
      w[0] = v[0].x, w[1] = v[0].y, w[2] = v[0].z, w[3] = v[0].w;
      w[4] = v[1].x, w[5] = v[1].y, w[6] = v[1].z, w[7] = v[1].w;
    };

    float inverse = 1.0f;
    if (kNorm) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < count; ++i) {
        uint32_t w[8];
        words(i, w);
#pragma unroll
        for (int c = 0; c < 8; ++c) {
          const float2 v = unpack_two<T>(w[c]);
          sum = fmaf(v.x, v.x, sum);
          sum = fmaf(v.y, v.y, sum);
        }
      }
#pragma unroll
      for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
      sum = across_warps(sum, shared_float,
                         [](float p, float q) { return p + q; });
      inverse =
          __frcp_rn(__fsqrt_rn(__fadd_rn(__fdiv_rn(sum, float(a.K)), a.eps)));
    }

    // The sixteen values to quantize of unit i: those of word c are v[2 c] and
    // v[2 c + 1].
    auto values = [&](int i, int part, float (&v)[16]) {
      uint32_t w[8];
      words(i, w);
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        const float2 p = unpack_two<T>(w[c]);
        v[2 * c] = p.x;
        v[2 * c + 1] = p.y;
      }
      if (!kNorm) return;
      const int u = threadIdx.x + i * blockDim.x;
      const int k = u / 2 * 32 + (u & 1) * 8;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float factor[8] = {};
        if (u < units) load_norm(factor, a, int64_t(part) * a.K, k + 16 * h);
#pragma unroll
        for (int c = 0; c < 8; ++c) {
          float& value = v[8 * h + c];
          value = to_float(from_float<T>(__fmul_rn(value, inverse)));
          value = __fmul_rn(value, factor[c]);
          if (a.norm_dtype != DType::kFloat) {
            value = to_float(from_float<T>(value));
          }
        }
      }
    };

    for (int part = blockIdx.y; part < a.parts; part += gridDim.y) {
      // As integers, so that infinity and NaN compare above every number.
      uint32_t most = 0;
#pragma unroll
      for (int i = 0; i < count; ++i) {
        if (kNorm) {
          float v[16];
          values(i, part, v);
#pragma unroll
          for (int c = 0; c < 16; ++c) {
            most = max(most, __float_as_uint(v[c]) & 0x7fffffffu);
          }
        } else {  // two at a time
          uint32_t w[8];
          words(i, w);
#pragma unroll
          for (int c = 0; c < 8; ++c) most = raise_largest(most, w[c]);
        }
      }
      if (!kNorm) {
        const uint32_t top = max(most & 0xffffu, most >> 16);
        most = __float_as_uint(to_float(reinterpret_cast<const T&>(top)));
      }
      most = across_warps(__reduce_max_sync(~0u, most), shared_max,
                          [](uint32_t p, uint32_t q) { return max(p, q); });
      const float factor = token_factor(__uint_as_float(most));

      const int64_t row = int64_t(part) * a.M + m;
      int total = 0;
#pragma unroll
      for (int i = 0; i < count; ++i) {
        float v[16];
        values(i, part, v);
        uint32_t q[16], out[4];
#pragma unroll
        for (int c = 0; c < 16; ++c) q[c] = round_to_byte(v[c], factor);
        int sum = 0;
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          out[t] =
              low_bytes(q[2 * t], q[8 + 2 * t], q[2 * t + 1], q[9 + 2 * t]);
          sum = __dp4a(int(out[t]), 0x01010101, sum);
        }
        const int u = threadIdx.x + i * blockDim.x;
        if (u < units) {
          *reinterpret_cast<uint4*>(a.xq + row * a.K_pad + u * 16) =
              make_uint4(out[0], out[1], out[2], out[3]);
        } else {
          sum = 0;  // NaN times zero is no zero
        }
        total += sum;
        if (a.xsum_tiles) {  // a k tile is eight units
#pragma unroll
          for (int d = 1; d < 8; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
          if (u < units && u % 8 == 0) {
            const int64_t tile = int64_t(part) * (a.K_pad / 128) + u / 8;
            a.xsum_tiles[tile * a.M + m] = sum;
          }
        }
      }
      total = across_warps(__reduce_add_sync(~0u, total), shared_sum,
                           [](int p, int q) { return p + q; });
      if (threadIdx.x == 0) {
        a.xsum[row] = total;
        a.xs[row] = token_scale(__uint_as_float(most));
      }
    }
  }
}

// Few tokens of K a multiple of 8, a CTA and a thread for each unit of one:
// what counts is how long a token takes. Addresses are computed before the
// wait, and a warp takes in the others' results by one load and one reduction.
template <typename T>
__global__ void __launch_bounds__(1024, 1)
    quantize_few_kernel(const __grid_constant__ QuantArgs a) {
  __shared__ uint32_t shared_max[32];
  __shared__ int shared_sum[32];
  pdl_launch_dependents();
  const int m = blockIdx.x, u = threadIdx.x;
  const int lane = u & 31, warp = u >> 5, warps = blockDim.x >> 5;
  const bool valid = u < a.K_pad / 16;
  const int k = u / 2 * 32 + (u & 1) * 8;
  const T* x = static_cast<const T*>(a.x) + int64_t(m) * a.ldx + k;
  int8_t* xq = a.xq + int64_t(m) * a.K_pad + u * 16;
  const int left = a.K - k;
  pdl_wait();

  uint4 low = make_uint4(0, 0, 0, 0), high = low;
  if (left >= 8) low = *reinterpret_cast<const uint4*>(x);
  if (left >= 24) high = *reinterpret_cast<const uint4*>(x + 16);
  uint32_t most = raise_largest(raise_largest(0, low), high);
  most = __reduce_max_sync(~0u, larger_half(most));
  if (lane == 0) shared_max[warp] = most;
  __syncthreads();
  most = __reduce_max_sync(~0u, lane < warps ? shared_max[lane] : 0u);
  const float largest = to_float(reinterpret_cast<const T&>(most));
  const float factor = token_factor(largest);
  uint32_t out[4];
  quantize_sixteen<T>(low, high, factor, out);
  int sum = 0;
#pragma unroll
  for (int t = 0; t < 4; ++t) sum = __dp4a(int(out[t]), 0x01010101, sum);
  if (valid) {
    *reinterpret_cast<uint4*>(xq) = make_uint4(out[0], out[1], out[2], out[3]);
  } else {
    sum = 0;  // NaN times zero is no zero
  }
  const int all = __reduce_add_sync(~0u, sum);
  if (lane == 0) shared_sum[warp] = all;
  if (a.xsum_tiles) {  // a k tile is eight units
#pragma unroll
    for (int d = 1; d < 8; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
    if (valid && u % 8 == 0) a.xsum_tiles[int64_t(u / 8) * a.M + m] = sum;
  }
  __syncthreads();
  if (warp == warps - 1 && lane == 0) a.xs[m] = token_scale(largest);
  if (warp == 0) {
    const int total =
        __reduce_add_sync(~0u, lane < warps ? shared_sum[lane] : 0);
    if (lane == 0) a.xsum[m] = total;
  }
}

template <typename T, bool kNorm>
void launch(const QuantArgs& a) {
  const int units = a.K_pad / 16;
  const DeviceInfo& device = device_info(a.device);
  void (*kernel)(QuantArgs) = quantize_kernel<T, kNorm, 0>;
  int per_thread = (units + max_threads(0) - 1) / max_threads(0);
  const bool each =
      !kNorm && a.M <= 16 && a.parts == 1 && a.K % 8 == 0 && units <= 1024;
  if (each) {
    kernel = quantize_few_kernel<T>;
    per_thread = 1;
  } else if (units <= max_threads(1)) {
    kernel = quantize_kernel<T, kNorm, 1>;
    per_thread = 1;
  } else if (units <= 2 * max_threads(2)) {
    kernel = quantize_kernel<T, kNorm, 2>;
    per_thread = 2;
  }
  const int threads = ((units + per_thread - 1) / per_thread + 31) / 32 * 32;
  cudaLaunchConfig_t config = {};
  // A CTA per token and part while these fill the device; else as many CTAs as
  // are resident, and each reads a token once for all parts.
  const bool few =
      each || int64_t(a.M) * threads < int64_t(device.processors) * 1024;
  const int resident = device.processors * std::max(1, 1024 / threads);
  config.gridDim = dim3(unsigned(few ? a.M : std::min(a.M, resident)),
                        few ? unsigned(a.parts) : 1u);
  config.blockDim = dim3(unsigned(threads));
  config.stream = a.stream;
  cudaLaunchAttribute attribute;
  config.attrs = &attribute;
  if (device.capability >= 90) {
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.numAttrs = 1;
  }
  check_cuda(cudaLaunchKernelEx(&config, kernel, a), "quantize_tokens");
}

template <typename T>
void launch(const QuantArgs& a) {
  if (a.norm_weight) {
    launch<T, true>(a);
  } else {
    launch<T, false>(a);
  }
}

}  // namespace

void quantize_tokens(const QuantArgs& a) {
  if (a.dtype == DType::kHalf) {
    launch<half>(a);
  } else {
    launch<__nv_bfloat16>(a);
  }
}

}  // namespace vllm::ternary
