// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The conditions of the CUDA driver API's documentation on 2-D maps without
// interleave. tests/unit/cuda_plans compiles this, too.
#include "cuda.h"

CUresult cuTensorMapEncodeTiled(
    CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* base,
    const cuuint64_t* dims, const cuuint64_t* strides, const cuuint32_t* box,
    const cuuint32_t* steps, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
    CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  const int bytes = type == CU_TENSOR_MAP_DATA_TYPE_UINT8   ? 1
                    : type == CU_TENSOR_MAP_DATA_TYPE_INT32 ? 4
                                                            : 2;
  const bool swizzled = swizzle == CU_TENSOR_MAP_SWIZZLE_128B;
  bool ok = rank == 2 && uintptr_t(base) % 16 == 0;
  for (int i = 0; i < 2; ++i) {
    ok = ok && dims[i] >= 1 && dims[i] <= (uint64_t(1) << 32) && box[i] >= 1 &&
         box[i] <= 256 && steps[i] == 1;
  }
  const uint64_t inner = uint64_t(box[0]) * bytes;
  ok = ok && strides[0] % 16 == 0 && strides[0] < (uint64_t(1) << 40) &&
       strides[0] >= dims[0] * bytes && inner % 16 == 0 &&
       (!swizzled || inner <= 128);
  if (!ok) return CUDA_ERROR_INVALID_VALUE;
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
