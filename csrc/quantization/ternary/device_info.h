// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
#pragma once

namespace vllm::ternary {

constexpr int kMaxDevices = 128;

struct DeviceInfo {
  int capability;     // major * 10 + minor
  int processors;     // multiprocessors
  int shared_memory;  // bytes a CTA may use, opted in
};

// Read once per device and kept. Throws std::runtime_error.
const DeviceInfo& device_info(int device);

}  // namespace vllm::ternary
