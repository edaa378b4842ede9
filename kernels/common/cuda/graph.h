// CUDA graphs that are launched together with the transfer of their inputs and results, in one call.
//
// Memory on the host is pinned, which kernels can read and write at the host's address. Small results are written there
// by the last kernel of a graph (graph_results). A launch passes their address through a slot in device memory, which
// the kernel that reads the inputs writes, so that launches with different memory on the host share a graph. Large
// results are copied after the graph.
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

// The memory that receives a launch's results.
struct GraphSlot {
  void* results;      // pinned
  int32_t* flag;      // pinned; set to 1 once all results are written
  int64_t bytes;      // of the results, a multiple of 4
  uint32_t finished;  // blocks of graph_results; 0 before and after a launch
};

// Transfers the inputs, launches the graph, copies its results to the host unless it has a slot, and records an event.
// Memory on the host must not be used until the event has completed or the flag is set.
struct GraphLaunch {
  void* exec;
  GraphSlot* slot;  // on the device; null for graphs without graph_results
  void* inputs;
  const void* host_inputs;
  int64_t input_bytes;  // with a slot a multiple of 16
  const void* results;
  void* host_results;
  int64_t result_bytes;
  int32_t* host_flag;
  void* event;  // cudaEvent_t
  int device;
  void* stream;
};

// Launches the last kernel of a graph, which writes the first `bytes` of the slot from `results` to the host.
struct GraphResults {
  const void* results;
  GraphSlot* slot;
  int64_t bytes;  // of the largest results
  int device;
  void* stream;
};

// Waits for a launch: for its flag, if it has a slot, and if that takes long, for its event.
struct GraphWait {
  const int32_t* flag;  // or null
  void* event;
};

namespace cuda {
Status graph_instantiate(const GraphInstantiate& params);
Status graph_destroy(const GraphDestroy& params);
Status graph_launch(const GraphLaunch& params);
Status graph_results(const GraphResults& params);
Status graph_wait(const GraphWait& params);
}  // namespace cuda
}  // namespace fasttfm
