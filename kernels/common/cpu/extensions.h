// Extensions beyond the instruction sets of isa.h, which some CPUs have.
#pragma once

namespace fasttfm {

bool has_avx512_vnni();
bool has_avx512_bf16();
bool has_avx_vnni();  // VNNI in 256 bits, of CPUs that may be without AVX-512
// Whether AMX's tiles of int8 and of bf16 can be used. The first call requests permission from the operating system.
bool may_use_amx_int8();
bool may_use_amx_bf16();
// Arm's dot products of int8 (SDOT), and its matrix products of int8 (SMMLA) and of bf16 (BFMMLA).
bool has_arm_dot_products();
bool has_arm_int8_matrices();
bool has_arm_bf16();

}  // namespace fasttfm
