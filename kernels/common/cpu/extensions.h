// Extensions of the avx512 instruction set that some CPUs have.
#pragma once

namespace fasttfm {

bool has_avx512_vnni();
// Requests permission to use AMX tiles from the operating system, once.
bool may_use_amx_int8();

}  // namespace fasttfm
