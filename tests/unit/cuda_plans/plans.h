// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// What a recorded launch must be: the checks of plans.cpp, by kernel.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <typeindex>
#include <utility>
#include <vector>

#include "cuda.h"
#include "cuda_runtime.h"

struct Launch {
  const void* kernel;
  dim3 grid, block;
  size_t shared;
  unsigned cluster;
  bool pdl;
  std::vector<std::pair<std::type_index, std::vector<char>>> arguments;

  // The n-th argument of type T.
  template <typename T>
  const T* find(int n = 0) const {
    for (const auto& [type, bytes] : arguments) {
      if (type == std::type_index(typeid(T)) && n-- == 0) {
        return reinterpret_cast<const T*>(bytes.data());
      }
    }
    return nullptr;
  }
};

struct Device {
  int capability, processors, shared, cluster_group;
};
const Device& device_now();

struct Wrong : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Throws Wrong with the values, in pairs of name and number.
#define REQUIRE(condition, ...)                           \
  do {                                                    \
    if (!(condition)) fail_with(#condition, __VA_ARGS__); \
  } while (false)

template <typename... Args>
[[noreturn]] void fail_with(const char* what, const Args&... args) {
  std::ostringstream out;
  out << what;
  ((out << " " << args), ...);
  throw Wrong(out.str());
}

// Demangled name of a kernel, with its template arguments.
std::string kernel_name(const Launch& launch);
// The numbers among the template arguments that follow `type` in a name.
std::vector<int> shape_of(const std::string& name, const std::string& type);

// Parts [begin, end) must follow each other from 0 to `end`, none empty.
struct Cover {
  int64_t at = 0;
  void add(int64_t begin, int64_t end) {
    REQUIRE(begin == at, "part begins at", begin, "and not at", at);
    REQUIRE(end > begin, "empty part at", begin);
    at = end;
  }
  void finish(int64_t end) const {
    REQUIRE(at == end, "covered to", at, "of", end);
  }
};

// Regions of shared memory, which must follow each other without overlap.
class Layout {
 public:
  void add(const char* what, int64_t begin, int64_t bytes, int64_t align) {
    REQUIRE(begin >= end_ && begin % align == 0, what, begin, "behind", end_);
    end_ = begin + bytes;
  }
  void finish(int64_t bytes) const {
    REQUIRE(end_ <= bytes, "regions end at", end_, "of", bytes);
  }

 private:
  int64_t end_ = 0;
};

// Throw Wrong. `rows` gets what the launch computes: [begin, end).
struct RowRange {
  int64_t begin, end;
};
struct Sizes {
  int M, N, K, N_pad, K_pad, block, num_blocks, scale_bytes;
  const char *x, *weight, *scale, *y;
  int64_t ldx;
  int parts = 1;
  const int* ends = nullptr;
  int share = 1;  // CTAs that a multiprocessor must have room for
};
// The block of scales of each k tile, which the kernels with short chains find
// by a shift.
template <typename Args>
void check_tile_blocks(const Args& a, const Sizes& s) {
  for (int kt = 0; kt < a.all_k_tiles; ++kt) {
    const int block = std::min(kt >> a.block_shift, a.last_block);
    REQUIRE(s.num_blocks == 1 ? block == 0 : block == kt * 128 / s.block,
            "block", block, "of k tile", kt);
  }
  REQUIRE(int64_t(s.num_blocks) * s.N_pad <= UINT32_MAX, "scales");
}

void check_launch(const Launch& launch);
RowRange check_prefill(const Launch& launch, const Sizes& s);
void check_few(const Launch& launch, const Sizes& s);
void check_wgmma_s8(const Launch& launch, const Sizes& s);
void check_mma(const Launch& launch, const Sizes& s);
void check_tokens(const Launch& launch, const Sizes& s);
void check_digits(const Launch& launch, const Sizes& s);
void check_quantize(const Launch& launch, const Sizes& s);
