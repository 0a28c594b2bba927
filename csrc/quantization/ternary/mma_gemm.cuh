// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// y = x W^T with the weights as the 16-row operand of mma.m16n8k16.
//
// A CTA owns a run of rows and a run of k tiles (128 weights along K). Its part
// of x sits in shared memory. The unit of work is a granule: kTiles successive
// k tiles of 16 * kR rows. Granules are dealt to the warps as equal contiguous
// runs; each warp streams its run through a ring of kStages granules of its own
// (asynchronous copies, begun before the kernel ahead in the stream has ended),
// so no warp waits for another. What a warp summed for some rows it leaves in
// shared memory, and one pass at the end adds these up in a fixed order. With
// split > 1 the CTAs of a cluster share the rows, cut K among them and exchange
// sums through distributed shared memory.
#pragma once

#include <type_traits>

#include "mma_cut.h"
#include "mma_ring.cuh"

namespace vllm::ternary {

struct MmaArgs : MmaCut {
  GemmArgs g;
  RingSource ring;       // fast: words and scales
  uint32_t block_magic;  // general: ceil(2^31 / (block_size / 32))
};

constexpr int kSlotStride =
    20;  // floats per token of a slot: no bank conflicts

template <int kMT_, int kR_, int kWarps_, int kTiles_, int kStages_,
          bool kGeneral_, int kMinBlocks_>
struct MmaShape {
  static constexpr int kMT = kMT_;  // token tiles of 8
  static constexpr int kR = kR_;    // row tiles of 16 in a row unit
  static constexpr int kWarps = kWarps_;
  static constexpr int kTiles = kTiles_;    // k tiles of a granule
  static constexpr int kStages = kStages_;  // granules in a warp's ring
  // General: scales of any type, blocks of any multiple of 32, zero points.
  // Otherwise: float16 scales, one for a whole k tile, no zero points.
  static constexpr bool kGeneral = kGeneral_;
  static constexpr int kMinBlocks = kMinBlocks_;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kRows = 16 * kR;
  static constexpr bool kScales = !kGeneral;  // in the ring's own form
  static constexpr int kScaleBlocks = kTiles * (kGeneral ? 4 : 1);
  static constexpr int kScaleBytes = kGeneral ? 64 : 32;  // of 16 rows, at most
  static constexpr int kWordBytes = kTiles * kR * 512;
  static constexpr int kGranuleBytes =
      kWordBytes + kScaleBlocks * kR * kScaleBytes;
  // The sums of x that take the codes' offset off again: added up while x is
  // staged (few tokens), or by the tensor cores afterwards.
  static constexpr bool kSumInStaging = kMT == 1;
};

// Where things lie in shared memory, in bytes from its start.
struct MmaShared {
  int ring, barriers, slots, runs, offsets, sums, total;
};

template <typename S>
__host__ __device__ __forceinline__ MmaShared mma_shared(const MmaArgs& a,
                                                         int tokens) {
  MmaShared s;
  s.ring = (tokens * (a.chunk * 256 + 16) + 127) / 128 * 128;
  s.barriers = s.ring + S::kWarps * S::kStages * S::kGranuleBytes;
  s.slots = s.barriers + S::kWarps * S::kStages * 8;
  s.runs = s.slots + S::kWarps * a.segments * tokens * S::kR * kSlotStride * 4;
  s.offsets = s.runs + a.units * 8 + (a.units & 1) * 8;
  s.sums = s.offsets + a.chunk * (S::kGeneral ? 4 : 1) * S::kMT * 64;
  const bool sums = a.split > 1 || a.chunk < a.k_tiles + (a.k_rest > 0);
  s.total = s.sums + (sums ? (a.units * S::kRows * 4) << a.tokens_log2 : 0);
  return s;
}

// The scale block of the `q`-th run of 32 weights: q * 32 / block_size, with
// the padding past K counted to the last block.
__device__ __forceinline__ uint32_t block_of(const MmaArgs& a, int q) {
  return min(__umulhi(2 * q + 1, a.block_magic), uint32_t(a.g.num_blocks - 1));
}

// Begins the copies of a general granule: words as in the ring, then scales
// [32 weights][row tile][16] of any type.
template <typename S>
__device__ __forceinline__ void copy_general(uint32_t dst, const MmaArgs& a,
                                             int row, int kt, int tiles,
                                             int lane) {
  const int k_tiles = a.g.K_pad >> 7;
  const uint4* words = reinterpret_cast<const uint4*>(a.g.weight) +
                       (int64_t(row >> 4) * k_tiles + kt) * 32 + lane;
#pragma unroll
  for (int d = 0; d < S::kTiles; ++d) {
    if (d < tiles) {
#pragma unroll
      for (int r = 0; r < S::kR; ++r) {
        cp_async_16(dst + (r * S::kTiles + d) * 512 + lane * 16,
                    words + (r * k_tiles + d) * 32);
      }
    }
  }
  dst += S::kWordBytes;
  const int wide = a.g.scale_dtype == DType::kFloat;
  const int pieces_log2 = 1 + wide;  // of 16 bytes, per 16 rows
  for (int i = lane; i < (S::kScaleBlocks * S::kR) << pieces_log2; i += 32) {
    const int qr = i >> pieces_log2, part = i & ((1 << pieces_log2) - 1);
    const int q = qr / S::kR, r = qr % S::kR;
    const uint32_t at = block_of(a, kt * 4 + q) * a.g.N_pad + row + r * 16;
    cp_async_16(dst + qr * S::kScaleBytes + part * 16,
                static_cast<const uint8_t*>(a.g.scale) +
                    (int64_t(at) << (1 + wide)) + part * 16);
  }
}

// The scale of one row from a granule in shared memory.
template <typename S>
__device__ __forceinline__ float granule_scale(uint32_t scales, int q, int r,
                                               int row, DType dtype) {
  const uint32_t at = scales + (q * S::kR + r) * S::kScaleBytes;
  if (S::kGeneral) {
    if (dtype == DType::kFloat) {
      return __uint_as_float(load_shared_u32(at + row * 4));
    }
    const uint32_t raw = load_shared_u16(at + row * 2);
    if (dtype == DType::kBFloat16) return __uint_as_float(raw << 16);
    return __half2float(__ushort_as_half(uint16_t(raw)));
  }
  return __half2float(
      __ushort_as_half(uint16_t(load_shared_u16(at + row * 2))));
}

// The sum of eight values of x.
template <typename T>
__device__ __forceinline__ float sum_of_eight(const uint4& v) {
  using T2 =
      std::conditional_t<std::is_same_v<T, half>, __half2, __nv_bfloat162>;
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const T2 pair = reinterpret_cast<const T2&>(words[i]);
    sum += to_float(pair.x) + to_float(pair.y);
  }
  return sum;
}

