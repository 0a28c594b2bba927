// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Enough of CUDA for g++ to compile the ternary kernels' sources: what the host
// calls is answered for made-up devices and recorded; device code compiles,
// with its inline assembly left out, and never runs. Every header of CUDA that
// the sources include is this one.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <typeindex>
#include <utility>
#include <vector>

// --- Device code ----------------------------------------------------------

#define __global__
#define __device__
#define __host__
#define __shared__
#define __forceinline__ inline
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
// `asm(...)` is nothing, and `asm volatile(...)` becomes `asm("")`.
#define asm(...)
#define volatile(...) ("")

using std::max;
using std::min;

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(8) ushort4 {
  unsigned short x, y, z, w;
};
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
  return {x, y, z, w};
}
inline float4 make_float4(float x, float y, float z, float w) {
  return {x, y, z, w};
}
inline float2 make_float2(float x, float y) { return {x, y}; }
struct uint2 {
  unsigned x, y;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline const dim3 threadIdx, blockIdx, blockDim, gridDim;

// 16-bit floats: distinct types of the right size.
template <int kKind>
struct Bits16 {
  uint16_t bits;
  Bits16() = default;
  explicit Bits16(float) : bits(0) {}
  operator float() const { return 0.0f; }
};
using half = Bits16<0>;
using __half = half;
using __nv_bfloat16 = Bits16<1>;
struct half2 {
  half x, y;
};
using __half2 = half2;
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline half __float2half_rn(float v) { return half(v); }
inline __nv_bfloat16 __float2bfloat16_rn(float v) { return __nv_bfloat16(v); }
inline float __half2float(half v) { return v; }
inline float __bfloat162float(__nv_bfloat16 v) { return v; }
inline half2 __floats2half2_rn(float, float) { return {}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float, float) { return {}; }
inline half __ushort_as_half(uint16_t) { return {}; }
inline __nv_bfloat16 __ushort_as_bfloat16(uint16_t) { return {}; }
inline half2 __hsub2(half2 a, half2) { return a; }
inline half2 __hmul2(half2 a, half2) { return a; }
inline __nv_bfloat162 __hsub2(__nv_bfloat162 a, __nv_bfloat162) { return a; }
inline __nv_bfloat162 __hmul2(__nv_bfloat162 a, __nv_bfloat162) { return a; }

inline void __syncthreads() {}
inline void __syncwarp() {}
template <typename T>
T __shfl_sync(unsigned, T v, int) {
  return v;
}
template <typename T>
T __shfl_xor_sync(unsigned, T v, int) {
  return v;
}
template <typename T>
T __shfl_down_sync(unsigned, T v, int) {
  return v;
}
template <typename T>
T __reduce_add_sync(unsigned, T v) {
  return v;
}
template <typename T>
T __reduce_max_sync(unsigned, T v) {
  return v;
}
template <typename T, typename V>
T atomicMax(T* p, V) {
  return *p;
}
template <typename T, typename V>
T atomicAdd(T* p, V) {
  return *p;
}
inline float __uint_as_float(unsigned) { return 0; }
inline unsigned __float_as_uint(float) { return 0; }
inline float __int_as_float(int) { return 0; }
inline unsigned __byte_perm(unsigned a, unsigned, unsigned) { return a; }
inline int __dp4a(int a, int, int) { return a; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float) { return a; }
inline float __frcp_rn(float a) { return a; }
inline float __fsqrt_rn(float a) { return a; }
inline unsigned __vmaxu2(unsigned a, unsigned) { return a; }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return unsigned(uint64_t(a) * b >> 32);
}
inline float __int2float_rn(int v) { return float(v); }
inline int __float2int_rn(float v) { return int(v); }
inline uint64_t __cvta_generic_to_shared(const void*) { return 0; }

