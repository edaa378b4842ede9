// What this build knows of CUDA. A core built without it still answers.
#pragma once

namespace fasttfm {
namespace cuda {

// The toolkit the core was built with, as CUDART_VERSION (13000 for 13.0); 0 when built without CUDA.
int compiled_version();

}  // namespace cuda
}  // namespace fasttfm
