#include "common/cuda/graph.h"

#include "binding.h"

namespace fasttfm {

#define INSTANTIATE(MEMBER) FASTTFM_FIELD(GraphInstantiate, MEMBER)
#define DESTROY(MEMBER) FASTTFM_FIELD(GraphDestroy, MEMBER)
#define LAUNCH(MEMBER) FASTTFM_FIELD(GraphLaunch, MEMBER)

FASTTFM_BINDING(graph) {
#ifdef FASTTFM_WITH_CUDA
  bind_launcher(module, "graph_instantiate_cuda", &cuda::graph_instantiate, INSTANTIATE(graph), INSTANTIATE(exec),
                INSTANTIATE(device));
  bind_launcher(module, "graph_destroy_cuda", &cuda::graph_destroy, DESTROY(exec), DESTROY(device));
  bind_launcher(module, "graph_launch_cuda", &cuda::graph_launch, LAUNCH(exec), LAUNCH(inputs), LAUNCH(host_inputs),
                LAUNCH(input_bytes), LAUNCH(results), LAUNCH(host_results), LAUNCH(result_bytes), LAUNCH(event),
                LAUNCH(device), LAUNCH(stream));
#endif
}

}  // namespace fasttfm
