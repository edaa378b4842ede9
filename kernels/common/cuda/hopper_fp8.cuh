// wgmma with FP8 operands in shared memory (sm_90a): e4m3 or e5m2, times e4m3. Both are K-major. A wgmma covers 32
// elements of K, which take 32 bytes like 16 elements of 16 bits, so TMA and the descriptors of hopper.cuh treat pairs
// of FP8 numbers as 16-bit elements.
#pragma once

#include <cstdint>

#include "common/cuda/hopper.cuh"

namespace fasttfm {
namespace cuda {

struct e4m3_t {
  uint8_t bits;
};
struct e5m2_t {
  uint8_t bits;
};

#define FASTTFM_RESULTS_AT(I)                                                                                 \
  "+f"(d[I]), "+f"(d[I + 1]), "+f"(d[I + 2]), "+f"(d[I + 3]), "+f"(d[I + 4]), "+f"(d[I + 5]), "+f"(d[I + 6]), \
      "+f"(d[I + 7])

// d = a b, or d += a b if `add`, over 32 elements of K, for COUNT = N / 2 registers of d; X0 to X2 are the numbers of
// the asm operands after them. A is the type of a.
#define FASTTFM_WGMMA_FP8(A, N, COUNT, X0, X1, X2)                                                                \
  __device__ __forceinline__ void wgmma_fp8(float (&d)[COUNT], uint64_t a, uint64_t b, bool add, A##_t) {         \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #X2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k32.f32." #A \
                 ".e4m3 {" FASTTFM_REGISTERS_##COUNT "}, %" #X0 ", %" #X1 ", p, 1, 1; }"                          \
                 : FASTTFM_RESULTS_##COUNT                                                                        \
                 : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                                   \
  }

FASTTFM_WGMMA_FP8(e4m3, 64, 32, 32, 33, 34)
FASTTFM_WGMMA_FP8(e4m3, 128, 64, 64, 65, 66)
FASTTFM_WGMMA_FP8(e5m2, 64, 32, 32, 33, 34)
FASTTFM_WGMMA_FP8(e5m2, 128, 64, 64, 65, 66)

#undef FASTTFM_WGMMA_FP8
#undef FASTTFM_RESULTS_AT

}  // namespace cuda
}  // namespace fasttfm
