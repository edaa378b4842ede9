#include "common/cpu/extensions.h"

#include "common/cpu/isa.h"

#ifdef FASTTFM_X86

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace fasttfm {

namespace {

struct Leaf {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Leaf leaf7(unsigned part) {
  Leaf leaf;
  if (!__get_cpuid_count(7, part, &leaf.eax, &leaf.ebx, &leaf.ecx, &leaf.edx)) leaf = {};
  return leaf;
}

constexpr unsigned kAvxVnni = 1u << 4, kAvx512Bf16 = 1u << 5;                      // leaf 7, part 1: eax
constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24, kAmxInt8 = 1u << 25;  // leaf 7, part 0: edx

bool may_use_tiles() {
  static const bool permitted = [] {
    if (!isa_supported(Isa::avx512) || !(leaf7(0).edx & kAmxTile)) return false;
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM of arch_prctl
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return permitted;
}

}  // namespace

bool has_avx512_vnni() {
  __builtin_cpu_init();
  return isa_supported(Isa::avx512) && __builtin_cpu_supports("avx512vnni");
}

bool has_avx_vnni() { return isa_supported(Isa::avx2) && (leaf7(1).eax & kAvxVnni) != 0; }
bool has_avx512_bf16() { return isa_supported(Isa::avx512) && (leaf7(1).eax & kAvx512Bf16) != 0; }
bool may_use_amx_int8() { return may_use_tiles() && (leaf7(0).edx & kAmxInt8) != 0; }
bool may_use_amx_bf16() { return may_use_tiles() && (leaf7(0).edx & kAmxBf16) != 0; }

}  // namespace fasttfm

#else

namespace fasttfm {

bool has_avx512_vnni() { return false; }
bool has_avx512_bf16() { return false; }
bool has_avx_vnni() { return false; }
bool may_use_amx_int8() { return false; }
bool may_use_amx_bf16() { return false; }

}  // namespace fasttfm

#endif

#if defined(__aarch64__) && defined(__linux__)

#include <sys/auxv.h>

namespace fasttfm {

bool has_arm_dot_products() { return (getauxval(AT_HWCAP) & 1ul << 20) != 0; }    // HWCAP_ASIMDDP
bool has_arm_int8_matrices() { return (getauxval(AT_HWCAP2) & 1ul << 13) != 0; }  // HWCAP2_I8MM
bool has_arm_bf16() { return (getauxval(AT_HWCAP2) & 1ul << 14) != 0; }           // HWCAP2_BF16

}  // namespace fasttfm

#elif defined(__aarch64__) && defined(__APPLE__)

#include <sys/sysctl.h>

namespace fasttfm {
namespace {

bool has(const char* feature) {
  int value = 0;
  size_t size = sizeof(value);
  return sysctlbyname(feature, &value, &size, nullptr, 0) == 0 && value != 0;
}

}  // namespace

bool has_arm_dot_products() { return has("hw.optional.arm.FEAT_DotProd"); }
bool has_arm_int8_matrices() { return has("hw.optional.arm.FEAT_I8MM"); }
bool has_arm_bf16() { return has("hw.optional.arm.FEAT_BF16"); }

}  // namespace fasttfm

#else

namespace fasttfm {

bool has_arm_dot_products() { return false; }
bool has_arm_int8_matrices() { return false; }
bool has_arm_bf16() { return false; }

}  // namespace fasttfm

#endif
