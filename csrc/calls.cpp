// Calls from Python: the conversion of arguments, torch's tensors and torch's current stream.
//
// torch 2.10 and later publish a table of C functions for tensors and streams (dlpack.h). Tensors of earlier versions
// are read by their attributes, which takes longer.
#include <algorithm>
#include <array>
#include <cctype>
#include <cstring>
#include <memory>

#include "binding.h"
#include "common/count.h"
#include "python.h"

namespace fasttfm {

namespace py = pybind11;

namespace {

constexpr int32_t kMaxDimensions = 8;

// Objects of torch, which are never released.
struct Torch {
  PyObject* tensor = nullptr;  // types
  PyObject* parameter = nullptr;
  PyObject* is_neg = nullptr;  // functions
  PyObject* threads = nullptr;
  PyObject* stream = nullptr;
  std::array<PyObject*, 3> tracers = {};  // functions whose result is 0 unless modes, transforms or tracers are active
  std::array<PyObject*, 7> dtypes = {};   // in the order of ElementType
  const dlpack::ExchangeApi* exchange = nullptr;
};
Torch torch;

// Memory for the shapes and strides of tensors that are read by their attributes.
struct Shapes {
  std::array<std::array<int64_t, 2 * kMaxDimensions>, kMaxArguments> numbers;
};

// For a Python exception that is already set.
[[noreturn]] void rethrow() { throw py::error_already_set(); }

int64_t as_integer(PyObject* object) {
  const long long value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred() != nullptr) rethrow();
  return value;
}

int64_t number_of(PyObject* function, PyObject* argument = nullptr) {
  PyObject* arguments[] = {nullptr, argument};
  const size_t count = (argument == nullptr ? 0 : 1) | PY_VECTORCALL_ARGUMENTS_OFFSET;
  const auto found = py::reinterpret_steal<py::object>(PyObject_Vectorcall(function, arguments + 1, count, nullptr));
  if (!found) rethrow();
  return as_integer(found.ptr());
}

ElementType element_type(dlpack::DataType type) {
  switch (type.code << 8 | type.bits) {
    case dlpack::kFloat << 8 | 32: return ElementType::f32;
    case dlpack::kBfloat << 8 | 16: return ElementType::bf16;
    case dlpack::kFloat << 8 | 16: return ElementType::f16;
    case dlpack::kFloat << 8 | 64: return ElementType::f64;
    case dlpack::kInt << 8 | 64: return ElementType::int64;
    case dlpack::kInt << 8 | 32: return ElementType::int32;
    case dlpack::kBool << 8 | 8: return ElementType::boolean;
    default: return ElementType::other;
  }
}

// Both readers return false for tensors that kernels cannot read. A Python exception may be set then.
bool read_exchanged(PyObject* object, Tensor& tensor) {
  dlpack::Tensor found;
  if (torch.exchange->tensor_from_py_object_no_sync(object, &found) != 0) return false;
  if (found.device.type != dlpack::kCpu && found.device.type != dlpack::kCuda) return false;
  tensor.data = static_cast<char*>(found.data) + found.byte_offset;
  tensor.shape = found.shape;
  tensor.strides = found.strides;
  tensor.dimensions = found.ndim;
  tensor.type = element_type(found.dtype);
  tensor.device = found.device.type == dlpack::kCuda ? found.device.index : -1;
  return true;
}

bool read_attributes(PyObject* object, Tensor& tensor, int64_t* numbers) {
  const py::handle given(object);
  const py::object device = given.attr("device");
  const auto kind = device.attr("type").cast<std::string>();
  const py::tuple shape = given.attr("shape"), strides = given.attr("stride")();
  if ((kind != "cpu" && kind != "cuda") || shape.size() > kMaxDimensions) return false;
  tensor.device = kind == "cuda" ? device.attr("index").cast<int32_t>() : -1;
  tensor.data = reinterpret_cast<void*>(given.attr("data_ptr")().cast<uintptr_t>());
  tensor.dimensions = static_cast<int32_t>(shape.size());
  for (size_t i = 0; i < shape.size(); ++i) {
    numbers[i] = shape[i].cast<int64_t>();
    numbers[kMaxDimensions + i] = strides[i].cast<int64_t>();
  }
  tensor.shape = numbers;
  tensor.strides = numbers + kMaxDimensions;
  const py::object dtype = given.attr("dtype");
  size_t code = 0;
  while (code < torch.dtypes.size() && torch.dtypes[code] != dtype.ptr()) ++code;
  tensor.type = static_cast<ElementType>(code);
  return true;
}

// Where torch's table does not support a tensor's element type, as FP8 in some versions, the attributes are read.
bool read_tensor(PyObject* object, Tensor& tensor, int64_t* numbers) {
  tensor.given = true;
  if (torch.exchange == nullptr) return read_attributes(object, tensor, numbers);
  if (read_exchanged(object, tensor)) return true;
  PyErr_Clear();
  return is_plain_tensor(object) && read_attributes(object, tensor, numbers);
}

bool is_tensor(PyObject* object) {
  return torch.tensor != nullptr && PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(torch.tensor));
}

