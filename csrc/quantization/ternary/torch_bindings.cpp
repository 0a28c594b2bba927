// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Schemas of the ternary ops, and the entry point that makes
// `import vllm._ternary_C` load this library. The implementations register
// themselves: csrc/cpu/ternary/*.cpp for the CPU key and
// csrc/quantization/ternary/*_bindings.cu for the CUDA key.

#include <Python.h>
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_FRAGMENT(_C, ops) {
  // y[M, N] = x[M, K] W^T (+ bias), W[n, k] = scale * (t - zero_point), with
  // W in the device layout of utils/ternary_layout_{cpu,cuda}.py.
  // block_size: weights along K that share a scale; >= size_k: one per row.
  ops.def(
      "ternary_gemm(Tensor x, Tensor weight, Tensor scale, "
      "Tensor? zero_point, Tensor? bias, SymInt size_n, SymInt size_k, "
      "SymInt block_size) -> Tensor");

  // The same with x quantized to 8 bits per token. norm_weight [P, K]: an
  // RMSNorm in front, one weight per part of a fused layer; part_ends int32
  // [P]: the output row at which each part ends.
  ops.def(
      "ternary_gemm_w2a8(Tensor x, Tensor weight, Tensor scale, Tensor? bias, "
      "Tensor? norm_weight, Tensor? part_ends, float norm_eps, "
      "SymInt size_n, SymInt size_k, SymInt block_size) -> Tensor");

  // Rows of W, decoded: [*indices.shape, K] in `dtype`.
  ops.def(
      "ternary_embedding(Tensor indices, Tensor weight, Tensor scale, "
      "Tensor? zero_point, SymInt size_n, SymInt size_k, SymInt block_size, "
      "ScalarType dtype) -> Tensor");
}

PyMODINIT_FUNC PyInit__ternary_C() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT,
                               "_ternary_C",
                               nullptr,
                               0,
                               nullptr,
                               nullptr,
                               nullptr,
                               nullptr,
                               nullptr};
  return PyModule_Create(&module);
}
