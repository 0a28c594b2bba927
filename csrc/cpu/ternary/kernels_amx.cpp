// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Kernels for AMX (bfloat16 and int8 tiles). Weights are decoded into a panel
// in the order of the instruction's second operand, which is that of the
// memory layout: one vector is one row of a tile. Then the tokens pass over
// the panel. Few tokens: a short panel of 64 rows, in L1, for decoding is the
// work. Many tokens: a band of long panels of 32 rows each fills a part of L2,
// and 32 tokens at a time stay in L1 for all of them, sums in tile registers.

#include "host_memory.h"
#include "kernels.h"
#include "simd.h"

#ifdef TERNARY_X86

TERNARY_TARGET_BEGIN(TERNARY_AMX)
  #include "amx_panel.h"

namespace vllm::ternary::cpu {
namespace {

constexpr int64_t kFewTokens = 64;  // short panels up to here
constexpr int64_t kShortPanel = 4;  // tiles along K
constexpr int64_t kLongPanel = 128;
constexpr int64_t kBandBytes = 512 * 1024;  // long panels that go together
constexpr int64_t kPair = 2 * kTokens;      // tokens that go together there
constexpr int64_t kPanelFetch = 4096;       // bytes ahead of its tiles

// What is fetched while panels are multiplied, a few lines with each step: the
// next tokens into L2, and the lines of y that this panel is going to write.
struct Fetch {
  const char* x = nullptr;
  char* y = nullptr;
  int64_t x_lines = 0, y_lines = 0;  // with each step
  int64_t y_step = 0;                // bytes
};

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

// Sums of a panel [2][2][16][16] that wait for their scales: vector
// instructions, which run beside tile instructions if dealt among those of the
// next panel.
struct Waiting {
  const char* sums = nullptr;
  int64_t m = 0, done = 0, count = 0;  // tokens
  uint16_t* y = nullptr;               // bfloat16, of token m
  __m512 scale[2], bias[2];
};

template <typename Path>
void finish_waiting(const Problem& p, Waiting& wait, int64_t tokens) {
  const int64_t left = wait.count - wait.done;
  const int64_t end = wait.done + (left < tokens ? left : tokens);
  for (; wait.done < end; ++wait.done) {
    const int64_t m = wait.m + wait.done;
    const __m512 factor =
        _mm512_set1_ps(p.x_scale != nullptr ? p.x_scale[m] : 1.0f);
    __m512 value[2];
    for (int u = 0; u < 2; ++u) {
      const char* row = wait.sums + 2 * u * kTileBytes + wait.done * 64;
      value[u] = _mm512_mul_ps(wait.scale[u], Path::sum(p, 0, m, row));
      value[u] = _mm512_fmadd_ps(value[u], factor, wait.bias[u]);
    }
    _mm512_storeu_si512(wait.y + wait.done * p.weight.size_n,
                        (__m512i)_mm512_cvtne2ps_pbh(value[1], value[0]));
  }
}

// Leaves the sums of two whole lane groups waiting; false: they cannot.
template <typename Path>
bool wait_for_scales(const Problem& p, int64_t unit, int64_t m, int64_t count,
                     const char* sums, Waiting& wait) {
  const Weight& w = p.weight;
  if (w.nblocks > 1 || w.zero_point != nullptr || p.y_type != Type::kBFloat16 ||
      (row_mask(p, unit) & row_mask(p, unit + 1)) != 0xffff) {
    return false;
  }
  wait.sums = sums;
  wait.m = m;
  wait.done = 0;
  wait.count = count;
  wait.y = (uint16_t*)p.y + m * w.size_n + unit * kLaneRows;
  for (int u = 0; u < 2; ++u) {
    const int64_t n = (unit + u) * kLaneRows;
    wait.scale[u] =
        Path::kFolded ? _mm512_set1_ps(1.0f) : load16(w.scale, w.scale_type, n);
    wait.bias[u] = p.bias == nullptr ? _mm512_setzero_ps()
                                     : load16(p.bias, p.bias_type, n);
  }
  return true;
}

// multiply_panel for two tiles of tokens, two lane groups and one plane, with
// what goes on beside the products.
template <typename Path>
void multiply_pair(const Problem& p, const char* x, const char* panel,
                   int64_t steps, bool fresh, char* out, Fetch& fetch,
                   Waiting& wait) {
  const int64_t next_tokens = p.weight.k_pad / Path::kStep * kTileBytes;
  const int64_t share = (wait.count - wait.done + steps - 1) / steps;
  if (fresh) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, out, 64);
    _tile_loadd(1, out + 2 * kTileBytes, 64);
    _tile_loadd(2, out + kTileBytes, 64);
    _tile_loadd(3, out + 3 * kTileBytes, 64);
  }
  for (int64_t step = 0; step < steps; ++step) {
    const char* ahead = panel + kPanelFetch;
    _tile_loadd(6, panel, 64);
    _tile_loadd(7, panel + kTileBytes, 64);
    _tile_loadd(4, x, 64);
    for (int64_t at = 0; at < kTileBytes; at += 64) {
      _mm_prefetch(ahead + at, _MM_HINT_T0);
    }
    TERNARY_MULTIPLY(0, 4, 6);
    TERNARY_MULTIPLY(1, 4, 7);
    _tile_loadd(5, x + next_tokens, 64);
    for (int64_t at = kTileBytes; at < 2 * kTileBytes; at += 64) {
      _mm_prefetch(ahead + at, _MM_HINT_T0);
    }
    for (int64_t i = 0; i < fetch.x_lines; ++i, fetch.x += 64) {
      _mm_prefetch(fetch.x, _MM_HINT_T1);
    }
    for (int64_t i = 0; i < fetch.y_lines; ++i, fetch.y += fetch.y_step) {
      __builtin_prefetch(fetch.y, 1);
    }
    TERNARY_MULTIPLY(2, 5, 6);
    TERNARY_MULTIPLY(3, 5, 7);
    if (share > 0) {
      finish_waiting<Path>(p, wait, share);
    }
    x += kTileBytes;
    panel += 2 * kTileBytes;
  }
  _tile_stored(0, out, 64);
  _tile_stored(1, out + 2 * kTileBytes, 64);
  _tile_stored(2, out + kTileBytes, 64);
  _tile_stored(3, out + 3 * kTileBytes, 64);
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
                   char* sums, float* totals, Fetch& fetch, Waiting& wait) {
  const Weight& w = p.weight;
  const char* x =
      (const char*)p.x + m / kTokens * (w.k_pad / Path::kStep) * kTileBytes;
  const bool whole = k0 == 0 && k1 == w.k_pad;
  for (int64_t k = k0; k < k1;) {  // pieces of blocks
    const bool complete = w.block_end(block) <= k1;
    const bool fresh = k == w.block_begin(block);
    const int64_t end = complete ? w.block_end(block) : k1;
    const int64_t steps = (end - k) / Path::kStep;
    const char* tiles = x + k / Path::kStep * kTileBytes;
    const char* part = panel + (k - k0) / Path::kStep * U * kTileBytes;
    bool waits = false;
    if (T == 2 && U == 2 && p.planes == 1) {
      multiply_pair<Path>(p, tiles, part, steps, fresh, sums, fetch, wait);
      waits = whole && wait_for_scales<Path>(p, unit, m, count, sums, wait);
    } else {
      multiply_panel<Path, T, U>(p, tiles, part, steps, fresh, sums);
    }
    if (complete) {
      if (!waits) {
        apply_block<Path, T, U>(p, block, unit, m, count, sums, totals);
      }
      ++block;
    }
    k = end;
  }
  return block;
}

