// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Launches of the kernels with short chains of latencies, against the sizes of
// their product. Where a warp's work lies is found as DirectWarp does it.
#include "mma_s8_direct_launch.cuh"
#include "plans.h"

using namespace vllm::ternary;

void check_direct(const Launch& l, const Sizes& s) {
  const DirectArgs* found = l.find<DirectArgs>();
  REQUIRE(found != nullptr, "other parameters than expected");
  const DirectArgs& a = *found;
  const std::string name = kernel_name(l);
  const std::vector<int> c = shape_of(name, "direct_int8_kernel");
  REQUIRE(c.size() == 5, name);
  const bool row = c[0];
  const int warps = c[1], tokens = c[2], held = c[3], rounds = c[4];

  // What they take at all.
  REQUIRE(device_now().capability >= 90, "before sm_90");
  REQUIRE(s.K % 32 == 0 && s.parts == 1, s.K, s.parts);
  REQUIRE(s.M <= tokens, s.M, tokens);
  REQUIRE(row == (s.num_blocks == 1), "scales", s.num_blocks);
  REQUIRE(row || s.scale_bytes == 2, s.scale_bytes);
  REQUIRE(reinterpret_cast<const char*>(a.weight) == s.weight, "weight");
  REQUIRE(a.scale == s.scale && a.y == s.y, "scale or y");
  REQUIRE(a.x != s.x, "x");  // tokens, not their bytes
  REQUIRE(a.ldx == s.ldx && a.ldy == s.N, a.ldx, a.ldy);
  REQUIRE(a.M == s.M && a.N == s.N && a.K == s.K && a.N_pad == s.N_pad, a.M,
          a.N, a.K, a.N_pad);
  REQUIRE(a.all_k_tiles == s.K_pad / 128, a.all_k_tiles);

  // The grid.
  REQUIRE(int(l.block.x) == warps * 32, l.block.x);
  REQUIRE(l.block.y == 1 && l.block.z == 1 && l.grid.z == 1, l.grid.z);
  REQUIRE(int(l.grid.x) == a.split && int(l.cluster) == a.split, a.split);
  REQUIRE(a.split == 1 && a.split_log2 == 0, a.split);
  const int parts = 1 << a.parts_log2, step = 1 << a.step_log2;
  REQUIRE(parts * step == warps && parts <= 16, parts, step);

  // Every k tile is one warp's, along K; no warp has none.
  Cover k;
  int k_most = 0;
  for (int place = 0; place < a.split * parts; ++place) {
    const int kt0 = place * a.k_tiles + std::min(place, a.k_rest);
    const int n = a.k_tiles + (place < a.k_rest);
    k.add(kt0, kt0 + n);
    k_most = std::max(k_most, n);
  }
  k.finish(a.all_k_tiles);
  REQUIRE(a.slot_bytes == k_most * 512, a.slot_bytes);
  REQUIRE(held ? k_most == held && held <= 2 : k_most > 2, k_most, held);
  REQUIRE(k_most <= 2 * rounds, k_most, rounds);
  for (int kt = 0; kt < a.all_k_tiles; ++kt) {
    const int block = std::min(kt >> a.block_shift, a.last_block);
    REQUIRE(s.num_blocks == 1 ? block == 0 : block == kt * 128 / s.block,
            "block", block, "of k tile", kt);
  }
  REQUIRE(int64_t(s.num_blocks) * s.N_pad <= UINT32_MAX, "scales");

  // Every row tile is one CTA's, and one warp's of each part of K.
  Cover rows;
  int most = 0;
  for (int group = 0; group < int(l.grid.y); ++group) {
    const int tile0 = group * a.tiles + std::min(group, a.tiles_rest);
    const int tiles = a.tiles + (group < a.tiles_rest);
    rows.add(tile0, tile0 + tiles);
    most = std::max(most, tiles);
    if (group > 0 && group != a.tiles_rest) continue;  // as the one before
    int dealt = 0;
    for (int first = 0; first < step; ++first) {
      const int mine = (tiles - first + step - 1) >> a.step_log2;
      REQUIRE(mine >= 0 && mine <= a.rows_most, mine, "of", a.rows_most);
      REQUIRE(mine == 0 || first + (mine - 1) * step < tiles, mine);
      dealt += mine;
    }
    REQUIRE(dealt == tiles, "row tiles dealt", dealt, "of", tiles);
  }
  rows.finish(s.N_pad / 16);

  // Shared memory: of a warp, then of the CTA.
  const int outputs = most * 16 * tokens;
  REQUIRE(a.slots >= 1 && a.slots <= a.rows_most, a.slots, a.rows_most);
  REQUIRE(a.pitch >= k_most * 128 && a.pitch % 16 == 0, a.pitch);
  Layout warp;
  warp.add("ring", 0, int64_t(a.slots) * a.slot_bytes, 128);
  if (!row) warp.add("scales", a.scales, k_most * a.rows_most * 32, 16);
  warp.add("columns", a.columns, tokens * a.pitch, 16);
  warp.add("starts", a.starts, k_most * 64, 16);
  warp.add("barriers", a.barriers, a.slots * 8, 8);
  warp.finish(a.warp_bytes);
  REQUIRE(a.warp_bytes % 128 == 0, a.warp_bytes);
  REQUIRE(a.part_sums >= outputs, a.part_sums, outputs);
  Layout all;
  all.add("warps", 0, int64_t(warps) * a.warp_bytes, 128);
  all.add("rows", a.rows, most * 16 * 8, 8);
  all.add("sums", a.sums, int64_t(parts) * a.part_sums * 4, 8);
  all.add("tokens", a.tokens, (warps + 1) * tokens * 4, 4);
  all.add("counter", a.counter, 8, 8);
  all.finish(int64_t(l.shared));
  // As many CTAs as asked for, with a kilobyte of the system's each.
  REQUIRE(s.share * (int(l.shared) + 1024) <= device_now().shared + 1024,
          l.shared, "times", s.share);
  // Bytes that an mbarrier counts.
  REQUIRE(a.slot_bytes < 1 << 20 && (outputs + 7) * 4 < 1 << 20, outputs);
}
