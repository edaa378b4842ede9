// Shared by the files that know Python: module.cpp, calls.cpp, sequences.cpp and triton_launch.cpp.
#pragma once

#include <pybind11/pybind11.h>

#include "common/status.h"
#include "dlpack.h"

namespace fasttfm {

class Module {
 public:
  pybind11::module_& python;
};

void raise_unless_ok(const Status& status);

// The result of a function that Python calls, a new reference. An exception becomes Python's, and the result null.
template <class Function>
PyObject* guarded(const Function& function) noexcept {
  try {
    return function();
  } catch (pybind11::error_already_set& error) {
    error.restore();
  } catch (const pybind11::builtin_exception& error) {
    error.set_error();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

// Adds use_torch(), signature() and tensor_table().
void bind_torch(pybind11::module_& python);

// torch's functions for tensors and streams; null before use_torch() and with torch versions before 2.10.
const dlpack::ExchangeApi* torch_exchange();

// Whether an object is a torch.Tensor or a torch.nn.Parameter, and not of a subclass, which may have no memory.
bool is_plain_tensor(PyObject* object);

// Adds triton_kernel().
void bind_triton(pybind11::module_& python);

// Adds Sequences and write_bucket().
void bind_sequences(pybind11::module_& python);

}  // namespace fasttfm
