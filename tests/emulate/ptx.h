// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The PTX instructions of the kernels, one function each: the name is the
// instruction's with _ for . and ::, the arguments are its operands, a list in
// braces is one argument (translate.py).
#pragma once

#include "cuda.h"
#include "cuda_bf16.h"
#include "cuda_fp16.h"

namespace emu::ptx {

// Addresses of the operands of a list.
template <typename T, int kCount>
struct List {
  T* at[kCount];
};
template <typename First, typename... Rest>
List<std::remove_reference_t<First>, 1 + sizeof...(Rest)> list(First&& first,
                                                               Rest&&... rest) {
  return {{&first, &rest...}};
}

// --- Arithmetic

inline void lop3_b32(uint32_t& d, uint32_t a, uint32_t b, uint32_t c, int lut) {
  d = 0;
  for (int i = 0; i < 8; ++i) {
    if (lut >> i & 1) {
      d |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
    }
  }
}
void sub_f16x2(uint32_t& d, uint32_t a, uint32_t b);
void sub_bf16x2(uint32_t& d, uint32_t a, uint32_t b);
void mul_f16x2(uint32_t& d, uint32_t a, uint32_t b);
void mul_bf16x2(uint32_t& d, uint32_t a, uint32_t b);
void fma_rn_bf16x2(uint32_t& d, uint32_t a, uint32_t b, uint32_t c);
inline void setp_ne_b32(bool& p, int a, int b) { p = a != b; }
inline void selp_u32(uint32_t& d, int a, int b, bool p) { d = p ? a : b; }

// --- Registers and places

uint32_t cluster_ctarank();
inline void mov_u32(uint32_t& d, uint32_t v) { d = v; }
void mapa_shared_cluster_u32(uint32_t& d, uint32_t address, int rank);
void elect_sync(bool& p, uint32_t mask);
inline void setmaxnreg_inc_sync_aligned_u32(int) {}
inline void setmaxnreg_dec_sync_aligned_u32(int) {}

// --- Shared memory

void load_words(void* const* d, int count, uint32_t address);
void store_words(uint32_t address, const void* const* v, int count);
template <typename T>
void ld_shared_v4_u32(const List<T, 4>& d, uint32_t address) {
  load_words((void* const*)(d.at), 4, address);
}
inline void ld_shared_v4_f32(const List<float, 4>& d, uint32_t address) {
  load_words((void* const*)(d.at), 4, address);
}
inline void ld_shared_v2_f32(const List<float, 2>& d, uint32_t address) {
  load_words((void* const*)(d.at), 2, address);
}
inline void load_word(void* d, uint32_t address) { load_words(&d, 1, address); }
inline void ld_shared_u32(uint32_t& d, uint32_t at) { load_word(&d, at); }
inline void ld_shared_f32(float& d, uint32_t at) { load_word(&d, at); }
inline void ld_shared_cluster_f32(float& d, uint32_t at) { load_word(&d, at); }
void ld_shared_u16(uint16_t& d, uint32_t address);
template <typename T>
void st_shared_v4_u32(uint32_t address, const List<T, 4>& v) {
  store_words(address, (const void* const*)(v.at), 4);
}
template <typename T>
void st_shared_cluster_v4_f32(uint32_t address, const List<T, 4>& v) {
  store_words(address, (const void* const*)(v.at), 4);
}
template <typename T>
void st_shared_v4_f32(uint32_t address, const List<T, 4>& v) {
  st_shared_v4_u32(address, v);
}
template <typename T>
void st_shared_v2_u32(uint32_t address, const List<T, 2>& v) {
  store_words(address, (const void* const*)(v.at), 2);
}
inline void store_word(uint32_t address, const void* v) {
  store_words(address, &v, 1);
}
inline void st_shared_f32(uint32_t at, float v) { store_word(at, &v); }
inline void st_shared_u32(uint32_t at, uint32_t v) { store_word(at, &v); }

void ldmatrix_sync_aligned_m8n8_x4_shared_b16(const List<uint32_t, 4>& d,
                                              uint32_t address);
void stmatrix_sync_aligned_m8n8_x4_trans_shared_b16(uint32_t address,
                                                    const List<uint32_t, 4>& v);

// --- Tensor cores, one warp

template <typename T>
struct Product {
  T* d[4];
  uint32_t a[4], b[2];
  T c[4];  // what the sums start from
};
void multiply_f16(Product<float>& p);
void multiply_bf16(Product<float>& p);
void multiply_s8(Product<int>& p);

template <typename T, typename A, typename B, typename C>
Product<T> product(const List<T, 4>& d, const List<A, 4>& a,
                   const List<B, 2>& b, const List<C, 4>& c) {
  Product<T> p;
  for (int i = 0; i < 4; ++i) {
    p.d[i] = d.at[i];
    p.a[i] = *a.at[i];
    p.c[i] = *c.at[i];
  }
  p.b[0] = *b.at[0];
  p.b[1] = *b.at[1];
  return p;
}
template <typename A, typename B>
void mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(
    const List<float, 4>& d, const List<A, 4>& a, const List<B, 2>& b,
    const List<float, 4>& c) {
  auto p = product(d, a, b, c);
  multiply_f16(p);
}
template <typename A, typename B>
void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(
    const List<float, 4>& d, const List<A, 4>& a, const List<B, 2>& b,
    const List<float, 4>& c) {
  auto p = product(d, a, b, c);
  multiply_bf16(p);
}
template <typename A, typename B, typename C>
void mma_sync_aligned_m16n8k32_row_col_s32_u8_s8_s32(const List<int, 4>& d,
                                                     const List<A, 4>& a,
                                                     const List<B, 2>& b,
                                                     const List<C, 4>& c) {
  auto p = product(d, a, b, c);
  multiply_s8(p);
}

// --- Tensor cores, a warpgroup

// kind: 0 float16, 1 bfloat16, 2 int8.
void issue_wgmma(int kind, int n, void* const* d, const uint32_t* const* a,
                 uint64_t descriptor, bool add);
#define TERNARY_WGMMA(kind, n, name)                                      \
  template <typename T, typename A>                                       \
  void wgmma_mma_async_sync_aligned_##name(                               \
      const List<T, n / 2>& d, const List<A, 4>& a, uint64_t descriptor,  \
      bool add, int negate_a = 1, int negate_b = 1, int transpose = 0) {  \
    if (negate_a != 1 || negate_b != 1 || transpose) fail("wgmma flags"); \
    issue_wgmma(kind, n, (void* const*)(d.at), a.at, descriptor, add);    \
  }
