// Shared by the binding files, one per op. They do not include Python.h, and so compile quickly: only the files that
// include python.h do.
//
//   FASTTFM_FUNCTION(Status, layer_norm_forward, const Tensor& x, const OptionalTensor& weight, float eps) { ... }
//
// defines a function of tensors and numbers and adds it to the module. Its parameter list is the only one: the
// conversion from Python, the error messages and the signature in _C.pyi follow from it. Parameters that belong
// together are a struct, which is a tuple in Python (FASTTFM_STRUCT).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "common/status.h"
#include "tensors.h"

namespace fasttfm {

class Module;  // the extension module, while it is set up

// An address is an integer: of an array in host memory that is not a tensor's, or a handle of the CUDA runtime.
enum class ArgumentType { tensor, optional_tensor, int64, int32, number, address };

struct Value {
  OptionalTensor tensor;
  int64_t integer = 0;
  double number = 0;
};

struct Outcome {
  Status status;
  int64_t number = 0;  // of a function that returns one
};

// A struct of tensors and numbers, which Python passes as a tuple.
struct Struct {
  const char* name;
  std::vector<std::string> fields;
  std::vector<ArgumentType> types;
};

// A parameter of a function: one value, or those of a struct.
struct Parameter {
  std::string name;
  const Struct* fields = nullptr;
};

// A function as calls.cpp calls it. `arguments` and `types` are those of the values, with a struct's fields in its
// place.
struct Function {
  const char* name;
  std::vector<Parameter> parameters;
  std::vector<std::string> arguments;
  std::vector<ArgumentType> types;
  bool returns_number;
  std::function<Outcome(const CallContext&, const Value*)> call;
};

constexpr std::size_t kMaxArguments = 56;  // of a function, with the fields of its structs

// How an argument of each C++ type is read.
template <class Argument, class = void>
struct Convert;
template <>
struct Convert<const Tensor&> {
  static constexpr ArgumentType type = ArgumentType::tensor;
  static const Tensor& from(const Value& value) { return value.tensor; }
};
template <>
struct Convert<const OptionalTensor&> {
  static constexpr ArgumentType type = ArgumentType::optional_tensor;
  static const OptionalTensor& from(const Value& value) { return value.tensor; }
};
template <class Number>
struct Convert<Number, std::enable_if_t<std::is_integral_v<Number> || std::is_enum_v<Number>>> {
  static_assert(sizeof(Number) == 4 || sizeof(Number) == 8, "flags are ints");
  static constexpr ArgumentType type = sizeof(Number) == 8 ? ArgumentType::int64 : ArgumentType::int32;
  static Number from(const Value& value) { return static_cast<Number>(value.integer); }
};
template <>
struct Convert<float> {
  static constexpr ArgumentType type = ArgumentType::number;
  static float from(const Value& value) { return static_cast<float>(value.number); }
};
template <class Element>
struct Convert<Element*> {
  static constexpr ArgumentType type = ArgumentType::address;
  static Element* from(const Value& value) { return reinterpret_cast<Element*>(value.integer); }
};

// Whether an argument is a struct, and how many values it has.
template <class Argument, class = void>
constexpr bool kIsStruct = false;
template <class Argument>
constexpr bool kIsStruct<Argument, std::void_t<decltype(Convert<Argument>::count)>> = true;

template <class Argument>
constexpr std::size_t count_of() {
  if constexpr (kIsStruct<Argument>)
    return Convert<Argument>::count;
  else
    return 1;
}

template <class Argument>
decltype(auto) read_values(const Value* values) {
  if constexpr (kIsStruct<Argument>)
    return Convert<Argument>::from(values);
  else
    return Convert<Argument>::from(*values);
}

template <class Argument>
const Struct* struct_of() {
  if constexpr (kIsStruct<Argument>)
    return &Convert<Argument>::fields();
  else
    return nullptr;
}

template <class Argument>
ArgumentType type_of() {
  if constexpr (kIsStruct<Argument>)
    return ArgumentType::tensor;  // not used: its fields have types
  else
    return Convert<Argument>::type;
}

// The index of the first value of the argument `which`.
template <class... Arguments>
constexpr std::size_t first_value(std::size_t which) {
  constexpr std::size_t counts[] = {count_of<Arguments>()..., 0};
  std::size_t first = 0;
  for (std::size_t i = 0; i < which; ++i) first += counts[i];
  return first;
}

template <class Return, class... Arguments, std::size_t... I>
Outcome call_with(Return (*function)(const CallContext&, Arguments...), const CallContext& context, const Value* values,
                  std::index_sequence<I...>) {
  static_cast<void>(values);  // of a function without arguments
  if constexpr (std::is_same_v<Return, Status>)
    return {function(context, read_values<Arguments>(values + first_value<Arguments...>(I))...)};
  else
    return {Status{}, function(context, read_values<Arguments>(values + first_value<Arguments...>(I))...)};
}

// The names in the text of a parameter list: "const Tensor& x, float eps" has x and eps.
std::vector<std::string> parameter_names(const char* parameters);

// A function of these parameters; `types` are those of the parameters that are no structs.
Function function_of(const char* name, const char* parameters, const std::vector<const Struct*>& structs,
                     const std::vector<ArgumentType>& types);

void add_function(Module& module, Function function);
void add_struct(Module& module, const Struct& fields);

template <class Return, class... Arguments>
void bind_function(Module& module, const char* name, const char* parameters,
                   Return (*function)(const CallContext&, Arguments...)) {
  static_assert(first_value<Arguments...>(sizeof...(Arguments)) <= kMaxArguments, "raise kMaxArguments");
  static_assert(std::is_same_v<Return, Status> || std::is_same_v<Return, int64_t>, "a status or a number");
  Function bound = function_of(name, parameters, {struct_of<Arguments>()...}, {type_of<Arguments>()...});
  bound.returns_number = std::is_same_v<Return, int64_t>;
  bound.call = [function](const CallContext& context, const Value* values) {
    return call_with(function, context, values, std::index_sequence_for<Arguments...>{});
  };
  add_function(module, std::move(bound));
}

void bind_constant(Module& module, const char* name, int64_t value);

using Binder = void (*)(Module&);
struct BinderRegistration {
  explicit BinderRegistration(Binder binder);
};

}  // namespace fasttfm

