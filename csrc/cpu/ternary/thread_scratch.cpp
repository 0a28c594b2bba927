// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Scratch that a thread keeps: a few hundred KiB, which the allocator would
// return to the system, and fault in again, with every call. In a large page
// where the system has them: small ones of a band of weights may share the sets
// of L2.

#include <cstdlib>
#include <new>

#ifdef __linux__
  #include <sys/mman.h>
#endif

#include "kernels.h"

namespace vllm::ternary::cpu {
namespace {

struct Buffer {
  char* data = nullptr;
  int64_t size = 0;
  ~Buffer() { std::free(data); }
};

}  // namespace

char* thread_scratch(int64_t bytes) {
  constexpr int64_t kLargePage = 2 << 20;
  static thread_local Buffer buffer;
  if (buffer.size < bytes) {
    std::free(buffer.data);
    buffer.size = 0;
    const bool large = bytes > kLargePage / 8;
    const int64_t page = large ? kLargePage : 4096;
    const int64_t size = (bytes + page - 1) / page * page;
    buffer.data = static_cast<char*>(std::aligned_alloc(page, size));
    if (buffer.data == nullptr) {
      throw std::bad_alloc();
    }
#ifdef MADV_HUGEPAGE
    if (large) {
      madvise(buffer.data, size, MADV_HUGEPAGE);
    }
#endif
    buffer.size = size;
  }
  return buffer.data;
}

}  // namespace vllm::ternary::cpu
