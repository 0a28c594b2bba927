// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// A launch against the sizes of its product: every output once, every k once,
// and what the kernels take for granted. Where a block's work lies is found by
// the kernels' own functions (`locate`), or as their code says it.
#include "plans.h"

#include "mma_cut.h"
#include "mma_gemm.cuh"
#include "mma_s8_stage.cuh"
#include "sm90_prefill_few_config.cuh"
#include "sm90_prefill_few_plan.h"
#include "sm90_prefill_plan.h"
#include "sm90_s8_config.cuh"
#include "sm90_s8_plan.h"

using namespace vllm::ternary;

namespace {

// What a tile shape of a plan must be as a kernel. Registers: what warpgroups
// give and take (setmaxnreg) is no more than what the block was launched with.
constexpr bool is_kernel(int threads, int consumers, int consumer_regs,
                         int producer_regs, int stages, int sets, int shared) {
  const int launched = 65536 / threads / 8 * 8 * threads;
  return threads <= 1024 && consumer_regs <= 255 && consumer_regs % 8 == 0 &&
         producer_regs >= 24 && producer_regs % 8 == 0 &&
         consumers * consumer_regs + 128 * producer_regs <= launched &&
         stages >= 3 && stages >= sets && shared <= 227 * 1024;
}

template <s8::ScaleMode kMode, const auto& kTable, size_t... I>
constexpr bool s8_kernels(std::index_sequence<I...>) {
  return ([] {
    constexpr s8::Variant v = kTable[I];
    using C = s8::Config<kMode, v.warpgroups, v.tiles, v.tokens, v.sets>;
    // Each stage is always the same set's.
    return C::kStages % v.sets == 0 &&
           is_kernel(C::kThreads, C::kConsumers * 128, C::kConsumerRegs,
                     C::kProducerRegs, C::kStages, v.sets, C::kSmemBytes);
  }() && ...);
}
static_assert(s8_kernels<s8::ScaleMode::kRow, s8::kRowVariants>(
    std::make_index_sequence<std::size(s8::kRowVariants)>()));
static_assert(s8_kernels<s8::ScaleMode::kBlock, s8::kBlockVariants>(
    std::make_index_sequence<std::size(s8::kBlockVariants)>()));

template <sm90::ScaleMode kMode, int kGroups, size_t... I>
constexpr bool prefill_kernels(std::index_sequence<I...>) {
  return ([] {
    constexpr sm90::Variant v = sm90::kVariants[I];
    if constexpr (kGroups > 1 && v.warpgroups != 3) {
      return true;  // not built
    } else {
      using C = sm90::Config<half, kMode, v.warpgroups, v.tiles, v.tokens,
                             kGroups, v.sets>;
      return is_kernel(C::kThreads, C::kConsumers, C::kConsumerRegs,
                       C::kProducerRegs, C::kStages, v.sets, C::kSmemBytes);
    }
  }() && ...);
}
constexpr auto kPrefill =
    std::make_index_sequence<std::size(sm90::kVariants)>();
static_assert(prefill_kernels<sm90::ScaleMode::kRow, 1>(kPrefill));
static_assert(prefill_kernels<sm90::ScaleMode::kBlock, 1>(kPrefill));
static_assert(prefill_kernels<sm90::ScaleMode::kBlock, 4>(kPrefill));

template <size_t... I>
constexpr bool few_kernels(std::index_sequence<I...>) {
  return ([] {
    constexpr sm90::FewVariant v = sm90::kFewVariants[I];
    using C = sm90::FewConfig<half, v.rows, v.sets, v.tokens, v.blocks>;
    const bool two = v.blocks * (C::kSmemBytes + 1024) <= 228 * 1024;
    if (!C::kGive) return two && v.resident <= v.blocks;
    return is_kernel(C::kThreads, C::kConsumers, C::kConsumerRegs,
                     C::kProducerRegs, C::kStages, v.sets, C::kSmemBytes);
  }() && ...);
}
static_assert(
    few_kernels(std::make_index_sequence<std::size(sm90::kFewVariants)>()));

// All tiles of up to this many are visited, of more the first and some others.
constexpr int kMostTiles = 1 << 14;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <typename P>
const P& params(const Launch& l) {
  const P* p = l.find<P>();
  REQUIRE(p != nullptr, "other parameters than expected");
  return *p;
}

// Tiles of `rows` x `tokens`: every one of them must be found once.
class Tiles {
 public:
  Tiles(int64_t rows, int64_t tokens) : tokens_(tokens), seen_(rows * tokens) {
    REQUIRE(rows * tokens < int64_t(1) << 31, "tiles beyond an int");
  }
  int64_t count() const { return int64_t(seen_.size()); }
  int64_t step() const { return std::max<int64_t>(1, count() / kMostTiles); }
  void add(int64_t row, int64_t token) {
    REQUIRE(token >= 0 && token < tokens_, "token tile", token);
    const int64_t at = row * tokens_ + token;
    REQUIRE(row >= 0 && at < count(), "row tile", row);
    REQUIRE(!seen_[at], "row tile", row, "token tile", token, "twice");
    seen_[at] = true;
    ++found_;
  }
  void finish() const {
    REQUIRE(found_ == ceil_div(count(), step()), "tiles found", found_);
  }

