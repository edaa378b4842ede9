// A CUDA driver for tests without a GPU, as libcuda.so.1: it loads every module, and records launches instead of
// starting kernels. It also stands in for torch's functions of tensors, for which CPU tensors are then on a GPU.
#include <pthread.h>
#include <stdint.h>
#include <string.h>

enum { kMaxParameters = 128, kMaxAttributes = 4 };

struct Attribute {
  int32_t id, padding, number;
  char rest[60];
};
struct Config {
  uint32_t grid[3], block[3], shared_bytes;
  void* stream;
  const struct Attribute* attributes;
  uint32_t attribute_count;
};
struct Launch {
  uint64_t function, stream;
  uint32_t grid[3], block[3], shared_bytes, attribute_count;
  int32_t attributes[kMaxAttributes][2];
  uint64_t parameters[kMaxParameters];
};

// Set and read by the tests.
struct Launch last_launch;
int64_t launch_count = 0;
int64_t loaded_count = 0;
int32_t parameter_sizes[kMaxParameters];  // in bytes; 0 after the last
int32_t launch_error = 0;
int32_t device = 0;  // of the current context; -1 if there is none

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

int cuLaunchKernelEx(const struct Config* config, void* function, void** parameters, void** extra) {
  (void)extra;
  if (launch_error != 0) return launch_error;
  pthread_mutex_lock(&lock);
  struct Launch launch;
  memset(&launch, 0, sizeof(launch));
  launch.function = (uint64_t)function;
  launch.stream = (uint64_t)config->stream;
  memcpy(launch.grid, config->grid, sizeof(launch.grid));
  memcpy(launch.block, config->block, sizeof(launch.block));
  launch.shared_bytes = config->shared_bytes;
  launch.attribute_count = config->attribute_count;
  for (uint32_t i = 0; i < config->attribute_count && i < kMaxAttributes; ++i) {
    launch.attributes[i][0] = config->attributes[i].id;
    launch.attributes[i][1] = config->attributes[i].number;
  }
  for (int i = 0; i < kMaxParameters && parameter_sizes[i] != 0; ++i)
    memcpy(&launch.parameters[i], parameters[i], parameter_sizes[i]);
  last_launch = launch;
  ++launch_count;
  pthread_mutex_unlock(&lock);
  return 0;
}

int cuModuleGetFunction(void** function, void* module, const char* name) {
  (void)module, (void)name;
  *function = (void*)++loaded_count;
  return 0;
}

int cuGetErrorString(int error, const char** text) {
  *text = error == 1 ? "invalid argument" : "another error";
  return 0;
}

int cuCtxGetDevice(int* found) {
  *found = device;
  return device < 0 ? 201 : 0;
}

static int set(void** pointer) {
  *pointer = (void*)1;
  return 0;
}
static int set_number(int* number, int value) {
  *number = value;
  return 0;
}
int cuModuleLoadData(void** module, const void* image) { return (void)image, set(module); }
int cuCtxGetCurrent(void** context) { return set(context); }
int cuCtxSetCurrent(void* context) { return (void)context, 0; }
int cuDevicePrimaryCtxRetain(void** context, int index) { return (void)index, set(context); }
int cuDeviceGet(int* found, int ordinal) { return set_number(found, ordinal); }
int cuDeviceGetAttribute(int* value, int attribute, int index) {
  return (void)attribute, (void)index, set_number(value, 232448);  // bytes of shared memory
}
int cuFuncGetAttribute(int* value, int attribute, void* function) {
  return (void)attribute, (void)function, set_number(value, 1024);  // threads of a block
}
int cuFuncSetAttribute(void* function, int attribute, int value) {
  return (void)function, (void)attribute, (void)value, 0;
}
int cuFuncSetCacheConfig(void* function, int config) { return (void)function, (void)config, 0; }
int cuCtxGetLimit(uint64_t* value, int limit) { return (void)limit, *value = 0, 0; }
int cuCtxSetLimit(int limit, uint64_t value) { return (void)limit, (void)value, 0; }
int cuPointerGetAttribute(uint64_t* value, int attribute, uint64_t pointer) {
  return (void)attribute, *value = pointer, 0;
}

// ---- torch's functions: csrc/dlpack.h --------------------------------------------------------------------------------

struct Device {
  int32_t type, index;
};
struct Tensor {
  void* data;
  struct Device device;
  char rest[32];
};
struct ExchangeApi {
  uint32_t version[2];
  void* unused[4];
  int (*tensor_from_py_object_no_sync)(void*, struct Tensor*);
  int (*current_work_stream)(int32_t, int32_t, void**);
};

struct ExchangeApi exchange;  // first a copy of torch's
int32_t tensor_device = 0;
uint64_t stream = 0;

static int (*read_tensor)(void*, struct Tensor*);

static int read_as_cuda(void* object, struct Tensor* tensor) {
  const int error = read_tensor(object, tensor);
  tensor->device.type = 2;
  tensor->device.index = tensor_device;
  return error;
}

static int find_stream(int32_t type, int32_t index, void** found) {
  (void)type, (void)index, *found = (void*)stream;
  return 0;
}

void replace_torch(const struct ExchangeApi* torch) {
  exchange = *torch;
  read_tensor = torch->tensor_from_py_object_no_sync;
  exchange.tensor_from_py_object_no_sync = read_as_cuda;
  exchange.current_work_stream = find_stream;
}
