// The part of DLPack 1.x (https://github.com/dmlc/dlpack) that the core uses: how torch describes a tensor to C code,
// and the table of functions that torch 2.10 and later publish as torch.Tensor.__dlpack_c_exchange_api__. A stable ABI:
// one build of the core works with every torch.
#pragma once

#include <cstdint>

namespace fasttfm {
namespace dlpack {

constexpr uint32_t kMajorVersion = 1;
constexpr const char* kExchangeCapsule = "dlpack_exchange_api";

struct Version {
  uint32_t major, minor;
};

enum DeviceType : int32_t { kCpu = 1, kCuda = 2 };

struct Device {
  DeviceType type;
  int32_t index;
};

enum TypeCode : uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kBool = 6 };

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements
  uint64_t byte_offset;
};

struct ExchangeHeader {
  Version version;
  ExchangeHeader* previous;
};

struct ExchangeApi {
  ExchangeHeader header;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object_no_sync;
  void* managed_tensor_to_py_object_no_sync;
  int (*tensor_from_py_object_no_sync)(void* py_object, Tensor* out);
  int (*current_work_stream)(DeviceType device_type, int32_t device_index, void** out);
};

}  // namespace dlpack
}  // namespace fasttfm
