#include "common/cuda/graph.h"

#include "binding.h"

namespace fasttfm {

FASTTFM_CONSTANT(graph_slot_bytes, sizeof(GraphSlot))

#ifdef FASTTFM_WITH_CUDA
// These take handles of the CUDA runtime and pinned memory as addresses, with the device and the stream that they use.
FASTTFM_FUNCTION(Status, graph_instantiate_cuda, void* graph, void** exec, int device) {
  return cuda::graph_instantiate({graph, exec, device});
}

FASTTFM_FUNCTION(Status, graph_destroy_cuda, void* exec, int device) { return cuda::graph_destroy({exec, device}); }

// The parameters that are the same for every launch of a graph come first.
FASTTFM_FUNCTION(Status, graph_launch_cuda, void* exec, int device, void* stream, void* slot, void* inputs,
                 int64_t input_bytes, const void* results, const void* host_inputs, void* host_results,
                 int64_t result_bytes, int32_t* host_flag, void* event) {
  return cuda::graph_launch({
      .exec = exec,
      .slot = static_cast<GraphSlot*>(slot),
      .inputs = inputs,
      .host_inputs = host_inputs,
      .input_bytes = input_bytes,
      .results = results,
      .host_results = host_results,
      .result_bytes = result_bytes,
      .host_flag = host_flag,
      .event = event,
      .device = device,
      .stream = stream,
  });
}

FASTTFM_FUNCTION(Status, graph_results_cuda, const Tensor& results, const Tensor& slot, int64_t bytes) {
  return cuda::graph_results({
      .results = results.data,
      .slot = static_cast<GraphSlot*>(slot.data),
      .bytes = bytes,
      .device = context.device,
      .stream = context.stream,
  });
}

FASTTFM_FUNCTION(Status, graph_wait_cuda, const int32_t* flag, void* event) { return cuda::graph_wait({flag, event}); }
#endif

}  // namespace fasttfm
