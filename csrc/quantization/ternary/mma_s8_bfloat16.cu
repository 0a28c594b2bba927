// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
#include "mma_s8_launch.cuh"

namespace vllm::ternary {

void mma_s8_digits_bfloat16(const S8Args& args, const MmaConfig& config) {
  launch_s8_digits<__nv_bfloat16>(args, config);
}

void mma_s8_int8_bfloat16(const S8Args& args, const MmaConfig& config,
                          S8Scale scale) {
  if (scale == S8Scale::kRow) {
    if (args.xq) {
      launch_s8_int8<__nv_bfloat16, S8Scale::kRow, S8Input::kBytes>(args,
                                                                    config);
    } else {
      launch_s8_int8<__nv_bfloat16, S8Scale::kRow, S8Input::kInside>(args,
                                                                     config);
    }
  } else if (scale == S8Scale::kTile) {
    if (args.xq) {
      launch_s8_int8<__nv_bfloat16, S8Scale::kTile, S8Input::kBytes>(args,
                                                                     config);
    } else {
      launch_s8_int8<__nv_bfloat16, S8Scale::kTile, S8Input::kInside>(args,
                                                                      config);
    }
  } else {
    launch_s8_int8<__nv_bfloat16, S8Scale::kGeneral, S8Input::kBytes>(args,
                                                                      config);
  }
}

}  // namespace vllm::ternary