 private:
  int64_t tokens_, found_ = 0;
  std::vector<bool> seen_;
};

// What `locate` reads of a config.
template <int kRowTiles_, int kTokens_>
struct Tile2D {
  static constexpr int kRowTiles = kRowTiles_, kRows = 64 * kRowTiles_;
  static constexpr int kTokens = kTokens_;
};

template <typename F>
void with_config(int row_tiles, int tokens, F f) {
  switch (row_tiles * 1000 + tokens) {
#define TILE(r, t)     \
  case r * 1000 + t:   \
    f(Tile2D<r, t>()); \
    return;
    TILE(1, 128)
    TILE(2, 64)
    TILE(3, 64)
    TILE(4, 64) TILE(6, 64) TILE(2, 128) TILE(3, 128) TILE(4, 128) TILE(2, 256)
#undef TILE
  }
  fail_with("no such tile", row_tiles, tokens);
}

const char* base_of(const CUtensorMap& m) {
  return reinterpret_cast<const char*>(m.base);
}

void check_maps(const CUtensorMap& x, const CUtensorMap& w, const Sizes& s,
                int64_t x_cols, int64_t x_stride, int64_t row_begin,
                int64_t rows) {
  REQUIRE(base_of(x) == s.x && x.rows == uint64_t(s.parts) * s.M, x.rows);
  REQUIRE(int64_t(x.cols) == x_cols && int64_t(x.row_bytes) == x_stride,
          x.cols);
  REQUIRE(base_of(w) == s.weight + row_begin / 16 * s.K_pad * 4, row_begin);
  REQUIRE(int64_t(w.rows) == rows / 16 && int64_t(w.cols) == s.K_pad, w.rows);
  REQUIRE(int64_t(w.row_bytes) == int64_t(s.K_pad) * 4, w.row_bytes);
}

void check_scale_map(const CUtensorMap& m, const Sizes& s, int64_t row_begin,
                     int64_t rows) {
  REQUIRE(base_of(m) == s.scale + row_begin * s.scale_bytes, row_begin);
  REQUIRE(int64_t(m.rows) == s.num_blocks && int64_t(m.cols) == rows, m.cols);
  REQUIRE(int64_t(m.row_bytes) == int64_t(s.N_pad) * s.scale_bytes,
          m.row_bytes);
  REQUIRE(m.element_bytes == s.scale_bytes, m.element_bytes);
}

void check_y_map(const CUtensorMap& m, const Sizes& s, int64_t begin,
                 int64_t rows) {
  REQUIRE(base_of(m) == s.y + begin * 2 && int64_t(m.rows) == s.M, begin);
  REQUIRE(int64_t(m.cols) == rows && int64_t(m.row_bytes) == int64_t(s.N) * 2,
          rows);
}

// A scale block for every k-block of 128 that has weights.
void check_blocks(const Sizes& s, int blocks_per_scale) {
  for (int kb = 0; kb * 128 < s.K; ++kb) {
    const int block = kb / blocks_per_scale;
    REQUIRE(block < s.num_blocks, "block", block, "of", s.num_blocks);
    REQUIRE(s.num_blocks == 1 || block == kb * 128 / s.block, "k-block", kb);
  }
}

}  // namespace

