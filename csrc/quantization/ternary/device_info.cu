// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
#include "device_info.h"

#include <mutex>

#include "cuda_common.h"

namespace vllm::ternary {

const DeviceInfo& device_info(int device) {
  static DeviceInfo infos[kMaxDevices];
  static std::once_flag flags[kMaxDevices];
  if (device < 0 || device >= kMaxDevices) {
    throw std::runtime_error("device index " + std::to_string(device) +
                             " is out of range");
  }
  std::call_once(flags[device], [&] {
    int major = 0, minor = 0;
    DeviceInfo& info = infos[device];
    auto read = [&](int* value, cudaDeviceAttr what) {
      check_cuda(cudaDeviceGetAttribute(value, what, device), "device_info");
    };
    read(&major, cudaDevAttrComputeCapabilityMajor);
    read(&minor, cudaDevAttrComputeCapabilityMinor);
    read(&info.processors, cudaDevAttrMultiProcessorCount);
    read(&info.shared_memory, cudaDevAttrMaxSharedMemoryPerBlockOptin);
    info.capability = major * 10 + minor;
  });
  return infos[device];
}

}  // namespace vllm::ternary
