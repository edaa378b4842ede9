// Wrappers of PTX instructions for the kernels for few rows. Names follow PTX.
#pragma once

#include <cstdint>

#include "common/cuda/convert.cuh"
#include "common/cuda/dependent.cuh"
#include "common/cuda/hopper.cuh"

namespace fasttfm {
namespace cuda {

// cp.async of 16 bytes, or of zeros if `loads` is false. The address must be valid, even if it is not read.
__device__ __forceinline__ void cp_async_zfill(bool loads, uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(loads ? 16 : 0)
               : "memory");
}

// The address of the same place in the shared memory of another block of the cluster.
__device__ __forceinline__ uint32_t mapa(uint32_t shared, uint32_t block) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared), "r"(block));
  return remote;
}

// Stores 16 bytes in a block of the cluster, and counts them at its mbarrier.
__device__ __forceinline__ void st_async(uint32_t remote, uint4 v, uint32_t remote_barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(remote),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(remote_barrier)
      : "memory");
}

// A barrier of the cluster in two halves, both of which all threads execute, after fence_mbarrier_init(). It makes only
// initialized mbarriers visible; cluster_sync() would also fence all memory.
__device__ __forceinline__ void cluster_arrive_initialized() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// Launches a kernel in clusters; if `dependent`, as launch_after().
template <class... Parameters, class... Arguments>
Status launch_clusters_after(bool dependent, void (*kernel)(Parameters...), dim3 grid, dim3 cluster, dim3 block,
                             size_t memory, void* stream, const Arguments&... arguments) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = cluster.x;
  attributes[0].val.clusterDim.y = cluster.y;
  attributes[0].val.clusterDim.z = cluster.z;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = launch_config(grid, block, memory, stream, attributes);
  config.numAttrs = dependent ? 2 : 1;
  return launch_as(config, kernel, arguments...);
}

// Prefetches the 128 bytes around an address into L2.
__device__ __forceinline__ void prefetch_l2(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

__device__ __forceinline__ void ldmatrix_x4_transposed(uint32_t* words, uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

// mma.sync: d [16, 8] += a [16, 16] b [16, 8], in fp32.
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t* b, bf16_t) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9},"
      " {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t* b, f16_t) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9},"
      " {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace cuda
}  // namespace fasttfm
