// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Which kernel a call takes. The numbers come from docs/kernels_cpu.md.

#pragma once

#include "activation.h"
#include "isa.h"
#include "kernels.h"

namespace vllm::ternary::cpu {

// The form in which a kernel reads x.
enum class Form {
  kRows,   // [size_m][k_pad]: float, bfloat16 or int8
  kTable,  // [size_m][k_pad / 2][16] float
  kTiles,  // AMX tiles, see kernels.h
};

struct Plan {
  Kernel kernel;
  Form form;
  int64_t element_bytes;  // of x in that form
  int64_t planes;         // with kTiles: values whose sum is x
  int64_t token_chunk;    // tokens in one call of the kernel
  const ActivationOps* ops;
};

// x in 16 or 32 bits.
Plan plan_w2a16(Isa isa, Type x_type, int64_t size_m, const Weight& w);

// x in int8.
Plan plan_w2a8(Isa isa, int64_t size_m, const Weight& w);

}  // namespace vllm::ternary::cpu