int64_t elements(const Tensor& tensor) {
  int64_t count = 1;
  for (int32_t i = 0; i < tensor.dimensions; ++i) count *= tensor.shape[i];
  return count;
}

// ---- calls -----------------------------------------------------------------------------------------------------------

// Larger than any real size, and small enough that sizes can be rounded up and multiplied by constants.
constexpr int64_t kMaxSize = int64_t{1} << 40;

std::string describe(const Function& function, size_t index) {
  return std::string(function.name) + ": " + function.arguments[index] + ": expected ";
}

[[noreturn]] void wrong_argument(const Function& function, size_t index, const char* expected, PyObject* got) {
  PyErr_Clear();
  throw py::type_error(describe(function, index) + expected + ", got " + py::repr(py::handle(got)).cast<std::string>());
}

void read_tensor_argument(const Function& function, size_t index, PyObject* given, Tensor& tensor, int64_t* numbers) {
  if (!is_tensor(given)) wrong_argument(function, index, "a tensor", given);
  if (!read_tensor(given, tensor, numbers)) {
    PyErr_Clear();
    throw py::type_error(describe(function, index) + "a CPU or CUDA tensor with memory of its own, got " +
                         py::str(py::type::handle_of(given).attr("__name__")).cast<std::string>());
  }
  if (tensor.data == nullptr && elements(tensor) != 0)  // a subclass: its null must not be taken for None
    throw py::type_error(describe(function, index) + "a tensor with memory of its own");
}

// Accepts only integers, not objects that convert to one: a tensor with one element is no address.
int64_t read_integer(const Function& function, size_t index, PyObject* given) {
  int overflow = 0;
  const int64_t integer = PyLong_Check(given) ? PyLong_AsLongLongAndOverflow(given, &overflow) : 0;
  const ArgumentType type = function.types[index];
  const bool fits = type == ArgumentType::address ? integer >= 0
                    : type == ArgumentType::int32 ? integer == static_cast<int32_t>(integer)
                                                  : true;
  if (!PyLong_Check(given) || overflow != 0 || !fits)
    wrong_argument(function, index, type == ArgumentType::int32 ? "an integer of 32 bits" : "an integer of 64 bits",
                   given);
  if (function.returns_number && (integer < 0 || integer > kMaxSize))
    throw py::value_error(describe(function, index) + "a number in [0, 2^40], got " + std::to_string(integer));
  return integer;
}

void read_argument(const Function& function, size_t index, PyObject* given, Value& value, int64_t* numbers) {
  switch (function.types[index]) {
    case ArgumentType::optional_tensor:
      if (given == Py_None) return;
      [[fallthrough]];
    case ArgumentType::tensor: return read_tensor_argument(function, index, given, value.tensor, numbers);
    case ArgumentType::number:
      value.number = PyFloat_AsDouble(given);
      if (value.number == -1.0 && PyErr_Occurred() != nullptr) wrong_argument(function, index, "a number", given);
      return;
    default: value.integer = read_integer(function, index, given);
  }
}

