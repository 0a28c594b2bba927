// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Launches of mma_s8_direct_digits.cuh against the sizes of their product.
// Where a warp's work lies is found as the kernel does it.
#include "mma_s8_direct_digits_launch.cuh"
#include "plans.h"

using namespace vllm::ternary;

void check_digits(const Launch& l, const Sizes& s) {
  const DigitsArgs* found = l.find<DigitsArgs>();
  REQUIRE(found != nullptr, "other parameters than expected");
  const DigitsArgs& a = *found;
  const std::string name = kernel_name(l);
  const std::vector<int> c = shape_of(name, "direct_digits_kernel");
  REQUIRE(c.size() == 5, name);
  const int tokens = c[0], held = c[1], rounds = c[2];
  const bool all_along_k = c[3], bytes = c[4];

  // What it takes at all.
  REQUIRE(device_now().capability >= 90, "before sm_90");
  REQUIRE(s.K % 32 == 0 && s.parts == 1, s.K, s.parts);
  REQUIRE(s.M == tokens, s.M, tokens);
  REQUIRE(bytes ? s.num_blocks == 1 && tokens == 1 : s.scale_bytes == 2,
          s.scale_bytes);
  REQUIRE(reinterpret_cast<const char*>(a.weight) == s.weight, "weight");
  REQUIRE(a.scale == s.scale, "scale");
  // To be quantized: not the bytes.
  REQUIRE(bytes ? a.x && a.x != s.x : a.x == s.x, "x");
  REQUIRE(a.y == s.y, "y");
  REQUIRE(a.ldx == s.ldx && a.ldy == s.N, a.ldx, a.ldy);
  REQUIRE(a.N == s.N && a.K == s.K && a.N_pad == s.N_pad, a.N, a.K, a.N_pad);
  REQUIRE(a.all_k_tiles == s.K_pad / 128, a.all_k_tiles);

  // The grid.
  REQUIRE(int(l.block.x) == kDigitsWarps * 32, l.block.x);
  REQUIRE(l.block.y == 1 && l.block.z == 1 && l.grid.z == 1, l.grid.z);
  REQUIRE(int(l.grid.x) == a.split && int(l.cluster) == a.split, a.split);
  REQUIRE(a.split == 1 << a.split_log2 && a.split <= 8, a.split);
  const int parts = 1 << a.parts_log2, step = 1 << a.step_log2;
  REQUIRE(parts * step == kDigitsWarps, parts, step);
  REQUIRE(all_along_k == (step == 1), step);

  // Every k tile is one warp's, along K; no warp has none.
  Cover k;
  int k_most = 0, k_least = a.all_k_tiles;
  for (int place = 0; place < a.split * parts; ++place) {
    const int kt0 = place * a.k_tiles + std::min(place, a.k_rest);
    const int n = a.k_tiles + (place < a.k_rest);
    k.add(kt0, kt0 + n);
    k_most = std::max(k_most, n);
    k_least = std::min(k_least, n);
  }
  k.finish(a.all_k_tiles);
  // One k tile of a warp may be missing: its last stands in for it.
  REQUIRE(!held || (k_most == held && k_least >= held - 1), k_most, held);
  REQUIRE(k_most <= 2 * rounds + (held & 1), k_most, rounds);
  REQUIRE(a.pitch == column_pitch(k_most), a.pitch, k_most);
  check_tile_blocks(a, s);

  // Every row tile is one CTA's.
  Cover rows;
  int most = 0;
  for (int group = 0; group < int(l.grid.y); ++group) {
    const int tile0 = group * a.tiles + std::min(group, a.tiles_rest);
    const int tiles = a.tiles + (group < a.tiles_rest);
    rows.add(tile0, tile0 + tiles);
    most = std::max(most, tiles);
  }
  rows.finish(s.N_pad / 16);
  // Where slots are filled again, each is always the same warps'.
  REQUIRE(a.slots >= 1 && a.slots <= most, a.slots, most);
  REQUIRE(a.slots == most || a.slots % step == 0, a.slots, step);

  // Shared memory. A CTA's k tiles: of its first place to its last.
  int cta_most = 0;
  for (int rank = 0; rank < a.split; ++rank) {
    const int p0 = rank * parts, p1 = p0 + parts;
    cta_most = std::max(cta_most, parts * a.k_tiles + std::min(p1, a.k_rest) -
                                      std::min(p0, a.k_rest));
  }
  const int outputs = most * 16 * tokens;
  REQUIRE(a.slot_bytes == cta_most * 512, a.slot_bytes, cta_most);
  REQUIRE(a.scale_bytes == most * 32, a.scale_bytes);
  const int columns = tokens * (bytes ? 1 : 4);
  REQUIRE(a.warp_bytes >= columns * a.pitch + (held ? 0 : k_most * 16),
          a.warp_bytes);
  REQUIRE(a.warp_bytes % 16 == 0, a.warp_bytes);
  Layout all;
  all.add("ring", 0, int64_t(a.slots) * a.slot_bytes, 128);
  all.add("scales", a.scale_at,
          bytes ? most * 16 * 4 : int64_t(cta_most) * a.scale_bytes, 16);
  all.add("columns", a.columns_at, int64_t(kDigitsWarps) * a.warp_bytes, 16);
  all.add("sums", a.sums_at, int64_t(outputs) * kSumPitch, 16);
  all.add("bias", a.bias_at, most * 16 * 4, 4);
  if (a.split > 1) {
    REQUIRE(a.rank_sums * a.split >= outputs, a.rank_sums, outputs);
    all.add("received", a.received_at, int64_t(a.split) * a.rank_sums * 4, 4);
  }
  if (bytes) {
    REQUIRE(kDigitsWarps * a.split <= 32, a.split);  // share_largest()
    all.add("largest", a.most_at, kDigitsWarps * a.split * 4, 4);
  }
  // Warps without a row tile read where theirs would be.
  REQUIRE(held < 1 || held > 2 || a.slots < most ||
              step * a.slot_bytes <= int(l.shared),
          l.shared);
  const int again = a.slots < most ? kDigitsWarps * a.slots : 0;
  all.add("barriers", a.barriers_at, (a.slots + 2 + again) * 8, 8);
  all.finish(int64_t(l.shared));
  // As many CTAs as asked for, with a kilobyte of the system's each.
  REQUIRE(s.share * (int(l.shared) + 1024) <= device_now().shared + 1024,
          l.shared, "times", s.share);
  // Bytes that an mbarrier counts.
  REQUIRE(a.slot_bytes < 1 << 20 && (outputs + 7) * 4 < 1 << 20, outputs);
  REQUIRE(int64_t(cta_most) * a.scale_bytes < 1 << 20, a.scale_bytes);
}
