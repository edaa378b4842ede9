#include "common/cpu/extensions.h"

#include "common/cpu/isa.h"

#ifdef FASTTFM_X86

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace fasttfm {

bool has_avx512_vnni() {
  __builtin_cpu_init();
  return isa_supported(Isa::avx512) && __builtin_cpu_supports("avx512vnni");
}

bool may_use_amx_int8() {
  static const bool permitted = [] {
    unsigned a, b, c, d;
    constexpr unsigned kTileAndInt8 = (1u << 24) | (1u << 25);  // AMX-TILE and AMX-INT8 in edx of CPUID leaf 7
    if (!isa_supported(Isa::avx512) || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    if ((d & kTileAndInt8) != kTileAndInt8) return false;
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM of arch_prctl
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return permitted;
}

}  // namespace fasttfm

#else

namespace fasttfm {

bool has_avx512_vnni() { return false; }
bool may_use_amx_int8() { return false; }

}  // namespace fasttfm

#endif

#if defined(__aarch64__) && defined(__linux__)

#include <sys/auxv.h>

namespace fasttfm {

bool has_arm_dot_products() {
  constexpr unsigned long kDotProducts = 1ul << 20;  // HWCAP_ASIMDDP
  return (getauxval(AT_HWCAP) & kDotProducts) != 0;
}

}  // namespace fasttfm

#else

namespace fasttfm {

bool has_arm_dot_products() { return false; }

}  // namespace fasttfm

#endif
