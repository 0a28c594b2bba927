// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
#include "host_memory.h"

#include <cstdlib>
#include <new>

#ifdef __linux__
  #include <sys/mman.h>
#endif

namespace vllm::ternary::cpu {
namespace {

struct Buffer {
  char* data = nullptr;
  int64_t size = 0;
  ~Buffer() { std::free(data); }
};

}  // namespace

void prefer_large_pages(void* data, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = (begin + kLargePage - 1) / kLargePage * kLargePage;
  const uintptr_t last = (begin + bytes) / kLargePage * kLargePage;
  if (first < last) {
    madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
  }
#endif
}

// A few hundred KiB, which the allocator would return to the system, and fault
// in again, with every call. In a large page where the system has them: small
// ones of a band of weights may share the sets of L2.
char* thread_scratch(int64_t bytes) {
  static thread_local Buffer buffer;
  if (buffer.size < bytes) {
    std::free(buffer.data);
    buffer.size = 0;
    const int64_t page = bytes > kLargePage / 8 ? kLargePage : 4096;
    const int64_t size = (bytes + page - 1) / page * page;
    buffer.data = static_cast<char*>(std::aligned_alloc(page, size));
    if (buffer.data == nullptr) {
      throw std::bad_alloc();
    }
    if (page == kLargePage) {
      prefer_large_pages(buffer.data, size);
    }
    buffer.size = size;
  }
  return buffer.data;
}

}  // namespace vllm::ternary::cpu
