// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
#include "device_info.h"

#include <mutex>

#include "cuda_common.h"

namespace vllm::ternary {

const DeviceInfo& device_info(int device) {
  static DeviceInfo infos[kMaxDevices];
  static bool known[kMaxDevices];
  static std::mutex mutex;  // std::call_once would need glibc 2.34
  if (device < 0 || device >= kMaxDevices) {
    throw std::runtime_error("device index " + std::to_string(device) +
                             " is out of range");
  }
  const std::lock_guard<std::mutex> lock(mutex);
  if (!known[device]) {
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
    known[device] = true;
  }
  return infos[device];
}

}  // namespace vllm::ternary
