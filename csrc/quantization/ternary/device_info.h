// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
#pragma once

#include <mutex>
#include <stdexcept>
#include <string>

namespace vllm::ternary {

constexpr int kMaxDevices = 128;

// What `make` gives for a device, asked for once and kept; every type of `make`
// has values of its own. Throws std::runtime_error for an index out of range.
template <typename T, typename Make>
const T& kept_per_device(int device, Make make) {
  static T values[kMaxDevices];
  static bool known[kMaxDevices];
  static std::mutex mutex;  // std::call_once would need glibc 2.34
  if (device < 0 || device >= kMaxDevices) {
    throw std::runtime_error("device index " + std::to_string(device) +
                             " is out of range");
  }
  const std::lock_guard<std::mutex> lock(mutex);
  if (!known[device]) {
    values[device] = make();
    known[device] = true;
  }
  return values[device];
}

struct DeviceInfo {
  int capability;     // major * 10 + minor
  int processors;     // multiprocessors
  int shared_memory;  // bytes a CTA may use, opted in
};

// Read once per device and kept. Throws std::runtime_error.
const DeviceInfo& device_info(int device);

}  // namespace vllm::ternary
