#include "column_sum/op.h"

#include "binding.h"
#include "common/cuda/device.h"

namespace fasttfm {

namespace {

int64_t parts_of(const CallContext& context, const Tensor& x) {
  return cuda::column_sum_parts(x.rows(), x.columns(), cuda::multiprocessors(context.device));
}

}  // namespace

FASTTFM_FUNCTION(int64_t, column_sum_workspace, const Tensor& x) {
  return context.is_cuda() ? parts_of(context, x) * x.columns() : cpu::column_sum_workspace(x.rows(), x.columns());
}

FASTTFM_FUNCTION(Status, column_sum, const Tensor& x, const Tensor& sum, const Tensor& workspace) {
  if (!x.has_rows()) return bad_size("column_sum: x must have adjacent columns and one stride between rows");
  const ColumnSum params{
      .x = x.data,
      .sum = sum.data,
      .workspace = workspace.as<float>(),
      .rows = x.rows(),
      .columns = x.columns(),
      .x_stride = x.row_stride(),
      .dtype = x.dtype(),
      .sum_dtype = sum.dtype(),
      .threads = context.threads,
      .parts = context.is_cuda() ? static_cast<int>(parts_of(context, x)) : 0,
      .device = context.device,
      .stream = context.stream,
  };
  return FASTTFM_LAUNCH(column_sum, params);
}

}  // namespace fasttfm