CallContext context_of(const Function& function, const Value* values) {
  const Tensor* first = nullptr;
  for (size_t i = 0; i < function.types.size(); ++i) {
    const Tensor& tensor = values[i].tensor;
    if (!tensor.given) continue;
    if (first == nullptr) first = &tensor;
    if (tensor.device != first->device)
      throw py::value_error(describe(function, i) + "a tensor on the device of the first one");
  }
  CallContext context{-1, nullptr, 1};
  if (first == nullptr) return context;
  context.device = first->device;
  if (!context.is_cuda()) {
    context.threads = static_cast<int>(number_of(torch.threads));
  } else if (torch.exchange != nullptr) {
    if (torch.exchange->current_work_stream(dlpack::kCuda, context.device, &context.stream) != 0) rethrow();
  } else {
    const py::int_ index(context.device);
    context.stream = reinterpret_cast<void*>(number_of(torch.stream, index.ptr()));
  }
  return context;
}

// The values of a struct, which is a tuple.
void read_struct(const Function& function, size_t first, const Parameter& parameter, PyObject* given, Value* values,
                 Shapes& shapes) {
  const size_t count = parameter.fields->types.size();
  const size_t length = PyTuple_Check(given) ? static_cast<size_t>(PyTuple_GET_SIZE(given)) : 0;
  if (length != count)
    throw py::type_error(
        std::string(function.name) + ": " + parameter.name + ": expected the " + std::to_string(count) + " fields of " +
        parameter.fields->name + " in a tuple, got " +
        (PyTuple_Check(given) ? std::to_string(length) : py::repr(py::handle(given)).cast<std::string>()));
  for (size_t i = first; i < first + count; ++i)
    read_argument(function, i, PyTuple_GET_ITEM(given, i - first), values[i], shapes.numbers[i].data());
}

PyObject* run(const Function& function, PyObject* const* given, size_t count) {
  if (count != function.parameters.size())
    throw py::type_error(std::string(function.name) + ": expected " + std::to_string(function.parameters.size()) +
                         " arguments, got " + std::to_string(count));
  alignas(Value) char memory[kMaxArguments * sizeof(Value)];  // only those that are given are initialized
  auto* values = reinterpret_cast<Value*>(memory);
  std::uninitialized_value_construct_n(values, function.types.size());
  Shapes shapes;
  size_t value = 0;
  for (size_t i = 0; i < count; ++i) {
    const Parameter& parameter = function.parameters[i];
    if (parameter.fields != nullptr) {
      read_struct(function, value, parameter, given[i], values, shapes);
      value += parameter.fields->types.size();
    } else {
      read_argument(function, value, given[i], values[value], shapes.numbers[value].data());
      ++value;
    }
  }
  const CallContext context = context_of(function, values);
  Outcome outcome;
  {
    py::gil_scoped_release unlocked;
    outcome = function.call(context, values);
  }
  raise_unless_ok(outcome.status);
  if (outcome.number == kTooMany)
    throw py::value_error(std::string(function.name) + ": expected a size that fits 64 bits, got a larger one");
  if (function.returns_number) return PyLong_FromLongLong(outcome.number);
  Py_RETURN_NONE;
}

const char* type_name(ArgumentType type) {
  static const char* const names[] = {"Tensor", "Tensor | None", "int", "int", "float", "int"};
  return names[static_cast<size_t>(type)];
}

// The signature as _C.pyi has it; the docstring of the function.
std::string signature_of(const Function& function) {
  std::string text = std::string(function.name) + "(";
  size_t value = 0;
  for (const Parameter& parameter : function.parameters) {
    const Struct* fields = parameter.fields;
    text += (text.back() == '(' ? "" : ", ") + parameter.name + ": ";
    text += fields != nullptr ? fields->name : type_name(function.types[value]);
    value += fields != nullptr ? fields->types.size() : 1;
  }
  return text + (text.back() == '(' ? "" : ", /") + ") -> " + (function.returns_number ? "int" : "None");
}