// `count` panels of U lane groups each, tokens [m_begin, m_end).
template <typename Path, int U>
void run_units(const Problem& p, int64_t unit, int64_t count,
               int64_t panel_tiles, char* panel, char* carried) {
  const Weight& w = p.weight;
  const int64_t chunk = panel_tiles * Path::kStep;
  const int64_t panel_bytes = panel_tiles * U * kTileBytes;
  const bool carry = chunk < w.k_pad;
  constexpr int kT = U <= 2 ? 2 : 1;  // tiles of tokens that go together
  constexpr int64_t kSums = kT * U * kTileBytes;
  const int64_t y_bytes = p.y_type == Type::kFloat ? 4 : 2;
  int64_t block = 0;
  Waiting wait;
  for (int64_t k0 = 0; k0 < w.k_pad; k0 += chunk) {
    const int64_t k1 = w.k_pad - k0 < chunk ? w.k_pad : k0 + chunk;
    for (int64_t i = 0; i < count; ++i) {
      decode_panel<Path, U>(p, unit + i * U, k0, k1, panel + i * panel_bytes);
    }
    fence();
    int64_t next = block;
    char* sums = carried;
    for (int64_t m = p.m_begin; m < p.m_end; m += kT * kTokens) {
      const int64_t left = p.m_end - m;
      Fetch fetch;
      if (count > 2 && left > kPair) {
        fetch.x = (const char*)p.x + (m + kPair) * w.k_pad * Path::kBytes;
        fetch.x_lines = (kPair + count - 1) / count;
      }
      for (int64_t i = 0; i < count; ++i) {
        const int64_t first = unit + i * U;
        if (k1 == w.k_pad && left >= kPair) {
          const int64_t steps = (k1 - k0) / Path::kStep;
          fetch.y = (char*)p.y + (m * w.size_n + first * kLaneRows) * y_bytes;
          fetch.y_step = w.size_n * y_bytes;
          fetch.y_lines = (kPair + steps - 1) / steps;
        }
        // Without sums that carry over two buffers take turns, for one waits.
        char* mine = carry ? sums : carried + i % 2 * kSums;
        float* totals = (float*)(carry ? sums + kSums : carried + 2 * kSums);
        const char* part = panel + i * panel_bytes;
        if (kT > 1 && left > kTokens) {
          const int64_t tokens = left < kT * kTokens ? left : kT * kTokens;
          next = run_tokens<Path, kT, U>(p, first, m, tokens, k0, k1, block,
                                         part, mine, totals, fetch, wait);
        } else {
          finish_waiting<Path>(p, wait, kPair);
          const int64_t tokens = left < kTokens ? left : kTokens;
          next = run_tokens<Path, 1, U>(p, first, m, tokens, k0, k1, block,
                                        part, mine, totals, fetch, wait);
        }
        if (carry) {
          sums += 2 * kSums;
        }
      }
    }
    block = next;
  }
  finish_waiting<Path>(p, wait, kPair);
}