// --- What the host calls ---------------------------------------------------

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
using cudaStream_t = void*;
enum cudaDeviceAttr {
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor,
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrMaxSharedMemoryPerBlockOptin
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaLaunchAttributeID {
  cudaLaunchAttributeClusterDimension,
  cudaLaunchAttributeProgrammaticStreamSerialization
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    struct {
      unsigned x, y, z;
    } clusterDim;
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  unsigned numAttrs = 0;
};

using cuuint64_t = uint64_t;
using cuuint32_t = uint32_t;
enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1 };
enum CUtensorMapDataType {
  CU_TENSOR_MAP_DATA_TYPE_UINT8,
  CU_TENSOR_MAP_DATA_TYPE_UINT16,
  CU_TENSOR_MAP_DATA_TYPE_INT32,
  CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
  CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
};
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle {
  CU_TENSOR_MAP_SWIZZLE_NONE,
  CU_TENSOR_MAP_SWIZZLE_128B
};
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_L2_256B };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };
struct CUtensorMap {
  const char* base;
  uint64_t cols, rows, stride;  // stride in bytes
  uint32_t box_cols, box_rows;
  int element_bytes;
  uint64_t box_bytes() const {
    return uint64_t(box_cols) * box_rows * element_bytes;
  }
};
CUresult cuTensorMapEncodeTiled(
    CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* base,
    const cuuint64_t* dims, const cuuint64_t* strides, const cuuint32_t* box,
    const cuuint32_t* steps, CUtensorMapInterleave interleave,
    CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
    CUtensorMapFloatOOBfill fill);

enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
constexpr unsigned long long cudaEnableDefault = 0;
cudaError_t cudaGetDriverEntryPointByVersion(
    const char*, void** fn, unsigned, unsigned long long,
    cudaDriverEntryPointQueryResult* found);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr what, int device);
inline const char* cudaGetErrorString(cudaError_t) { return "error"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

// The device that is current, and what was launched on it.
struct Argument {
  std::type_index type;
  std::vector<char> bytes;
};
struct Launch {
  const void* kernel;
  dim3 grid, block;
  size_t shared;
  unsigned cluster = 1;
  bool pdl = false;
  std::vector<Argument> arguments;

  // The n-th argument of type T.
  template <typename T>
  const T* find(int n = 0) const {
    for (const Argument& a : arguments) {
      if (a.type == std::type_index(typeid(T)) && n-- == 0) {
        return reinterpret_cast<const T*>(a.bytes.data());
      }
    }
    return nullptr;
  }
};
void record(Launch launch);
// Allows a kernel that much dynamic shared memory, as the host asked.
cudaError_t allow_shared(const void* kernel, int bytes);
int fitting_clusters(unsigned size, int threads, size_t shared);

template <typename... P>
cudaError_t cudaFuncSetAttribute(void (*kernel)(P...), cudaFuncAttribute,
                                 int bytes) {
  return allow_shared(reinterpret_cast<const void*>(kernel), bytes);
}

template <typename... P>
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, void (*)(P...),
                                           const cudaLaunchConfig_t* c) {
  *clusters = fitting_clusters(c->attrs[0].val.clusterDim.x, c->blockDim.x,
                               c->dynamicSmemBytes);
  return cudaSuccess;
}

template <typename... P, typename... A>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* c,
                               void (*kernel)(P...), A&&... args) {
  Launch launch{reinterpret_cast<const void*>(kernel), c->gridDim, c->blockDim,
                c->dynamicSmemBytes};
  for (unsigned i = 0; i < c->numAttrs; ++i) {
    if (c->attrs[i].id == cudaLaunchAttributeClusterDimension) {
      launch.cluster = c->attrs[i].val.clusterDim.x;
    } else {
      launch.pdl = true;
    }
  }
  auto keep = [&](const auto& a) {
    using T = std::remove_cv_t<std::remove_reference_t<decltype(a)>>;
    static_assert(std::is_trivially_copyable_v<T>);
    Argument copy{typeid(T), std::vector<char>(sizeof(T))};
    std::memcpy(copy.bytes.data(), &a, sizeof(T));
    launch.arguments.push_back(std::move(copy));
  };
  (keep(args), ...);
  record(std::move(launch));
  return cudaSuccess;
}
