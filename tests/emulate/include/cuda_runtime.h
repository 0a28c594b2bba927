// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// CUDA C++ as the device code uses it: keywords, vectors, built-in variables,
// intrinsics, launches.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>
#include <typeinfo>

#include "cuda_runtime_api.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

struct uint2 {
  alignas(8) unsigned x;
  unsigned y;
};
struct uint3 {
  unsigned x, y, z;
};
struct uint4 {
  alignas(16) unsigned x;
  unsigned y, z, w;
};
struct int4 {
  alignas(16) int x;
  int y, z, w;
};
struct float2 {
  alignas(8) float x;
  float y;
};
struct float4 {
  alignas(16) float x;
  float y, z, w;
};
struct ushort4 {
  alignas(8) unsigned short x;
  unsigned short y, z, w;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1)
      : x(x), y(y), z(z) {}
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
  return {x, y, z, w};
}
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) {
  return {x, y, z, w};
}

// Of the thread that runs.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

enum cudaLaunchAttributeID {
  cudaLaunchAttributeClusterDimension = 4,
  cudaLaunchAttributeProgrammaticStreamSerialization = 6,
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  union {
    struct {
      unsigned x, y, z;
    } clusterDim;
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

namespace emu {

cudaError_t allow_shared(const void* kernel, int bytes);
// What a launch's attributes ask for.
struct Attributes {
  unsigned cluster = 1;
  bool dependent = false;
  explicit Attributes(const cudaLaunchConfig_t& c) {
    for (unsigned i = 0; i < c.numAttrs; ++i) {
      if (c.attrs[i].id == cudaLaunchAttributeClusterDimension) {
        cluster = c.attrs[i].val.clusterDim.x;
      } else {
        dependent = true;
      }
    }
  }
};

// An argument of a kernel.
struct Argument {
  const std::type_info* type;
  const void* data;
  size_t bytes;
};
using Arguments = std::initializer_list<Argument>;

// thread(closure) is one thread of the launch.
cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel,
                   Arguments arguments, void (*thread)(const void*),
                   const void* closure);
template <typename... P, typename... A>
cudaError_t launch(const cudaLaunchConfig_t& config, void (*kernel)(P...),
                   const A&... args) {
  const auto thread = [&] { kernel(args...); };
  using Thread = decltype(thread);
  return launch(
      config, reinterpret_cast<const void*>(kernel),
      {{&typeid(A), &args, sizeof(A)}...},
      [](const void* t) { (*static_cast<Thread*>(t))(); }, &thread);
}
int active_clusters(const cudaLaunchConfig_t& config);

// kernel<<<grid, block, shared, stream>>>(args).
struct Launch {
  cudaLaunchConfig_t config;
  Launch(dim3 grid, dim3 block, size_t shared = 0,
         cudaStream_t stream = nullptr)
      : config{grid, block, shared, stream, nullptr, 0} {}
  template <typename... P, typename... A>
  void operator()(void (*kernel)(P...), const A&... args) const {
    launch(config, kernel, args...);
  }
};

// Static shared memory of the block that runs: the same bytes for the same
// declaration.
void* block_static(const void* key, size_t bytes, size_t align);
uint8_t* block_dynamic();

// Lanes of a warp meet: the last of `mask` to come runs body(arguments, mask).
void meet(uint32_t mask, const char* what, void* mine,
          void (*body)(void* const* lanes, uint32_t mask));
[[noreturn]] void fail(const char* format, ...);
int lane();
void sync_block();

template <typename T>
struct Shuffle {
  T value;
  int from;
  T result;
  static void body(void* const* lanes, uint32_t mask) {
    for (int i = 0; i < 32; ++i) {
      if (!(mask >> i & 1)) continue;
      auto& me = *static_cast<Shuffle*>(lanes[i]);
      if (!(mask >> me.from & 1))
        fail("shfl.sync from a lane outside its mask");
      me.result = static_cast<const Shuffle*>(lanes[me.from])->value;
    }
  }
};

template <typename T>
T shuffle(uint32_t mask, T v, int from) {
  Shuffle<T> s{v, from, {}};
  meet(mask, "shfl.sync", &s, Shuffle<T>::body);
  return s.result;
}

template <typename T, typename Op>
T reduce(uint32_t mask, T v, Op) {
  struct Arg {
    T value, result;
  } arg{v, {}};
  meet(mask, "redux.sync", &arg, [](void* const* lanes, uint32_t mask) {
    T total{};
    for (int i = 0; i < 32; ++i) {
      if (mask >> i & 1)
        total = Op()(total, static_cast<Arg*>(lanes[i])->value);
    }
    for (int i = 0; i < 32; ++i) {
      if (mask >> i & 1) static_cast<Arg*>(lanes[i])->result = total;
    }
  });
  return arg.result;
}

}  // namespace emu

template <typename K>
cudaError_t cudaFuncSetAttribute(K* kernel, cudaFuncAttribute, int bytes) {
  return emu::allow_shared(reinterpret_cast<const void*>(kernel), bytes);
}
template <typename K>
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, K*,
                                           const cudaLaunchConfig_t* config) {
  *clusters = emu::active_clusters(*config);
  return cudaSuccess;
}
template <typename... P, typename... A>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config,
                               void (*kernel)(P...), const A&... args) {
  return emu::launch(*config, kernel, args...);
}

