// Selects the instruction set at run time.
//
// Every kernels/<op>/cpu.cpp is compiled once per instruction set (CMakeLists.txt), each time with a different value of
// FASTTFM_ISA: `baseline` (the compiler's default target: SSE2 or NEON), and on x86-64 also `avx2` and `avx512`. All
// code in those files, and every helper in simd.h, is in namespace fasttfm::FASTTFM_ISA. That namespace keeps the
// linker from merging an inline function built for AVX-512 into the code path of an older CPU. For the same reason
// cpu.cpp files use nothing from the standard library that the compiler could emit as a separate function.
#pragma once

#include "common/status.h"

#ifndef FASTTFM_ISA
#define FASTTFM_ISA baseline
#define FASTTFM_ISA_BASELINE 1
#endif

namespace fasttfm {

// Declared inline here and in philox.h, so that the two files can be included in either order.
inline namespace FASTTFM_ISA {}  // namespace FASTTFM_ISA

enum class Isa { baseline, avx2, avx512 };

// The widest set that this CPU has and this build contains, or the one forced with set_isa().
Isa active_isa();
// Forces a set, for tests and benchmarks. Returns false if this CPU or this build does not have it.
bool set_isa(Isa isa);
bool isa_supported(Isa isa);

}  // namespace fasttfm

// Defines fasttfm::cpu::NAME(const PARAMS&), which forwards to the active instruction set's copy. This is written once
// at the end of a cpu.cpp file, after fasttfm::FASTTFM_ISA::NAME.
#if defined(FASTTFM_ISA_BASELINE) && defined(FASTTFM_X86)
#define FASTTFM_CPU_LAUNCHER(NAME, PARAMS)           \
  namespace fasttfm {                                \
  namespace avx2 {                                   \
  Status NAME(const PARAMS&);                        \
  }                                                  \
  namespace avx512 {                                 \
  Status NAME(const PARAMS&);                        \
  }                                                  \
  Status cpu::NAME(const PARAMS& params) {           \
    switch (active_isa()) {                          \
      case Isa::avx512: return avx512::NAME(params); \
      case Isa::avx2: return avx2::NAME(params);     \
      default: return baseline::NAME(params);        \
    }                                                \
  }                                                  \
  }
#elif defined(FASTTFM_ISA_BASELINE)
#define FASTTFM_CPU_LAUNCHER(NAME, PARAMS)                                  \
  namespace fasttfm {                                                       \
  Status cpu::NAME(const PARAMS& params) { return baseline::NAME(params); } \
  }
#else
#define FASTTFM_CPU_LAUNCHER(NAME, PARAMS)
#endif
