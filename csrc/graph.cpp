#include "common/cuda/graph.h"

#include "binding.h"

#ifdef FASTTFM_WITH_CUDA
namespace fasttfm {

// These take handles of the CUDA runtime and pinned memory as addresses, with the device and the stream that they use.
FASTTFM_FUNCTION(Status, graph_instantiate_cuda, void* graph, void** exec, int device) {
  return cuda::graph_instantiate({graph, exec, device});
}

FASTTFM_FUNCTION(Status, graph_destroy_cuda, void* exec, int device) { return cuda::graph_destroy({exec, device}); }

// The parameters that are the same for every launch of a graph come first.
FASTTFM_FUNCTION(Status, graph_launch_cuda, void* exec, int device, void* stream, void* inputs, int64_t input_bytes,
                 const void* results, const void* host_inputs, void* host_results, int64_t result_bytes, void* event) {
  return cuda::graph_launch({
      .exec = exec,
      .inputs = inputs,
      .host_inputs = host_inputs,
      .input_bytes = input_bytes,
      .results = results,
      .host_results = host_results,
      .result_bytes = result_bytes,
      .event = event,
      .device = device,
      .stream = stream,
  });
}

}  // namespace fasttfm
#endif
