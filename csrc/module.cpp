// The extension module fasttfm._C: build information, thread and instruction-set control, and the ops' bindings.
#include <cstring>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "binding.h"
#include "common/count.h"
#include "common/cpu/blas.h"
#include "common/cpu/isa.h"
#include "common/cpu/parallel.h"
#include "common/cuda/device.h"
#include "python.h"

namespace fasttfm {

namespace py = pybind11;

namespace {

// Larger than any real size, and small enough that sizes can be rounded up and multiplied by constants.
constexpr int64_t kMaxCounted = int64_t{1} << 40;

std::vector<Binder>& binders() {
  static std::vector<Binder> all;
  return all;
}

// A field with its keyword, interned for the module's lifetime.
struct KeyedField {
  Field field;
  PyObject* key;
};

template <class Member>
void put(void* params, std::ptrdiff_t offset, Member value) {
  std::memcpy(static_cast<char*>(params) + offset, &value, sizeof(value));
}

// Accepts only integers, not objects that convert to one: a tensor with one element is not an address.
void put_number(void* params, const Field& field, py::handle value) {
  if (field.type != FieldType::float32 && !PyLong_Check(value.ptr())) throw py::cast_error();
  switch (field.type) {
    case FieldType::pointer: return put(params, field.offset, py::cast<uintptr_t>(value));
    case FieldType::int64: return put(params, field.offset, py::cast<int64_t>(value));
    case FieldType::int32: return put(params, field.offset, py::cast<int32_t>(value));
    case FieldType::float32: return put(params, field.offset, py::cast<float>(value));
  }
}

void fill(void* params, const std::string& launcher, const std::vector<KeyedField>& fields, const py::kwargs& given) {
  for (const auto& [field, key] : fields) {
    PyObject* value = PyDict_GetItemWithError(given.ptr(), key);
    if (value == nullptr) throw py::type_error(launcher + ": missing argument '" + field.name + "'");
    try {
      put_number(params, field, value);
    } catch (const py::cast_error&) {
      throw py::type_error(launcher + ": " + field.name + ": expected a number that fits its field, got " +
                           py::repr(py::handle(value)).cast<std::string>());
    }
  }
  if (given.size() == fields.size()) return;
  std::string unknown;
  for (const auto& item : given) {
    const auto name = py::cast<std::string>(item.first);
    bool known = false;
    for (const auto& keyed : fields) known = known || name == keyed.field.name;
    if (!known) unknown += " '" + name + "'";
  }
  throw py::type_error(launcher + ": unknown arguments:" + unknown);
}

// Python's exception for StatusCode::does_not_fit. It is set as Python's error rather than thrown as a C++ type of its
// own, so that every way into the core (pybind11's functions and those of calls.cpp) raises the same exception.
PyObject* does_not_fit = nullptr;

Isa parse_isa(const std::string& name) {
  if (name == "baseline") return Isa::baseline;
  if (name == "avx2") return Isa::avx2;
  if (name == "avx512") return Isa::avx512;
  throw py::value_error("set_isa: name: expected 'baseline', 'avx2' or 'avx512', got '" + name + "'");
}

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::avx512: return "avx512";
    case Isa::avx2: return "avx2";
    case Isa::baseline: return "baseline";
  }
  return "unknown";
}

}  // namespace

void check_count(const std::string& function, const char* argument, int64_t number) {
  if (number < 0 || number > kMaxCounted)
    throw py::value_error(function + ": " + argument + ": expected a number in [0, 2^40], got " +
                          std::to_string(number));
}

void raise_unless_ok(const Status& status) {
  switch (status.code) {
    case StatusCode::ok: return;
    case StatusCode::cuda_error: throw std::runtime_error(status.detail);
    case StatusCode::does_not_fit: PyErr_SetString(does_not_fit, status.detail); throw py::error_already_set();
    default: throw py::value_error(status.detail);
  }
}