// --- Intrinsics

template <typename A, typename B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  using C = std::common_type_t<A, B>;
  return C(b) < C(a) ? C(b) : C(a);
}
template <typename A, typename B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  using C = std::common_type_t<A, B>;
  return C(a) < C(b) ? C(b) : C(a);
}

inline void __syncthreads() { emu::sync_block(); }
inline void __syncwarp(uint32_t mask = ~0u) {
  emu::meet(mask, "bar.warp.sync", nullptr, [](void* const*, uint32_t) {});
}
template <typename T>
T __shfl_sync(uint32_t mask, T v, int from) {
  return emu::shuffle(mask, v, from & 31);
}
template <typename T>
T __shfl_xor_sync(uint32_t mask, T v, int with) {
  return emu::shuffle(mask, v, emu::lane() ^ with);
}
template <typename T>
T __shfl_down_sync(uint32_t mask, T v, int by) {
  const int from = emu::lane() + by;
  return emu::shuffle(mask, v, from > 31 ? emu::lane() : from);
}
inline unsigned __reduce_max_sync(uint32_t mask, unsigned v) {
  struct Max {
    unsigned operator()(unsigned a, unsigned b) const { return a < b ? b : a; }
  };
  return emu::reduce(mask, v, Max());
}
inline int __reduce_add_sync(uint32_t mask, int v) {
  struct Plus {
    int operator()(int a, int b) const { return a + b; }
  };
  return emu::reduce(mask, v, Plus());
}

inline int atomicAdd(int* p, int v) {
  const int old = *p;
  *p += v;
  return old;
}
inline unsigned atomicMax(unsigned* p, unsigned v) {
  const unsigned old = *p;
  if (old < v) *p = v;
  return old;
}

inline uint32_t __float_as_uint(float v) { return std::bit_cast<uint32_t>(v); }
inline float __uint_as_float(uint32_t v) { return std::bit_cast<float>(v); }
inline float __int_as_float(int v) { return std::bit_cast<float>(v); }
inline float __int2float_rn(int v) { return float(v); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline int __float2int_rn(float v) {  // NaN is 0, others saturate
  if (std::isnan(v)) return 0;
  if (v >= 2147483648.0f) return INT32_MAX;
  if (v < -2147483648.0f) return INT32_MIN;
  return int(std::nearbyint(v));
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return unsigned(uint64_t(a) * b >> 32);
}
inline unsigned __vmaxu2(unsigned a, unsigned b) {
  return max(a & 0xffffu, b & 0xffffu) | max(a >> 16, b >> 16) << 16;
}
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 32; i += 8) c += int8_t(a >> i) * int8_t(b >> i);
  return c;
}
inline int __dp2a_lo(int a, int b, int c) {
  return c + int16_t(a) * int8_t(b) + (a >> 16) * int8_t(b >> 8);
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
  const uint64_t both = uint64_t(b) << 32 | a;
  unsigned r = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned pick = s >> 4 * i & 15;
    unsigned byte = unsigned(both >> 8 * (pick & 7)) & 0xff;
    if (pick & 8) byte = byte & 0x80 ? 0xff : 0;
    r |= byte << 8 * i;
  }
  return r;
}
inline size_t __cvta_generic_to_shared(const void* p) { return size_t(p); }