#define FASTTFM_TEXT_(...) #__VA_ARGS__
#define FASTTFM_TEXT(...) FASTTFM_TEXT_(__VA_ARGS__)  // after the expansion of macros

// Defines `NAME(parameters)` and adds it to the module, where it takes its arguments by position. RETURN is Status,
// which becomes an exception, or int64_t, for example the number of elements of a workspace. The integer arguments of a
// function that returns a number are sizes from 0 to 2^40. The function runs without the GIL. All its tensors are on
// one device; `context` has that device with torch's current stream, or, for the CPU, torch's number of threads.
#define FASTTFM_FUNCTION(RETURN, NAME, ...)                                                    \
  static RETURN NAME(const CallContext& context __VA_OPT__(, ) __VA_ARGS__);                   \
  static const BinderRegistration register_##NAME(                                             \
      [](Module& module) { bind_function(module, #NAME, FASTTFM_TEXT(__VA_ARGS__), &NAME); }); \
  static RETURN NAME([[maybe_unused]] const CallContext& context __VA_OPT__(, ) __VA_ARGS__)

#define FASTTFM_CONSTANT(NAME, VALUE) \
  static const BinderRegistration register_##NAME([](Module& module) { bind_constant(module, #NAME, VALUE); });

// For a list of parameters that several functions share: with
//   #define INPUTS(F) F(const Tensor&, x), F(float, eps)
// INPUTS(FASTTFM_PARAMETER) declares them and INPUTS(FASTTFM_NAME) passes them on.
#define FASTTFM_PARAMETER(TYPE, NAME) TYPE NAME
#define FASTTFM_NAME(TYPE, NAME) NAME

// Defines a struct that functions take as `const NAME&`, and its named tuple in the module. With
//   #define FIELDS(F) F(const Tensor&, x) F(float, eps)
// FASTTFM_STRUCT(NAME, FIELDS) in the namespace fasttfm has the fields x and eps. The tensors are those of the call.
#define FASTTFM_STRUCT(NAME, FIELDS)                                                              \
  struct NAME {                                                                                   \
    FIELDS(FASTTFM_FIELD)                                                                         \
  };                                                                                              \
  template <>                                                                                     \
  struct Convert<const NAME&> {                                                                   \
    static constexpr std::size_t count = 0 FIELDS(FASTTFM_COUNT_FIELD);                           \
    static const Struct& fields() {                                                               \
      static const Struct all{#NAME, {FIELDS(FASTTFM_FIELD_NAME)}, {FIELDS(FASTTFM_FIELD_TYPE)}}; \
      return all;                                                                                 \
    }                                                                                             \
    static NAME from(const Value* values) { return {FIELDS(FASTTFM_READ_FIELD)}; }                \
  };                                                                                              \
  static const BinderRegistration register_##NAME(                                                \
      [](Module& module) { add_struct(module, Convert<const NAME&>::fields()); });
#define FASTTFM_FIELD(TYPE, NAME) TYPE NAME;
#define FASTTFM_COUNT_FIELD(TYPE, NAME) +1
#define FASTTFM_FIELD_NAME(TYPE, NAME) #NAME,
#define FASTTFM_FIELD_TYPE(TYPE, NAME) Convert<TYPE>::type,
#define FASTTFM_READ_FIELD(TYPE, NAME) Convert<TYPE>::from(*values++),

// Calls cpu::LAUNCHER or cuda::LAUNCHER, depending on the device of the tensors.
#define FASTTFM_LAUNCH_CPU(LAUNCHER, PARAMS, WITHOUT) \
  (context.is_cuda() ? bad_size("the core was built without " WITHOUT) : cpu::LAUNCHER(PARAMS))
#define FASTTFM_LAUNCH_BOTH(LAUNCHER, PARAMS) (context.is_cuda() ? cuda::LAUNCHER(PARAMS) : cpu::LAUNCHER(PARAMS))

#ifdef FASTTFM_WITH_CUDA
#define FASTTFM_LAUNCH(LAUNCHER, PARAMS) FASTTFM_LAUNCH_BOTH(LAUNCHER, PARAMS)
#else
#define FASTTFM_LAUNCH(LAUNCHER, PARAMS) FASTTFM_LAUNCH_CPU(LAUNCHER, PARAMS, "CUDA")
#endif
#ifdef FASTTFM_WITH_HOPPER  // for launchers whose only CUDA kernels are Hopper's
#define FASTTFM_LAUNCH_HOPPER(LAUNCHER, PARAMS) FASTTFM_LAUNCH_BOTH(LAUNCHER, PARAMS)
#else
#define FASTTFM_LAUNCH_HOPPER(LAUNCHER, PARAMS) FASTTFM_LAUNCH_CPU(LAUNCHER, PARAMS, "Hopper's kernels")
#endif
