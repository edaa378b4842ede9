// attention backward for Hopper, head dim 64: one pass with the five products. Formulas: reference.py.
//
// A block takes 128 keys of a (sequence, head) at a time, and for them it goes over all queries, 64 at a time. Four
// warpgroups share the work:
//
//   0  producer: warp 0 brings tiles in by TMA, warps 1 to 3 draw dropout's random bits
//   1, 2  64 keys each, keys by queries:  S^T = K Q^T, dP^T = V dO^T, then P^T and dS^T in registers, and from there
//         dV += P^T dO and dK += dS^T Q; dS^T is left in shared memory
//   3  dQ += dS K of all 128 keys.
//
// There are two forms. Up to kOnChipQueries queries, a block has one (sequence, head) after another, and dQ's sums over
// keys stand in shared memory, each thread's own in its own place (cuda_backward_products.cuh). Beyond, they stand in
// the workspace, where the copy engine adds to them; the two blocks of a cluster share a (sequence, head), take tiles
// of keys by turns and add in the order of the keys; who comes last takes the sum and writes dQ
// (cuda_backward_long.cuh). As they meet the same queries at about the same time, the second level cache has them and
// the sums: with a head for each block these are 134 MB at 2,048 queries.
//
// Every sum has one fixed order.
#include <algorithm>
#include <atomic>

#include "attention/cuda_backward_launch.cuh"
#include "attention/cuda_backward_long.cuh"
#include "attention/cuda_backward_products.cuh"
#include "attention/cuda_backward_tiles.cuh"
#include "attention/cuda_backward_wide.h"
#include "attention/cuda_call.h"
#include "attention/op.h"
#include "common/hopper.cuh"
#include "common/reduce.cuh"

namespace fasttfm {
namespace cuda {
namespace {

// ---- the kernels -----------------------------------------------------------------------------------------------------

template <class Memory>
__device__ __forceinline__ void begin_block(const Parameters& p, Memory& memory) {
  if (threadIdx.x == 0) {
    memory.initialize();
    prefetch_map(&p.q);
    prefetch_map(&p.k);
    prefetch_map(&p.v);
    prefetch_map(&p.dout);
  }
  __syncthreads();
}

template <class T, bool DROPOUT, bool CAUSAL>
__global__ void __launch_bounds__(kThreads, 1) backward_kernel(const __grid_constant__ Parameters p) {
  extern __shared__ __align__(1024) char bytes[];
  auto& memory = *reinterpret_cast<Memory*>(bytes);
  const int warpgroup = uniform(threadIdx.x / kWarpgroup);
  begin_block(p, memory);
  if (warpgroup == 0) {
    lower_registers<48>();
    const int warp = uniform(threadIdx.x / 32);
    if (warp == 0)
      bring_tiles<CAUSAL>(p, memory);
    else if constexpr (DROPOUT)
      draw_kept<CAUSAL>(p, memory, warp - 1);
  } else if (warpgroup == 3) {
    lower_registers<64>();
    sum_dq<T, CAUSAL>(p, memory);
  } else {
    raise_registers<200>();
    KeyWarpgroup<T, DROPOUT, CAUSAL> keys(p, memory, warpgroup - 1);
    for (int index = blockIdx.x; index < p.sequences * p.heads; index += gridDim.x)
      keys.over_unit(Unit<CAUSAL>(p, index));
  }
}

template <class T, bool DROPOUT, bool CAUSAL>
__global__ void __launch_bounds__(kThreads, 1) long_backward_kernel(const __grid_constant__ Parameters p) {
  extern __shared__ __align__(1024) char bytes[];
  auto& memory = *reinterpret_cast<LongMemory*>(bytes);
  const int warpgroup = uniform(threadIdx.x / kWarpgroup);
  begin_block(p, memory);
  if (p.blocks > 1) sync_cluster();
  if (warpgroup == 0) {
    lower_registers<DROPOUT ? 48 : 32>();
    const int warp = uniform(threadIdx.x / 32);
    if (warp == 0)
      bring_tiles<CAUSAL>(p, memory);
    else if constexpr (DROPOUT)
      draw_kept<CAUSAL>(p, memory, warp - 1);
  } else if (warpgroup == 3) {
    lower_registers<64>();
    sum_long_dq<T, CAUSAL>(p, memory);
  } else {
    raise_registers<DROPOUT ? 200 : 208>();
    LongKeyWarpgroup<T, DROPOUT, CAUSAL>(p, memory, warpgroup - 1).run();
  }
  if (p.blocks > 1) {  // who is told how far another one is has to be there
    __syncwarp();
    sync_cluster();
  }
}

// ---- launchers -------------------------------------------------------------------------------------------------------

// How many blocks share a (sequence, head), for more than kOnChipQueries queries (measured; clusters of 4 and 8 leave
// multiprocessors without work, as these do not come in multiples of that).
int blocks_of(const AttentionCall& call, bool causal, int processors) {
  if (call.max_seqlen <= kOnChipQueries) return 1;
  const bool few = call.sequences * call.heads * 2 <= processors, longer = call.max_seqlen > 1024;
  return call.max_seqlen_k > kKeys && (!causal || longer || few) ? 2 : 1;
}

// How many clusters of `blocks` blocks run at the same time; asked once for a device.
template <class Kernel>
cudaError_t resident_clusters(Kernel kernel, int device, int blocks, int* clusters) {
  static std::atomic<int> known[16][3];
  std::atomic<int>* own = device < 16 ? &known[device][blocks] : nullptr;
  *clusters = own == nullptr ? 0 : own->load();
  if (*clusters > 0) return cudaSuccess;
  const ClusterLaunch launch(dim3(static_cast<unsigned>(blocks)), dim3(kThreads), blocks, sizeof(LongMemory), nullptr);
  const cudaError_t error = launch.resident(kernel, clusters);
  if (error == cudaSuccess && own != nullptr) own->store(*clusters);
  return error;
}

template <class T, bool DROPOUT, bool CAUSAL>
Status launch_long(const AttentionBackward& call, const Parameters& p, int processors) {
  const auto kernel = long_backward_kernel<T, DROPOUT, CAUSAL>;
  const int64_t units = call.sequences * call.heads;
  if (p.blocks == 1) {
    const dim3 grid(static_cast<unsigned>(std::min<int64_t>(units, processors)));
    return launch(kernel, grid, dim3(kThreads), sizeof(LongMemory), call.stream, p);
  }
  int clusters = 0;
  const cudaError_t error = resident_clusters(kernel, call.device, p.blocks, &clusters);
  if (error != cudaSuccess) return status_of(error);
  if (clusters == 0) return {StatusCode::cuda_error, "attention: the device runs no cluster of two blocks"};
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>(units, clusters)) * p.blocks);
  return ClusterLaunch(grid, dim3(kThreads), p.blocks, sizeof(LongMemory), call.stream)(kernel, p);
}

template <class T, bool DROPOUT, bool CAUSAL>
Status launch_backward(const AttentionBackward& call, const Parameters& p, int processors) {
  if (call.max_seqlen > kOnChipQueries) return launch_long<T, DROPOUT, CAUSAL>(call, p, processors);
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>(call.sequences * call.heads, processors)));
  return launch(backward_kernel<T, DROPOUT, CAUSAL>, grid, dim3(kThreads), sizeof(Memory), call.stream, p);
}

