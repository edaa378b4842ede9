// The part of cuBLASLt's C interface that gemm uses: types and codes as in cublasLt.h, which are the same in versions
// 11 to 13, and the functions of the library that the process has loaded.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>

namespace fasttfm {
namespace cuda {
namespace cublaslt {

// Opaque descriptors are initialized in place. This is larger than the descriptors of any version; the library checks
// the size.
struct Descriptor {
  uint64_t data[64];
};
struct Algorithm {
  uint64_t data[8];
};
struct HeuristicResult {
  Algorithm algorithm;
  size_t workspace_bytes;
  int state;
  float waves;
  int reserved[4];
};
using Handle = void*;

constexpr int kSuccess = 0, kInvalidValue = 7, kNotSupported = 15;
constexpr int kCompute32F = 68;
constexpr int kReal32F = 0, kReal16F = 2, kReal16BF = 14, kReal8FE4M3 = 28, kReal8FE5M2 = 29;
constexpr int kTransposed = 1;
// Attributes of a matmul descriptor and of a preference.
constexpr int kTransposeA = 3, kTransposeB = 4, kEpilogue = 7, kBiasPointer = 8;
constexpr int kScalePointerA = 17, kScalePointerB = 18, kFastAccumulation = 25;
constexpr int kMaxWorkspace = 1, kReductionMask = 3, kAlignmentA = 5, kAlignmentB = 6, kAlignmentC = 7, kAlignmentD = 8;
constexpr uint32_t kEpilogueBias = 4;
constexpr uint32_t kReduceInComputeType = 2;

struct Library {
  int (*create)(Handle*);
  size_t (*version)();
  const char* (*status_text)(int);
  int (*layout_init)(Descriptor*, size_t, int type, uint64_t rows, uint64_t columns, int64_t leading);
  int (*product_init)(Descriptor*, size_t, int compute, int scale);
  int (*product_set)(Descriptor*, int attribute, const void*, size_t);
  int (*preference_init)(Descriptor*, size_t);
  int (*preference_set)(Descriptor*, int attribute, const void*, size_t);
  int (*heuristic)(Handle, Descriptor* product, Descriptor* a, Descriptor* b, Descriptor* c, Descriptor* d,
                   Descriptor* preference, int requested, HeuristicResult*, int* returned);
  int (*matmul)(Handle, const Descriptor* product, const void* alpha, const void* a, const Descriptor* a_layout,
                const void* b, const Descriptor* b_layout, const void* beta, const void* c, const Descriptor* c_layout,
                void* d, const Descriptor* d_layout, const Algorithm*, void* workspace, size_t workspace_bytes,
                void* stream);
};

template <class Function>
bool find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

// The library that the process has loaded, or null. It stays loaded.
inline const Library* library() {
  static Library functions{};
  static const bool complete = [] {
    for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so.11"}) {
      void* loaded = dlopen(name, RTLD_LAZY | RTLD_NOLOAD);
      if (loaded == nullptr) continue;
      return find(loaded, "cublasLtCreate", &functions.create) &&
             find(loaded, "cublasLtGetVersion", &functions.version) &&
             find(loaded, "cublasLtGetStatusString", &functions.status_text) &&
             find(loaded, "cublasLtMatrixLayoutInit_internal", &functions.layout_init) &&
             find(loaded, "cublasLtMatmulDescInit_internal", &functions.product_init) &&
             find(loaded, "cublasLtMatmulDescSetAttribute", &functions.product_set) &&
             find(loaded, "cublasLtMatmulPreferenceInit_internal", &functions.preference_init) &&
             find(loaded, "cublasLtMatmulPreferenceSetAttribute", &functions.preference_set) &&
             find(loaded, "cublasLtMatmulAlgoGetHeuristic", &functions.heuristic) &&
             find(loaded, "cublasLtMatmul", &functions.matmul);
    }
    return false;
  }();
  return complete ? &functions : nullptr;
}

}  // namespace cublaslt
}  // namespace cuda
}  // namespace fasttfm
