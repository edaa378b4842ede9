// Shared by the binding files: one per op, each adds its launchers to the module inside FASTTFM_BINDING. They know
// nothing of Python and compile in a moment; module.cpp does, once for all launchers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <type_traits>
#include <vector>

#include "common/status.h"

namespace fasttfm {

class Module;  // the extension module, while it is set up

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
