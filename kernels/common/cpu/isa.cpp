#include "common/cpu/isa.h"

#include <atomic>

namespace fasttfm {
namespace {

Isa widest() {
  if (isa_supported(Isa::avx512)) return Isa::avx512;
  if (isa_supported(Isa::avx2)) return Isa::avx2;
  return Isa::baseline;
}

std::atomic<Isa>& chosen() {
  static std::atomic<Isa> isa{widest()};
  return isa;
}

}  // namespace

bool isa_supported(Isa isa) {
  if (isa == Isa::baseline) return true;
#ifdef FASTTFM_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (isa == Isa::avx2) return avx2;
  return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#else
  return false;
#endif
}

Isa active_isa() { return chosen().load(std::memory_order_relaxed); }

bool set_isa(Isa isa) {
  if (!isa_supported(isa)) return false;
  chosen().store(isa, std::memory_order_relaxed);
  return true;
}

}  // namespace fasttfm