// A function of the module; lives as long as the process.
struct Bound {
  Function function;
  std::string doc;
  PyMethodDef definition;
};

PyObject* entry(PyObject* self, PyObject* const* given, Py_ssize_t count) noexcept {
  return guarded([&] {
    const auto* bound = static_cast<const Bound*>(PyCapsule_GetPointer(self, nullptr));
    return run(bound->function, given, static_cast<size_t>(count));
  });
}

// ---- signatures ------------------------------------------------------------------------------------------------------

constexpr size_t kMaxKeyTensors = 8;

// The properties of tensors that a call's checks and its choice of a backend depend on, as a key of a dictionary.
class Key {
 public:
  void add(int64_t number) {
    if (size_ < numbers_.size()) numbers_[size_++] = number;
  }
  PyObject* bytes() const {
    return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(numbers_.data()), size_ * sizeof(int64_t));
  }

 private:
  std::array<int64_t, 8 * kMaxKeyTensors> numbers_;
  size_t size_ = 0;
};

bool is_aligned(const Tensor& tensor) { return reinterpret_cast<uintptr_t>(tensor.data) % 16 == 0; }

bool is_contiguous(const Tensor& tensor) {
  int64_t next = 1;
  for (int32_t i = tensor.dimensions - 1; i >= 0; next *= tensor.shape[i--])
    if (tensor.shape[i] != 1 && tensor.strides[i] != next) return false;
  return true;
}

bool same_shape(const Tensor& a, const Tensor& b) {
  return a.dimensions == b.dimensions && std::memcmp(a.shape, b.shape, a.dimensions * sizeof(int64_t)) == 0;
}

// Each adds the properties of one tensor, or returns false for one that every call has to check.
bool add_rows(Key& key, const Tensor& tensor) {
  if (!tensor.has_rows() || elements(tensor) == 0 || elements(tensor) >= int64_t{1} << 31) return false;
  bool whole_vectors = true;
  for (int32_t i = 0; i + 1 < tensor.dimensions; ++i) whole_vectors = whole_vectors && tensor.strides[i] % 8 == 0;
  key.add(static_cast<int64_t>(tensor.type) << 2 | whole_vectors << 1 | is_aligned(tensor));
  return true;
}

bool add_parameter(Key& key, const Tensor& tensor, int64_t columns) {
  if (tensor.dimensions != 1 || tensor.shape[0] != columns || (tensor.strides[0] != 1 && columns != 1)) return false;
  key.add(static_cast<int64_t>(tensor.type) << 2 | is_aligned(tensor));
  return true;
}

bool is_floating(const Tensor& tensor) { return tensor.type <= ElementType::f16; }

// Queries, keys or values, [B, S, H, D] or [T, H, D], or [..., 3, H, D], without the numbers of sequences and tokens.
bool add_heads(Key& key, const Tensor& tensor, int32_t dimensions) {
  const int32_t last = tensor.dimensions - 1;
  if (last < dimensions || tensor.strides[last] != 1 || elements(tensor) == 0) return false;
  bool whole_vectors = true, overlaps = false;
  for (int32_t i = 0; i < last; ++i) {
    whole_vectors = whole_vectors && tensor.strides[i] % 8 == 0;
    overlaps = overlaps || tensor.strides[i] == 0;
  }
  key.add(tensor.dimensions);
  key.add(static_cast<int64_t>(tensor.type) << 3 | overlaps << 2 | whole_vectors << 1 | is_aligned(tensor));
  for (int32_t i = 0; i < dimensions; ++i) key.add(tensor.shape[last - i]);
  return true;
}

