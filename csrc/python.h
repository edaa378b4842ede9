// Shared by the files that know Python: module.cpp and calls.cpp.
#pragma once

#include <pybind11/pybind11.h>

#include "common/status.h"

namespace fasttfm {

class Module {
 public:
  pybind11::module_& python;
};

void raise_unless_ok(const Status& status);

// Adds use_torch(), signature() and tensor_table().
void bind_torch(pybind11::module_& python);

}  // namespace fasttfm