RowRange check_prefill(const Launch& l, const Sizes& s) {
  using P = sm90::KernelParams;
  const P& p = params<P>(l);
  const CUtensorMap &x = *l.find<CUtensorMap>(0), &w = *l.find<CUtensorMap>(1);
  const CUtensorMap &sc = *l.find<CUtensorMap>(2), &y = *l.find<CUtensorMap>(3);
  const int64_t begin = (static_cast<const char*>(p.y) - s.y) / 2;
  const RowRange rows{begin, begin + p.N_pad};
  const std::vector<int> c = shape_of(kernel_name(l), "sm90::Config");
  const bool block_mode = c[0] == 0;
  const int row_tiles = c[1] * c[2], tokens = c[3];
  REQUIRE(int(l.block.x) == (c[1] * c[5] + 1) * 128, l.block.x);
  REQUIRE(begin % 64 == 0 && p.N == std::min(s.N, int(rows.end)) - begin, p.N);
  REQUIRE(p.N > 0 && p.M == s.M && p.ldy == s.N, p.N, p.M, p.ldy);
  REQUIRE(block_mode == (s.num_blocks > 1), "mode");
  check_maps(x, w, s, s.K, s.ldx * 2, begin, p.N_pad);
  check_scale_map(sc, s, begin, p.N_pad);
  REQUIRE(int(x.box_rows) * p.multicast == tokens && x.box_cols == 64, tokens);
  REQUIRE(int(w.box_rows) == row_tiles * 4 && w.box_cols == 128, row_tiles);
  REQUIRE(int(sc.box_cols) == row_tiles * 64, sc.box_cols);
  REQUIRE(int(sc.box_rows) == p.scales_per_block, sc.box_rows);
  REQUIRE(
      p.weight_tx_bytes == w.box_bytes() + (block_mode ? sc.box_bytes() : 0),
      p.weight_tx_bytes);
  REQUIRE(p.tma_store == (s.N % 8 == 0 && p.split == 1 && c[5] == 1),
          "tma_store");
  if (p.tma_store) check_y_map(y, s, begin, p.N);
  if (p.scales_per_block > 1) {
    REQUIRE(128 / p.scales_per_block == s.block && c[4] == 4, s.block);
  } else {
    check_blocks(s, p.blocks_per_scale);
    REQUIRE(c[4] == 1, "groups");
  }
  REQUIRE(p.k_blocks * 128 == s.K_pad, p.k_blocks);
  REQUIRE(p.row_groups == ceil_div(p.N_pad / 64, row_tiles * p.multicast),
          p.row_groups);
  REQUIRE(p.token_tiles == ceil_div(s.M, tokens), p.token_tiles);
  const int size = p.split * p.multicast;
  REQUIRE(int(l.cluster) == size && int(l.grid.x) == p.num_clusters * size,
          l.grid.x);
  REQUIRE(p.num_clusters >= 1, p.num_clusters);
  REQUIRE((p.split == 1 && c[5] == 1) || p.num_clusters == p.num_tiles,
          p.num_clusters);
  REQUIRE(p.split == 1 || (1 << p.groups_log2) * p.split * 8 == tokens,
          p.groups_log2);
  Tiles tiles(p.row_groups, p.token_tiles);
  REQUIRE(tiles.count() == p.num_tiles, p.num_tiles);
  with_config(row_tiles, tokens, [&](auto config) {
    using C = decltype(config);
    for (int64_t i = 0; i < p.num_tiles; i += tiles.step()) {
      const sm90::Tile t = sm90::locate<C>(p, int(i), 0, 0);
      tiles.add(t.row_tile / row_tiles, t.token / tokens);
    }
    Cover k;
    for (int part = 0; part < p.split; ++part) {
      const sm90::Tile t = sm90::locate<C>(p, 0, 0, part);
      k.add(t.kb_begin, t.kb_end);
    }
    k.finish(p.k_blocks);
  });
  tiles.finish();
  return rows;
}