bool add_keys(Key& key, const Tensor& tensor, const Tensor& queries) {
  const int32_t last = queries.dimensions - 1;
  if (tensor.dimensions != queries.dimensions || tensor.shape[last] != queries.shape[last]) return false;
  key.add(tensor.shape[0] == queries.shape[0]);  // sequences, or packed tokens
  return (last < 3 || tensor.shape[0] == queries.shape[0]) && add_heads(key, tensor, 2);
}

bool add_indices(Key& key, const Tensor& tensor, ElementType type, int64_t length) {
  if (tensor.type != type || tensor.dimensions != 1 || tensor.strides[0] != 1) return false;
  key.add(1);
  return length < 0 ? tensor.shape[0] > 1 : tensor.shape[0] == length;
}

bool is_index(const Tensor& tensor) { return tensor.type == ElementType::int64 || tensor.type == ElementType::int32; }

// Indices of any shape.
bool add_index(Key& key, const Tensor& tensor) {
  key.add(static_cast<int64_t>(tensor.type) << 1 | (tensor.dimensions == 1));
  return is_index(tensor);
}

// A table or a parameter, with its sizes.
bool add_sizes(Key& key, const Tensor& tensor) {
  if (tensor.dimensions > 2) return false;
  key.add(static_cast<int64_t>(tensor.type) << 2 | is_contiguous(tensor) << 1 | is_aligned(tensor));
  key.add(tensor.shape[0]);
  key.add(tensor.dimensions == 2 ? tensor.shape[1] : -1);
  return true;
}

// The meaning of each letter. Some relate a tensor to those before it.
bool add_tensor(Key& key, char kind, const Tensor* tensors, size_t index) {
  const Tensor &tensor = tensors[index], &first = tensors[0];
  switch (kind) {
    case 'r': key.add(tensor.columns()); return is_floating(tensor) && add_rows(key, tensor);    // rows
    case 'l': return is_floating(tensor) && same_shape(tensor, first) && add_rows(key, tensor);  // rows like the first
    case 'p': return is_floating(tensor) && add_parameter(key, tensor, first.columns());         // a parameter
    case 'q': return is_floating(tensor) && add_heads(key, tensor, 2);                           // queries
    case 'f': return is_floating(tensor) && add_heads(key, tensor, 3);                     // queries, keys and values
    case 'k': return is_floating(tensor) && add_keys(key, tensor, first);                  // keys
    case 'v': return same_shape(tensor, tensors[index - 1]) && add_heads(key, tensor, 0);  // values
    case 'c': return add_indices(key, tensor, ElementType::int32, -1);                     // cu_seqlens
    case 'n': return add_indices(key, tensor, ElementType::int32, first.shape[0]);         // lengths
    case 's': return add_indices(key, tensor, ElementType::int64, 1);                      // a seed
    case 'i': return add_index(key, tensor);                                               // indices
    case 'j': return same_shape(tensor, first) && add_index(key, tensor);                  // indices like the first
    case 't': return add_sizes(key, tensor);                                               // a table or its parameter
    default: return false;
  }
}

// Whether a tensor has torch's negative bit, which kernels would ignore and torch's dispatcher resolves. Only views of
// complex tensors have it, never parameters.
bool is_negative(PyObject* object) {
  return reinterpret_cast<PyObject*>(Py_TYPE(object)) == torch.tensor && number_of(torch.is_neg, object) != 0;
}

bool is_traced() {
  for (PyObject* tracer : torch.tracers)
    if (number_of(tracer) != 0) return true;
  return false;
}

