// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// y = x W^T on mma.m16n8k32 with unsigned codes as the 16-row operand and
// signed bytes of x as the 8-column one.
//
// A word of sixteen codes is the whole A operand of one instruction: two bits
// of each byte, so one mask makes a register, and registers 1 and 3
// (rows 8..15) are left at 4 times the code, which saves a shift and is divided
// out of the sums. The cut of the work, the runs of granules, the ring and the
// fixed-order sums are those of mma_gemm.cuh.
#pragma once

#include "mma_s8_stage.cuh"

namespace vllm::ternary {

constexpr int kS8SlotStride = 20;  // words per token of a slot: no conflicts

template <typename T_, S8Scale kScale_, S8Input kInput_, int kNT_, int kR_,
          int kWarps_, int kTiles_, int kStages_, int kMinBlocks_>
struct S8Shape {
  using T = T_;
  static constexpr S8Scale kScale = kScale_;
  static constexpr S8Input kInput = kInput_;
  static constexpr int kNT = kNT_;  // column tiles of 8
  // Columns per token.
  static constexpr int kDigits = kInput == S8Input::kDigits ? 4 : 1;
  static constexpr int kR = kR_;  // row tiles of 16 in a row unit
  static constexpr int kWarps = kWarps_;
  static constexpr int kTiles = kTiles_;    // k tiles of a granule
  static constexpr int kStages = kStages_;  // granules in a warp's ring
  static constexpr int kMinBlocks = kMinBlocks_;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kRows = 16 * kR;
  static constexpr int kTokens = kNT * 8 / kDigits;
  static constexpr int kWordBytes = kTiles * kR * 512;
  static constexpr bool kScales = kScale == S8Scale::kTile;  // in the ring
  static constexpr int kGranuleBytes =
      kWordBytes + (kScales ? kTiles * kRows * 2 : 0);
  // With one scale per row nothing but integers is summed.
  using Sum = std::conditional_t<kScale == S8Scale::kRow, int, float>;
};

// Where things lie in shared memory, in bytes from its start.
struct S8Shared {
  int ring, barriers, slots, runs, offsets, tokens, rows, sums, total;
};

template <typename S>
__host__ __device__ __forceinline__ S8Shared s8_shared(const S8Args& a,
                                                       int tokens) {
  S8Shared s;
  s.ring = (tokens * S::kDigits * (a.chunk * 128 + 16) + 127) / 128 * 128;
  s.barriers = s.ring + S::kWarps * S::kStages * S::kGranuleBytes;
  s.slots = s.barriers + S::kWarps * S::kStages * 8;
  s.runs =
      s.slots + S::kWarps * a.segments * tokens * S::kR * kS8SlotStride * 4;
  s.offsets = s.runs + (a.units + 1) / 2 * 16;
  // Of each k tile (general: each 32), or of the whole run of k.
  const int entries = S::kScale == S8Scale::kRow    ? 0
                      : S::kScale == S8Scale::kTile ? a.chunk
                                                    : a.chunk * 4;
  s.tokens = s.offsets + entries * S::kNT * 64;
  s.rows = s.tokens + (S::kTokens * 12 + 15) / 16 * 16;
  s.sums = s.rows + a.units * S::kRows * 8;
  const bool sums = a.split > 1 || a.chunk < a.k_tiles + (a.k_rest > 0);
  s.total = s.sums + (sums ? (a.units * S::kRows * 4) << a.tokens_log2 : 0);
  return s;
}

// d = a * b + c.
__device__ __forceinline__ void mma_s8(int (&d)[4], const uint32_t (&a)[4],
                                       uint32_t b0, uint32_t b1,
                                       const int (&c)[4]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]),
        "r"(c[1]), "r"(c[2]), "r"(c[3]));
}

__device__ __forceinline__ void mma_s8(int (&d)[4], const uint32_t (&a)[4],
                                       uint32_t b0, uint32_t b1) {
  mma_s8(d, a, b0, b1, d);
}

