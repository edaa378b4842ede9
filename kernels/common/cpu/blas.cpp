#include "common/cpu/blas.h"

#include <dlfcn.h>

#include <atomic>

namespace fasttfm {
namespace {

// The Fortran interface with 32-bit integers, which torch's wheels provide.
using Sgemm = void (*)(const char*, const char*, const int*, const int*, const int*, const float*, const float*,
                       const int*, const float*, const int*, const float*, float*, const int*);
std::atomic<Sgemm> blas_sgemm{nullptr};

}  // namespace

const char* find_blas(const char* library_path) {
  void* library = dlopen(library_path, RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) return "";
  void* symbol = dlsym(library, "sgemm_");
  dlclose(library);
  if (symbol == nullptr) return "";
  blas_sgemm.store(reinterpret_cast<Sgemm>(symbol), std::memory_order_release);
  static Dl_info info;
  return dladdr(symbol, &info) != 0 ? info.dli_fname : "unknown";
}

bool sgemm(char transposed_a, char transposed_b, int m, int n, int k, const float* a, int lda, const float* b, int ldb,
           float beta, float* c, int ldc) {
  const Sgemm call = blas_sgemm.load(std::memory_order_acquire);
  if (call == nullptr) return false;
  const float one = 1.0f;
  call(&transposed_a, &transposed_b, &m, &n, &k, &one, a, &lda, b, &ldb, &beta, c, &ldc);
  return true;
}

}  // namespace fasttfm