// The key of tensors, with a letter of `kinds` for each; None if the call has to be checked or is traced. All tensors
// but the first may be None.
py::object find_signature(const char* kinds, PyObject* const* given) {
  if (torch.exchange == nullptr || is_traced()) return py::none();
  Key key;
  std::array<Tensor, kMaxKeyTensors> tensors;
  for (size_t i = 0; kinds[i] != '\0'; ++i) {
    if (given[i] == Py_None && i > 0) {
      key.add(-1);
      continue;
    }
    Tensor &tensor = tensors[i], &first = tensors[0];
    if (!is_plain_tensor(given[i]) || is_negative(given[i])) return py::none();
    if (!read_exchanged(given[i], tensor)) {
      PyErr_Clear();
      return py::none();
    }
    if (i == 0) key.add(tensor.device);
    if (tensor.dimensions == 0 || tensor.device != first.device || tensor.data == nullptr) return py::none();
    if (!add_tensor(key, kinds[i], tensors.data(), i)) return py::none();
  }
  return py::reinterpret_steal<py::object>(key.bytes());
}

PyObject* signature(PyObject*, PyObject* const* given, Py_ssize_t count) noexcept {
  const char* kinds = count == 0 ? nullptr : PyUnicode_AsUTF8(given[0]);
  if (kinds == nullptr || std::strlen(kinds) > std::min<size_t>(count - 1, kMaxKeyTensors)) {
    PyErr_SetString(PyExc_TypeError, "signature: expected kinds and as many tensors or Nones");
    return nullptr;
  }
  try {
    return find_signature(kinds, given + 1).release().ptr();
  } catch (py::error_already_set& error) {
    error.restore();
  }
  return nullptr;
}

PyMethodDef signature_definition = {"signature", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(signature)),
                                    METH_FASTCALL, "signature(kinds: str, *tensors: Tensor | None) -> bytes | None"};

// ---- tables ----------------------------------------------------------------------------------------------------------

bool is_alike(const Tensor& a, const Tensor& b) {
  return a.given == b.given && (!a.given || (a.type == b.type && a.device == b.device && same_shape(a, b)));
}

// Writes the addresses of tensors, 0 for None, to `target`. Returns the code of their type if all are contiguous (on a
// GPU also aligned), of one type and on one device, and if the shapes of the first `period` of them repeat; otherwise
// kMixed, or kUnread if some are not plain tensors or torch has no table of C functions.
int64_t tensor_table(const py::list& tensors, uintptr_t target, size_t period) {
  constexpr int64_t kMixed = -1, kUnread = -2;
  if (torch.exchange == nullptr || period == 0) return kUnread;
  auto* addresses = reinterpret_cast<int64_t*>(target);
  std::vector<Tensor> first;
  const Tensor* some = nullptr;
  bool mixed = false;
  for (size_t i = 0; i < tensors.size(); ++i) {
    PyObject* object = PyList_GET_ITEM(tensors.ptr(), static_cast<Py_ssize_t>(i));
    Tensor tensor;
    if (object != Py_None) {
      tensor.given = true;
      const bool plain = is_plain_tensor(object) && !is_negative(object);
      if (!plain || !read_exchanged(object, tensor) || tensor.data == nullptr) {
        PyErr_Clear();
        return kUnread;
      }
    }
    addresses[i] = reinterpret_cast<int64_t>(tensor.data);
    if (i < period) first.push_back(tensor);
    mixed = mixed || !is_alike(tensor, first[i % period]) || (tensor.given && !is_contiguous(tensor)) ||
            (tensor.device >= 0 && !is_aligned(tensor));
  }
  for (const Tensor& tensor : first) {
    if (!tensor.given) continue;
    if (some == nullptr) some = &tensor;
    mixed = mixed || tensor.type != some->type || tensor.device != some->device;
  }
  return mixed || some == nullptr ? kMixed : static_cast<int64_t>(some->type);
}

// ---- torch -----------------------------------------------------------------------------------------------------------

PyObject* held(const py::object& from, const char* name) { return py::getattr(from, name, py::none()).release().ptr(); }

