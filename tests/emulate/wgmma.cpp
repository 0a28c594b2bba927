// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// wgmma with A in registers. A product is computed at its commit or at the last
// moment, when it is waited for; its accumulators hold poison in between, and
// its operands must stay as they were.
#include <cstring>

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "emulator.h"

namespace emu {
namespace {

uint32_t poisoned() { return 0xffffffffu; }

inline float value_of(int kind, uint16_t bits) {
  return kind == 0 ? half_values[bits] : __uint_as_float(uint32_t(bits) << 16);
}

// Where byte `b` of row `n` of a K-major operand with rows of 128 bytes lies
// that the copy engine has swizzled.
const uint8_t* operand(uint64_t descriptor, uint32_t window, int n, int b) {
  const uint32_t start = uint32_t(descriptor & 0x3fff) << 4;
  const uint32_t stride = uint32_t(descriptor >> 32 & 0x3fff) << 4;
  const uint32_t at =
      start + uint32_t(n / 8) * stride + uint32_t(n % 8) * 128 + uint32_t(b);
  return shared(window + (at ^ (at >> 3 & 0x70)), 16, 16);
}

// sums[row][n] of a[row][k] * b[k][n], so that the compiler takes several n at
// a time.
template <typename Value, int kDepth>
__attribute__((optimize("O3"))) void multiply_tile(
    const Value (&a)[16][kDepth], const Value (&b)[kDepth][256], int n,
    Value (&sums)[16][256]) {
  for (int row = 0; row < 16; ++row) {
    Value* const to = sums[row];
    for (int i = 0; i < n; ++i) to[i] = 0;
    for (int k = 0; k < kDepth; ++k) {
      const Value factor = a[row][k];
      const Value* const from = b[k];
      for (int i = 0; i < n; ++i) to[i] += factor * from[i];
    }
  }
}

// One product of a warp's sixteen rows.
template <typename Element, typename Value, typename Convert>
void multiply(Fiber* const* lanes, size_t index, Convert convert) {
  const Wgmma& first = lanes[0]->wgmmas[index];
  constexpr int kInWord = 4 / sizeof(Element), kDepth = 8 * kInWord;
  static Value a[16][kDepth], b[kDepth][256], sums[16][256];
  for (int l = 0; l < 32; ++l) {
    const Wgmma& op = lanes[l]->wgmmas[index];
    for (int r = 0; r < 4; ++r) {
      if (*op.a[r] != op.a_values[r]) {
        current = lanes[l];
        fail("register %d of A changes while a wgmma reads it", r);
      }
      const int row = l / 4 + r % 2 * 8;
      const int k = (l % 4 + r / 2 * 4) * kInWord;
      for (int i = 0; i < kInWord; ++i) {
        a[row][k + i] =
            convert(Element(op.a_values[r] >> (8 * sizeof(Element) * i)));
      }
    }
  }
  const uint32_t window =
      windows + uint32_t(lanes[0]->block->rank) * kWindowBytes;
  for (int n = 0; n < first.n; ++n) {
    for (int half = 0; half < 2; ++half) {
      Element row[kDepth / 2];
      memcpy(row, operand(first.descriptor, window, n, half * 16), 16);
      for (int k = 0; k < kDepth / 2; ++k) {
        b[half * kDepth / 2 + k][n] = convert(row[k]);
      }
    }
  }
  multiply_tile(a, b, first.n, sums);
  for (int l = 0; l < 32; ++l) {
    std::vector<uint32_t>& d =
        lanes[l]->accumulators.at(lanes[l]->wgmmas[index].d).values;
    for (int i = 0; i < first.n / 2; ++i) {
      const int row = l / 4 + i % 4 / 2 * 8, n = i / 4 * 8 + l % 4 * 2 + i % 2;
      const Value sum = sums[row][n];
      if constexpr (std::is_same_v<Value, int>) {
        d[i] = (first.add ? d[i] : 0) + uint32_t(sum);
      } else {
        d[i] = __float_as_uint(first.add ? __uint_as_float(d[i]) + sum : sum);
      }
    }
  }
}

// Computes what the groups before `group` have not yet.
void compute(void* const* arguments, unsigned group) {
  Fiber* lanes[32];
  for (int l = 0; l < 32; ++l) lanes[l] = static_cast<Fiber*>(arguments[l]);
  Fiber* const who = current;
  for (size_t i = 0; i < lanes[0]->wgmmas.size(); ++i) {
    const Wgmma first = lanes[0]->wgmmas[i];
    if (first.done || first.group >= group) continue;
    for (Fiber* f : lanes) {
      if (f->wgmmas.size() != lanes[0]->wgmmas.size() ||
          f->wgmmas[i].descriptor != first.descriptor ||
          f->wgmmas[i].add != first.add || f->wgmmas[i].n != first.n ||
          f->wgmmas[i].group != first.group) {
        fail("lanes of a warp differ in a wgmma");
      }
    }
    if ((first.descriptor >> 62) != 1) fail("wgmma operand is not swizzled");
    if (first.kind == 2) {
      multiply<int8_t, int>(lanes, i, [](int8_t v) { return int(v); });
    } else {
      const int kind = first.kind;
      multiply<uint16_t, float>(
          lanes, i, [kind](uint16_t v) { return value_of(kind, v); });
    }
    for (Fiber* f : lanes) f->wgmmas[i].done = true;
  }
  current = who;
}

}  // namespace

void issue_wgmma(const Wgmma& op, uint32_t* const* registers) {
  Fiber& f = *current;
  if (!f.wgmma_fenced) fail("wgmma without wgmma.fence");
  Accumulator& acc = f.accumulators[op.d];
  if (acc.pending++ == 0) {
    acc.values.clear();
    acc.registers.assign(registers, registers + op.n / 2);
    for (uint32_t* r : acc.registers) {
      acc.values.push_back(*r);
      *r = poisoned();
    }
  }
  f.wgmmas.push_back(op);
  f.wgmmas.back().group = f.wgmma_group;
}

void commit_wgmma() {
  Fiber& f = *current;
  ++f.wgmma_group;
  f.wgmma_fenced = false;
  if (mood.wgmma_at_commit) {
    meet(~0u, "wgmma.commit_group", &f, [](void* const* lanes, uint32_t) {
      compute(lanes, static_cast<Fiber*>(lanes[0])->wgmma_group);
    });
  }
}

void wait_wgmma(int pending) {
  static int left;
  left = pending;
  meet(~0u, "wgmma.wait_group", current, [](void* const* lanes, uint32_t) {
    const unsigned group = static_cast<Fiber*>(lanes[0])->wgmma_group;
    if (group > unsigned(left)) compute(lanes, group - unsigned(left));
  });
  Fiber& f = *current;
  if (f.wgmma_group <= unsigned(pending)) return;
  size_t kept = 0;
  for (Wgmma& op : f.wgmmas) {
    if (op.group >= f.wgmma_group - unsigned(pending)) {
      f.wgmmas[kept++] = op;
      continue;
    }
    Accumulator& acc = f.accumulators.at(op.d);
    if (--acc.pending) continue;
    for (size_t i = 0; i < acc.registers.size(); ++i) {
      if (*acc.registers[i] != poisoned()) {
        fail("accumulator %zu changes while a wgmma writes it", i);
      }
      *acc.registers[i] = acc.values[i];
    }
  }
  f.wgmmas.resize(kept);
}

}  // namespace emu
