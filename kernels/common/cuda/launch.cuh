// Helpers of the CUDA launchers: setting the device, launching kernels, and converting CUDA errors to a Status.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <mutex>
#include <vector>

#include "common/status.h"

namespace fasttfm {
namespace cuda {

// Converts the error of a CUDA call to a Status. CUDA also stores the error until cudaGetLastError() is called; without
// that call, the next launch, here or in another library, would report it again.
inline Status status_of(cudaError_t error) {
  if (error == cudaSuccess) return {};
  cudaGetLastError();
  if (error == cudaErrorCooperativeLaunchTooLarge) return {StatusCode::does_not_fit, cudaGetErrorString(error)};
  return {StatusCode::cuda_error, cudaGetErrorString(error)};
}

inline Status count_multiprocessors(int device, int* count) {
  return status_of(cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device));
}

// Looks up a function of the CUDA driver at run time, because the library does not link against the driver. Returns
// null if the driver does not have it.
template <class Function>
Function driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &result);
#else
  const cudaError_t error = cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &result);
#endif
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) function = nullptr;
  return reinterpret_cast<Function>(function);
}

// The calling thread's CUDA context; null if it has none.
inline CUcontext current_context() {
  static const auto get = driver_function<CUresult (*)(CUcontext*)>("cuCtxGetCurrent");
  CUcontext context = nullptr;
  if (get == nullptr || get(&context) != CUDA_SUCCESS) return nullptr;
  return context;
}

// Makes `device` current for the lifetime of the guard. If that fails, status() is not ok, and the launcher returns it
// instead of launching on another device.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) : status_(status_of(cudaGetDevice(&previous_))) {
    if (status_.code != StatusCode::ok) return;
    // A new thread has no context until it calls cudaSetDevice(), even if the device is already current.
    if (previous_ == device && current_context() != nullptr) return;
    status_ = status_of(cudaSetDevice(device));
    changed_ = status_.code == StatusCode::ok && previous_ != device;
  }
  const Status& status() const { return status_; }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
  Status status_;
};

// The largest dynamic shared memory that each kernel has been allowed to use in each context.
struct AllowedMemory {
  struct Entry {
    const void* kernel;
    CUcontext context;
    size_t bytes;
  };
  std::vector<Entry> entries;

  size_t& of(const void* kernel, CUcontext context) {
    for (Entry& entry : entries)
      if (entry.kernel == kernel && entry.context == context) return entry.bytes;
    entries.push_back({kernel, context, 0});
    return entries.back().bytes;
  }
};

// Allows a kernel to use `memory` bytes of dynamic shared memory. The attribute is specific to a context, and setting
// it takes about as long as a launch, so it is set once per kernel and context. A thread looks up what it knows without
// a lock; it must not lower what another thread has set.
inline cudaError_t allow_memory(const void* kernel, size_t memory) {
  if (memory <= 48 * 1024) return cudaSuccess;  // more than this requires the attribute
  thread_local AllowedMemory known;
  static AllowedMemory allowed;
  static std::mutex mutex;
  const CUcontext context = current_context();
  size_t& known_bytes = known.of(kernel, context);
  if (known_bytes >= memory && context != nullptr) return cudaSuccess;
  const std::lock_guard<std::mutex> lock(mutex);
  size_t& allowed_bytes = allowed.of(kernel, context);
  const size_t bytes = std::max(allowed_bytes, memory);
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (error == cudaSuccess) known_bytes = allowed_bytes = bytes;
  return error;
}

// Launches a kernel with `config`. The status is that of this launch, even if an error of another library is pending.
template <class... Parameters, class... Arguments>
Status launch_as(const cudaLaunchConfig_t& config, void (*kernel)(Parameters...), const Arguments&... arguments) {
  const cudaError_t error = allow_memory(reinterpret_cast<const void*>(kernel), config.dynamicSmemBytes);
  if (error != cudaSuccess) return status_of(error);
  return status_of(cudaLaunchKernelEx(&config, kernel, arguments...));
}

// `attribute`: nullptr for none.
inline cudaLaunchConfig_t launch_config(dim3 grid, dim3 block, size_t memory, void* stream,
                                        cudaLaunchAttribute* attribute = nullptr) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = memory;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attribute;
  config.numAttrs = attribute != nullptr ? 1 : 0;
  return config;
}

// Launches a kernel with `memory` bytes of dynamic shared memory.
template <class... Parameters, class... Arguments>
Status launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t memory, void* stream,
              const Arguments&... arguments) {
  return launch_as(launch_config(grid, block, memory, stream), kernel, arguments...);
}

// The same as a cooperative launch, for kernels whose blocks wait for one another: all blocks are resident at the same
// time. If they do not fit, e.g. under MPS or in a green context, where a stream has only some of the SMs, the status
// is does_not_fit.
template <class... Parameters, class... Arguments>
Status launch_together(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t memory, void* stream,
                       const Arguments&... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  return launch_as(launch_config(grid, block, memory, stream, &attribute), kernel, arguments...);
}

}  // namespace cuda
}  // namespace fasttfm