void use_torch(const py::module_& module) {
  const py::object core = module.attr("_C");
  torch.tensor = held(module, "Tensor");
  torch.parameter = held(module.attr("nn"), "Parameter");
  torch.is_neg = held(module.attr("Tensor"), "is_neg");
  torch.threads = held(module, "get_num_threads");
  torch.stream = held(core, "_cuda_getCurrentRawStream");
  torch.tracers = {held(core, "_len_torch_dispatch_stack"), held(core, "_are_functorch_transforms_active"),
                   held(core, "_is_tracing")};
  const char* const dtypes[] = {"float32", "bfloat16", "float16", "float64", "int64", "int32", "bool"};
  for (size_t i = 0; i < torch.dtypes.size(); ++i) torch.dtypes[i] = held(module, dtypes[i]);
  const py::object capsule = py::getattr(module.attr("Tensor"), "__dlpack_c_exchange_api__", py::none());
  if (!PyCapsule_IsValid(capsule.ptr(), dlpack::kExchangeCapsule)) return;
  const void* found = PyCapsule_GetPointer(capsule.ptr(), dlpack::kExchangeCapsule);
  const auto* exchange = static_cast<const dlpack::ExchangeApi*>(found);
  if (exchange->header.version.major == dlpack::kMajorVersion && exchange->tensor_from_py_object_no_sync != nullptr)
    torch.exchange = exchange;
}

}  // namespace

const dlpack::ExchangeApi* torch_exchange() { return torch.exchange; }

bool is_plain_tensor(PyObject* object) {
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  return type == torch.tensor || type == torch.parameter;
}

std::vector<std::string> parameter_names(const char* parameters) {
  std::vector<std::string> names;
  std::string word;
  for (const char* letter = parameters; *letter != '\0'; ++letter) {
    if (*letter == ',') names.push_back(word);
    if (std::isalnum(static_cast<unsigned char>(*letter)) || *letter == '_') {
      word += *letter;
    } else {
      word.clear();
    }
  }
  if (!word.empty()) names.push_back(word);
  return names;
}

Function function_of(const char* name, const char* parameters, const std::vector<const Struct*>& structs,
                     const std::vector<ArgumentType>& types) {
  Function function{name, {}, {}, {}, false, {}};
  const std::vector<std::string> names = parameter_names(parameters);
  for (size_t i = 0; i < names.size(); ++i) {
    function.parameters.push_back({names[i], structs[i]});
    if (structs[i] == nullptr) {
      function.arguments.push_back(names[i]);
      function.types.push_back(types[i]);
      continue;
    }
    for (const std::string& field : structs[i]->fields) function.arguments.push_back(names[i] + "." + field);
    function.types.insert(function.types.end(), structs[i]->types.begin(), structs[i]->types.end());
  }
  return function;
}

// The named tuple; its docstring has the types of the fields.
void add_struct(Module& module, const Struct& fields) {
  py::list names;
  std::string doc;
  for (size_t i = 0; i < fields.fields.size(); ++i) {
    names.append(fields.fields[i]);
    doc += (i == 0 ? "" : ", ") + fields.fields[i] + ": " + type_name(fields.types[i]);
  }
  const py::object type = py::module_::import("collections").attr("namedtuple")(fields.name, names);
  type.attr("__doc__") = std::string(fields.name) + "(" + doc + ")";
  type.attr("__module__") = module.python.attr("__name__");
  module.python.attr(fields.name) = type;
}

void add_function(Module& module, Function function) {
  auto* bound = new Bound{std::move(function), {}, {}};
  const char* name = bound->function.name;
  bound->doc = signature_of(bound->function);
  bound->definition = {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(entry)), METH_FASTCALL,
                       bound->doc.c_str()};
  const py::capsule self(bound);
  module.python.attr(name) = py::reinterpret_steal<py::object>(PyCFunction_New(&bound->definition, self.ptr()));
}

void bind_torch(py::module_& python) {
  python.def("use_torch", &use_torch, py::arg("torch"));
  python.def("tensor_table", &tensor_table, py::arg("tensors"), py::arg("target"), py::arg("period"));
  python.attr("signature") = py::reinterpret_steal<py::object>(PyCFunction_New(&signature_definition, nullptr));
}

}  // namespace fasttfm
