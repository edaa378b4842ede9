// Cooperative launches of kernels whose blocks form clusters.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "common/cuda/launch.cuh"

namespace fasttfm {
namespace cuda {

// launch_together() for `blocks` blocks in clusters of `cluster`. A cluster occupies SMs of one GPC, so that fewer
// blocks may fit than without clusters.
template <class... Parameters, class... Arguments>
Status launch_clusters_together(void (*kernel)(Parameters...), int blocks, int cluster, int threads, size_t memory,
                                void* stream, const Arguments&... arguments) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeCooperative;
  attributes[0].val.cooperative = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = static_cast<unsigned>(cluster);
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config = launch_config(blocks, threads, memory, stream, attributes);
  config.numAttrs = 2;
  int resident = 0;
  cudaError_t error = allow_memory(reinterpret_cast<const void*>(kernel), memory);
  if (error == cudaSuccess) error = cudaOccupancyMaxActiveClusters(&resident, kernel, &config);
  if (error != cudaSuccess) return status_of(error);
  if (resident * cluster < blocks) return {StatusCode::does_not_fit, "the clusters are not all resident at once"};
  return launch_as(config, kernel, arguments...);
}

}  // namespace cuda
}  // namespace fasttfm
