// What a bound function gets: views of torch's tensors, valid during the call, and the device that it runs on.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace fasttfm {

// Element types beyond DType's, whose codes these continue.
enum class ElementType : int32_t { f32 = 0, bf16 = 1, f16 = 2, f64, int64, int32, boolean, other };

struct Tensor {
  void* data = nullptr;  // null for None and for a tensor without elements
  const int64_t* shape = nullptr;
  const int64_t* strides = nullptr;  // in elements
  int32_t dimensions = 0;
  ElementType type = ElementType::f32;
  int32_t device = -1;  // index of the GPU, -1 for the CPU
  bool given = false;   // false for None

  template <class Element>
  Element* as() const {
    return static_cast<Element*>(data);
  }
  // The address of an element of a contiguous tensor; null for None.
  template <class Element>
  Element* from(int64_t index) const {
    return data == nullptr ? nullptr : as<Element>() + index;
  }

  // Valid for floating-point tensors that kernels support; None has an arbitrary code.
  DType dtype() const { return static_cast<DType>(type); }

  // A tensor [..., C] as rows of C columns.
  int64_t columns() const { return shape[dimensions - 1]; }
  int64_t rows() const {
    int64_t count = 1;
    for (int32_t i = 0; i + 1 < dimensions; ++i) count *= shape[i];
    return count;
  }
  // The strides of a tensor without rows mean nothing, and torch makes no copy of it that has other ones.
  bool has_adjacent_columns() const { return strides[dimensions - 1] == 1 || rows() == 0; }
  int64_t row_stride() const {
    if (rows() == 0) return columns();
    for (int32_t i = dimensions - 2; i >= 0; --i)
      if (shape[i] != 1) return strides[i];
    return dimensions > 0 ? columns() : 1;
  }
  // Whether columns are adjacent and all rows are one stride apart.
  bool has_rows() const {
    if (dimensions == 0) return false;
    if (rows() == 0) return true;
    if (strides[dimensions - 1] != 1 && columns() != 1) return false;
    int64_t next = row_stride();
    for (int32_t i = dimensions - 2; i >= 0; --i) {
      if (shape[i] == 1) continue;
      if (strides[i] != next) return false;
      next *= shape[i];
    }
    return true;
  }
};

// A tensor or None.
struct OptionalTensor : Tensor {};

// The device and stream on which a call runs.
struct CallContext {
  int32_t device;  // index of the GPU, -1 for the CPU
  void* stream;    // CUDA: torch's current stream
  int threads;     // CPU: torch's number of threads

  bool is_cuda() const { return device >= 0; }
};

}  // namespace fasttfm
