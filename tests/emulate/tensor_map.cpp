// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
#include "cuda_fp16.h"
#include "emulator.h"

namespace emu {
namespace {

const float* make_half_values() {
  static float values[65536];
  for (int i = 0; i < 65536; ++i) {
    const int exponent = i >> 10 & 31, mantissa = i & 1023;
    float v = exponent == 0 ? std::ldexp(float(mantissa), -24)
                            : std::ldexp(float(1024 + mantissa), exponent - 25);
    if (exponent == 31) v = mantissa ? NAN : INFINITY;
    values[i] = i >> 15 ? -v : v;
  }
  return values;
}

}  // namespace

const float* const half_values = make_half_values();

}  // namespace emu

// The driver's conditions on 2-D maps without interleave.
CUresult cuTensorMapEncodeTiled(
    CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* base,
    const cuuint64_t* dims, const cuuint64_t* strides, const cuuint32_t* box,
    const cuuint32_t* steps, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
    CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  const int bytes = type == CU_TENSOR_MAP_DATA_TYPE_UINT8   ? 1
                    : type == CU_TENSOR_MAP_DATA_TYPE_INT32 ? 4
                                                            : 2;
  const bool swizzled = swizzle == CU_TENSOR_MAP_SWIZZLE_128B;
  if (rank != 2 || uintptr_t(base) % 16 || strides[0] % 16 ||
      strides[0] >= uint64_t(1) << 40 || steps[0] != 1 || steps[1] != 1 ||
      box[0] * bytes % 16 || (swizzled && box[0] * bytes > 128)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  for (int i = 0; i < 2; ++i) {
    if (dims[i] < 1 || dims[i] > uint64_t(1) << 32 || box[i] < 1 ||
        box[i] > 256) {
      return CUDA_ERROR_INVALID_VALUE;
    }
  }
  *map = {static_cast<uint8_t*>(base),
          dims[1],
          dims[0],
          strides[0],
          box[1],
          box[0],
          bytes,
          swizzled};
  return CUDA_SUCCESS;
}
