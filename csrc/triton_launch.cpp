// Launches of Triton's kernels: what JITFunction.run does in Python for every launch, for the calls that need no more
// than a kernel that is already compiled.
//
// A launch builds a key of everything that Triton compiles a kernel for: the device, the values of constexprs, the
// types of the other arguments, whether pointers and integers are divisible by 16 and whether integers are 1, and
// options such as num_warps. The first launch with a key asks Triton for the compiled kernel (LaunchedKernel._prepare);
// later ones write the arguments to memory and call the driver. Whatever is unusual, from a hook of a profiler to an
// argument of another type, is left to Triton's run().
#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "common/cuda/driver.h"
#include "python.h"

namespace fasttfm {

namespace py = pybind11;

namespace {

constexpr size_t kMaxParameters = 96;
constexpr size_t kMaxWords = 3 * kMaxParameters;
constexpr size_t kMaxObjects = 48;
constexpr size_t kHidden = 2;  // pointers after a kernel's parameters: global and profile scratch memory, here null

constexpr const char* kCapsule = "fasttfm.triton";

struct Parameter {
  bool is_constexpr;
  bool by_value;       // specialized for 1 and for multiples of 16
  bool by_alignment;   // for multiples of 16
  py::object absence;  // the default; null if there is none
};

// One for each decorated function; lives as long as the process.
struct Kernel {
  py::object jit;  // the LaunchedKernel
  py::object knobs;
  std::string name;
  std::vector<Parameter> parameters;
  py::dict indices;  // of parameters, by name
  py::dict records;  // a capsule of a Record by key; None if Triton has to launch the kernel
};

// A variable that a kernel uses, and its value when the kernel was compiled.
struct Global {
  py::dict scope;
  py::object name;
  py::object value;
};

// A compiled kernel.
struct Record {
  py::object compiled;  // keeps the function loaded
  void* function;
  uint32_t threads;
  uint32_t shared_bytes;
  bool cooperative;
  bool dependent;
  std::string layout;  // for each parameter the letter of its argument, '-' if the compiled kernel does not have it
  std::vector<Global> globals;
};

// The arguments of a launch. Letters: p a pointer, i and l integers of 32 and 64 bits, b a bool, f a float, - a
// constant.
struct Call {
  std::array<PyObject*, kMaxParameters> arguments;
  std::array<uint64_t, kMaxParameters> values;
  std::array<char, kMaxParameters> letters;
  int32_t device;
};

class LaunchKey {
 public:
  void add(int64_t word) {
    if (size_ < kMaxWords) words_[size_] = word;
    ++size_;
  }
  void add_object(PyObject* object) {
    if (count_ < kMaxObjects) objects_[count_] = object;
    ++count_;
  }
  // Numbers are part of the key's bytes with their type, because 1, 1.0 and True are equal in Python.
  void add_constant(PyObject* object) {
    int overflow = 0;
    PyTypeObject* type = Py_TYPE(object);
    add(reinterpret_cast<intptr_t>(type));
    if (type == &PyTuple_Type) {
      add(PyTuple_GET_SIZE(object));
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(object); ++i) add_constant(PyTuple_GET_ITEM(object, i));
    } else if (type == &PyFloat_Type) {
      add_bits(PyFloat_AS_DOUBLE(object));
    } else if (type == &PyBool_Type) {
      add(object == Py_True);
    } else if (type == &PyLong_Type) {
      const int64_t value = PyLong_AsLongLongAndOverflow(object, &overflow);
      add(overflow == 0 ? value : 0);
      if (overflow != 0) add_object(object);
    } else if (object != Py_None) {
      add_object(object);
    }
  }
  bool fits() const { return size_ <= kMaxWords && count_ <= kMaxObjects; }
  py::tuple tuple() const {
    py::tuple key(1 + count_);
    key[0] = py::bytes(reinterpret_cast<const char*>(words_.data()), size_ * sizeof(int64_t));
    for (size_t i = 0; i < count_; ++i) key[1 + i] = py::handle(objects_[i]);
    return key;
  }

