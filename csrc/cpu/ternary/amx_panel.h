// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// AMX: tiles, the kinds of products, and weights decoded into panels. Include
// after kernels.h and simd.h, between TERNARY_TARGET_BEGIN and
// TERNARY_TARGET_END.

#pragma once

#include "avx512_common.h"

namespace vllm::ternary::cpu {
namespace {

constexpr int64_t kTileBytes = 1024;
constexpr int64_t kTokens = 16;                // rows of a tile
constexpr int64_t kPanelAhead = 4096;          // bytes the decoder claims ahead
constexpr int64_t kPrefetch = 32 * kTileRows;  // words ahead of it

// Tiles 0 to 3 accumulate, 4 and 5 are tokens, 6 and 7 weights.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};
};

// The compiler does not see what tile instructions read: without this it may
// drop or delay the stores that they depend on.
void fence() { asm volatile("" ::: "memory"); }

void configure(int64_t tokens) {
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.bytes_per_row[i] = 64;
    config.rows[i] = i < 6 ? (uint8_t)tokens : 16;
  }
  asm volatile("" ::"r"(&config) : "memory");
  _tile_loadconfig(&config);
}

struct BFloat16Path {
  static constexpr bool kFolded = false;
  static constexpr int64_t kStep = 32;  // k of one tile
  static constexpr int64_t kBytes = 2;  // of one element of x

  // 16 k of a lane group into 8 rows of a tile.
  static void decode(__m512i word, char* rows) {
    const __m512i values = bfloat16_pairs();
    for (int s = 0; s < 8; ++s) {
      _mm512_store_si512(rows + 64 * s, _mm512_permutexvar_epi32(word, values));
      word = _mm512_srli_epi32(word, 4);
    }
  }

  static __m512 sum(const Problem&, int64_t, int64_t, const void* tile_row) {
    return _mm512_load_ps(tile_row);
  }
};

// bfloat16 with the scales of the blocks multiplied into the weights, rounded
// to bfloat16: one long sum instead of one per block.
struct FoldedPath : BFloat16Path {
  static constexpr bool kFolded = true;

  // Scales of 16 rows, each twice, as the two halves of a pair.
  static __m512i scales(const Problem& p, int64_t k, int64_t unit) {
    const Weight& w = p.weight;
    int64_t block = k / p.folded_block;
    block = block < p.folded_count ? block : p.folded_count - 1;
    const __m512i one = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(
        load16(w.scale, w.scale_type, block * w.n_pad + unit * kLaneRows)));
    return _mm512_or_si512(one, _mm512_slli_epi32(one, 16));
  }

  static void decode(__m512i word, __m512i scale, char* rows) {
    // +1 keeps the magnitude of the scale, -1 flips its sign too, 0 keeps none.
    const int plus = 0x7fff, minus = 0xffff;
    const auto pair = [](int first, int second) {
      return (int)((unsigned)first | (unsigned)second << 16);
    };
    const __m512i masks = _mm512_setr_epi32(
        pair(minus, minus), pair(0, minus), pair(plus, minus), 0,
        pair(minus, 0), 0, pair(plus, 0), 0, pair(minus, plus), pair(0, plus),
        pair(plus, plus), 0, 0, 0, 0, 0);
    const __m512i sign = _mm512_set1_epi16((short)0x8000);
    constexpr int kXorSignElseAnd = 0x68;  // of mask and scale
    for (int s = 0; s < 8; ++s) {
      const __m512i mask = _mm512_permutexvar_epi32(word, masks);
      _mm512_store_si512(
          rows + 64 * s,
          _mm512_ternarylogic_epi32(mask, scale, sign, kXorSignElseAnd));
      word = _mm512_srli_epi32(word, 4);
    }
  }
};

struct Int8Path {
  static constexpr bool kFolded = false;
  static constexpr int64_t kStep = 64;
  static constexpr int64_t kBytes = 1;

  // 16 k of a lane group into 4 rows of a tile.
  static void decode(__m512i word, char* rows) {
    const __m512i three = _mm512_set1_epi32(0x03030303);
    for (int j = 0; j < 4; ++j) {
      _mm512_store_si512(
          rows + 64 * j,
          _mm512_and_si512(_mm512_srli_epi32(word, 2 * j), three));
    }
  }

  // The codes are t + 1: take the sum of x off.
  static __m512 sum(const Problem& p, int64_t block, int64_t m,
                    const void* tile_row) {
    return _mm512_cvtepi32_ps(
        _mm512_sub_epi32(_mm512_load_si512(tile_row),
                         _mm512_set1_epi32(p.xq_sum[block * p.size_m + m])));
  }
};

// A macro, for the intrinsics spell their arguments into the instruction.
#define TERNARY_MULTIPLY(c, a, b)      \
  do {                                 \
    if constexpr (Path::kBytes == 2) { \
      _tile_dpbf16ps(c, a, b);         \
    } else {                           \
      _tile_dpbsud(c, a, b);           \
    }                                  \
  } while (false)

// Decodes U lane groups of [k0, k1) into panel [tile along K][U].
template <typename Path, int U>
void decode_panel(const Problem& p, int64_t unit, int64_t k0, int64_t k1,
                  char* panel) {
  constexpr int64_t kPart = kTileBytes * kWordCodes / Path::kStep;
  const uint32_t* group =
      p.weight.unit_words(unit) + k0 / kWordCodes * kTileRows;
  for (int64_t k = k0; k < k1; k += Path::kStep, panel += U * kTileBytes) {
    __m512i scale[U];
    if constexpr (Path::kFolded) {
      for (int u = 0; u < U; ++u) {
        scale[u] = Path::scales(p, k, unit + u);
      }
    }
    for (int64_t part = 0; part < kTileBytes; part += kPart) {
      for (int u = 0; u < U; ++u) {
        const uint32_t* word = group + u * kLaneRows;
        char* rows = panel + u * kTileBytes + part;
        _mm_prefetch((const char*)(word + kPrefetch), _MM_HINT_T0);
        for (int64_t at = 0; at < kPart; at += 64) {
          __builtin_prefetch(rows + kPanelAhead + at, 1);
        }
        if constexpr (Path::kFolded) {
          Path::decode(_mm512_loadu_si512(word), scale[u], rows);
        } else {
          Path::decode(_mm512_loadu_si512(word), rows);
        }
      }
      group += kTileRows;
    }
  }
}

}  // namespace
}  // namespace vllm::ternary::cpu