void check_few(const Launch& l, const Sizes& s) {
  const sm90::FewParams& p = params<sm90::FewParams>(l);
  const CUtensorMap &x = *l.find<CUtensorMap>(0), &w = *l.find<CUtensorMap>(1),
                    &sc = *l.find<CUtensorMap>(2);
  const std::vector<int> c = shape_of(kernel_name(l), "sm90::FewConfig");
  const int rows = c[0], sets = c[1], tokens = c[2], blocks = c[3];
  const int pair = w.box_cols / 128;
  REQUIRE(int(l.block.x) == rows * sets * 128 + (blocks == 1 ? 128 : 64),
          l.block.x);
  REQUIRE(blocks * (int(l.shared) + 1024) <= 228 * 1024, l.shared, "twice");
  check_maps(x, w, s, s.K, s.ldx * 2, 0, s.N_pad);
  check_scale_map(sc, s, 0, s.N_pad);
  REQUIRE(int(x.box_rows) == tokens && x.box_cols == 64, tokens);
  REQUIRE(int(w.box_rows) == rows * 4 && int(sc.box_cols) == rows * 64, rows);
  REQUIRE(int(sc.box_rows) == pair, pair);
  REQUIRE(p.stage_tx_bytes ==
              2 * pair * x.box_bytes() + w.box_bytes() + sc.box_bytes(),
          p.stage_tx_bytes);
  check_blocks(s, p.blocks_per_scale);
  REQUIRE(p.M == s.M && p.N == s.N && p.ldy == s.N, p.M, p.N);
  REQUIRE(p.k_stages == ceil_div(s.K_pad / 128, pair), p.k_stages);
  REQUIRE(p.token_tiles == ceil_div(s.M, tokens), p.token_tiles);
  REQUIRE(p.num_tiles == ceil_div(s.N_pad / 64, rows) * p.token_tiles,
          p.num_tiles);
  REQUIRE(p.num_clusters >= 1 && p.num_clusters <= p.num_tiles, p.num_clusters);
  REQUIRE(int(l.cluster) == p.split, p.split);
  REQUIRE(int(l.grid.x) == p.num_clusters * p.split, l.grid.x);
  Cover k, finished;
  for (int rank = 0; rank < p.split; ++rank) {
    k.add(p.k_stages * rank / p.split, p.k_stages * (rank + 1) / p.split);
    const int first = rank * p.share;
    const int count = std::max(0, std::min(p.share, tokens - first));
    // The last blocks of a cluster may have no tokens to finish.
    if (count > 0) finished.add(first, first + count);
  }
  k.finish(p.k_stages);
  finished.finish(tokens);
  REQUIRE(p.split * p.share <= tokens + 7, p.share);  // kExchangeBytes
}

