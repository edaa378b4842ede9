#include "qkv_projection/op.h"

#include "binding.h"

namespace fasttfm {

#define FIELD(MEMBER) FASTTFM_FIELD(QkvProjection, MEMBER)

FASTTFM_BINDING(qkv_projection) {
#ifdef FASTTFM_WITH_HOPPER
  bind_launcher(module, "qkv_projection_cuda", &cuda::qkv_projection, FIELD(x), FIELD(weight), FIELD(bias), FIELD(qkv),
                FIELD(rows), FIELD(inputs), FIELD(columns), FIELD(x_stride), FIELD(dtype), FIELD(bias_dtype),
                FIELD(device), FIELD(stream));
#endif
}

}  // namespace fasttfm
