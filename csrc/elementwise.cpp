#include "elementwise/op.h"

#include "binding.h"

namespace fasttfm {

// Takes addresses rather than tensors: tests place the memory at the end of a page and choose the number of threads.
FASTTFM_FUNCTION(Status, elementwise_cpu, const void* x, void* y, int64_t count, DType x_dtype, DType y_dtype,
                 ElementFunction function, int threads) {
  return cpu::elementwise({x, y, count, x_dtype, y_dtype, function, threads});
}

}  // namespace fasttfm