// A word of sixteen codes as an A operand; registers 1 and 3 hold 4 (t + 1).
__device__ __forceinline__ void decode_s8(uint32_t w, uint32_t (&a)[4]) {
  const uint32_t right = w >> 4;
  a[0] = w & 0x03030303u;
  a[1] = w & 0x0C0C0C0Cu;
  a[2] = right & 0x03030303u;
  a[3] = right & 0x0C0C0C0Cu;
}

template <typename S>
__global__ void __launch_bounds__(S::kThreads, S::kMinBlocks)
    mma_s8_kernel(const __grid_constant__ S8Args a) {
  using T = typename S::T;
  using Sum = typename S::Sum;
  constexpr int kNT = S::kNT, kR = S::kR, kWarps = S::kWarps;
  constexpr int kTiles = S::kTiles, kStages = S::kStages, kRows = S::kRows;
  constexpr int kDigits = S::kDigits;
  constexpr S8Input kInput = S::kInput;
  constexpr bool kInside = kInput == S8Input::kInside;
  constexpr bool kRow = S::kScale == S8Scale::kRow;
  constexpr bool kTile = S::kScale == S8Scale::kTile;
  constexpr bool kGeneral = S::kScale == S8Scale::kGeneral;
  extern __shared__ __align__(128) uint8_t smem[];
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);  // uniform
  const int lane = threadIdx.x & 31;
  const int first_token = blockIdx.z * S::kTokens;
  const int tokens = min(S::kTokens, a.M - first_token);
  const int group = blockIdx.y, rank = blockIdx.x;
  const int cta_u0 = group * a.group_units + min(group, a.group_rest);
  const int cta_u1 = cta_u0 + a.group_units + (group < a.group_rest);
  const int k0 = rank * a.k_tiles + min(rank, a.k_rest);
  const int k1 = k0 + a.k_tiles + (rank < a.k_rest);

  const S8Shared at = s8_shared<S>(a, min(S::kTokens, a.M));
  const uint32_t xs = smem_address(smem);
  const uint32_t ring = xs + at.ring + warp * kStages * S::kGranuleBytes;
  const uint32_t barriers = xs + at.barriers + warp * kStages * 8;
  Sum* const slots = reinterpret_cast<Sum*>(smem + at.slots);
  // Of each row unit: the slot of its first warp, that warp, and the last warp.
  ushort4* const runs = reinterpret_cast<ushort4*>(smem + at.runs);
  int4* const offsets = reinterpret_cast<int4*>(smem + at.offsets);
  S8Token* const table = reinterpret_cast<S8Token*>(smem + at.tokens);
  float2* const row_table = reinterpret_cast<float2*>(smem + at.rows);
  Sum* const sums = reinterpret_cast<Sum*>(smem + at.sums);
  const bool direct = a.split == 1 && a.chunk >= k1 - k0;  // no sums needed

  pdl_launch_dependents();
  ring_init<S>(barriers, lane);
  int fill_slot = 0, slot = 0;
  uint32_t parity = 0;
  bool waited = false;

  for (int part = 0; part < a.parts; ++part) {
    // The rows of the part, and the row units of this CTA that have some.
    const int begin_n = part == 0 ? 0 : a.part_ends[part - 1];
    const int end_n = a.part_ends ? min(a.part_ends[part], a.N) : a.N;
    const int u0 = max(cta_u0, begin_n / kRows);
    const int units = min(cta_u1, (end_n + kRows - 1) / kRows) - u0;
    if (units <= 0 || begin_n >= end_n) continue;

    // Output i is a row, a token and a row unit, rows fastest.
    const int outputs = (units * kRows) << a.tokens_log2;
    auto row_of = [&](int i) { return i % kRows; };
    auto token_of = [&](int i) {
      return (i / kRows) & ((1 << a.tokens_log2) - 1);
    };
    auto unit_of = [&](int i) { return (i / kRows) >> a.tokens_log2; };
    auto store = [&](int i, Sum sum) {
      const int n = (u0 + unit_of(i)) * kRows + row_of(i);
      if (n < begin_n || n >= end_n) return;
      const int m = first_token + token_of(i);
      const float2 row = row_table[i % kRows + unit_of(i) * kRows];
      float v = float(sum);
      if constexpr (kInput != S8Input::kDigits) {
        const S8Token& token = table[token_of(i)];
        if constexpr (kRow) {
          if (!kInside) v = float(sum - token.sum);
          v = __fmul_rn(v, row.x);
        }
        v = __fmul_rn(v, token.factor);
      }
      if (a.bias) v += row.y;
      static_cast<T*>(a.y)[int64_t(m) * a.ldy + n] = from_float<T>(v);
    };

    // Runs are dealt as if every chunk were a full one.
    const int per_unit =
        (min(a.chunk, a.k_tiles + (a.k_rest > 0)) + kTiles - 1) / kTiles;
    const int total = units * per_unit;
    const int begin = warp * (total / kWarps) + min(warp, total % kWarps);
    const int count = total / kWarps + (warp < total % kWarps);
    const int first_unit = unsigned(begin) / unsigned(per_unit);
    const int first_tile = (begin - first_unit * per_unit) * kTiles;

    for (int c0 = k0; c0 < k1; c0 += a.chunk) {
      const int tiles = min(a.chunk, k1 - c0);
      int next_tile = first_tile, next_row = (u0 + first_unit) * kRows;
      int left = count;
      auto prefetch = [&] {
        if (left > 0) {
          --left;
          if (next_tile < tiles) {
            ring_fill<S>(ring + fill_slot * S::kGranuleBytes,
                         barriers + fill_slot * 8, a.ring, next_row,
                         c0 + next_tile, min(kTiles, tiles - next_tile), lane);
            if (++fill_slot == kStages) fill_slot = 0;
          }
          next_tile += kTiles;
          if (next_tile >= per_unit * kTiles) {
            next_tile = 0;
            next_row += kRows;
          }
        }
        ring_commit();
      };
#pragma unroll 1
      for (int p = 0; p < kStages - 1; ++p) prefetch();

      if (c0 != k0 || part > 0) {
        __syncthreads();  // what was staged has been used
      }
      // The scale and the bias of each row: on their way while x is waited for.
      const int rows = c0 == k0 && (kRow || a.bias) ? units * kRows : 0;
      auto load_row = [&](int i) {
        const int n = u0 * kRows + i;
        float2 row = {};
        if (i < rows && kRow) row.x = load_as_float(a.scale, a.scale_dtype, n);
        if (i < rows && a.bias && n < a.N) {
          row.y = to_float(static_cast<const T*>(a.bias)[n]);
        }
        return row;
      };
      const float2 first_row = load_row(threadIdx.x);
      if (kInput != S8Input::kBytes) {
        if (threadIdx.x < S::kTokens) {
          table[threadIdx.x].sum = 0;
          if (kDigits > 1 || c0 == k0) table[threadIdx.x].most = 0;
        }
        __syncthreads();
      }
      if (!waited) pdl_wait();
      waited = true;
      int* const starts = reinterpret_cast<int*>(offsets);
      if constexpr (kInput == S8Input::kBytes) {
        stage_int8<S>(xs, starts, table, a, part, first_token, tokens, c0,
                      tiles);
      } else if constexpr (kInput == S8Input::kDigits) {
        stage_digits<S>(smem, starts, table, a, first_token, tokens, c0, tiles);
      } else {
        stage_quantized<S>(smem, starts, table, a, first_token, tokens, c0,
                           tiles, c0 == k0);
      }
      for (int i = threadIdx.x; i < rows; i += S::kThreads) {
        row_table[i] = i == int(threadIdx.x) ? first_row : load_row(i);
      }
      __syncthreads();
      if constexpr (kGeneral) {
        sum_groups<S>(xs, starts, tokens, tiles);
        __syncthreads();
      }

      // ldmatrix: lane gives the address of row lane % 8 of matrix lane / 8.
      // Columns past the last repeat it and are never stored.
      uint32_t x_row[kNT];
#pragma unroll
      for (int i = 0; i < kNT; ++i) {
        const int column = min(i * 8 + (lane & 7), tokens * kDigits - 1);
        x_row[i] = xs + column * (tiles * 128 + 16) + (lane >> 3) * 16;
      }

      constexpr int kSums = kDigits == 1 ? 4 : 2;
      Sum acc[kR][kNT][kSums] = {};
      int unit = first_unit, tile = first_tile, segment = 0;
      bool from_start = tile == 0;
      auto flush = [&](bool to_end) {
        const int to_slot = warp * a.segments + segment;
        Sum* to = slots + to_slot * tokens * kR * kS8SlotStride;
#pragma unroll
        for (int i = 0; i < kNT; ++i) {
#pragma unroll
          for (int c = 0; c < kSums; ++c) {
            const int h = kDigits == 1 ? c >> 1 : c;
            const int row = (lane >> 2) + h * 8;
            int m = i * 8 + (lane & 3) * 2 + (c & 1);
            if (kDigits > 1) m = i * 2 + ((lane & 3) >> 1);
#pragma unroll
            for (int r = 0; r < kR; ++r) {
              Sum v = acc[r][i][c];
              acc[r][i][c] = 0;
              if constexpr (kRow) {
                if (h) v >>= 2;
              } else {
                if (h) v *= 0.25f;
              }
              if constexpr (kDigits > 1) {  // two digits each of two lanes
                const float low = __shfl_down_sync(~0u, v, 1);
                v = fmaf(v, 65536.0f, low);
                if (lane & 1) continue;
              }
              if (m < tokens) to[(m * kR + r) * kS8SlotStride + row] = v;
            }
          }
        }
        if (lane == 0) {
          if (from_start) {
            runs[unit].x = uint16_t(to_slot);
            runs[unit].y = uint16_t(warp);
          }
          if (to_end) runs[unit].z = uint16_t(warp);
        }
        ++segment;
      };

      // Adds k tile d of a granule.
      auto multiply = [&](int d, uint32_t granule) {
        uint4 words[kR];
        int part_sum[kR][kNT][4];  // of a block; with kRow, acc is that
#pragma unroll
        for (int r = 0; r < kR; ++r) {
          words[r] =
              load_shared_16(granule + (r * kTiles + d) * 512 + lane * 16);
        }
        auto start_block = [&](int entry) {
#pragma unroll
          for (int i = 0; i < kNT; ++i) {
            const int4 v = offsets[(entry * kNT + i) * 4 + (lane & 3)];
#pragma unroll
            for (int r = 0; r < kR; ++r) {
              part_sum[r][i][0] = v.x;
              part_sum[r][i][1] = v.y;
              part_sum[r][i][2] = v.z;
              part_sum[r][i][3] = v.w;
            }
          }
        };
        auto end_block = [&](int r, int h, float s) {
          if constexpr (!kRow) {
#pragma unroll
            for (int i = 0; i < kNT; ++i) {
              const int p = part_sum[r][i][2 * h];
              const int q = part_sum[r][i][2 * h + 1];
              if constexpr (kDigits > 1) {
                acc[r][i][h] = fmaf(s, float(p * 256 + q), acc[r][i][h]);
              } else {
                float (&to)[kSums] = acc[r][i];
                to[2 * h] = fmaf(s, float(p), to[2 * h]);
                to[2 * h + 1] = fmaf(s, float(q), to[2 * h + 1]);
              }
            }
          }
        };
        if (kTile) start_block(tile + d);
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          uint32_t b[kNT][4];
#pragma unroll
          for (int i = 0; i < kNT; ++i) {
            ldmatrix_x4(b[i], x_row[i] + (tile + d) * 128 + pair * 64);
          }
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            if (kGeneral) start_block((tile + d) * 4 + pair * 2 + half);
#pragma unroll
            for (int r = 0; r < kR; ++r) {
              const uint4& w = words[r];
              uint32_t codes[4];
              decode_s8(
                  pair == 0 ? (half == 0 ? w.x : w.y) : (half == 0 ? w.z : w.w),
                  codes);
#pragma unroll
              for (int i = 0; i < kNT; ++i) {
                if constexpr (kRow) {
                  mma_s8(acc[r][i], codes, b[i][2 * half], b[i][2 * half + 1]);
                } else {
                  mma_s8(part_sum[r][i], codes, b[i][2 * half],
                         b[i][2 * half + 1]);
                }
              }
              if constexpr (kGeneral) {
                const int q = (c0 + tile + d) * 4 + pair * 2 + half;
                const int64_t block = min(__umulhi(2 * q + 1, a.block_magic),
                                          uint32_t(a.num_blocks - 1));
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                  const int row = (u0 + unit) * kRows + r * 16 + h * 8;
                  end_block(r, h,
                            load_as_float(a.scale, a.scale_dtype,
                                          block * a.N_pad + row + (lane >> 2)));
                }
              }
            }
          }
        }
        if constexpr (kTile) {
#pragma unroll
          for (int r = 0; r < kR; ++r) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const uint32_t raw = load_shared_u16(
                  granule + S::kWordBytes +
                  (d * kRows + r * 16 + h * 8 + (lane >> 2)) * 2);
              end_block(r, h, __half2float(__ushort_as_half(uint16_t(raw))));
            }
          }
        }
      };

