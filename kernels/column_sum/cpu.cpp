// The sum over rows on the CPU. Chunks of rows are processed in parallel, eight rows at a time, so that a block of the
// sum is read and written once for eight rows.
#include "column_sum/op.h"

#include "common/cpu/parallel.h"
#include "common/cpu/row_chunks.h"
#include "common/cpu/simd.h"

namespace fasttfm {
namespace FASTTFM_ISA {
namespace {

template <class T, int R>
FASTTFM_KERNEL void add_rows(const ColumnSum& p, int64_t first, float* part) {
  const T* x = static_cast<const T*>(p.x) + first * p.x_stride;
  for_columns(p.columns, [&](int64_t c, auto n) {
    Lanes sum = load(part + c, n);
    for (int r = 0; r < R; ++r) sum = sum + load(x + r * p.x_stride + c, n);
    store(part + c, sum, n);
  });
}

}  // namespace

Status column_sum(const ColumnSum& p) {
  if (p.columns < 1) return bad_size("column_sum: columns must be at least 1");
  return with_dtype(p.dtype, unknown_dtype(), [&](auto element) {
    const auto chunk = [&](int64_t, int64_t begin, int64_t end, float* const* parts) {
      for_row_groups<8>(begin, end, [&](int64_t row, auto count) {
        add_rows<decltype(element), decltype(count)::value>(p, row, parts[0]);
      });
    };
    sum_over_chunks(p.rows, p.columns, p.threads, p.workspace, {p.sum}, chunk);
    return Status{};
  });
}

}  // namespace FASTTFM_ISA

#ifdef FASTTFM_ISA_BASELINE
int64_t cpu::column_sum_workspace(int64_t rows, int64_t columns) { return row_chunk_count(rows) * columns; }
#endif

}  // namespace fasttfm

FASTTFM_CPU_LAUNCHER(column_sum, ColumnSum)
