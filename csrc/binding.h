// Shared by the binding files: one per op, each adds its functions to the module inside FASTTFM_BINDING. They know
// nothing of Python and compile in a moment; module.cpp and calls.cpp do, once for all functions.
#pragma once

#include <array>
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

// ---- calls: a function of tensors and numbers ------------------------------------------------------------------------

enum class ArgumentType { tensor, optional_tensor, integer, number };

struct Value {
  OptionalTensor tensor;
  int64_t integer = 0;
  double number = 0;
};

struct Outcome {
  Status status;
  int64_t number = 0;  // of a function that returns one
};

struct Call {
  std::string name;
  std::vector<std::string> arguments;
  std::vector<ArgumentType> types;
  bool returns_number;
  std::function<Outcome(const Place&, const Value*)> function;
};

constexpr std::size_t kMaxArguments = 24;

template <class Argument>
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
template <>
struct Convert<int64_t> {
  static constexpr ArgumentType type = ArgumentType::integer;
  static int64_t from(const Value& value) { return value.integer; }
};
template <>
struct Convert<double> {
  static constexpr ArgumentType type = ArgumentType::number;
  static double from(const Value& value) { return value.number; }
};

template <class Return, class... Arguments, std::size_t... I>
Outcome call_with(Return (*function)(const Place&, Arguments...), const Place& place, const Value* values,
                  std::index_sequence<I...>) {
  if constexpr (std::is_same_v<Return, Status>)
    return {function(place, Convert<Arguments>::from(values[I])...)};
  else
    return {Status{}, function(place, Convert<Arguments>::from(values[I])...)};
}

void add_call(Module& module, Call call);

// Adds `name(...)`, which takes its arguments by position; `arguments` has their names: "x, weight, eps". All tensors
// are on one device, where the call runs: torch's current stream there, or torch's number of CPU threads. The function
// returns a status, which becomes an exception, or a number. The docstring has the signature of _C.pyi.
template <class Return, class... Arguments>
void bind_call(Module& module, const char* name, const char* arguments,
               Return (*function)(const Place&, Arguments...)) {
  static_assert(sizeof...(Arguments) <= kMaxArguments, "raise kMaxArguments");
  Call call{name, {}, {Convert<Arguments>::type...}, !std::is_same_v<Return, Status>, nullptr};
  for (const char* letter = arguments; *letter != '\0'; ++letter) {
    if (letter == arguments || *letter == ',') call.arguments.emplace_back();
    if (*letter != ',' && *letter != ' ') call.arguments.back() += *letter;
  }
  call.function = [function](const Place& place, const Value* values) {
    return call_with(function, place, values, std::index_sequence_for<Arguments...>{});
  };
  add_call(module, std::move(call));
}

// The CPU's or the GPU's launcher of a name, by the call's place.
#ifdef FASTTFM_WITH_CUDA
#define FASTTFM_LAUNCH(PLACE, LAUNCHER, PARAMS) ((PLACE).is_cuda() ? cuda::LAUNCHER(PARAMS) : cpu::LAUNCHER(PARAMS))
#else
#define FASTTFM_LAUNCH(PLACE, LAUNCHER, PARAMS) \
  ((PLACE).is_cuda() ? bad_size("the core was built without CUDA") : cpu::LAUNCHER(PARAMS))
#endif

// ---- launchers: the fields of a params struct by keyword -------------------------------------------------------------

// The value types that Python passes: addresses and sizes as integers, enumerations as their codes.
enum class FieldType { pointer, int64, int32, float32 };

// One member of a params struct and the keyword that fills it.
struct Field {
  const char* name;
  FieldType type;
  std::ptrdiff_t offset;  // in the struct
};

template <class Member>
constexpr FieldType field_type() {
  if constexpr (std::is_pointer_v<Member>) return FieldType::pointer;
  if constexpr (std::is_same_v<Member, float>) return FieldType::float32;
  if constexpr (std::is_integral_v<Member> && sizeof(Member) == 8) return FieldType::int64;
  static_assert(std::is_pointer_v<Member> || std::is_same_v<Member, float> ||
                    ((std::is_integral_v<Member> || std::is_enum_v<Member>) && sizeof(Member) >= 4),
                "a type that the binding does not support");
  return FieldType::int32;
}

template <class Params, class Member>
Field make_field(const char* name, Member Params::* member) {
  static const Params params{};
  const auto* start = reinterpret_cast<const char*>(&params);
  return {name, field_type<Member>(), reinterpret_cast<const char*>(&(params.*member)) - start};
}

constexpr std::size_t kMaxParamsSize = 512;

// Adds `name(**fields)`: fills the params struct from keywords (each exactly once, none unknown), runs the launcher
// without the GIL and turns its status into an exception. Its docstring lists the fields; a test holds _C.pyi against
// it.
void add_launcher(Module& module, const char* name, std::vector<Field> fields,
                  std::function<Status(const void* params)> launcher);

template <class Params, class... Fields>
void bind_launcher(Module& module, const char* name, Status (*launcher)(const Params&), Fields... fields) {
  static_assert(std::is_trivially_copyable_v<Params> && sizeof(Params) <= kMaxParamsSize, "plain and small");
  add_launcher(module, name, {fields...},
               [launcher](const void* params) { return launcher(*static_cast<const Params*>(params)); });
}

// Adds `name(arguments...)`, which returns the number of elements of a workspace or of bytes of a block. Arguments
// outside of [0, 2^40] raise an error.
template <class... Numbers>
void bind_workspace(Module& module, const char* name, int64_t (*size)(Numbers...),
                    std::array<const char*, sizeof...(Numbers)> arguments);
inline void bind_workspace(Module& module, const char* name, int64_t (*size)(int64_t, int64_t)) {
  bind_workspace(module, name, size, {"rows", "columns"});
}

// Adds `name()`: a number that is looked up at each call.
void bind_number(Module& module, const char* name, int64_t (*number)());

void bind_constant(Module& module, const char* name, int64_t value);

using Binder = void (*)(Module&);
struct BinderRegistration {
  explicit BinderRegistration(Binder binder);
};

}  // namespace fasttfm

// The cast makes a member of a base struct one of PARAMS.
#define FASTTFM_FIELD(PARAMS, MEMBER) \
  ::fasttfm::make_field(#MEMBER, static_cast<decltype(PARAMS::MEMBER) PARAMS::*>(&PARAMS::MEMBER))

#define FASTTFM_BINDING(NAME)                                    \
  static void bind_##NAME(Module& module);                       \
  static const BinderRegistration register_##NAME(&bind_##NAME); \
  static void bind_##NAME(Module& module)
