// CUDA graphs that are launched together with the copies of their inputs and results, in one call.
#pragma once

#include <cstdint>

#include "common/status.h"

namespace fasttfm {

struct GraphInstantiate {
  void* graph;  // cudaGraph_t
  void** exec;  // receives the cudaGraphExec_t
  int device;
};

struct GraphDestroy {
  void* exec;  // may still run
  int device;
};

// Copies the inputs from the host, launches the graph, copies its results to the host and records an event. Memory on
// the host must be pinned, and must not be used until the event has completed.
struct GraphLaunch {
  void* exec;
  void* inputs;
  const void* host_inputs;
  int64_t input_bytes;
  const void* results;
  void* host_results;
  int64_t result_bytes;
  void* event;  // cudaEvent_t
  int device;
  void* stream;
};

namespace cuda {
Status graph_instantiate(const GraphInstantiate& params);
Status graph_destroy(const GraphDestroy& params);
Status graph_launch(const GraphLaunch& params);
}  // namespace cuda
}  // namespace fasttfm
