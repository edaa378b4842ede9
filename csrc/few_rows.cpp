#include "few_rows/op.h"

#include "binding.h"
#include "few_rows/plan.h"

namespace fasttfm {

int64_t few_rows_tile(int64_t rows, int64_t columns, int64_t inner, int64_t processors, int64_t partial) {
  return few_rows::plan_product(rows, columns, inner, processors, partial != 0).tile;
}
int64_t few_rows_parts(int64_t rows, int64_t columns, int64_t inner, int64_t processors, int64_t partial) {
  return few_rows::plan_product(rows, columns, inner, processors, partial != 0).parts;
}

#define PRODUCT(MEMBER) FASTTFM_FIELD(FewRowsProduct, MEMBER)
#define NORM(MEMBER) FASTTFM_FIELD(FewRowsAddNorm, MEMBER)
#define ATTENTION(MEMBER) FASTTFM_FIELD(FewRowsAttention, MEMBER)

FASTTFM_BINDING(few_rows) {
  bind_workspace(module, "few_rows_tile", &few_rows_tile, {"rows", "columns", "inner", "processors", "partial"});
  bind_workspace(module, "few_rows_parts", &few_rows_parts, {"rows", "columns", "inner", "processors", "partial"});
#ifdef FASTTFM_WITH_HOPPER
  bind_launcher(module, "few_rows_product_cuda", &cuda::few_rows_product, PRODUCT(x), PRODUCT(weight), PRODUCT(bias),
                PRODUCT(y), PRODUCT(parts), PRODUCT(rows), PRODUCT(columns), PRODUCT(inner), PRODUCT(tile),
                PRODUCT(part_count), PRODUCT(activates), PRODUCT(activation), PRODUCT(dtype), PRODUCT(bias_dtype),
                PRODUCT(dependent), PRODUCT(device), PRODUCT(stream));
  bind_launcher(module, "few_rows_add_norm_cuda", &cuda::few_rows_add_norm, NORM(parts), NORM(residual),
                NORM(linear_bias), NORM(weight), NORM(bias), NORM(y), NORM(z), NORM(rows), NORM(columns),
                NORM(part_count), NORM(eps), NORM(dtype), NORM(residual_dtype), NORM(parameter_dtype), NORM(dependent),
                NORM(device), NORM(stream));
  bind_launcher(module, "few_rows_attention_cuda", &cuda::few_rows_attention, ATTENTION(qkv), ATTENTION(out),
                ATTENTION(cu_seqlens), ATTENTION(tokens), ATTENTION(sequences), ATTENTION(heads), ATTENTION(head_dim),
                ATTENTION(max_seqlen), ATTENTION(window_left), ATTENTION(window_right), ATTENTION(scale),
                ATTENTION(split_keys), ATTENTION(dtype), ATTENTION(dependent), ATTENTION(device), ATTENTION(stream));
#endif
}

}  // namespace fasttfm
