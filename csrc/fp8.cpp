#include "fp8/op.h"

#include "binding.h"

namespace fasttfm {

#define CAST(MEMBER) FASTTFM_FIELD(Fp8Cast, MEMBER)
#define MANY(MEMBER) FASTTFM_FIELD(Fp8CastMany, MEMBER)
#define FORWARD(MEMBER) FASTTFM_FIELD(Fp8GeluForward, MEMBER)
#define BACKWARD(MEMBER) FASTTFM_FIELD(Fp8GeluBackward, MEMBER)
#define PRODUCT(MEMBER) FASTTFM_FIELD(Fp8GeluProduct, MEMBER)

FASTTFM_BINDING(fp8) {
#ifdef FASTTFM_WITH_HOPPER
  bind_workspace(module, "fp8_gelu_workspace_cuda", &cuda::fp8_gelu_workspace);
  bind_launcher(module, "fp8_cast_cuda", &cuda::fp8_cast, CAST(x), CAST(scale), CAST(amax), CAST(as_rows),
                CAST(as_columns), CAST(rows), CAST(columns), CAST(padded), CAST(x_stride), CAST(e5m2), CAST(dtype),
                CAST(device), CAST(stream));
  bind_launcher(module, "fp8_cast_dropped_cuda", &cuda::fp8_cast, CAST(x), CAST(scale), CAST(amax), CAST(as_rows),
                CAST(as_columns), CAST(rows), CAST(columns), CAST(padded), CAST(x_stride), CAST(e5m2), CAST(dtype),
                CAST(device), CAST(stream), CAST(seed), CAST(cu_seqlens), CAST(sequences), CAST(threshold),
                CAST(kept_scale));
  bind_workspace(module, "fp8_cast_tiles_cuda", &cuda::fp8_cast_tiles);
  bind_launcher(module, "fp8_cast_many_cuda", &cuda::fp8_cast_many, MANY(table), MANY(count), MANY(tiles), MANY(e5m2),
                MANY(device), MANY(stream));
  bind_launcher(module, "fp8_gelu_forward_cuda", &cuda::fp8_gelu_forward, FORWARD(h), FORWARD(bias), FORWARD(scale),
                FORWARD(amax), FORWARD(as_rows), FORWARD(rows), FORWARD(columns), FORWARD(e5m2), FORWARD(activation),
                FORWARD(dtype), FORWARD(bias_dtype), FORWARD(device), FORWARD(stream));
  bind_launcher(module, "fp8_gelu_backward_cuda", &cuda::fp8_gelu_backward, BACKWARD(da), BACKWARD(h), BACKWARD(bias),
                BACKWARD(a_scale), BACKWARD(scale), BACKWARD(amax), BACKWARD(as_rows), BACKWARD(as_columns),
                BACKWARD(a_columns), BACKWARD(dbias), BACKWARD(workspace), BACKWARD(rows), BACKWARD(columns),
                BACKWARD(padded), BACKWARD(e5m2), BACKWARD(activation), BACKWARD(dtype), BACKWARD(bias_dtype),
                BACKWARD(device), BACKWARD(stream));
  bind_launcher(module, "fp8_gelu_product_cuda", &cuda::fp8_gelu_product, PRODUCT(x), PRODUCT(weight),
                PRODUCT(x_inverse), PRODUCT(weight_inverse), PRODUCT(bias), PRODUCT(scale), PRODUCT(amax), PRODUCT(h),
                PRODUCT(a), PRODUCT(rows), PRODUCT(inputs), PRODUCT(columns), PRODUCT(activation), PRODUCT(bias_dtype),
                PRODUCT(device), PRODUCT(stream));
#endif
}

}  // namespace fasttfm
