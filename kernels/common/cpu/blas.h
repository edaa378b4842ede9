// The BLAS that torch's CPU library contains or depends on, found by name at run time: the core links none.
#pragma once

namespace fasttfm {

// Looks for sgemm_ in the loaded library at `library_path` and in what it depends on. Returns the file that has it, or
// "" where there is none.
const char* find_blas(const char* library_path);

// c [m, n] = a b + beta c, column-major, as BLAS computes it; false where no BLAS was found.
bool sgemm(char transposed_a, char transposed_b, int m, int n, int k, const float* a, int lda, const float* b, int ldb,
           float beta, float* c, int ldc);

}  // namespace fasttfm
