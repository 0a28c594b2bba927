// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
#include "device_info.h"

#include "cuda_common.h"

namespace vllm::ternary {

const DeviceInfo& device_info(int device) {
  return kept_per_device<DeviceInfo>(device, [device] {
    int major = 0, minor = 0;
    DeviceInfo info{};
    auto read = [&](int* value, cudaDeviceAttr what) {
      check_cuda(cudaDeviceGetAttribute(value, what, device), "device_info");
    };
    read(&major, cudaDevAttrComputeCapabilityMajor);
    read(&minor, cudaDevAttrComputeCapabilityMinor);
    read(&info.processors, cudaDevAttrMultiProcessorCount);
    read(&info.shared_memory, cudaDevAttrMaxSharedMemoryPerBlockOptin);
    info.capability = major * 10 + minor;
    return info;
  });
}

}  // namespace vllm::ternary
