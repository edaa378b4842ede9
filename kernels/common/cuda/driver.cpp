#include "common/cuda/driver.h"

#include <dlfcn.h>

namespace fasttfm {
namespace cuda {
namespace {

struct Functions {
  int (*get_device)(int*);
  int (*get_error_string)(int, const char**);
  int (*launch)(const driver::Config*, void* function, void** parameters, void** extra);
};

template <class Function>
bool find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

// Returns null without a driver, or with one that is older than CUDA 12.
const Functions* functions() {
  static Functions loaded{};
  static const bool complete = [] {
    void* library = dlopen("libcuda.so.1", RTLD_LAZY);
    return library != nullptr && find(library, "cuCtxGetDevice", &loaded.get_device) &&
           find(library, "cuGetErrorString", &loaded.get_error_string) &&
           find(library, "cuLaunchKernelEx", &loaded.launch);
  }();
  return complete ? &loaded : nullptr;
}

}  // namespace

int current_device() {
  int device = -1;
  const Functions* driver = functions();
  return driver != nullptr && driver->get_device(&device) == 0 ? device : -1;
}

Status launch_function(const DriverLaunch& p) {
  const Functions* driver_api = functions();
  if (driver_api == nullptr) return {StatusCode::cuda_error, "there is no CUDA driver of version 12 or later"};
  driver::Attribute attributes[2] = {};
  driver::Config config{};
  for (int i = 0; i < 3; ++i) config.grid[i] = p.grid[i];
  config.block[0] = p.threads;
  config.block[1] = config.block[2] = 1;
  config.shared_bytes = p.shared_bytes;
  config.stream = p.stream;
  config.attributes = attributes;
  if (p.dependent) attributes[config.attribute_count++] = {driver::kProgrammaticStreamSerialization, 0, {1}};
  if (p.cooperative) attributes[config.attribute_count++] = {driver::kCooperative, 0, {1}};
  const int error = driver_api->launch(&config, p.function, p.parameters, nullptr);
  if (error == 0) return {};
  const char* text = nullptr;
  if (driver_api->get_error_string(error, &text) != 0 || text == nullptr) text = "an unknown error of the CUDA driver";
  return {StatusCode::cuda_error, text};
}

}  // namespace cuda
}  // namespace fasttfm