// Copies columns [first, first + 128 * tiles) of `tokens` rows of x into shared
// memory, zero past K, and where S asks for it fills the table of offsets (see
// fill_offsets). Several loads of a thread are under way at once.
template <typename T, typename S>
__device__ __forceinline__ void stage_x(uint8_t* xs, float* offsets,
                                        const GemmArgs& g, int first_token,
                                        int tokens, int first, int tiles) {
  constexpr int kBatch = 8;
  const int pieces = tiles * 16;  // of 8 values: half a warp has a k tile
  const int pitch = tiles * 256 + 16;
  const int m0 = threadIdx.x / unsigned(pieces);
  const int m_step = max(S::kThreads / pieces, 1);
  const uint32_t half_warp = 0xFFFFu << (threadIdx.x & 16);
  if (m0 >= m_step) return;  // the odd threads out
  for (int p = threadIdx.x - m0 * pieces; p < pieces; p += S::kThreads) {
    const int k = first + p * 8;
    const T* from =
        static_cast<const T*>(g.x) + int64_t(first_token) * g.ldx + k;
    for (int m = m0; m < tokens; m += kBatch * m_step) {
      uint4 v[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int row = m + i * m_step;
        v[i] = make_uint4(0, 0, 0, 0);
        if (row < tokens) {
          if (k + 8 <= g.K) {
            v[i] = *reinterpret_cast<const uint4*>(from + row * g.ldx);
          } else {
            uint32_t w[4] = {};
            const uint16_t* tail =
                reinterpret_cast<const uint16_t*>(from + row * g.ldx);
#pragma unroll
            for (int c = 0; c < 8; ++c) {
              if (k + c < g.K) w[c / 2] |= uint32_t(tail[c]) << (16 * (c & 1));
            }
            v[i] = make_uint4(w[0], w[1], w[2], w[3]);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int row = m + i * m_step;
        if (row >= tokens) break;  // alike in all threads of a half warp
        *reinterpret_cast<uint4*>(xs + row * pitch + p * 16) = v[i];
        if (S::kSumInStaging) {
          constexpr int kShare = S::kGeneral ? 4 : 16;  // pieces under one sum
          float sum = sum_of_eight<T>(v[i]);
#pragma unroll
          for (int d = 1; d < kShare; d *= 2) {
            sum += __shfl_xor_sync(half_warp, sum, d);
          }
          if (p % kShare == 0) {
            float* to = offsets + (p / kShare * 4 + row / 2) * 4 + (row & 1);
            to[0] = -Mma<T>::kEvenValue * sum;
            to[2] = -Mma<T>::kOddValue * sum;
          }
        }
      }
    }
  }
}

// The offsets' products, negated, for every k tile (general: every 32 weights)
// and token tile: [tile][token tile][lane % 4] = rows 0..7 and 8..15 of two
// tokens each.
template <typename T, typename S>
__device__ __forceinline__ void fill_offsets(float4* offsets, uint32_t xs,
                                             int tiles, int tokens, int warp,
                                             int lane) {
  constexpr uint32_t even = Mma<T>::kEven, odd = Mma<T>::kOdd;
  const uint32_t a[4] = {even, odd, even, odd};
#pragma unroll 2
  for (int t = warp; t < tiles * S::kMT; t += S::kWarps) {
    const int kt = t / S::kMT, i = t % S::kMT;
    const int m = min(i * 8 + (lane & 7), tokens - 1);
    const uint32_t row = xs + m * (tiles * 256 + 16) + (lane >> 3) * 16;
    float part[4][4] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t b[4];
      ldmatrix_x4(b, row + kt * 256 + j * 64);
      Mma<T>::mma(part[j], a, b[0], b[1]);
      Mma<T>::mma(part[j], a, b[2], b[3]);
    }
    float4 sum = {};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      sum.x -= part[j][0];
      sum.y -= part[j][1];
      sum.z -= part[j][2];
      sum.w -= part[j][3];
      if (S::kGeneral) {
        if (lane < 4) offsets[((kt * 4 + j) * S::kMT + i) * 4 + lane] = sum;
        sum = {};
      }
    }
    if (!S::kGeneral && lane < 4) offsets[(kt * S::kMT + i) * 4 + lane] = sum;
  }
}

