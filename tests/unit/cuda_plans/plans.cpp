// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Calls the ternary kernels' host code for made-up devices and checks every
// launch: what test_cuda_plans.py calls.
#include "plans.h"

#include <cxxabi.h>
#include <dlfcn.h>

#include <map>

#include "cuda_fp16.h"
#include "gemm_dispatch.h"
#include "mma_gemm.h"
#include "mma_s8.h"
#include "moe_gemm.h"
#include "sm90_prefill.h"
#include "sm90_s8.h"

// What device code refers to and never touches.
namespace vllm::ternary {
uint8_t smem[1];
namespace sm90 {
uint8_t smem_raw[1];
}
namespace s8 {
uint8_t smem_raw[1];
}
}  // namespace vllm::ternary

using namespace vllm::ternary;

namespace {

std::vector<Device> devices(128);
int current = 0;
std::vector<Launch> launches;
std::map<std::pair<int, const void*>, int> allowed;
std::string message, names;

}  // namespace

const Device& device_now() { return devices[current]; }

std::string kernel_name(const Launch& launch) {
  Dl_info info;
  if (!dladdr(launch.kernel, &info) || !info.dli_sname) return "?";
  int status = 0;
  char* text = abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status);
  std::string name = status == 0 ? text : info.dli_sname;
  free(text);
  return name;
}

std::vector<int> shape_of(const std::string& name, const std::string& type) {
  const size_t at = name.find(type + "<");
  REQUIRE(at != std::string::npos, type, "is not in", name);
  std::vector<int> out;
  int depth = 0;
  for (size_t i = at + type.size(); i < name.size(); ++i) {
    if (name[i] == '<') ++depth;
    if (name[i] == '>' && --depth == 0) break;
    if (depth != 1 || (name[i] != '<' && name[i] != ',')) continue;
    const std::string rest = name.substr(i + 1 + (name[i + 1] == ' '));
    if (rest[0] == '(') {  // an enumerator: (type)1
      out.push_back(atoi(rest.c_str() + rest.find(')') + 1));
    } else if (isdigit(rest[0])) {
      out.push_back(atoi(rest.c_str()));
    } else if (rest.rfind("true", 0) == 0 || rest.rfind("false", 0) == 0) {
      out.push_back(rest[0] == 't');
    }
  }
  return out;
}

// --- CUDA, as far as the host code asks it ---------------------------------

namespace emu {

cudaError_t launch(const cudaLaunchConfig_t& c, const void* kernel,
                   Arguments arguments, void (*)(const void*), const void*) {
  const Attributes a(c);
  ::Launch l{kernel,    c.gridDim,  c.blockDim, c.dynamicSmemBytes,
             a.cluster, a.dependent};
  for (const Argument& argument : arguments) {
    const char* data = static_cast<const char*>(argument.data);
    l.arguments.emplace_back(*argument.type,
                             std::vector<char>(data, data + argument.bytes));
  }
  launches.push_back(std::move(l));
  return cudaSuccess;
}

cudaError_t allow_shared(const void* kernel, int bytes) {
  if (bytes > device_now().shared) return cudaErrorInvalidValue;
  allowed[{current, kernel}] = bytes;
  return cudaSuccess;
}

int active_clusters(const cudaLaunchConfig_t& c) {
  const Device& d = device_now();
  const int size = int(Attributes(c).cluster);
  const int blocks =
      std::min(2048 / int(c.blockDim.x),
               int((d.shared + 1024) / (c.dynamicSmemBytes + 1024)));
  if (size == 1) return d.processors * blocks;
  // A cluster lies in one group of multiprocessors.
  const int whole = d.processors / d.cluster_group;
  const int rest = d.processors % d.cluster_group;
  return whole * (d.cluster_group * blocks / size) + rest * blocks / size;
}

// What device code calls, which never runs.
const float* const half_values = nullptr;
int lane() { abort(); }
void sync_block() { abort(); }
void fail(const char*, ...) { abort(); }
void meet(uint32_t, const char*, void*, void (*)(void* const*, uint32_t)) {
  abort();
}

}  // namespace emu

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