#define TERNARY_WGMMA_16(n)                     \
  TERNARY_WGMMA(0, n, m64n##n##k16_f32_f16_f16) \
  TERNARY_WGMMA(1, n, m64n##n##k16_f32_bf16_bf16)
TERNARY_WGMMA_16(8)
TERNARY_WGMMA_16(16)
TERNARY_WGMMA_16(32)
TERNARY_WGMMA_16(64)
TERNARY_WGMMA_16(128)
TERNARY_WGMMA_16(256)
TERNARY_WGMMA(2, 64, m64n64k32_s32_s8_s8)
TERNARY_WGMMA(2, 128, m64n128k32_s32_s8_s8)
#undef TERNARY_WGMMA_16
#undef TERNARY_WGMMA
void wgmma_fence_sync_aligned();
void wgmma_commit_group_sync_aligned();
void wgmma_wait_group_sync_aligned(int pending);

// --- Barriers

void bar_sync(int id, int count);
void bar_arrive(int id, int count);
void barrier_cluster_arrive_aligned();
void barrier_cluster_wait_aligned();
void barrier_cluster_arrive_release();
void barrier_cluster_arrive_relaxed();
void barrier_cluster_wait_acquire();
void mbarrier_init_shared_cta_b64(uint32_t bar, int count);
void mbarrier_arrive_expect_tx_shared_cta_b64(uint32_t bar, uint32_t bytes);
void mbarrier_arrive_shared_cta_b64(uint32_t bar);
void mbarrier_arrive_shared_cluster_b64(uint32_t bar);
void mbarrier_try_wait_parity_shared_cta_b64(bool& done, uint32_t bar,
                                             uint32_t parity);
void mbarrier_try_wait_parity_acquire_cluster_shared_cta_b64(bool& done,
                                                             uint32_t bar,
                                                             uint32_t parity);
inline void fence_mbarrier_init_release_cluster() {}
void fence_proxy_async_shared_cta();
void griddepcontrol_wait();
inline void griddepcontrol_launch_dependents() {}

// --- Asynchronous copies

void cp_async_cg_shared_global(uint32_t dst, const void* src, int bytes);
void cp_async_commit_group();
void cp_async_wait_group(int pending);
void cp_async_mbarrier_arrive_noinc_shared_cta_b64(uint32_t bar);
void cp_async_bulk_shared_cluster_global_mbarrier_complete_tx_bytes(
    uint32_t dst, const void* src, uint32_t bytes, uint32_t bar);

// Up to four words.
void store_async(uint32_t address, const uint32_t* values, int count,
                 uint32_t bar);
inline void st_async_shared_cluster_mbarrier_complete_tx_bytes_b32(
    uint32_t address, uint32_t v, uint32_t bar) {
  store_async(address, &v, 1, bar);
}
template <typename T>
void st_async_shared_cluster_mbarrier_complete_tx_bytes_v4_b32(
    uint32_t address, const List<T, 4>& v, uint32_t bar) {
  const uint32_t values[4] = {*v.at[0], *v.at[1], *v.at[2], *v.at[3]};
  store_async(address, values, 4, bar);
}

using Corner = List<int, 2>;
void cp_async_bulk_tensor_2d_shared_cluster_global_mbarrier_complete_tx_bytes(
    uint32_t dst, const CUtensorMap* map, const Corner& c, uint32_t bar);
void cp_async_bulk_tensor_2d_shared_cluster_global_mbarrier_complete_tx_bytes_multicast_cluster(
    uint32_t dst, const CUtensorMap* map, const Corner& c, uint32_t bar,
    uint16_t mask);
void cp_async_bulk_tensor_2d_global_shared_cta_bulk_group(
    const CUtensorMap* map, const Corner& c, uint32_t src);
void cp_async_bulk_commit_group();
void cp_async_bulk_wait_group_read(int pending);
inline void prefetch_tensormap(const CUtensorMap*) {}

}  // namespace emu::ptx