template <typename T, typename S>
__global__ void __launch_bounds__(S::kThreads, S::kMinBlocks)
    mma_gemm_kernel(const __grid_constant__ MmaArgs a) {
  constexpr int kMT = S::kMT, kR = S::kR, kWarps = S::kWarps;
  constexpr int kTiles = S::kTiles, kStages = S::kStages, kRows = S::kRows;
  constexpr bool kGeneral = S::kGeneral;
  extern __shared__ __align__(128) uint8_t smem[];
  const GemmArgs& g = a.g;
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);  // uniform
  const int lane = threadIdx.x & 31;
  const int first_token = blockIdx.z * kMT * 8;
  const int tokens = min(kMT * 8, g.M - first_token);
  const int group = blockIdx.y, rank = blockIdx.x;
  const int u0 = group * a.group_units + min(group, a.group_rest);
  const int units = a.group_units + (group < a.group_rest);
  const int k0 = rank * a.k_tiles + min(rank, a.k_rest);
  const int k1 = k0 + a.k_tiles + (rank < a.k_rest);

  const MmaShared at = mma_shared<S>(a, min(kMT * 8, g.M));
  const uint32_t xs = smem_address(smem);
  const uint32_t ring = xs + at.ring + warp * kStages * S::kGranuleBytes;
  const uint32_t barriers = xs + at.barriers + warp * kStages * 8;
  float* const slots = reinterpret_cast<float*>(smem + at.slots);
  // Of each row unit: the slot of its first warp, that warp, and the last warp.
  ushort4* const runs = reinterpret_cast<ushort4*>(smem + at.runs);
  float4* const offsets = reinterpret_cast<float4*>(smem + at.offsets);
  float* const sums = reinterpret_cast<float*>(smem + at.sums);
  const bool direct = a.split == 1 && a.chunk >= k1 - k0;  // no sums needed

  const int outputs = (units * kRows) << a.tokens_log2;
  // Output i of a CTA is a row, a token and a row unit, rows fastest.
  auto row_of = [&](int i) { return i % kRows; };
  auto token_of = [&](int i) {
    return (i / kRows) & ((1 << a.tokens_log2) - 1);
  };
  auto unit_of = [&](int i) { return (i / kRows) >> a.tokens_log2; };
  auto store = [&](int i, float v) {
    const int n = (u0 + unit_of(i)) * kRows + row_of(i);
    if (n < g.N) {
      if (g.bias) v += to_float(static_cast<const T*>(g.bias)[n]);
      static_cast<T*>(g.y)[int64_t(first_token + token_of(i)) * g.ldy + n] =
          from_float<T>(v);
    }
  };

  pdl_launch_dependents();
  if constexpr (!kGeneral) ring_init<S>(barriers, lane);
  int fill_slot = 0, slot = 0;
  uint32_t parity = 0;
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
          const uint32_t dst = ring + fill_slot * S::kGranuleBytes;
          const int here = min(kTiles, tiles - next_tile);
          if constexpr (kGeneral) {
            copy_general<S>(dst, a, next_row, c0 + next_tile, here, lane);
          } else {
            ring_fill<S>(dst, barriers + fill_slot * 8, a.ring, next_row,
                         c0 + next_tile, here, lane);
          }
          if (++fill_slot == kStages) fill_slot = 0;
        }
        next_tile += kTiles;
        if (next_tile >= per_unit * kTiles) {
          next_tile = 0;
          next_row += kRows;
        }
      }
      if constexpr (kGeneral) {
        cp_async_commit();
      } else {
        ring_commit();
      }
    };
