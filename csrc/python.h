// Shared by the files that know Python: module.cpp and calls.cpp.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

#include "common/status.h"

namespace fasttfm {

class Module {
 public:
  pybind11::module_& python;
};

void raise_unless_ok(const Status& status);

// Raises for a size that no machine has so much of: sizes can be rounded up and multiplied by constants.
void check_count(const std::string& function, const char* argument, int64_t number);

// Adds what calls of tensors need: use_torch(), signature() and tensor_table().
void bind_tensors(pybind11::module_& python);

}  // namespace fasttfm