 private:
  void add_bits(double number) {
    int64_t bits;
    std::memcpy(&bits, &number, sizeof(bits));
    add(bits);
  }

  std::array<int64_t, kMaxWords> words_;
  std::array<PyObject*, kMaxObjects> objects_;
  size_t size_ = 0;
  size_t count_ = 0;
};

// ---- arguments -------------------------------------------------------------------------------------------------------
// Each returns false for what is left to Triton. No Python exception is set then.

bool bind_arguments(const Kernel& kernel, PyObject* args, PyObject* kwargs, Call& call, LaunchKey& key) {
  const size_t count = kernel.parameters.size(), positional = PyTuple_GET_SIZE(args);
  if (positional > count) return false;
  for (size_t i = 0; i < count; ++i)
    call.arguments[i] = i < positional ? PyTuple_GET_ITEM(args, i) : kernel.parameters[i].absence.ptr();
  PyObject *name = nullptr, *value = nullptr;
  for (Py_ssize_t position = 0; kwargs != nullptr && PyDict_Next(kwargs, &position, &name, &value);) {
    PyObject* index = PyDict_GetItem(kernel.indices.ptr(), name);
    if (index == nullptr) {  // an option of the compiler or of the launch
      key.add_object(name);
      key.add_constant(value);
      continue;
    }
    const size_t i = PyLong_AsSize_t(index);
    if (i < positional) return false;
    call.arguments[i] = value;
  }
  for (size_t i = 0; i < count; ++i)
    if (call.arguments[i] == nullptr) return false;
  return true;
}

bool read_tensor(const Parameter& parameter, PyObject* argument, Call& call, size_t i, LaunchKey& key) {
  dlpack::Tensor tensor;
  if (torch_exchange()->tensor_from_py_object_no_sync(argument, &tensor) != 0) {
    PyErr_Clear();
    return false;
  }
  if (tensor.device.type != dlpack::kCuda || tensor.device.index != call.device) return false;
  call.letters[i] = 'p';
  call.values[i] = reinterpret_cast<uint64_t>(tensor.data) + tensor.byte_offset;
  const bool aligned = parameter.by_value && parameter.by_alignment && call.values[i] % 16 == 0;
  key.add('p' | tensor.dtype.code << 8 | tensor.dtype.bits << 16 | static_cast<int64_t>(tensor.dtype.lanes) << 32 |
          int64_t{aligned} << 48);
  return true;
}

bool read_integer(const Parameter& parameter, PyObject* argument, Call& call, size_t i, LaunchKey& key) {
  int overflow = 0;
  const int64_t value = PyLong_AsLongLongAndOverflow(argument, &overflow);
  if (overflow != 0) return false;
  call.letters[i] = value == static_cast<int32_t>(value) ? 'i' : 'l';
  call.values[i] = static_cast<uint64_t>(value);
  const bool one = parameter.by_value && value == 1;
  const bool aligned = parameter.by_value && parameter.by_alignment && value % 16 == 0;
  key.add(call.letters[i] | one << 8 | aligned << 9);
  return true;
}

bool read_float(PyObject* argument, Call& call, size_t i, LaunchKey& key) {
  const float value = static_cast<float>(PyFloat_AS_DOUBLE(argument));
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  call.letters[i] = 'f';
  call.values[i] = bits;
  key.add('f');
  return true;
}

bool read_argument(const Parameter& parameter, PyObject* argument, Call& call, size_t i, LaunchKey& key) {
  if (parameter.is_constexpr || argument == Py_None) {
    call.letters[i] = '-';
    key.add_constant(argument);
    return true;
  }
  if (is_plain_tensor(argument)) return read_tensor(parameter, argument, call, i, key);
  if (PyLong_CheckExact(argument)) return read_integer(parameter, argument, call, i, key);
  if (PyFloat_CheckExact(argument)) return read_float(argument, call, i, key);
  if (!PyBool_Check(argument)) return false;
  call.letters[i] = 'b';
  call.values[i] = argument == Py_True;
  key.add('b');
  return true;
}

bool read_grid(PyObject* grid_argument, uint32_t* grid) {
  if (!PyTuple_Check(grid_argument) || PyTuple_GET_SIZE(grid_argument) < 1 || PyTuple_GET_SIZE(grid_argument) > 3)
    return false;
  for (Py_ssize_t i = 0; i < 3; ++i) {
    grid[i] = 1;
    if (i >= PyTuple_GET_SIZE(grid_argument)) continue;
    int overflow = 0;
    PyObject* size = PyTuple_GET_ITEM(grid_argument, i);
    const int64_t value = PyLong_Check(size) ? PyLong_AsLongLongAndOverflow(size, &overflow) : -1;
    if (overflow != 0 || value < 0 || value > INT32_MAX) return false;
    grid[i] = static_cast<uint32_t>(value);
  }
  return true;
}

// ---- Triton's settings -----------------------------------------------------------------------------------------------

// Names of attributes, which are never released.
struct Names {
  PyObject* runtime = PyUnicode_InternFromString("runtime");
  PyObject* compilation = PyUnicode_InternFromString("compilation");
  PyObject* launch_enter_hook = PyUnicode_InternFromString("launch_enter_hook");
  PyObject* launch_exit_hook = PyUnicode_InternFromString("launch_exit_hook");
  PyObject* calls = PyUnicode_InternFromString("calls");
  PyObject* debug = PyUnicode_InternFromString("debug");
  PyObject* instrumentation_mode = PyUnicode_InternFromString("instrumentation_mode");
  PyObject* pre_run_hooks = PyUnicode_InternFromString("pre_run_hooks");
  PyObject* run = PyUnicode_InternFromString("run");
  PyObject* prepare = PyUnicode_InternFromString("_prepare");
};

const Names& names() {
  static const Names all;
  return all;
}

py::object attribute(const py::object& from, PyObject* name) {
  PyObject* value = PyObject_GetAttr(from.ptr(), name);
  if (value == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(value);
}

bool is_true(const py::object& object) { return PyObject_IsTrue(object.ptr()) != 0; }

// Triton has a chain of hooks, which is empty unless a profiler adds one.
bool is_hooked(const py::object& hook) {
  if (hook.is_none()) return false;
  const auto calls = py::reinterpret_steal<py::object>(PyObject_GetAttr(hook.ptr(), names().calls));
  if (!calls) PyErr_Clear();
  return !calls || is_true(calls);
}

// Whether Triton has to see this launch, for the sake of a profiler or a debugger.
bool is_observed(const Kernel& kernel) {
  const py::object runtime = attribute(kernel.knobs, names().runtime);
  return is_hooked(attribute(runtime, names().launch_enter_hook)) ||
         is_hooked(attribute(runtime, names().launch_exit_hook)) || is_true(attribute(runtime, names().debug)) ||
         is_true(attribute(attribute(kernel.knobs, names().compilation), names().instrumentation_mode)) ||
         is_true(attribute(kernel.jit, names().pre_run_hooks));
}

// Whether a variable that the kernel uses has another value than when it was compiled. Triton reports that.
bool has_changed(const Record& record) {
  for (const Global& global : record.globals)
    if (PyDict_GetItem(global.scope.ptr(), global.name.ptr()) != global.value.ptr()) return true;
  return false;
}

// ---- launches --------------------------------------------------------------------------------------------------------

py::object launch_by_triton(const Kernel& kernel, PyObject* grid, PyObject* args, PyObject* kwargs) {
  const auto all = py::reinterpret_steal<py::dict>(kwargs == nullptr ? PyDict_New() : PyDict_Copy(kwargs));
  if (!all) throw py::error_already_set();
  all["grid"] = py::handle(grid);
  all["warmup"] = false;
  PyObject* compiled = PyObject_Call(attribute(kernel.jit, names().run).ptr(), args, all.ptr());
  if (compiled == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(compiled);
}

// The kernel that Triton compiles for a call, as a capsule of a Record; None if Triton has to launch it.
py::object make_record(const Kernel& kernel, const Call& call, PyObject* grid, PyObject* args, PyObject* kwargs) {
  const py::object keyword_arguments = kwargs == nullptr ? py::dict() : py::reinterpret_borrow<py::object>(kwargs);
  const py::object prepared =
      attribute(kernel.jit, names().prepare)(py::handle(grid), py::handle(args), keyword_arguments);
  if (prepared.is_none()) return prepared;
  const py::tuple fields = prepared;
  auto record = std::make_unique<Record>(Record{
      .compiled = fields[0],
      .function = reinterpret_cast<void*>(fields[1].cast<uintptr_t>()),
      .threads = fields[2].cast<uint32_t>(),
      .shared_bytes = fields[3].cast<uint32_t>(),
      .cooperative = fields[4].cast<bool>(),
      .dependent = fields[5].cast<bool>(),
      .layout = fields[6].cast<std::string>(),
      .globals = {},
  });
  if (record->layout.size() != kernel.parameters.size()) return py::none();
  for (size_t i = 0; i < kernel.parameters.size(); ++i)
    if (record->layout[i] != '-' && record->layout[i] != call.letters[i]) return py::none();
  for (const py::handle element : fields[7].cast<py::list>()) {
    const py::tuple variable = element.cast<py::tuple>();
    record->globals.push_back({variable[0], variable[1], variable[2]});
  }
  return py::capsule(record.release(), kCapsule, [](PyObject*) {});
}

void launch_record(const Kernel& kernel, const Record& record, const Call& call, const uint32_t* grid) {
  if (grid[0] == 0 || grid[1] == 0 || grid[2] == 0) return;
  std::array<const void*, kMaxParameters + kHidden> parameters;
  static const uint64_t hidden = 0;
  size_t count = 0;
  for (size_t i = 0; i < record.layout.size(); ++i)
    if (record.layout[i] != '-') parameters[count++] = &call.values[i];
  for (size_t i = 0; i < kHidden; ++i) parameters[count++] = &hidden;
  void* stream = nullptr;
  if (torch_exchange()->current_work_stream(dlpack::kCuda, call.device, &stream) != 0) throw py::error_already_set();
  const cuda::DriverLaunch launch{
      .function = record.function,
      .grid = {grid[0], grid[1], grid[2]},
      .threads = record.threads,
      .shared_bytes = record.shared_bytes,
      .cooperative = record.cooperative,
      .dependent = record.dependent,
      .parameters = const_cast<void**>(parameters.data()),
      .stream = stream,
  };
  Status status;
  {
    py::gil_scoped_release unlocked;
    status = cuda::launch_function(launch);
  }
  if (status.code == StatusCode::ok) return;
  throw std::runtime_error(kernel.name + ": the CUDA driver did not launch a grid of " + std::to_string(grid[0]) +
                           " x " + std::to_string(grid[1]) + " x " + std::to_string(grid[2]) + " blocks with " +
                           std::to_string(record.threads) + " threads and " + std::to_string(record.shared_bytes) +
                           " bytes of shared memory each: " + status.detail);
}

py::object launch(const Kernel& kernel, PyObject* grid_argument, PyObject* args, PyObject* kwargs) {
  LaunchKey key;
  Call call;
  uint32_t grid[3];
  call.device = cuda::current_device();
  bool known =
      torch_exchange() != nullptr && call.device >= 0 && !is_observed(kernel) && read_grid(grid_argument, grid);
  key.add(call.device);
  known = known && bind_arguments(kernel, args, kwargs, call, key);
  for (size_t i = 0; known && i < kernel.parameters.size(); ++i)
    known = read_argument(kernel.parameters[i], call.arguments[i], call, i, key);
  if (!known || !key.fits()) return launch_by_triton(kernel, grid_argument, args, kwargs);
  const py::tuple record_key = key.tuple();
  PyObject* capsule = PyDict_GetItemWithError(kernel.records.ptr(), record_key.ptr());
  if (capsule == nullptr) {
    if (PyErr_Occurred() != nullptr) {  // a constant without a hash
      PyErr_Clear();
      return launch_by_triton(kernel, grid_argument, args, kwargs);
    }
    const py::object made = make_record(kernel, call, grid_argument, args, kwargs);
    // Another thread may have added it in the meantime, and may be using what it added.
    capsule = PyDict_SetDefault(kernel.records.ptr(), record_key.ptr(), made.ptr());
    if (capsule == nullptr) throw py::error_already_set();
  }
  if (capsule == Py_None) return launch_by_triton(kernel, grid_argument, args, kwargs);
  const auto& record = *static_cast<const Record*>(PyCapsule_GetPointer(capsule, kCapsule));
  if (has_changed(record)) return launch_by_triton(kernel, grid_argument, args, kwargs);
  launch_record(kernel, record, call, grid);
  return record.compiled;
}

// ---- Python's functions ----------------------------------------------------------------------------------------------

const Kernel& kernel_of(PyObject* capsule) {
  return *static_cast<const Kernel*>(PyCapsule_GetPointer(capsule, kCapsule));
}

// `self` is a tuple of the kernel's capsule and the grid. The arguments arrive as Python has them, without a copy.
PyObject* call_with_grid(PyObject* self, PyObject* args, PyObject* kwargs) noexcept {
  return guarded([&] {
    const Kernel& kernel = kernel_of(PyTuple_GET_ITEM(self, 0));
    return launch(kernel, PyTuple_GET_ITEM(self, 1), args, kwargs).release().ptr();
  });
}

PyMethodDef call_definition = {"launch", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call_with_grid)),
                               METH_VARARGS | METH_KEYWORDS, "launch(*args, **kwargs)"};

PyObject* at_grid(PyObject* self, PyObject* grid) noexcept {
  PyObject* both = PyTuple_Pack(2, self, grid);
  if (both == nullptr) return nullptr;
  PyObject* function = PyCFunction_New(&call_definition, both);
  Py_DECREF(both);
  return function;
}

PyMethodDef grid_definition = {"at_grid", at_grid, METH_O, "at_grid(grid)"};

py::object triton_kernel(const py::object& jit, const py::object& knobs) {
  auto kernel = std::make_unique<Kernel>();
  kernel->jit = jit;
  kernel->knobs = knobs;
  kernel->name = jit.attr("__name__").cast<std::string>();
  for (const py::handle parameter : jit.attr("params")) {
    kernel->indices[parameter.attr("name")] = kernel->parameters.size();
    kernel->parameters.push_back({
        .is_constexpr = parameter.attr("is_constexpr").cast<bool>(),
        .by_value = !parameter.attr("do_not_specialize").cast<bool>(),
        .by_alignment = !parameter.attr("do_not_specialize_on_alignment").cast<bool>(),
        .absence = parameter.attr("has_default").cast<bool>() ? py::object(parameter.attr("default")) : py::object(),
    });
  }
  if (kernel->parameters.size() > kMaxParameters)
    throw py::value_error(kernel->name + ": expected at most " + std::to_string(kMaxParameters) + " parameters, got " +
                          std::to_string(kernel->parameters.size()));
  const py::capsule self(kernel.release(), kCapsule, [](PyObject*) {});
  return py::reinterpret_steal<py::object>(PyCFunction_New(&grid_definition, self.ptr()));
}

}  // namespace

void bind_triton(py::module_& python) {
  python.def("triton_kernel", &triton_kernel, py::arg("kernel"), py::arg("knobs"));
}

}  // namespace fasttfm
