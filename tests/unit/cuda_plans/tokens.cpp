// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Launches of mma_s8_direct_tokens.cuh against the sizes of their product.
// Where a warp's work lies is found as the kernel does it.
#include "mma_s8_direct_tokens_launch.cuh"
#include "plans.h"

using namespace vllm::ternary;

void check_tokens(const Launch& l, const Sizes& s) {
  const TokenArgs* found = l.find<TokenArgs>();
  REQUIRE(found != nullptr, "other parameters than expected");
  const TokenArgs& a = *found;
  const std::string name = kernel_name(l);
  const std::vector<int> c = shape_of(name, "direct_tokens_kernel");
  REQUIRE(c.size() == 5, name);
  const bool inside = c[0], row = c[1];
  const int tokens = c[2], held = c[3], rounds = c[4];

  // What it takes at all.
  REQUIRE(device_now().capability >= 90, "before sm_90");
  REQUIRE(s.K % 32 == 0 && s.parts == 1, s.K, s.parts);
  REQUIRE(s.M <= 16 && tokens == (inside || s.M <= 8 ? 8 : 16), s.M, tokens);
  const int ctas = (s.M + tokens - 1) / tokens;  // along M
  REQUIRE(row == (s.num_blocks == 1), "scales", s.num_blocks);
  REQUIRE(row || s.scale_bytes == 2, s.scale_bytes);
  REQUIRE(reinterpret_cast<const char*>(a.weight) == s.weight, "weight");
  REQUIRE(a.scale == s.scale && a.y == s.y, "scale or y");
  REQUIRE(inside == !a.xq && inside == (a.x != nullptr), "x or bytes");
  REQUIRE(!inside || a.ldx == s.ldx, a.ldx);
  REQUIRE(a.M == s.M && a.N == s.N && a.K == s.K && a.N_pad == s.N_pad, a.M,
          a.N, a.K, a.N_pad);
  REQUIRE(a.ldy == s.N && a.all_k_tiles == s.K_pad / 128, a.all_k_tiles);

  // The grid.
  REQUIRE(int(l.block.x) == kTokenWarps * 32, l.block.x);
  REQUIRE(l.block.y == 1 && l.block.z == 1 && int(l.grid.z) == ctas, l.grid.z);
  REQUIRE(int(l.grid.x) == a.split && int(l.cluster) == a.split, a.split);
  REQUIRE(a.split == 1 << a.split_log2 && a.split <= (inside ? 2 : 8), a.split);
  // CTAs without rows only make up for multiprocessors.
  const int pads = int(l.grid.y) - a.groups;
  REQUIRE(pads == 0 || (a.split > 1 && int(l.grid.y * l.grid.x) * ctas <=
                                           device_now().processors),
          pads);
  const int parts = 1 << a.parts_log2, step = kTokenWarps >> a.parts_log2;
  REQUIRE(parts >= 4 && parts * step == kTokenWarps, parts, step);

  // Every k tile is one warp's, along K; no warp has none, and one at most has
  // its last stand in for another.
  Cover k;
  int k_most = 0, cta_most = 0;
  for (int rank = 0; rank < a.split; ++rank) {
    const int kt0 = rank * a.k_tiles + std::min(rank, a.k_rest);
    const int n = a.k_tiles + (rank < a.k_rest);
    const int each = n >> a.parts_log2, rest = n & (parts - 1);
    for (int part = 0; part < parts; ++part) {
      const int tile = part * each + std::min(part, rest);
      const int mine = each + (part < rest);
      REQUIRE(mine >= 1 && mine <= held, mine, held);
      k.add(kt0 + tile, kt0 + tile + mine);
      k_most = std::max(k_most, mine);
    }
    cta_most = std::max(cta_most, n);
  }
  k.finish(a.all_k_tiles);
  REQUIRE(held <= 2 && k_most == held, k_most, held);
  REQUIRE(row || held * tokens <= 16, held, tokens);
  const int slots = kTokenWarps >> a.tokens_log2;
  REQUIRE(slots >= 1 && std::min(s.M, tokens) <= 1 << a.tokens_log2, slots);
  REQUIRE(!inside || cta_most <= 4 * slots * rounds, cta_most, rounds);
  // A lane reads one largest value.
  REQUIRE(!inside || slots * a.split <= 32, slots);
  check_tile_blocks(a, s);

  // Every row tile is one CTA's.
  Cover cover;
  int most = 0;
  for (int group = 0; group < a.groups; ++group) {
    const int tile0 = group * a.tiles + std::min(group, a.tiles_rest);
    const int tiles = a.tiles + (group < a.tiles_rest);
    cover.add(tile0, tile0 + tiles);
    most = std::max(most, tiles);
  }
  cover.finish(s.N_pad / 16);
  REQUIRE(a.sum_rows == most * 16, a.sum_rows, most);

  // Shared memory.
  REQUIRE(a.row_bytes == cta_most * 512, a.row_bytes, cta_most);
  REQUIRE(a.pitch >= cta_most * 128 && a.pitch % 128 == 16, a.pitch);
  const int columns = std::min(s.M, tokens);
  const int sums = (row ? tokens / 2 : tokens) * a.sum_rows * parts;
  Layout all;
  all.add("weights", 0, int64_t(most) * a.row_bytes, 128);
  if (!row) {
    REQUIRE(a.scale_pitch >= most * 32, a.scale_pitch);
    all.add("scales", a.scales, int64_t(cta_most) * a.scale_pitch, 16);
  }
  all.add("columns", a.columns, int64_t(columns) * a.pitch, 16);
  all.add("rows", a.rows, most * 16 * 8, 8);
  all.add("sums", a.sums, int64_t(sums) * 4, 16);
  all.add("factors", a.factors, tokens * 4, 4);
  all.add("most", a.most, (slots << a.tokens_log2) * a.split * 4, 4);
  all.add("barriers", a.barriers, (3 + (most + step - 1) / step) * 8, 8);
  if (a.split > 1) {
    REQUIRE(a.own_rows * a.split >= most * 16, a.own_rows, most);
    REQUIRE(a.own_rows % 16 == 0, a.own_rows);
    all.add("received", a.received,
            int64_t(a.split) * tokens / 2 * a.own_rows * 8, 8);
  }
  all.finish(int64_t(l.shared));
  // As many CTAs as asked for, with a kilobyte of the system's each; bytes:
  // one.
  const int share = inside ? s.share : 1;
  REQUIRE(share * (int(l.shared) + 1024) <= device_now().shared + 1024,
          l.shared, "times", share);
  // Bytes that an mbarrier counts.
  REQUIRE(int64_t(step) * a.row_bytes < 1 << 20, a.row_bytes);
  REQUIRE(row || int64_t(cta_most) * most * 32 < 1 << 20, cta_most, most);
  REQUIRE(int64_t(a.own_rows) * tokens * 4 * a.split < 1 << 20, a.own_rows);
}