template <class T>
Status launch_kernel(const AttentionBackward& call, const Parameters& p, bool causal, int processors) {
  if (call.seed != nullptr)
    return causal ? launch_backward<T, true, true>(call, p, processors)
                  : launch_backward<T, true, false>(call, p, processors);
  return causal ? launch_backward<T, false, true>(call, p, processors)
                : launch_backward<T, false, false>(call, p, processors);
}

template <class T>
Status launch_typed(const AttentionBackward& call, Parameters p, float* statistics) {
  int processors = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, call.device);
  if (error != cudaSuccess) return status_of(error);
  const bool causal = call.window_right == 0;
  p.blocks = blocks_of(call, causal, processors);
  Status status = launch_statistics<T, kHeadDim>(call, p, statistics, nullptr);
  if (status.code == StatusCode::ok) status = launch_kernel<T>(call, p, causal, processors);
  if (status.code != StatusCode::ok || call.column_sums == nullptr) return status;
  return sum_parts(call.column_parts, {call.column_sums, call.column_sums_dtype}, {},
                   static_cast<int>(call.sequences * p.blocks * kColumnPlaces), 3 * call.heads * kHeadDim, call.stream);
}

}  // namespace

int64_t attention_backward_workspace(int64_t sequences, int64_t heads, int64_t head_dim, int64_t tokens,
                                     int64_t longest) {
  if (head_dim == kWideDim) return attention_backward_wide_workspace(sequences, heads, tokens, longest);
  const int64_t tiles = tiles_of(sequences, tokens, true);  // not fewer than those of dense sequences
  return heads * tiles * (2 * kQueries + (longest > kOnChipQueries ? kSumFloats : 0));
}

int64_t attention_column_parts(int64_t sequences, int64_t heads, int64_t head_dim, int64_t max_seqlen) {
  return sequences * (max_seqlen > kOnChipQueries ? 2 : 1) * kColumnPlaces * 3 * heads * head_dim;
}

Status attention_backward(const AttentionBackward& call) {
  Status status = check_hopper_call(call);
  if (status.code != StatusCode::ok) return status;
  if (call.column_sums != nullptr && call.head_dim != kHeadDim)
    return bad_size("attention: column sums come with a head dim of 64");
  if (call.head_dim == kWideDim) return attention_backward_wide(call);
  if (call.kv_heads != call.heads) return bad_size("kv_heads differs from heads");
  if (call.sequences == 0 || call.heads == 0) return {};
  if (call.sequences > 65535 || call.heads > 65535) return bad_size("more than 65535 sequences or heads");
  const DeviceGuard guard(call.device);
  Parameters p{};
  status = set_parameters(call, &p);
  if (status.code != StatusCode::ok) return status;
  p.column_parts = call.column_sums == nullptr ? nullptr : call.column_parts;
  p.statistics = call.workspace;
  p.sums = call.workspace + call.heads * static_cast<int64_t>(p.tiles) * 2 * kQueries;
  return call.dtype == DType::bf16  ? launch_typed<bf16_t>(call, p, call.workspace)
         : call.dtype == DType::f16 ? launch_typed<f16_t>(call, p, call.workspace)
                                    : unknown_dtype();
}

}  // namespace cuda
}  // namespace fasttfm