#pragma unroll 1
    for (int p = 0; p < kStages - 1; ++p) prefetch();

    if (c0 == k0) {
      pdl_wait();
    } else {
      __syncthreads();  // the last chunk has been read and added up
    }
    stage_x<T, S>(smem, reinterpret_cast<float*>(offsets), g, first_token,
                  tokens, c0 * 128, tiles);
    __syncthreads();
    if (!S::kSumInStaging) {
      fill_offsets<T, S>(offsets, xs, tiles, tokens, warp, lane);
      __syncthreads();
    }

    // ldmatrix: lane gives the address of row lane % 8 of matrix lane / 8.
    // Rows past the last token repeat it; their columns are never stored.
    uint32_t x_row[kMT];
#pragma unroll
    for (int i = 0; i < kMT; ++i) {
      const int m = min(i * 8 + (lane & 7), tokens - 1);
      x_row[i] = xs + m * (tiles * 256 + 16) + (lane >> 3) * 16;
    }

    float acc[kR][kMT][4] = {};
    int unit = first_unit, tile = first_tile, segment = 0;
    bool from_start = tile == 0;
    auto flush = [&](bool to_end) {
      const int to_slot = warp * a.segments + segment;
      float* to = slots + to_slot * tokens * kR * kSlotStride;
#pragma unroll
      for (int i = 0; i < kMT; ++i) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int m = i * 8 + (lane & 3) * 2 + (c & 1);
          const int row = (lane >> 2) + (c >> 1) * 8;
          if (m < tokens) {
#pragma unroll
            for (int r = 0; r < kR; ++r) {
              to[(m * kR + r) * kSlotStride + row] = acc[r][i][c];
            }
          }
#pragma unroll
          for (int r = 0; r < kR; ++r) acc[r][i][c] = 0.0f;
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

    // Adds k tiles [d0, d0 + n) of a granule.
    auto multiply = [&](auto n, int d0, uint32_t granule) {
      constexpr int kN = decltype(n)::value;
      constexpr int kChains = kMT == 1 && kN == 1 ? 2 : 1;
      float part[kN][kChains][kR][kMT][4];
      uint4 words[kN][kR];
#pragma unroll
      for (int d = 0; d < kN; ++d) {
#pragma unroll
        for (int r = 0; r < kR; ++r) {
          words[d][r] =
              load_shared_16(granule + (r * kTiles + d0 + d) * 512 + lane * 16);
        }
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int d = 0; d < kN; ++d) {
          uint32_t b[kMT][4];
#pragma unroll
          for (int i = 0; i < kMT; ++i) {
            ldmatrix_x4(b[i], x_row[i] + (tile + d0 + d) * 256 + j * 64);
          }
          const int entry = kGeneral ? (tile + d0 + d) * 4 + j : tile + d0 + d;
          if (kGeneral || j == 0) {
#pragma unroll
            for (int i = 0; i < kMT; ++i) {
              const float4 v = offsets[(entry * kMT + i) * 4 + (lane & 3)];
#pragma unroll
              for (int r = 0; r < kR; ++r) {
                part[d][0][r][i][0] = v.x;
                part[d][0][r][i][1] = v.y;
                part[d][0][r][i][2] = v.z;
                part[d][0][r][i][3] = v.w;
                if (kChains == 2) {
#pragma unroll
                  for (int c = 0; c < 4; ++c)
                    part[d][kChains - 1][r][i][c] = 0.0f;
                }
              }
            }
          }
#pragma unroll
          for (int r = 0; r < kR; ++r) {
            const uint32_t word = j == 0   ? words[d][r].x
                                  : j == 1 ? words[d][r].y
                                  : j == 2 ? words[d][r].z
                                           : words[d][r].w;
            uint32_t w[2][4];
            Mma<T>::decode(word, w);
#pragma unroll
            for (int s = 0; s < 2; ++s) {
#pragma unroll
              for (int i = 0; i < kMT; ++i) {
                Mma<T>::mma(part[d][s % kChains][r][i], w[s], b[i][2 * s],
                            b[i][2 * s + 1]);
              }
            }
          }
          if (!kGeneral && j != 3) continue;
          const int q = kGeneral ? (d0 + d) * 4 + j : d0 + d;
#pragma unroll
          for (int r = 0; r < kR; ++r) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const int row = h * 8 + (lane >> 2);
              const float s = granule_scale<S>(granule + S::kWordBytes, q, r,
                                               row, g.scale_dtype);
              float zp = 0.0f;
              if (kGeneral && g.zero_point) {
                const int64_t block = block_of(a, (c0 + tile) * 4 + q);
                zp = g.zero_point[block * g.N_pad + (u0 + unit) * kRows +
                                  r * 16 + row];
                zp *= 1.0f / Mma<T>::kEvenValue;
              }
#pragma unroll
              for (int i = 0; i < kMT; ++i) {
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                  float v = part[d][0][r][i][h * 2 + c];
                  if (kChains == 2) v += part[d][kChains - 1][r][i][h * 2 + c];
                  if (kGeneral && g.zero_point) {
                    // -kEven * sum(x) is at hand: add zp / kEven of it.
                    const float4& sum =
                        offsets[(entry * kMT + i) * 4 + (lane & 3)];
                    v = fmaf(zp, c ? sum.y : sum.x, v);
                  }
                  acc[r][i][h * 2 + c] = fmaf(s, v, acc[r][i][h * 2 + c]);
                }
              }
            }
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
        if constexpr (kGeneral) {
          cp_async_wait<kStages - 1>();
          __syncwarp();
        } else {
          ring_wait<kStages - 1>(barriers + slot * 8, parity);
        }
        if (here >= kTiles) {
          constexpr int kStep = kTiles % 2 ? 1 : 2;
#pragma unroll
          for (int d = 0; d < kTiles; d += kStep) {
            multiply(std::integral_constant<int, kStep>{}, d, granule);
          }
        } else if constexpr (kTiles > 1) {
#pragma unroll 1
          for (int d = 0; d < here; ++d) {
            multiply(std::integral_constant<int, 1>{}, d, granule);
          }
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
    const int slot_size = tokens * kR * kSlotStride;
    for (int i = threadIdx.x; i < outputs; i += S::kThreads) {
      const int m = token_of(i), row = row_of(i);
      if (m >= tokens) continue;
      const ushort4 run = runs[unit_of(i)];
      const float* from = slots + (m * kR + row / 16) * kSlotStride + row % 16;
      float v = from[run.x * slot_size];
      for (int w = run.y + 1; w <= run.z; ++w) {
        v += from[w * a.segments * slot_size];
      }
      if (direct) {
        store(i, v);
      } else {
        sums[i] = c0 == k0 ? v : sums[i] + v;
      }
    }
  }
  if (direct) return;

  // Each CTA of the cluster finishes its share of the outputs.
  if (a.split > 1) cluster_sync();
  for (int i = rank * S::kThreads + threadIdx.x; i < outputs;
       i += a.split * S::kThreads) {
    if (token_of(i) >= tokens) continue;
    float v = 0.0f;
    if (a.split > 1) {
      for (int r = 0; r < a.split; ++r) {
        v += load_cluster(smem_address(sums + i), r);
      }
    } else {
      v = sums[i];
    }
    store(i, v);
  }
  if (a.split > 1) cluster_sync();  // shared memory outlives its readers
}

}  // namespace vllm::ternary
