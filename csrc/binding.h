// Shared by the binding files: one per op, each adds its launchers to the module inside FASTTFM_BINDING.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <set>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "common/dtype.h"
#include "common/status.h"

namespace fasttfm {

namespace py = pybind11;

inline void raise_unless_ok(const Status& status) {
  switch (status.code) {
    case StatusCode::ok: return;
    case StatusCode::cuda_error: throw std::runtime_error(status.detail);
    default: throw py::value_error(status.detail);
  }
}

// One member of a params struct and the keyword that fills it.
template <class Params, class Member>
struct Field {
  const char* name;
  PyObject* key;  // interned, lives as long as the module
  Member Params::* member;
};
template <class Params, class Member>
Field<Params, Member> make_field(const char* name, Member Params::* member) {
  return {name, PyUnicode_InternFromString(name), member};
}

// Pointers cross the bridge as integers (tensor.data_ptr(), 0 for null), enumerations as their codes. Where an integer
// is due, nothing else is taken, though it might convert: a tensor of one element is not an address.
template <class Member>
Member from_python(PyObject* value) {
  if (!std::is_floating_point_v<Member> && !PyLong_Check(value)) throw py::cast_error();
  if constexpr (std::is_pointer_v<Member>) {
    return reinterpret_cast<Member>(py::cast<uintptr_t>(py::handle(value)));
  } else if constexpr (std::is_enum_v<Member>) {
    return static_cast<Member>(py::cast<int32_t>(py::handle(value)));
  } else {
    return py::cast<Member>(py::handle(value));
  }
}

template <class Params, class Member>
void assign(Params& params, PyObject* given, const char* launcher, const Field<Params, Member>& field) {
  PyObject* value = PyDict_GetItemWithError(given, field.key);
  if (value == nullptr) throw py::type_error(std::string(launcher) + ": missing argument '" + field.name + "'");
  try {
    params.*field.member = from_python<Member>(value);
  } catch (const py::cast_error&) {
    throw py::type_error(std::string(launcher) + ": " + field.name + ": expected a number that fits its field, got " +
                         py::repr(py::handle(value)).template cast<std::string>());
  }
}

[[noreturn]] inline void raise_unknown(const char* launcher, const py::kwargs& given,
                                       const std::set<std::string>& known) {
  std::string unknown;
  for (const auto& item : given) {
    const auto name = py::cast<std::string>(item.first);
    if (known.count(name) == 0) unknown += " '" + name + "'";
  }
  throw py::type_error(std::string(launcher) + ": unknown arguments:" + unknown);
}

// Adds `name(**fields)`: fills the params struct from keywords (each exactly once, none unknown), runs the launcher
// without the GIL and turns its status into an exception. Its docstring lists the fields; a test holds _C.pyi against
// it.
template <class Params, class... Members>
void bind_launcher(py::module_& module, const char* name, Status (*launcher)(const Params&),
                   Field<Params, Members>... fields) {
  std::string doc = "fields:";
  ((doc += std::string(" ") + fields.name), ...);
  module.def(
      name,
      [=](const py::kwargs& given) {
        Params params{};
        (assign(params, given.ptr(), name, fields), ...);
        if (given.size() != sizeof...(fields)) raise_unknown(name, given, {fields.name...});
        Status status;
        {
          py::gil_scoped_release unlocked;
          status = launcher(params);
        }
        raise_unless_ok(status);
      },
      doc.c_str());
}

using Binder = void (*)(py::module_&);
inline std::vector<Binder>& binders() {
  static std::vector<Binder> all;
  return all;
}
struct BinderRegistration {
  explicit BinderRegistration(Binder binder) { binders().push_back(binder); }
};

}  // namespace fasttfm

// The cast makes a member of a base struct one of PARAMS.
#define FASTTFM_FIELD(PARAMS, MEMBER) \
  ::fasttfm::make_field(#MEMBER, static_cast<decltype(PARAMS::MEMBER) PARAMS::*>(&PARAMS::MEMBER))

#define FASTTFM_BINDING(NAME)                                    \
  static void bind_##NAME(pybind11::module_& module);            \
  static const BinderRegistration register_##NAME(&bind_##NAME); \
  static void bind_##NAME(pybind11::module_& module)