void check_wgmma_s8(const Launch& l, const Sizes& s) {
  const s8::KernelParams& p = params<s8::KernelParams>(l);
  const CUtensorMap &x = *l.find<CUtensorMap>(0), &w = *l.find<CUtensorMap>(1);
  const CUtensorMap &sc = *l.find<CUtensorMap>(2), &y = *l.find<CUtensorMap>(3);
  const std::vector<int> c = shape_of(kernel_name(l), "s8::Config");
  const bool block_mode = c[0] == 1;
  const int row_tiles = c[1] * c[2], rows = row_tiles * 64, tokens = c[3];
  const int sets = c[4];
  REQUIRE(block_mode == (s.num_blocks > 1), "mode");
  REQUIRE(int(l.block.x) == (c[1] * sets + 1) * 128, l.block.x);
  check_maps(x, w, s, s.K_pad, s.K_pad, 0, s.N_pad);
  if (block_mode) check_scale_map(sc, s, 0, s.N_pad);
  REQUIRE(int(x.box_rows) == tokens && x.box_cols == 128, tokens);
  REQUIRE(int(w.box_rows) == rows / 16 && w.box_cols == 256, rows);
  REQUIRE(p.stage_tx_bytes == 2 * x.box_bytes() + w.box_bytes() +
                                  (block_mode ? 2 * sc.box_bytes() : 0),
          p.stage_tx_bytes);
  if (block_mode) check_blocks(s, p.blocks_per_scale);
  // to_float takes sums of up to 2^22.
  REQUIRE(block_mode || int64_t(s.K) * 127 <= 1 << 22, s.K);
  REQUIRE(p.tma_store == (s.N % 8 == 0 && p.split == 1), "tma_store");
  if (p.tma_store) check_y_map(y, s, 0, s.N);
  REQUIRE(int64_t(s.parts) * s.M <= INT32_MAX, "rows of x");
  REQUIRE(p.stages == ceil_div(s.K_pad, 256), p.stages);
  REQUIRE(int(l.cluster) == p.split, p.split);
  REQUIRE(int(l.grid.x) == p.num_clusters * p.split, l.grid.x);
  REQUIRE(p.split == 1 || (1 << p.groups_log2) * p.split * 8 == tokens,
          p.groups_log2);
  with_config(row_tiles, tokens, [&](auto config) {
    using C = decltype(config);
    Cover k;
    for (int part = 0; part < p.split; ++part) {
      const s8::Tile t = s8::locate<C>(p, p.row_groups, 0, part);
      k.add(t.begin, t.end);
      REQUIRE(t.end - t.begin >= sets, "a set without a stage");
    }
    k.finish(p.stages);
    const int groups = s8::count_row_groups<C>(p);
    REQUIRE(groups <= p.row_groups, "row groups", groups, p.row_groups);
    const int64_t count = int64_t(groups) * p.token_tiles;
    REQUIRE(p.split == 1 || p.num_clusters >= count, p.num_clusters);
    REQUIRE(p.num_clusters >= 1, p.num_clusters);
    // Rows that are stored, of the first and the last token tile.
    Tiles tiles(groups, p.token_tiles);
    std::vector<char> stored(s.N);
    for (int64_t i = 0; i < count; i += tiles.step()) {
      const s8::Tile t = s8::locate<C>(p, groups, int(i), 0);
      REQUIRE(t.row % 16 == 0 && t.token % tokens == 0, t.row, t.token);
      if (s.parts == 1) tiles.add(t.row / rows, t.token / tokens);
      if (t.token != 0 || tiles.step() > 1) continue;
      for (int n = std::max(t.row, t.lo); n < std::min(t.row + rows, t.hi);
           ++n) {
        int part = 0;  // whose row it is
        while (s.parts > 1 && n >= s.ends[part]) ++part;
        REQUIRE(part == t.part && !stored[n], "row", n, "of part", part);
        stored[n] = true;
      }
    }
    if (s.parts == 1) tiles.finish();
    const int last = s.parts > 1 ? std::min(s.N, s.ends[s.parts - 1]) : s.N;
    if (tiles.step() > 1) return;
    for (int n = 0; n < last; ++n) REQUIRE(stored[n], "row", n, "not stored");
  });
}

namespace {

struct Shape {
  int rows, tokens, warps, granule, slot_words;
};

// The runs of granules of one CTA with `units` row units and k tiles [0, k),
// as both kernels deal them to their warps.
void check_runs(const MmaCut& a, const Shape& shape, int units, int k) {
  const int most = a.k_tiles + (a.k_rest > 0);
  const int per_unit = int(ceil_div(std::min(a.chunk, most), shape.granule));
  for (int c0 = 0; c0 < k; c0 += a.chunk) {
    const int tiles = std::min(a.chunk, k - c0);
    const int total = units * per_unit;
    std::vector<int> first(units, -1), last(units, -1);
    std::vector<int> summed(units);  // k tiles
    std::vector<int> first_unit_of_warp(shape.warps, -1);
    for (int warp = 0; warp < shape.warps; ++warp) {
      const int begin =
          warp * (total / shape.warps) + std::min(warp, total % shape.warps);
      const int count = total / shape.warps + (warp < total % shape.warps);
      int unit = begin / per_unit, segment = 0;
      int tile = (begin - unit * per_unit) * shape.granule;
      bool from_start = tile == 0;
      auto flush = [&](bool to_end) {
        REQUIRE(segment < a.segments, "segments", a.segments);
        if (segment == 0) first_unit_of_warp[warp] = unit;
        if (from_start) first[unit] = warp;
        if (to_end) last[unit] = warp;
        ++segment;
      };
      for (int i = 0; i < count; ++i) {
        REQUIRE(unit < units, "unit", unit);
        summed[unit] += std::max(0, std::min(shape.granule, tiles - tile));
        tile += shape.granule;
        if (tile >= per_unit * shape.granule) {
          flush(true);
          tile = 0;
          from_start = true;
          ++unit;
        }
      }
      if (tile != 0 && count > 0) flush(false);
    }
    for (int u = 0; u < units; ++u) {
      REQUIRE(summed[u] == tiles, "k tiles of unit", u, summed[u], tiles);
      REQUIRE(first[u] >= 0 && last[u] >= first[u], "warps of unit", u);
      // The final sums take the first slot of every further warp.
      for (int w = first[u] + 1; w <= last[u]; ++w) {
        REQUIRE(first_unit_of_warp[w] == u, "warp", w,
                "begins in another unit");
      }
    }
  }
}

}  // namespace