template <typename Path>
void run(const Problem& p, int64_t unit, int64_t unit_end) {
  const int64_t tokens = p.m_end - p.m_begin;
  const bool few = tokens <= kFewTokens;
  const int64_t k_tiles = p.weight.k_pad / Path::kStep;
  const int64_t most = few ? kShortPanel : kLongPanel;
  const int64_t panel_tiles = k_tiles < most ? k_tiles : most;
  int64_t band = 2;  // pairs of lane groups
  if (!few && p.weight.k_pad * Path::kBytes <= kBandRow) {
    band = kBandBytes / (2 * panel_tiles * kTileBytes);
  }
  const int64_t panel_bytes = 2 * band * panel_tiles * kTileBytes;
  // Sums and totals of the lane groups for every two tiles of tokens.
  const int64_t pairs = (tokens + kPair - 1) / kPair;
  const int64_t sums_bytes =
      panel_tiles < k_tiles ? pairs * band * 8 * kTileBytes : 12 * kTileBytes;
  char* panel = thread_scratch(panel_bytes + sums_bytes);
  char* carried = panel + panel_bytes;
  configure(p.size_m < kTokens ? p.size_m : kTokens);
  while (unit < unit_end) {
    const int64_t units = units_together(unit, unit_end);
    if (few && units == 4) {
      run_units<Path, 4>(p, unit, 1, panel_tiles, panel, carried);
      unit += 4;
    } else if (units >= 2 && unit % 2 == 0) {
      int64_t count = few ? 1 : (unit_end - unit) / 2;
      count = count < band ? count : band;
      run_units<Path, 2>(p, unit, count, panel_tiles, panel, carried);
      unit += 2 * count;
    } else {
      run_units<Path, 1>(p, unit, 1, panel_tiles, panel, carried);
      unit += 1;
    }
  }
  _tile_release();
}

}  // namespace

void gemm_bf16_amx(const Problem& p, int64_t unit, int64_t unit_end) {
  const Weight& w = p.weight;
  // By size_m: how tokens are cut into chunks must not change the result.
  if (p.size_m <= kFewTokens || p.planes > 1 || w.nblocks == 1 ||
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
