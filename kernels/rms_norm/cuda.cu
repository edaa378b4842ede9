// RMSNorm on NVIDIA GPUs: the launchers; the kernels are in common/cuda/norm_kernels.cuh, the formulas in reference.py.
#include <cstdint>

#include "common/cuda/norm_kernels.cuh"
#include "common/cuda/rows.cuh"
#include "rms_norm/op.h"

namespace fasttfm {
namespace cuda {

int64_t rms_norm_backward_memory(int64_t columns, int64_t dtype, int64_t limit) {
  return norm_backward_memory(columns, dtype, limit);
}

Status rms_norm_forward(const RmsNormForward& p) {
  if (!rows_aligned(p.x, p.x_stride) || !rows_aligned(p.weight, 0)) return misaligned_rows();
  return norm_forward(p, p.weight_dtype);
}

Status rms_norm_backward(const WithBlockMemory<RmsNormBackward>& p) {
  if (!rows_aligned(p.x, p.x_stride) || !rows_aligned(p.dy, 0) || !rows_aligned(p.weight, 0)) return misaligned_rows();
  return norm_backward(p, {});
}

}  // namespace cuda
}  // namespace fasttfm
