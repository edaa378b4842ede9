// Extensions beyond the instruction sets of isa.h, which some CPUs have.
#pragma once

namespace fasttfm {

bool has_avx512_vnni();
// Whether AMX's int8 tiles can be used. The first call requests permission from the operating system.
bool may_use_amx_int8();
// Arm's dot products of int8 (SDOT).
bool has_arm_dot_products();

}  // namespace fasttfm