void check_mma(const Launch& l, const Sizes& s) {
  const std::string name = kernel_name(l);
  const bool sixteen = name.find("mma_gemm_kernel") != std::string::npos;
  const MmaCut& a = sixteen ? static_cast<const MmaCut&>(params<MmaArgs>(l))
                            : static_cast<const MmaCut&>(params<S8Args>(l));
  Shape shape;
  if (sixteen) {
    const std::vector<int> c = shape_of(name, "MmaShape");
    shape = {c[1] * 16, c[0] * 8, c[2], c[3], 20};
  } else {
    const std::vector<int> c = shape_of(name, "S8Shape");
    const bool digits = c[1] == int(S8Input::kDigits);
    shape = {c[3] * 16, c[2] * (digits ? 2 : 8), c[4], c[5], 20};
  }
  REQUIRE(int(l.block.x) == shape.warps * 32, l.block.x);
  REQUIRE(int(l.grid.x) == a.split && int(l.cluster) == a.split, a.split);
  REQUIRE(a.split <= 8 && is_power_of_two(a.split), a.split);
  REQUIRE(l.grid.z == ceil_div(s.M, shape.tokens), l.grid.z);
  REQUIRE(1 << a.tokens_log2 >= std::min(s.M, shape.tokens), a.tokens_log2);
  const int k_tiles = s.K_pad / 128, groups = int(l.grid.y);
  Cover k;
  for (int r = 0; r < a.split; ++r) {
    const int k0 = r * a.k_tiles + std::min(r, a.k_rest);
    k.add(k0, k0 + a.k_tiles + (r < a.k_rest));
  }
  k.finish(k_tiles);
  Cover units;
  for (int g = 0; g < groups; ++g) {
    const int u0 = g * a.group_units + std::min(g, a.group_rest);
    units.add(u0, u0 + a.group_units + (g < a.group_rest));
    REQUIRE(a.group_units + (g < a.group_rest) <= a.units, "units", a.units);
  }
  units.finish(s.N_pad / shape.rows);
  REQUIRE(a.chunk >= 1 && a.chunk <= k_tiles, a.chunk);
  REQUIRE(a.units < 1 << 16 && shape.warps * a.segments <= 1 << 16, a.segments);
  // The kernels' offsets of scales are 32 bits.
  REQUIRE(int64_t(s.num_blocks) * s.N_pad <= UINT32_MAX, "scales");
  const int longest = a.k_tiles + (a.k_rest > 0);
  for (int n : {a.group_units + (a.group_rest > 0), a.group_units}) {
    check_runs(a, shape, n, longest);
    if (a.k_rest > 0) check_runs(a, shape, n, a.k_tiles);
  }
}

void check_quantize(const Launch& l, const Sizes& s) {
  const QuantArgs& q = params<QuantArgs>(l);
  const int units = s.K_pad / 16, threads = int(l.block.x);
  if (s.M <= 16 && s.parts == 1 && s.K % 8 == 0 && units <= 1024 &&
      !q.norm_weight) {  // a thread each, in a CTA for each token
    REQUIRE(threads >= units && threads <= 1024, threads, "for", units);
    REQUIRE(int(l.grid.x) == s.M && l.grid.y == 1, l.grid.x);
    REQUIRE(q.M == s.M && q.K_pad == s.K_pad && q.parts == 1, q.M);
    return;
  }
  // Up to 512 threads keep one unit each, up to 768 two; more read them again.
  const int held = units <= 512 ? 1 : units <= 1536 ? 2 : 0;
  REQUIRE(threads <= (held == 0 ? 1024 : held == 1 ? 512 : 768), threads);
  REQUIRE(held == 0 || threads * held >= units, threads, "for", units);
  REQUIRE(int(l.grid.x) <= s.M, l.grid.x);
  REQUIRE(int(l.grid.y) == 1 || int(l.grid.y) == s.parts, l.grid.y);
  REQUIRE(q.M == s.M && q.parts == s.parts && q.K_pad == s.K_pad, q.M);
}
