// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
#include "ptx.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <utility>

#include "emulator.h"

namespace emu::ptx {

// --- Arithmetic

template <typename T, typename Op>
uint32_t pairwise(uint32_t a, uint32_t b, Op op) {
  uint32_t d = 0;
  for (int s = 0; s < 32; s += 16) {
    const float x = float(std::bit_cast<T>(uint16_t(a >> s)));
    const float y = float(std::bit_cast<T>(uint16_t(b >> s)));
    d |= uint32_t(std::bit_cast<uint16_t>(T(op(x, y)))) << s;
  }
  return d;
}
void sub_f16x2(uint32_t& d, uint32_t a, uint32_t b) {
  d = pairwise<__half>(a, b, std::minus<float>());
}
void sub_bf16x2(uint32_t& d, uint32_t a, uint32_t b) {
  d = pairwise<__nv_bfloat16>(a, b, std::minus<float>());
}
void mul_f16x2(uint32_t& d, uint32_t a, uint32_t b) {
  d = pairwise<__half>(a, b, std::multiplies<float>());
}
void mul_bf16x2(uint32_t& d, uint32_t a, uint32_t b) {
  d = pairwise<__nv_bfloat16>(a, b, std::multiplies<float>());
}
void fma_rn_bf16x2(uint32_t& d, uint32_t a, uint32_t b, uint32_t c) {
  uint32_t out = 0;
  for (int s = 0; s < 32; s += 16) {
    const auto value = [s](uint32_t pair) {
      return double(float(std::bit_cast<__nv_bfloat16>(uint16_t(pair >> s))));
    };
    const __nv_bfloat16 sum(float(value(a) * value(b) + value(c)));
    out |= uint32_t(std::bit_cast<uint16_t>(sum)) << s;
  }
  d = out;
}

// --- Registers and places

uint32_t cluster_ctarank() { return uint32_t(current->block->rank); }
void mapa_shared_cluster_u32(uint32_t& d, uint32_t address, int rank) {
  if (rank < 0 || rank >= int(cluster->blocks.size())) fail("mapa to %d", rank);
  d = windows + uint32_t(rank) * kWindowBytes + address % kWindowBytes;
}
void elect_sync(bool& p, uint32_t mask) {
  meet(mask, "elect.sync", nullptr, [](void* const*, uint32_t) {});
  p = current->lane == __builtin_ctz(mask);
}

// --- Shared memory

void load_words(void* const* d, int count, uint32_t address) {
  maybe_yield();
  const uint8_t* from =
      shared(address, uint32_t(count) * 4, uint32_t(count) * 4);
  for (int i = 0; i < count; ++i) memcpy(d[i], from + 4 * i, 4);
}
void store_words(uint32_t address, const void* const* v, int count) {
  uint8_t* to = shared(address, uint32_t(count) * 4, uint32_t(count) * 4);
  for (int i = 0; i < count; ++i) memcpy(to + 4 * i, v[i], 4);
  ordinary_write(address, uint32_t(count) * 4);
}
void ld_shared_u16(uint16_t& d, uint32_t address) {
  memcpy(&d, shared(address, 2, 2), 2);
}

struct Matrices {  // of ldmatrix and stmatrix, x4
  uint32_t address;
  uint32_t* registers[4];
};
void ldmatrix_sync_aligned_m8n8_x4_shared_b16(const List<uint32_t, 4>& d,
                                              uint32_t address) {
  Matrices m{address, {d.at[0], d.at[1], d.at[2], d.at[3]}};
  meet(~0u, "ldmatrix", &m, [](void* const* lanes, uint32_t) {
    for (int l = 0; l < 32; ++l) {
      for (int i = 0; i < 4; ++i) {
        const auto* row = static_cast<const Matrices*>(lanes[i * 8 + l / 4]);
        memcpy(static_cast<Matrices*>(lanes[l])->registers[i],
               shared(row->address, 16, 16) + l % 4 * 4, 4);
      }
    }
  });
}
void stmatrix_sync_aligned_m8n8_x4_trans_shared_b16(
    uint32_t address, const List<uint32_t, 4>& v) {
  uint32_t values[4] = {*v.at[0], *v.at[1], *v.at[2], *v.at[3]};
  Matrices m{address, {&values[0], &values[1], &values[2], &values[3]}};
  meet(~0u, "stmatrix", &m, [](void* const* lanes, uint32_t) {
    for (int l = 0; l < 32; ++l) {
      for (int i = 0; i < 8; ++i) {  // matrix i / 2, columns l / 4
        const auto* from = static_cast<const Matrices*>(lanes[l]);
        const auto* row =
            static_cast<const Matrices*>(lanes[i / 2 * 8 + l % 4 * 2 + i % 2]);
        const uint16_t value =
            uint16_t(*from->registers[i / 2] >> 16 * (i % 2));
        memcpy(shared(row->address, 16, 16) + l / 4 * 2, &value, 2);
      }
    }
  });
  ordinary_write(address, 16);
}

// --- Tensor cores

// Value k of row (or column) g of an operand: word k / per_word of a lane.
template <bool kBf16>
void multiply_16816(void* const* lanes, uint32_t) {
  using P = Product<float>;
  static float a[16][16], b[8][16];
  auto value = [](uint32_t word, int i) {
    const uint16_t bits = uint16_t(word >> 16 * i);
    return kBf16 ? __uint_as_float(uint32_t(bits) << 16) : half_values[bits];
  };
  for (int l = 0; l < 32; ++l) {
    const P& p = *static_cast<P*>(lanes[l]);
    for (int i = 0; i < 2; ++i) {
      for (int r = 0; r < 4; ++r) {
        a[l / 4 + r % 2 * 8][l % 4 * 2 + r / 2 * 8 + i] = value(p.a[r], i);
      }
      for (int r = 0; r < 2; ++r) {
        b[l / 4][l % 4 * 2 + r * 8 + i] = value(p.b[r], i);
      }
    }
  }
  for (int l = 0; l < 32; ++l) {
    const P& p = *static_cast<P*>(lanes[l]);
    for (int i = 0; i < 4; ++i) {
      const float* x = a[l / 4 + i / 2 * 8];
      const float* y = b[l % 4 * 2 + i % 2];
      double sum = p.c[i];
      for (int k = 0; k < 16; ++k) sum += double(x[k]) * y[k];
      *p.d[i] = float(sum);
    }
  }
}

void multiply_16832(void* const* lanes, uint32_t) {
  using P = Product<int>;
  static int16_t a[16][32], b[8][32];
  for (int l = 0; l < 32; ++l) {
    const P& p = *static_cast<P*>(lanes[l]);
    for (int i = 0; i < 4; ++i) {
      for (int r = 0; r < 4; ++r) {
        a[l / 4 + r % 2 * 8][l % 4 * 4 + r / 2 * 16 + i] =
            uint8_t(p.a[r] >> 8 * i);
      }
      for (int r = 0; r < 2; ++r) {
        b[l / 4][l % 4 * 4 + r * 16 + i] = int8_t(p.b[r] >> 8 * i);
      }
    }
  }
  for (int l = 0; l < 32; ++l) {
    const P& p = *static_cast<P*>(lanes[l]);
    for (int i = 0; i < 4; ++i) {
      const int16_t* x = a[l / 4 + i / 2 * 8];
      const int16_t* y = b[l % 4 * 2 + i % 2];
      int sum = p.c[i];
      for (int k = 0; k < 32; ++k) sum += x[k] * y[k];
      *p.d[i] = sum;
    }
  }
}

void multiply_f16(Product<float>& p) {
  meet(~0u, "mma.f16", &p, multiply_16816<false>);
}
void multiply_bf16(Product<float>& p) {
  meet(~0u, "mma.bf16", &p, multiply_16816<true>);
}
void multiply_s8(Product<int>& p) { meet(~0u, "mma.s8", &p, multiply_16832); }

void issue_wgmma(int kind, int n, void* const* d, const uint32_t* const* a,
                 uint64_t descriptor, bool add) {
  Wgmma op{};
  for (int i = 0; i < 4; ++i) {
    op.a[i] = a[i];
    op.a_values[i] = *a[i];
  }
  op.descriptor = descriptor;
  op.add = add;
  op.kind = kind;
  op.n = n;
  op.d = d[0];
  emu::issue_wgmma(op, (uint32_t* const*)(d));
}
void wgmma_fence_sync_aligned() { current->wgmma_fenced = true; }
void wgmma_commit_group_sync_aligned() { commit_wgmma(); }
void wgmma_wait_group_sync_aligned(int pending) { wait_wgmma(pending); }

// --- Barriers

void bar_sync(int id, int count) { bar(id, count, true); }
void bar_arrive(int id, int count) {
  maybe_yield();
  bar(id, count, false);
}
void barrier_cluster_arrive_aligned() { cluster_arrive(); }
void barrier_cluster_wait_aligned() { cluster_wait(); }
void barrier_cluster_arrive_release() { cluster_arrive(); }
void barrier_cluster_arrive_relaxed() { cluster_arrive(); }
void barrier_cluster_wait_acquire() { cluster_wait(); }

void mbarrier_init_shared_cta_b64(uint32_t bar, int count) {
  barrier_init(bar, count);
}
void mbarrier_arrive_expect_tx_shared_cta_b64(uint32_t bar, uint32_t bytes) {
  barrier_expect(bar, bytes);
  barrier_arrive(bar, 1);
}
void mbarrier_arrive_shared_cta_b64(uint32_t bar) {
  barrier_arrive(bar, 1);
  maybe_yield();
}
void mbarrier_arrive_shared_cluster_b64(uint32_t bar) {
  barrier_arrive(bar, 1);
  maybe_yield();
}
void mbarrier_try_wait_parity_shared_cta_b64(bool& done, uint32_t bar,
                                             uint32_t parity) {
  done = barrier_done(bar, parity);
  if (!done) barrier_wait(bar);
}
void mbarrier_try_wait_parity_acquire_cluster_shared_cta_b64(bool& done,
                                                             uint32_t bar,
                                                             uint32_t parity) {
  mbarrier_try_wait_parity_shared_cta_b64(done, bar, parity);
}
void fence_proxy_async_shared_cta() { ++current->proxy_fences; }

void griddepcontrol_wait() { grid_dependency_wait(); }

// --- Asynchronous copies

void cp_async_cg_shared_global(uint32_t dst, const void* src, int bytes) {
  uint8_t* to = shared(dst, 16, 16);
  if (bytes != 16 || uintptr_t(src) % 16) fail("cp.async of odd bytes");
  const auto* from = static_cast<const uint8_t*>(src);
  if (mood.copies_at_once) {
    memcpy(to, from, 16);
  } else {
    memset(to, kPoison, 16);
    current->copies.push_back({dst, from, current->copy_group});
  }
}
void cp_async_commit_group() { ++current->copy_group; }
void cp_async_wait_group(int pending) {
  Fiber& f = *current;
  if (f.copy_group > unsigned(pending)) {
    finish_copies(f, f.copy_group - unsigned(pending));
  }
}
void cp_async_mbarrier_arrive_noinc_shared_cta_b64(uint32_t bar) {
  Fiber* f = current;
  const unsigned before = ++f->copy_group;
  later([=] {
    finish_copies(*f, before);
    barrier_arrive(bar, 1);
  });
}

void cp_async_bulk_shared_cluster_global_mbarrier_complete_tx_bytes(
    uint32_t dst, const void* src, uint32_t bytes, uint32_t bar) {
  if (bytes % 16 || uintptr_t(src) % 16 || bytes == 0) fail("bulk copy");
  memset(shared(dst, bytes, 16), kPoison, bytes);
  later([=] {
    memcpy(shared(dst, bytes, 16), src, bytes);
    barrier_bytes(bar, bytes);
  });
}

void store_async(uint32_t address, const uint32_t* v, int count, uint32_t bar) {
  std::array<uint32_t, 4> values = {};
  std::copy_n(v, count, values.begin());
  const uint32_t bytes = uint32_t(count) * 4;
  if (address / kWindowBytes != bar / kWindowBytes) fail("st.async: barrier");
  shared(address, bytes, bytes);
  later([=] {
    memcpy(shared(address, bytes, bytes), values.data(), bytes);
    barrier_bytes(bar, bytes);
  });
}

// --- The copy engine

uint32_t swizzled(const CUtensorMap& map, uint32_t address) {
  return map.swizzled ? address ^ (address >> 3 & 0x70) : address;
}

// A box at column c0, row c1, zero outside of the tensor.
void load_box(const CUtensorMap& map, uint32_t dst, int c0, int c1) {
  const uint32_t pitch = map.box_cols * map.element_bytes;
  for (uint32_t r = 0; r < map.box_rows; ++r) {
    const int64_t row = int64_t(c1) + r;
    for (uint32_t b = 0; b < pitch; b += 16) {
      uint8_t piece[16] = {};
      for (int i = 0; i < 16; i += map.element_bytes) {
        const int64_t col = c0 + int64_t(b + i) / map.element_bytes;
        if (row < 0 || row >= int64_t(map.rows)) continue;
        if (col < 0 || col >= int64_t(map.cols)) continue;
        memcpy(piece + i,
               map.base + row * map.row_bytes + col * map.element_bytes,
               map.element_bytes);
      }
      memcpy(shared(swizzled(map, dst + r * pitch + b), 16, 16), piece, 16);
    }
  }
}
void fetch(uint32_t dst, const CUtensorMap* map, int c0, int c1, uint32_t bar) {
  const uint32_t bytes = map->box_rows * map->box_cols * map->element_bytes;
  memset(shared(dst, bytes, 128), kPoison, bytes);
  later([=, map = *map] {
    load_box(map, dst, c0, c1);
    barrier_bytes(bar, bytes);
  });
}
void cp_async_bulk_tensor_2d_shared_cluster_global_mbarrier_complete_tx_bytes(
    uint32_t dst, const CUtensorMap* map, const Corner& c, uint32_t bar) {
  fetch(dst, map, *c.at[0], *c.at[1], bar);
}
void cp_async_bulk_tensor_2d_shared_cluster_global_mbarrier_complete_tx_bytes_multicast_cluster(
    uint32_t dst, const CUtensorMap* map, const Corner& c, uint32_t bar,
    uint16_t mask) {
  for (int r = 0; r < kMaxCluster; ++r) {
    if (!(mask >> r & 1)) continue;
    const uint32_t window = windows + uint32_t(r) * kWindowBytes;
    fetch(window + dst % kWindowBytes, map, *c.at[0], *c.at[1],
          window + bar % kWindowBytes);
  }
}

void cp_async_bulk_tensor_2d_global_shared_cta_bulk_group(
    const CUtensorMap* map, const Corner& c, uint32_t src) {
  const uint32_t bytes = map->box_rows * map->box_cols * map->element_bytes;
  shared(src, bytes, 128);
  check_fenced(src, bytes);
  auto store = std::make_shared<BulkStore>();
  store->group = current->store_group;
  const int c0 = *c.at[0], c1 = *c.at[1];
  store->run = [=, map = *map] {
    const uint32_t pitch = map.box_cols * map.element_bytes;
    for (uint32_t r = 0; r < map.box_rows; ++r) {
      for (uint32_t b = 0; b < pitch; b += map.element_bytes) {
        const int64_t row = int64_t(c1) + r, col = c0 + b / map.element_bytes;
        if (row >= int64_t(map.rows) || col >= int64_t(map.cols)) continue;
        memcpy(map.base + row * map.row_bytes + col * map.element_bytes,
               shared(swizzled(map, src + r * pitch + b), map.element_bytes, 1),
               map.element_bytes);
      }
    }
  };
  current->stores.push_back(store);
  later([store] {
    if (!std::exchange(store->done, true)) store->run();
  });
}
void cp_async_bulk_commit_group() { ++current->store_group; }
void cp_async_bulk_wait_group_read(int pending) {
  Fiber& f = *current;
  for (auto& s : f.stores) {
    if (s->group + unsigned(pending) < f.store_group &&
        !std::exchange(s->done, true)) {
      s->run();
    }
  }
}

}  // namespace emu::ptx
