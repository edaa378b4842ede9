#include "column_sum/op.h"

#include "binding.h"

namespace fasttfm {

#define SUM(MEMBER) FASTTFM_FIELD(ColumnSum, MEMBER)

FASTTFM_BINDING(column_sum) {
  bind_workspace(module, "column_sum_workspace", &cpu::column_sum_workspace);
  bind_constant(module, "column_sum_strip", cuda::kColumnSumStrip);
  bind_launcher(module, "column_sum_cpu", &cpu::column_sum, SUM(x), SUM(sum), SUM(workspace), SUM(rows), SUM(columns),
                SUM(x_stride), SUM(dtype), SUM(threads));
#ifdef FASTTFM_WITH_CUDA
  bind_launcher(module, "column_sum_cuda", &cuda::column_sum, SUM(x), SUM(sum), SUM(workspace), SUM(rows), SUM(columns),
                SUM(x_stride), SUM(dtype), SUM(sum_dtype), SUM(parts), SUM(device), SUM(stream));
#endif
}

}  // namespace fasttfm