const char* cudaGetErrorString(cudaError_t) { return "error"; }
cudaError_t cudaGetLastError() { return cudaSuccess; }

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr what, int i) {
  const Device& d = devices[i];
  *value = what == cudaDevAttrComputeCapabilityMajor   ? d.capability / 10
           : what == cudaDevAttrComputeCapabilityMinor ? d.capability % 10
           : what == cudaDevAttrMultiProcessorCount    ? d.processors
                                                       : d.shared;
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(
    const char*, void** fn, unsigned, unsigned long long,
    cudaDriverEntryPointQueryResult* found) {
  *fn = reinterpret_cast<void*>(&cuTensorMapEncodeTiled);
  *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

void check_launch(const Launch& l) {
  const Device& d = device_now();
  REQUIRE(l.grid.x >= 1 && l.grid.x <= 2147483647u, l.grid.x);
  REQUIRE(l.grid.y >= 1 && l.grid.y <= 65535, l.grid.y);
  REQUIRE(l.grid.z >= 1 && l.grid.z <= 65535, l.grid.z);
  REQUIRE(l.block.x >= 32 && l.block.x <= 1024 && l.block.x % 32 == 0,
          l.block.x);
  REQUIRE(int(l.shared) <= d.shared, l.shared, "of", d.shared);
  if (l.shared > 48 << 10) {
    const auto found = allowed.find({current, l.kernel});
    REQUIRE(found != allowed.end() && found->second >= int(l.shared),
            "shared memory not allowed on this device:", l.shared);
  }
  REQUIRE(l.cluster <= 8 && l.grid.x % l.cluster == 0, l.cluster, l.grid.x);
  REQUIRE(d.capability >= 90 || (l.cluster == 1 && !l.pdl), l.cluster);
}

// --- What Python calls ------------------------------------------------------

namespace {

const char* const kX = reinterpret_cast<const char*>(uintptr_t(1) << 40);
const char* const kW = kX + (int64_t(1) << 40);
const char* const kS = kW + (int64_t(1) << 40);
const char* const kY = kS + (int64_t(1) << 40);
const char* const kOther = kY + (int64_t(1) << 42);

int round_up(int64_t v, int m) { return int((v + m - 1) / m * m); }

Sizes sizes_of(int M, int N, int K, int block, int scale_dtype) {
  Sizes s{};
  s.M = M;
  s.N = N;
  s.K = K;
  s.N_pad = round_up(N, 64);
  s.K_pad = round_up(K, 128);
  s.block = std::min(block, s.K_pad);  // as check_weight in cuda_args.h
  s.num_blocks = (K + s.block - 1) / s.block;
  s.scale_bytes = scale_dtype == 2 ? 4 : 2;
  s.x = kX;
  s.weight = kW;
  s.scale = kS;
  s.y = kY;
  s.ldx = round_up(K, 8);
  return s;
}

// Every launch of a call, which together must compute all of y once.
void check_all(const Sizes& s) {
  REQUIRE(!launches.empty(), "nothing was launched");
  Cover rows;
  bool product = false;
  for (const Launch& l : launches) {
    check_launch(l);
    if (l.find<QuantArgs>()) {
      check_quantize(l, s);
      continue;
    }
    const std::string name = kernel_name(l);
    names += name + "\n";
    REQUIRE(!product || name.find("prefill_kernel") != std::string::npos,
            "two products");
    product = true;
    if (name.find("prefill_kernel") != std::string::npos) {
      const RowRange r = check_prefill(l, s);
      rows.add(r.begin, r.end);
      continue;
    }
    if (name.find("few_kernel") != std::string::npos) check_few(l, s);
    if (name.find("s8_kernel") != std::string::npos) {
      name.find("mma_s8") != std::string::npos ? check_mma(l, s)
                                               : check_wgmma_s8(l, s);
    }
    if (name.find("mma_gemm_kernel") != std::string::npos) check_mma(l, s);
    if (name.find("::direct_digits") != std::string::npos) check_digits(l, s);
    if (name.find("::direct_tokens") != std::string::npos) check_tokens(l, s);
    rows.add(0, s.N_pad);
  }
  rows.finish(s.N_pad);
}

// A naive kernel was called.
struct NaiveDone : std::exception {};

// `call` is false where the kernel asked for does not take the product; `check`
// looks at what it launched.
template <typename Call, typename Check>
const char* run(Call call, Check check) {
  launches.clear();
  names.clear();
  try {
    if (!call()) return "unsupported";
    check();
    return "";
  } catch (const NaiveDone&) {
    return "unsupported";
  } catch (const std::exception& e) {
    message = e.what();
    return message.c_str();
  }
}

template <typename Call>
const char* run(const Sizes& s, Call call) {
  return run(call, [&] { check_all(s); });
}

// CTAs that a multiprocessor must have room for, of mma_s8_gemm's variants.
int share_of(int variant) {
  if (variant >= kDirectOne) variant += kDirect - kDirectOne;
  constexpr int kShare[] = {2, 3, 1};
  return variant < kDirect ? 1 : kShare[(variant - kDirect) % 3];
}

// What arguments of both kinds of product have.
template <typename Args>
void set_product(Args& a, const Sizes& s, int scale_dtype) {
  a.weight = reinterpret_cast<const int32_t*>(s.weight);
  a.scale = s.scale;
  a.scale_dtype = DType(scale_dtype);
  a.y = const_cast<char*>(s.y);
  a.M = s.M;
  a.N = s.N;
  a.K = s.K;
  a.N_pad = s.N_pad;
  a.K_pad = s.K_pad;
  a.block_size = s.block;
  a.num_blocks = s.num_blocks;
  a.device = current;
}

void naive(const char* name) { names += std::string(name) + "\n"; }

}  // namespace

namespace vllm::ternary {
// The naive kernels, which walk any sizes.
void reference_gemm(const GemmArgs&) {
  naive("reference_gemm");
  throw NaiveDone();
}
void reference_w2a8(const W2A8Args&) {
  naive("reference_w2a8");
  throw NaiveDone();
}
}  // namespace vllm::ternary

extern "C" {

void set_device(int index, int capability, int processors, int shared,
                int cluster_group) {
  devices[index] = {capability, processors, shared, cluster_group};
}

// Kernels of the last call, one a line.
const char* kernels() { return names.c_str(); }

// kind 0: as the dispatch table says; 1: mma_gemm, 2: mma_s8_gemm with a
// config; 3: the Hopper kernels. "" if all is right.
const char* check_gemm(int device, int kind, int M, int N, int K, int block,
                       int dtype, int scale_dtype, int zero_point, int variant,
                       int groups, int split) {
  current = device;
  Sizes s = sizes_of(M, N, K, block, scale_dtype);
  if (kind == 2) s.share = share_of(std::min(variant, kDirect + 2));
  GemmArgs a{};
  a.x = s.x;
  a.ldx = s.ldx;
  a.dtype = DType(dtype);
  a.zero_point = zero_point ? reinterpret_cast<const float*>(kOther) : nullptr;
  a.bias = M % 2 ? kOther : nullptr;
  a.ldy = N;
  set_product(a, s, scale_dtype);
  return run(s, [&] {
    const MmaConfig config{variant, groups, split};
    if (kind == 0) {
      dispatch_gemm(a);
    } else if (kind == 1 && mma_supported(a)) {
      mma_gemm(a, config);
    } else if (kind == 2 && mma_s8_supported(a)) {
      mma_s8_gemm(a, config);
    } else if (kind == 3 && sm90_gemm_supported(a)) {
      sm90_gemm(a);
    } else {
      return false;
    }
    return true;
  });
}

// kind 0: as the table says; 1: mma_s8_gemm; 2: the same, quantizing; 3: the
// Hopper kernel. `ends`: of the parts, or nullptr for one part.
const char* check_w2a8(int device, int kind, int M, int N, int K, int block,
                       int dtype, int scale_dtype, int norm, int parts,
                       const int* ends, int variant, int groups, int split) {
  current = device;
  Sizes s = sizes_of(M, N, K, block, scale_dtype);
  s.parts = parts;
  s.ends = ends;
  if (kind == 2) s.share = share_of(variant);
  QuantArgs q{};
  q.x = kX;
  q.ldx = s.ldx;
  q.dtype = DType(dtype);
  q.norm_weight = norm ? kOther : nullptr;
  q.norm_dtype = q.dtype;
  q.xq = reinterpret_cast<int8_t*>(const_cast<char*>(kOther));
  q.xs = reinterpret_cast<float*>(q.xq + int64_t(parts) * M * s.K_pad);
  q.xsum = reinterpret_cast<int32_t*>(q.xs + int64_t(parts) * M);
  q.xsum_tiles = s.num_blocks > 1 ? q.xsum + int64_t(parts) * M : nullptr;
  q.parts = parts;
  q.M = M;
  q.K = K;
  q.K_pad = s.K_pad;
  q.device = device;
  W2A8Args a{};
  a.xq = q.xq;
  a.xs = q.xs;
  a.xsum = q.xsum;
  a.xsum_tiles = q.xsum_tiles;
  a.part_ends = parts > 1 ? ends : nullptr;
  a.dtype = q.dtype;
  a.parts = parts;
  set_product(a, s, scale_dtype);
  s.x = kOther;
  return run(s, [&] {
    const MmaConfig config{variant, groups, split};
    if (kind == 0) {
      dispatch_w2a8(q, a);
    } else if (kind == 1 && mma_s8_supported(a)) {
      mma_s8_gemm(a, config);
    } else if (kind == 2 && mma_s8_quantizes(q, a)) {
      mma_s8_gemm(a, config, &q);
    } else if (kind == 3 && sm90_w2a8_supported(a)) {
      sm90_w2a8(a);
    } else {
      return false;
    }
    return true;
  });
}

// The experts' product of that many blocks of routes.
const char* check_moe(int device, int N, int K, int blocks, int dtype,
                      int zero_point) {
  current = device;
  MoeGemmArgs a{};
  a.dtype = DType(dtype);
  a.zero_point = zero_point ? reinterpret_cast<const float*>(kOther) : nullptr;
  a.routes = blocks * kMoeBlock;
  a.top_k = 1;
  a.blocks = blocks;
  a.N = N;
  a.K = K;
  a.N_pad = round_up(N, 64);
  a.K_pad = round_up(K, 128);
  a.block_size = a.K_pad;
  a.num_blocks = 1;
  return run([&] { return moe_gemm(a), true; },
             [&] {
               Cover covered;
               for (const Launch& l : launches) {
                 names += "moe_gemm\n";
                 check_launch(l);
                 REQUIRE(int64_t(l.grid.x) * 64 == a.N_pad, l.grid.x);
                 REQUIRE(l.grid.z == 1 && l.shared == 0, l.grid.z, l.shared);
                 const int64_t first = *l.find<int>();
                 covered.add(first, first + l.grid.y);
               }
               covered.finish(blocks);
             });
}

}  // extern "C"
