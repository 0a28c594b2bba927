// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Kernels for AMX (bfloat16 and int8 tiles). Weights are decoded into a panel
// in the order of the instruction's second operand, which is that of the
// memory layout: one vector is one row of a tile. Then the tokens pass over
// the panel. Few tokens: a short panel of 64 rows, in L1, for decoding is the
// work. Many tokens: a long panel of 32 rows, in L2, so that sums stay in tile
// registers, and 32 tokens times 32 rows at a time.

#include "kernels.h"
#include "simd.h"

#ifdef TERNARY_X86

TERNARY_TARGET_BEGIN(TERNARY_AMX)
  #include "avx512_common.h"

namespace vllm::ternary::cpu {
namespace {

constexpr int64_t kTileBytes = 1024;
constexpr int64_t kTokens = 16;     // rows of a tile
constexpr int64_t kFewTokens = 64;  // short panels up to here
constexpr int64_t kShortPanel = 4;  // tiles along K
constexpr int64_t kLongPanel = 128;
constexpr int64_t kPanelAhead = 4096;          // bytes it claims ahead
constexpr int64_t kPrefetch = 32 * kTileRows;  // words ahead of the decoder

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

// out (+)= x times panel: T tiles of tokens and U lane groups (T * U <= 4),
// `steps` tiles along K. out [U][T][16][16].
template <typename Path, int T, int U>
void multiply_panel(const Problem& p, const char* x, const char* panel,
                    int64_t steps, bool fresh, char* out) {
  constexpr bool kWide = U > 2;  // then T is 1
  const int64_t planes = p.planes;
  const int64_t plane_bytes = p.x_plane;
  const int64_t next_tokens = p.weight.k_pad / Path::kStep * kTileBytes;
  if (fresh) {
    _tile_zero(0);
    if constexpr (U > 1) _tile_zero(1);
    if constexpr (T > 1 || kWide) _tile_zero(2);
    if constexpr (T * U > 3) _tile_zero(3);
  } else {
    _tile_loadd(0, out, 64);
    if constexpr (U > 1) _tile_loadd(1, out + T * kTileBytes, 64);
    if constexpr (T > 1) _tile_loadd(2, out + kTileBytes, 64);
    if constexpr (T > 1 && U > 1) _tile_loadd(3, out + 3 * kTileBytes, 64);
    if constexpr (kWide) _tile_loadd(2, out + 2 * kTileBytes, 64);
    if constexpr (kWide && U > 3) _tile_loadd(3, out + 3 * kTileBytes, 64);
  }
  for (int64_t step = 0; step < steps; ++step, panel += U * kTileBytes) {
    const char* tile = x + step * kTileBytes;
    _tile_loadd(6, panel, 64);
    if constexpr (U > 1) _tile_loadd(7, panel + kTileBytes, 64);
    for (int64_t plane = 0; plane < planes; ++plane, tile += plane_bytes) {
      _tile_loadd(4, tile, 64);
      if constexpr (kWide) {
        if (plane > 0) {
          _tile_loadd(6, panel, 64);
          _tile_loadd(7, panel + kTileBytes, 64);
        }
      }
      TERNARY_MULTIPLY(0, 4, 6);
      if constexpr (U > 1) TERNARY_MULTIPLY(1, 4, 7);
      if constexpr (T > 1) {
        _tile_loadd(5, tile + next_tokens, 64);
        TERNARY_MULTIPLY(2, 5, 6);
        if constexpr (U > 1) TERNARY_MULTIPLY(3, 5, 7);
      }
      if constexpr (kWide) {
        _tile_loadd(6, panel + 2 * kTileBytes, 64);
        TERNARY_MULTIPLY(2, 4, 6);
      }
      if constexpr (kWide && U > 3) {
        _tile_loadd(7, panel + 3 * kTileBytes, 64);
        TERNARY_MULTIPLY(3, 4, 7);
      }
    }
  }
  _tile_stored(0, out, 64);
  if constexpr (U > 1) _tile_stored(1, out + T * kTileBytes, 64);
  if constexpr (T > 1) _tile_stored(2, out + kTileBytes, 64);
  if constexpr (T > 1 && U > 1) _tile_stored(3, out + 3 * kTileBytes, 64);
  if constexpr (kWide) _tile_stored(2, out + 2 * kTileBytes, 64);
  if constexpr (kWide && U > 3) _tile_stored(3, out + 3 * kTileBytes, 64);
  fence();
}

// Applies the scales of a block that is complete to `count` tokens from m on
// and U lane groups, sums and totals [U][T][16][16]; after the last block,
// writes y.
template <typename Path, int T, int U>
void apply_block(const Problem& p, int64_t block, int64_t unit, int64_t m,
                 int64_t count, const char* sums, float* totals) {
  const Weight& w = p.weight;
  const bool first = block == 0;
  const bool last = block + 1 == w.nblocks;
  __m512 scale[U], zero[U], bias[U];
  __mmask16 mask[U];
  bool whole = true;
  for (int u = 0; u < U; ++u) {
    const int64_t n = (unit + u) * kLaneRows;
    scale[u] = Path::kFolded
                   ? _mm512_set1_ps(1.0f)
                   : load16(w.scale, w.scale_type, block * w.n_pad + n);
    zero[u] = bias[u] = _mm512_setzero_ps();
    if (w.zero_point != nullptr) {
      zero[u] = load16(w.zero_point, w.zero_point_type, block * w.n_pad + n);
    }
    mask[u] = row_mask(p, unit + u);
    whole = whole && mask[u] == 0xffff;
    if (last && p.bias != nullptr) {
      bias[u] = load16_masked(p.bias, p.bias_type, n, mask[u]);
    }
  }
  for (int64_t t = 0; t < count; ++t) {
    __m512 value[U];
    for (int u = 0; u < U; ++u) {
      __m512 sum =
          Path::sum(p, block, m + t, sums + u * T * kTileBytes + t * 64);
      if (w.zero_point != nullptr) {
        sum = _mm512_fnmadd_ps(
            zero[u], _mm512_set1_ps(p.x_sum[block * p.size_m + m + t]), sum);
      }
      float* total = totals + (u * T * kTokens + t) * 16;
      value[u] = first ? _mm512_mul_ps(scale[u], sum)
                       : _mm512_fmadd_ps(scale[u], sum, _mm512_load_ps(total));
      if (!last) {
        _mm512_store_ps(total, value[u]);
      }
    }
    if (!last) {
      continue;
    }
    const __m512 factor =
        _mm512_set1_ps(p.x_scale != nullptr ? p.x_scale[m + t] : 1.0f);
    const int64_t at = (m + t) * w.size_n + unit * kLaneRows;
    for (int u = 0; u < U; ++u) {
      value[u] = _mm512_fmadd_ps(value[u], factor, bias[u]);
    }
    if (U > 1 && whole && p.y_type == Type::kBFloat16) {
      for (int u = 0; u + 1 < U; u += 2) {
        _mm512_storeu_si512(
            (uint16_t*)p.y + at + u * kLaneRows,
            (__m512i)_mm512_cvtne2ps_pbh(value[u + 1], value[u]));
      }
    } else {
      for (int u = 0; u < U; ++u) {
        store16_masked(p.y, p.y_type, at + u * kLaneRows, value[u], mask[u]);
      }
    }
  }
}

// T tiles of tokens from m on over the panel of [k0, k1), which begins in
// `block`. sums and totals, [U][T][16][16], carry over to the next panel.
// Returns the block in which that one begins.
template <typename Path, int T, int U>
int64_t run_tokens(const Problem& p, int64_t unit, int64_t m, int64_t count,
                   int64_t k0, int64_t k1, int64_t block, const char* panel,
                   char* sums, float* totals) {
  const Weight& w = p.weight;
  const char* x =
      (const char*)p.x + m / kTokens * (w.k_pad / Path::kStep) * kTileBytes;
  if (k1 == w.k_pad) {  // y is written soon, a line here and a line there
    const int64_t bytes = p.y_type == Type::kFloat ? 4 : 2;
    char* y = (char*)p.y + (m * w.size_n + unit * kLaneRows) * bytes;
    for (int64_t t = 0; t < count; ++t, y += w.size_n * bytes) {
      for (int64_t at = 0; at < U * kLaneRows * bytes; at += 64) {
        __builtin_prefetch(y + at, 1);
      }
    }
  }
  for (int64_t k = k0; k < k1;) {  // pieces of blocks
    const bool complete = w.block_end(block) <= k1;
    const int64_t end = complete ? w.block_end(block) : k1;
    multiply_panel<Path, T, U>(p, x + k / Path::kStep * kTileBytes,
                               panel + (k - k0) / Path::kStep * U * kTileBytes,
                               (end - k) / Path::kStep,
                               k == w.block_begin(block), sums);
    if (complete) {
      apply_block<Path, T, U>(p, block, unit, m, count, sums, totals);
      ++block;
    }
    k = end;
  }
  return block;
}

// P times U lane groups, tokens [m_begin, m_end).
template <typename Path, int P, int U>
void run_units(const Problem& p, int64_t unit, int64_t panel_tiles, char* panel,
               char* carried) {
  const Weight& w = p.weight;
  const int64_t chunk = panel_tiles * Path::kStep;
  const int64_t panel_bytes = panel_tiles * U * kTileBytes;
  const bool carry = chunk < w.k_pad;
  constexpr int kT = U <= 2 ? 2 : 1;  // tiles of tokens that go together
  constexpr int64_t kSums = kT * U * kTileBytes;
  int64_t block = 0;
  for (int64_t k0 = 0; k0 < w.k_pad; k0 += chunk) {
    const int64_t k1 = w.k_pad - k0 < chunk ? w.k_pad : k0 + chunk;
    for (int i = 0; i < P; ++i) {
      decode_panel<Path, U>(p, unit + i * U, k0, k1, panel + i * panel_bytes);
    }
    fence();
    int64_t next = block;
    char* sums = carried;
    for (int64_t m = p.m_begin; m < p.m_end; m += kT * kTokens) {
      const int64_t left = p.m_end - m;
      for (int i = 0; i < P; ++i) {
        char* mine = sums + 2 * i * kSums;
        float* totals = (float*)(mine + kSums);
        const char* part = panel + i * panel_bytes;
        if (kT > 1 && left > kTokens) {
          const int64_t count = left < kT * kTokens ? left : kT * kTokens;
          next = run_tokens<Path, kT, U>(p, unit + i * U, m, count, k0, k1,
                                         block, part, mine, totals);
        } else {
          const int64_t count = left < kTokens ? left : kTokens;
          next = run_tokens<Path, 1, U>(p, unit + i * U, m, count, k0, k1,
                                        block, part, mine, totals);
        }
      }
      if (carry) {
        sums += 2 * P * kSums;
      }
    }
    block = next;
  }
}

template <typename Path>
void run(const Problem& p, int64_t unit, int64_t unit_end) {
  const int64_t tokens = p.m_end - p.m_begin;
  const bool few = tokens <= kFewTokens;
  const int64_t k_tiles = p.weight.k_pad / Path::kStep;
  const int64_t most = few ? kShortPanel : kLongPanel;
  const int64_t panel_tiles = k_tiles < most ? k_tiles : most;
  const int64_t panel_bytes = 4 * panel_tiles * kTileBytes;
  // Sums and totals of four lane groups for every two tiles of tokens.
  const int64_t pairs = (tokens + 2 * kTokens - 1) / (2 * kTokens);
  char* panel = thread_scratch(panel_bytes + pairs * 16 * kTileBytes);
  char* carried = panel + panel_bytes;
  configure(p.size_m < kTokens ? p.size_m : kTokens);
  while (unit < unit_end) {
    const int64_t units = units_together(unit, unit_end);
    if (units == 4) {
      few ? run_units<Path, 1, 4>(p, unit, panel_tiles, panel, carried)
          : run_units<Path, 2, 2>(p, unit, panel_tiles, panel, carried);
      unit += 4;
    } else if (units >= 2) {
      run_units<Path, 1, 2>(p, unit, panel_tiles, panel, carried);
      unit += 2;
    } else {
      run_units<Path, 1, 1>(p, unit, panel_tiles, panel, carried);
      unit += 1;
    }
  }
  _tile_release();
}

}  // namespace

void gemm_bf16_amx(const Problem& p, int64_t unit, int64_t unit_end) {
  const Weight& w = p.weight;
  if (p.m_end - p.m_begin <= kFewTokens || p.planes > 1 || w.nblocks == 1 ||
      w.zero_point != nullptr) {
    run<BFloat16Path>(p, unit, unit_end);
    return;
  }
  Problem folded = p;
  folded.folded_block = w.block_pad;
  folded.folded_count = w.nblocks;
  folded.weight.nblocks = 1;
  run<FoldedPath>(folded, unit, unit_end);
}

void gemm_int8_amx(const Problem& p, int64_t unit, int64_t unit_end) {
  run<Int8Path>(p, unit, unit_end);
}

}  // namespace vllm::ternary::cpu
TERNARY_TARGET_END

#endif  // TERNARY_X86
