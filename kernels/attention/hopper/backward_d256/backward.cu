// attention backward for Hopper, head dims 192 and 256: a kernel for dK and dV, and one for dQ. Formulas: reference.py.
//
// Both kernels compute S and dP, so there are seven products instead of five. In return no block adds to another
// block's results: the accumulators of dK and dV fill the registers, and dQ of a step would be added in fp32 in global
// memory, 4 bytes for every 2 that the step loads. Every sum has a fixed order, whichever block computes it.
#include <algorithm>

#include "attention/hopper/backward_d256/backward.h"
#include "attention/hopper/backward_d256/keys.cuh"
#include "attention/hopper/backward_d256/queries.cuh"
#include "attention/hopper/shared/backward_launch.cuh"
#include "attention/hopper/shared/call.h"
#include "attention/op.h"
#include "common/cuda/hopper.cuh"

namespace fasttfm {
namespace cuda {
namespace hopper_backward {
namespace {

// ---- the kernels ----------------------------------------------------------------------------------------------------

constexpr int kThreadsWide = 3 * kWarpgroup;
constexpr int kProducerRegistersWide = 24, kConsumerRegistersWide = 240;

__device__ __forceinline__ void prefetch_tensormaps(const Parameters& p) {
  prefetch_tensormap(&p.q);
  prefetch_tensormap(&p.k);
  prefetch_tensormap(&p.v);
  prefetch_tensormap(&p.dout);
}

template <class T, int HEAD_DIM, Mask MASK, bool GROUPED>
__global__ void __launch_bounds__(kThreadsWide, 1) backward_kernel_wide_keys(const __grid_constant__ Parameters p) {
  extern __shared__ __align__(1024) char bytes[];
  auto& memory = *reinterpret_cast<WideKeysMemory<HEAD_DIM>*>(bytes);
  if (threadIdx.x == 0) {
    memory.init();
    prefetch_tensormaps(p);
  }
  __syncthreads();
  const int warp = warp_uniform(threadIdx.x / 32);
  if (warp < 4) {
    setmaxnreg_dec<kProducerRegistersWide>();
    if (warp == 0)
      WideKeysLoader<HEAD_DIM, MASK, GROUPED>(p, memory).run();
    else if (warp == 1)
      fetch_all(p, memory.queue);
  } else {
    setmaxnreg_inc<kConsumerRegistersWide>();
    if (warp < 8)
      WideKeysWarpgroup<T, HEAD_DIM, MASK, GROUPED, true>(p, memory).run();
    else
      WideKeysWarpgroup<T, HEAD_DIM, MASK, GROUPED, false>(p, memory).run();
  }
}

template <class T, int HEAD_DIM, Mask MASK, bool GROUPED>
__global__ void __launch_bounds__(kThreadsWide, 1) backward_kernel_wide_queries(const __grid_constant__ Parameters p) {
  extern __shared__ __align__(1024) char bytes[];
  auto& memory = *reinterpret_cast<WideQueriesMemory<HEAD_DIM>*>(bytes);
  if (threadIdx.x == 0) {
    memory.init();
    prefetch_tensormaps(p);
  }
  __syncthreads();
  const int warp = warp_uniform(threadIdx.x / 32);
  if (warp < 4) {
    setmaxnreg_dec<kProducerRegistersWide>();
    if (warp == 0)
      WideQueriesLoader<HEAD_DIM, MASK, GROUPED>(p, memory).run();
    else if (warp == 1)
      fetch_all(p, memory.queue);
  } else {
    setmaxnreg_inc<kConsumerRegistersWide>();
    WideQueriesWarpgroup<T, HEAD_DIM, MASK>(p, memory, warp / 4 - 1).run();
  }
}

// ---- launchers -------------------------------------------------------------------------------------------------------

// Sets Parameters::slots and tasks for tasks of `rows` rows of `heads` heads.
Status set_tasks(const AttentionBackward& call, int64_t heads, int64_t size, int64_t rows, Parameters* p) {
  const int64_t slots = count_slots(call.cu_seqlens != nullptr, call.sequences, size, rows);
  const int64_t tasks = (Count(heads) * slots).value;
  if (tasks > 0x7fffffff / 2) return bad_size("attention: too many tiles for 32-bit indices");
  p->slots = static_cast<int>(slots);
  p->tasks = static_cast<int>(tasks);
  return {};
}

template <class T, int HEAD_DIM, Mask MASK, bool GROUPED>
Status launch_wide_keys(const AttentionBackward& call, Parameters p, int processors) {
  using Memory = WideKeysMemory<HEAD_DIM>;
  static_assert(sizeof(Memory) <= 227 * 1024);
  const Status status = set_tasks(call, p.grouping.gradient_heads, call.keys, kTaskRows<true>, &p);
  if (status.code != StatusCode::ok || p.tasks == 0) return status;
  const dim3 grid(static_cast<unsigned>(std::min(p.tasks, processors)));
  return launch(backward_kernel_wide_keys<T, HEAD_DIM, MASK, GROUPED>, grid, dim3(kThreadsWide), sizeof(Memory),
                call.stream, p);
}

template <class T, int HEAD_DIM, Mask MASK, bool GROUPED>
Status launch_wide_queries(const AttentionBackward& call, Parameters p, int processors) {
  using Memory = WideQueriesMemory<HEAD_DIM>;
  static_assert(sizeof(Memory) <= 227 * 1024);
  const Status status = set_tasks(call, call.heads, call.queries, kTaskRows<false>, &p);
  if (status.code != StatusCode::ok || p.tasks == 0) return status;
  ++p.taken;  // each kernel has its own counter
  const dim3 grid(static_cast<unsigned>(std::min(p.tasks, processors)));
  return launch(backward_kernel_wide_queries<T, HEAD_DIM, MASK, GROUPED>, grid, dim3(kThreadsWide), sizeof(Memory),
                call.stream, p);
}

template <class T, int HEAD_DIM, Mask MASK, bool GROUPED>
Status launch_wide(const AttentionBackward& call, const Parameters& p, int processors) {
  const Status status = launch_wide_keys<T, HEAD_DIM, MASK, GROUPED>(call, p, processors);
  if (status.code != StatusCode::ok) return status;
  return launch_wide_queries<T, HEAD_DIM, MASK, GROUPED>(call, p, processors);
}

template <class T, bool GROUPED>
Status launch_wide_typed(const AttentionBackward& call, const Parameters& p) {
  int processors = 0;
  Status status = count_multiprocessors(call.device, &processors);
  if (status.code != StatusCode::ok) return status;
  // The kernel for 256 columns also supports 192. It sets the counters to 0.
  status = launch_statistics<T, T, 256, GROUPED>(call, p, statistics_in(call, kMaxBlocks), nullptr);
  if (status.code != StatusCode::ok) return status;
  const bool causal = mask_of(call) == Mask::causal;
  if (call.head_dim == 192)
    return causal ? launch_wide<T, 192, Mask::causal, GROUPED>(call, p, processors)
                  : launch_wide<T, 192, Mask::full, GROUPED>(call, p, processors);
  return causal ? launch_wide<T, 256, Mask::causal, GROUPED>(call, p, processors)
                : launch_wide<T, 256, Mask::full, GROUPED>(call, p, processors);
}

}  // namespace
}  // namespace hopper_backward

using namespace hopper_backward;

int64_t attention_backward_wide_workspace(int64_t sequences, int64_t heads, int64_t tokens) {
  const int64_t tiles = tiles_of(sequences, tokens, true);  // at least as many as for dense sequences
  return (Count(heads) * tiles * (2 * kQueries) + kMaxBlocks + order_floats(sequences)).value;
}

Status attention_backward_wide(const AttentionBackward& call) {
  if (call.seed != nullptr || has_window(call))
    return bad_size("attention: head dims 192 and 256 have neither dropout nor windows");
  if (call.sequences == 0 || call.heads == 0) return {};
  if (call.sequences > 65535 || call.heads > 65535) return bad_size("more than 65535 sequences or heads");
  const DeviceGuard guard(call.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  Parameters p{};
  const Status status = set_parameters(call, &p, kWideRows);
  if (status.code != StatusCode::ok) return status;
  p.progress = reinterpret_cast<uint32_t*>(call.workspace);
  p.taken = reinterpret_cast<int*>(call.workspace);
  p.statistics = statistics_in(call, kMaxBlocks);
  if (is_grouped(call))
    return call.dtype == DType::bf16 ? launch_wide_typed<bf16_t, true>(call, p)
                                     : launch_wide_typed<f16_t, true>(call, p);
  return call.dtype == DType::bf16 ? launch_wide_typed<bf16_t, false>(call, p)
                                   : launch_wide_typed<f16_t, false>(call, p);
}

}  // namespace cuda
}  // namespace fasttfm