#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        prefetch();
        const int here = tiles - tile;
        if (here > 0) {
          const uint32_t granule = ring + slot * S::kGranuleBytes;
          ring_wait<kStages - 1>(barriers + slot * 8, parity);
          if (here >= kTiles) {
#pragma unroll
            for (int d = 0; d < kTiles; ++d) multiply(d, granule);
          } else {
#pragma unroll 1
            for (int d = 0; d < here; ++d) multiply(d, granule);
          }
          if (++slot == kStages) {
            slot = 0;
            parity ^= 1;
          }
        }
        tile += kTiles;
        if (tile >= per_unit * kTiles) {
          flush(true);
          tile = 0;
          from_start = true;
          ++unit;
        }
        __syncwarp();  // the granule has been read: its place may be filled
      }
      if (tile != 0 && count > 0) flush(false);
      __syncthreads();

      // Add up what the warps left.
      const int slot_size = tokens * kR * kS8SlotStride;
      for (int i = threadIdx.x; i < outputs; i += S::kThreads) {
        const int m = token_of(i), row = row_of(i);
        if (m >= tokens) continue;
        const ushort4 run = runs[unit_of(i)];
        const Sum* from =
            slots + (m * kR + row / 16) * kS8SlotStride + row % 16;
        Sum v = from[run.x * slot_size];
        for (int w = run.y + 1; w <= run.z; ++w) {
          v += from[w * a.segments * slot_size];
        }
        if constexpr (kDigits > 1) {
          v = v * (1.0f / 32768.0f) * table[m].factor;
        } else if constexpr (kInside && kRow) {
          v -= table[m].sum;
        }
        if (direct) {
          store(i, v);
        } else {
          sums[i] = c0 == k0 ? v : sums[i] + v;
        }
      }
    }
    if (direct) continue;

    // Each CTA of the cluster finishes its share of the outputs.
    if (a.split > 1) {
      cluster_sync();
    } else {
      __syncthreads();
    }
    for (int i = rank * S::kThreads + threadIdx.x; i < outputs;
         i += a.split * S::kThreads) {
      if (token_of(i) >= tokens) continue;
      Sum v = 0;
      if (a.split > 1) {
        for (int r = 0; r < a.split; ++r) {
          const float raw = load_cluster(smem_address(sums + i), r);
          v += reinterpret_cast<const Sum&>(raw);
        }
      } else {
        v = sums[i];
      }
      store(i, v);
    }
    if (a.split > 1) cluster_sync();  // shared memory outlives its readers
  }
}

}  // namespace vllm::ternary
