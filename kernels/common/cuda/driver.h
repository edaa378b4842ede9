// Launches of kernels that another library compiled and loaded, as Triton does, by functions of the CUDA driver. They
// are looked up at run time, because the library does not link against the driver, and also exist in builds without
// CUDA.
#pragma once

#include <cstdint>

#include "common/status.h"

namespace fasttfm {
namespace cuda {

struct DriverLaunch {
  void* function;  // CUfunction
  uint32_t grid[3];
  uint32_t threads;       // of a block
  uint32_t shared_bytes;  // dynamic shared memory
  bool cooperative;       // all blocks are resident at the same time
  bool dependent;         // may start before the previous kernel of the stream ends: programmatic dependent launch
  void** parameters;      // the address of each parameter's value
  void* stream;
};

// The device of the calling thread's context; -1 without a context and without a driver.
int current_device();

Status launch_function(const DriverLaunch& params);

// The types of cuda.h that a launch takes; device.cu compares them with that header.
namespace driver {

enum AttributeId : int32_t { kCooperative = 2, kProgrammaticStreamSerialization = 6 };

struct Attribute {
  AttributeId id;
  int32_t padding;
  union {
    int32_t number;
    alignas(8) char bytes[64];
  } value;
};

struct Config {
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t shared_bytes;
  void* stream;
  Attribute* attributes;
  uint32_t attribute_count;
};

}  // namespace driver
}  // namespace cuda
}  // namespace fasttfm