void add_launcher(Module& module, const char* name, std::vector<Field> fields,
                  std::function<Status(const void* params)> launcher) {
  std::string doc = "fields:";  // tools/make_stub.py reads them
  std::vector<KeyedField> keyed;
  for (const Field& field : fields) {
    doc += std::string(" ") + field.name + (field.type == FieldType::float32 ? ":float" : ":int");
    keyed.push_back({field, PyUnicode_InternFromString(field.name)});
  }
  module.python.def(
      name,
      [name = std::string(name), keyed, launcher](const py::kwargs& given) {
        alignas(std::max_align_t) char params[kMaxParamsSize] = {};
        fill(params, name, keyed, given);
        Status status;
        {
          py::gil_scoped_release unlocked;
          status = launcher(params);
        }
        raise_unless_ok(status);
      },
      doc.c_str());
}

template <class... Numbers>
void bind_workspace(Module& module, const char* name, int64_t (*size)(Numbers...),
                    std::array<const char*, sizeof...(Numbers)> arguments) {
  const auto checked = [name = std::string(name), size, arguments](Numbers... numbers) {
    size_t place = 0;
    for (int64_t number : {numbers...}) {
      check_count(name, arguments[place], number);
      ++place;
    }
    const int64_t elements = size(numbers...);
    if (elements == kTooMany) throw py::value_error(name + ": expected a size that fits 64 bits, got a larger one");
    return elements;
  };
  std::apply([&](auto... argument) { module.python.def(name, checked, py::arg(argument)...); }, arguments);
}

template void bind_workspace(Module&, const char*, int64_t (*)(int64_t, int64_t), std::array<const char*, 2>);
template void bind_workspace(Module&, const char*, int64_t (*)(int64_t, int64_t, int64_t), std::array<const char*, 3>);
template void bind_workspace(Module&, const char*, int64_t (*)(int64_t, int64_t, int64_t, int64_t),
                             std::array<const char*, 4>);
template void bind_workspace(Module&, const char*, int64_t (*)(int64_t, int64_t, int64_t, int64_t, int64_t),
                             std::array<const char*, 5>);

void bind_number(Module& module, const char* name, int64_t (*number)()) { module.python.def(name, number); }

void bind_constant(Module& module, const char* name, int64_t value) { module.python.attr(name) = value; }

BinderRegistration::BinderRegistration(Binder binder) { binders().push_back(binder); }

PYBIND11_MODULE(_C, python) {
  python.doc() = "fasttfm's native core. Private: the checked entry points are in fasttfm.ops.";
  python.attr("version") = FASTTFM_VERSION;
  python.attr("compiler") = FASTTFM_COMPILER;
  python.attr("cuda_version") = cuda::compiled_version();
  python.attr("cuda_archs") = FASTTFM_CUDA_ARCHS_TEXT;

  does_not_fit = PyErr_NewException("fasttfm._C.DoesNotFit", PyExc_RuntimeError, nullptr);
  python.attr("DoesNotFit") = py::handle(does_not_fit);
  python.def("driver_version", &cuda::driver_version);
  python.def("compute_capability", &cuda::compute_capability, py::arg("device"));
  python.def("block_memory", &cuda::block_memory, py::arg("device"));
  python.def("active_isa", [] { return isa_name(active_isa()); });
  python.def("supported_isas", [] {
    py::list names;
    for (Isa isa : {Isa::baseline, Isa::avx2, Isa::avx512})
      if (isa_supported(isa)) names.append(isa_name(isa));
    return names;
  });
  python.def(
      "set_isa",
      [](const std::string& name) {
        if (!set_isa(parse_isa(name)))
          throw py::value_error("set_isa: name: expected one of supported_isas(), got '" + name + "'");
      },
      py::arg("name"));
  python.def(
      "share_openmp",
      [](const std::string& library_path) {
        const char* reason = "";
        const std::string runtime = share_openmp(library_path.c_str(), &reason);
        return std::make_pair(runtime, std::string(reason));
      },
      py::arg("library_path"));
  python.def(
      "find_blas", [](const std::string& library_path) { return std::string(find_blas(library_path.c_str())); },
      py::arg("library_path"));
  python.def("parallel_runtime", &parallel_runtime);
  python.def("use_plain_threads", &use_plain_threads);

  bind_tensors(python);
  Module module{python};
  for (Binder bind : binders()) bind(module);
}

}  // namespace fasttfm
