// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Large pages, and scratch that a thread keeps.

#pragma once

#include <cstdint>

namespace vllm::ternary::cpu {

constexpr int64_t kLargePage = 2 << 20;

// Asks the system for large pages where [data, data + bytes) has whole ones.
void prefer_large_pages(void* data, int64_t bytes);

// At least `bytes`, aligned to a page, of this thread; valid until it asks
// again.
char* thread_scratch(int64_t bytes);

}  // namespace vllm::ternary::cpu
