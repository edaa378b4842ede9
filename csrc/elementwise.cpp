#include "elementwise/op.h"

#include "binding.h"

namespace fasttfm {

#define FIELD(MEMBER) FASTTFM_FIELD(Elementwise, MEMBER)

FASTTFM_BINDING(elementwise) {
  bind_launcher(module, "elementwise_cpu", &cpu::elementwise, FIELD(x), FIELD(y), FIELD(count), FIELD(x_dtype),
                FIELD(y_dtype), FIELD(function), FIELD(threads));
}

}  // namespace fasttfm
