# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
#
# The extension vllm._ternary_C: ternary kernels against torch's stable ABI, for
# the CPU and the CUDA build. Included where define_extension_target is known;
# sources are relative to the folder of vLLM's CMakeLists.txt.

file(GLOB TERNARY_SRC
  RELATIVE ${CMAKE_SOURCE_DIR}
  CONFIGURE_DEPENDS
  "${CMAKE_SOURCE_DIR}/csrc/cpu/ternary/*.cpp")
list(APPEND TERNARY_SRC "csrc/quantization/ternary/torch_bindings.cpp")
set(TERNARY_LANGUAGE CXX)

if(VLLM_GPU_LANG STREQUAL "CUDA")
  set(TERNARY_LANGUAGE CUDA)
  file(GLOB TERNARY_CUDA_SRC
    RELATIVE ${CMAKE_SOURCE_DIR}
    CONFIGURE_DEPENDS
    "${CMAKE_SOURCE_DIR}/csrc/quantization/ternary/*.cu")
  # Kernels of one architecture are in files of its name; their host functions
  # check the device, so these files are compiled whatever else is asked for.
  set(TERNARY_SM90_SRC ${TERNARY_CUDA_SRC})
  list(FILTER TERNARY_SM90_SRC INCLUDE REGEX "/sm90_[^/]*$")
  list(FILTER TERNARY_CUDA_SRC EXCLUDE REGEX "/sm90_[^/]*$")

  cuda_archs_loose_intersection(TERNARY_ARCHS
    "8.0;8.6;8.7;8.9;9.0a;10.0;11.0;12.0" "${CUDA_ARCHS}")
  if(NOT TERNARY_ARCHS)
    message(FATAL_ERROR
      "The ternary kernels need CUDA architecture 8.0 or newer, not ${CUDA_ARCHS}")
  endif()
  set_gencode_flags_for_srcs(
    SRCS "${TERNARY_CUDA_SRC}"
    CUDA_ARCHS "${TERNARY_ARCHS}")
  if(TERNARY_SM90_SRC)
    set_gencode_flags_for_srcs(
      SRCS "${TERNARY_SM90_SRC}"
      CUDA_ARCHS "9.0a")
  endif()
  list(APPEND TERNARY_SRC ${TERNARY_CUDA_SRC} ${TERNARY_SM90_SRC})
  message(STATUS "Building ternary kernels for archs: ${TERNARY_ARCHS}")
endif()

define_extension_target(
  _ternary_C
  DESTINATION vllm
  LANGUAGE ${TERNARY_LANGUAGE}
  SOURCES ${TERNARY_SRC}
  COMPILE_FLAGS ${VLLM_GPU_FLAGS}
  ARCHITECTURES ${VLLM_GPU_ARCHES}
  USE_SABI 3
  WITH_SOABI)

# The stable ABI of torch 2.11; torch is named for the linker although no symbol
# says that it is needed, since loading the extension registers its ops.
target_compile_definitions(_ternary_C PRIVATE
  TORCH_TARGET_VERSION=0x020B000000000000ULL)
target_compile_options(_ternary_C PRIVATE $<$<NOT:$<CONFIG:Debug>>:-O3>)
target_link_options(_ternary_C PRIVATE "LINKER:--no-as-needed")
if(TERNARY_LANGUAGE STREQUAL "CUDA")
  target_compile_definitions(_ternary_C PRIVATE USE_CUDA)
endif()
