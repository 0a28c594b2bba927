// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Devices, memory with guard pages, launches: the CUDA API.
#include <sys/mman.h>

#include <cstdio>

#include "cuda_fp16.h"
#include "emulator.h"

namespace emu {
namespace {

struct Device {
  int capability, processors, shared_memory;
};
// An H200, the same with few multiprocessors (so that small products take
// several turns), an A100, an L40S.
constexpr Device kDevices[] = {
    {90, 132, 227 << 10}, {90, 3, 227 << 10},  {90, 8, 227 << 10},
    {80, 108, 163 << 10}, {89, 142, 99 << 10},
};

std::string message;  // of the last launch
unsigned first_seed = 0, launches = 0;
int device = 0;
// Dynamic shared memory of a kernel on a device.
std::map<std::pair<const void*, int>, int> allowed;

struct Buffer {
  uint8_t *base, *data;
  size_t mapped, bytes;
};
std::map<uint8_t*, Buffer> buffers;
std::vector<uint8_t*> withheld;  // until the kernel before has ended

void protect_all(int how) {
  for (uint8_t* p : withheld) {
    const Buffer& b = buffers.at(p);
    mprotect(b.base + kPage, b.mapped - 2 * kPage, how);
  }
}

const float* make_half_values() {
  static float values[65536];
  for (int i = 0; i < 65536; ++i) {
    const int exponent = i >> 10 & 31, mantissa = i & 1023;
    float v = exponent == 0 ? std::ldexp(float(mantissa), -24)
                            : std::ldexp(float(1024 + mantissa), exponent - 25);
    if (exponent == 31) v = mantissa ? NAN : INFINITY;
    values[i] = i >> 15 ? -v : v;
  }
  return values;
}

}  // namespace

const float* const half_values = make_half_values();

bool protect_withheld() {
  protect_all(PROT_NONE);
  return !withheld.empty();
}

void release_withheld() {
  protect_all(PROT_READ | PROT_WRITE);
  withheld.clear();
}

std::string describe(const uint8_t* at) {
  char text[120] = "in no buffer";
  for (auto& [data, b] : buffers) {
    if (at < b.base || at >= b.base + b.mapped) continue;
    snprintf(text, sizeof text, "byte %td of a buffer of %zu", at - data,
             b.bytes);
  }
  return text;
}

cudaError_t allow_shared(const void* kernel, int bytes) {
  if (bytes > kDevices[device].shared_memory) return cudaErrorInvalidValue;
  allowed[{kernel, device}] = bytes;
  return cudaSuccess;
}

int active_clusters(const cudaLaunchConfig_t& c) {
  const int blocks = c.dynamicSmemBytes <= 113 << 10 ? 2 : 1;
  return kDevices[device].processors * blocks / int(Attributes(c).cluster);
}

cudaError_t launch(const cudaLaunchConfig_t& c, const void* kernel, Arguments,
                   void (*thread)(const void*), const void* closure) {
  const Attributes a(c);
  const dim3 &grid = c.gridDim, &block = c.blockDim;
  const unsigned threads = block.x * block.y * block.z;
  const auto limit = allowed.find({kernel, device});
  const size_t most = limit == allowed.end() ? 48 << 10 : limit->second;
  if (threads < 1 || threads > 1024 || threads % 32 || a.cluster < 1 ||
      a.cluster > kMaxCluster || grid.x % a.cluster || grid.x < 1 ||
      grid.y < 1 || grid.z < 1 || grid.y > 65535 || grid.z > 65535 ||
      c.dynamicSmemBytes > most ||
      ((a.cluster > 1 || a.dependent) && kDevices[device].capability < 90)) {
    message = "invalid launch";
    return cudaErrorInvalidValue;
  }
  const unsigned seed = first_seed * 7919u + ++launches;
  message = run(c, a.cluster, a.dependent, seed, thread, closure);
  return message.empty() ? cudaSuccess : cudaErrorLaunchFailure;
}

}  // namespace emu

const char* cudaGetErrorString(cudaError_t) { return emu::message.c_str(); }
cudaError_t cudaGetLastError() {
  return emu::message.empty() ? cudaSuccess : cudaErrorLaunchFailure;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr what,
                                   int device) {
  const emu::Device& d = emu::kDevices[device];
  switch (what) {
    case cudaDevAttrMultiProcessorCount:
      *value = d.processors;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = d.capability / 10;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = d.capability % 10;
      break;
    default:
      *value = d.shared_memory;
  }
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(
    const char*, void** function, unsigned, unsigned long long,
    cudaDriverEntryPointQueryResult* found) {
  *function = reinterpret_cast<void*>(&cuTensorMapEncodeTiled);
  *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// --- For the tests

#pragma GCC visibility push(default)
extern "C" {

// `bytes` that end where a page without access begins, as far as 16-byte
// alignment allows; another such page is in front.
void* emu_alloc(size_t bytes) {
  using namespace emu;
  const size_t size = round_up(bytes, 16);
  Buffer b{};
  b.mapped = round_up(size + 1, kPage) + 2 * kPage;
  b.base = static_cast<uint8_t*>(mmap(nullptr, b.mapped, PROT_READ | PROT_WRITE,
                                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  b.data = b.base + b.mapped - kPage - size;
  b.bytes = bytes;
  memset(b.base, kPoison, b.mapped - kPage);
  mprotect(b.base, kPage, PROT_NONE);
  mprotect(b.base + b.mapped - kPage, kPage, PROT_NONE);
  buffers[b.data] = b;
  return b.data;
}

// Frees; false where the bytes around the buffer were written.
bool emu_free(void* data) {
  using namespace emu;
  const Buffer b = buffers.at(static_cast<uint8_t*>(data));
  bool good = true;
  for (uint8_t* p = b.base + kPage; p < b.base + b.mapped - kPage; ++p) {
    if ((p < b.data || p >= b.data + b.bytes) && *p != kPoison) good = false;
  }
  munmap(b.base, b.mapped);
  buffers.erase(b.data);
  return good;
}

void emu_begin(unsigned seed, int device) {
  emu::first_seed = seed;
  emu::device = device;
  emu::launches = 0;
}

// The next launch may touch the buffer only once it has waited for the kernel
// ahead of it in the stream.
void emu_withhold(void* data) {
  emu::withheld.push_back(static_cast<uint8_t*>(data));
}
}
