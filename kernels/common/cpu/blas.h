// The BLAS that torch's CPU library contains or depends on. It is looked up by name at run time; the core does not link
// against a BLAS.
#pragma once

namespace fasttfm {

// Looks up sgemm_ in the loaded library at `library_path` and its dependencies. Returns the file that contains it, or
// "" if there is none.
const char* find_blas(const char* library_path);

// c [m, n] = a b + beta c, with column-major matrices as in BLAS. Returns false if no BLAS was found.
bool sgemm(char transposed_a, char transposed_b, int m, int n, int k, const float* a, int lda, const float* b, int ldb,
           float beta, float* c, int ldc);

}  // namespace fasttfm
