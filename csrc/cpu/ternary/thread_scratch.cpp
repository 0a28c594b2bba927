// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Scratch that a thread keeps: a few hundred KiB, which the allocator would
// return to the system, and fault in again, with every call.

#include <cstdlib>
#include <new>

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
  constexpr int64_t kPage = 4096;
  static thread_local Buffer buffer;
  if (buffer.size < bytes) {
    std::free(buffer.data);
    buffer.size = 0;
    const int64_t size = (bytes + kPage - 1) / kPage * kPage;
    buffer.data = static_cast<char*>(std::aligned_alloc(kPage, size));
    if (buffer.data == nullptr) {
      throw std::bad_alloc();
    }
    buffer.size = size;
  }
  return buffer.data;
}

}  // namespace vllm::ternary::cpu
