// Programmatic dependent launch: a kernel starts while the previous one in the stream still runs, prepares what does
// not depend on it, and then waits for it. Only files that are compiled for sm_90a (hopper.cuh) can include this.
#pragma once

#include <cstdint>

#include "common/cuda/launch.cuh"

namespace fasttfm {
namespace cuda {

// Lets the stream's next kernel, if it is a dependent launch, start when all blocks of this kernel have executed this.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
// Waits until the previous kernel has ended and its writes are visible; returns immediately if this is not a dependent
// launch. Every block of every kernel calls it before it reads or writes activations, so all earlier kernels have
// ended, too.
__device__ __forceinline__ void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// Does the same for loads that the compiler may move, as those of load_packed_if(): they stay after the wait if their
// addresses are computed from the returned index.
__device__ __forceinline__ int64_t griddepcontrol_wait_for(int64_t index) {
  griddepcontrol_wait();
  asm volatile("" : "+l"(index));
  return index;
}

// Launches a kernel; if `dependent`, it may start before the previous kernel in the stream has ended, and
// has to call griddepcontrol_wait().
template <class... Parameters, class... Arguments>
Status launch_after(bool dependent, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t memory, void* stream,
                    const Arguments&... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return launch_as(launch_config(grid, block, memory, stream, dependent ? &attribute : nullptr), kernel, arguments...);
}

}  // namespace cuda
}  // namespace fasttfm
