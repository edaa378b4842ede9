// attention backward for Hopper, head dim 64, without dropout or window, for more than kOnChipQueries queries and for
// several query heads that share k and v: one pass with the five products. Formulas: reference.py.
//
// A block processes tiles of 128 keys of a (sequence, head) pair. For each tile it iterates over all queries, 64 at a
// time, of one query head or (GROUPED) of several that share k and v. It has four warpgroups:
//   0  warp 0 loads tiles by TMA, warps 1 to 3 add to dQ in the workspace
//   1, 2  consumers of 64 keys each: they compute S^T = K Q^T and dP^T = V dO^T, from these P^T and dS^T in registers,
//         and then dV += P^T dO and dK += dS^T Q. dS^T is stored in shared memory.
//   3  dQ = dS K of all 128 keys
//
// dQ of a query tile is accumulated in the workspace by TMA reductions. Several blocks process the key tiles of one
// pair, and semaphores order their additions (backward_split_units.cuh). The block whose addition is the last one loads
// the sum and writes dQ. Because blocks wait for one another, the launch is cooperative. Every sum is accumulated in a
// fixed order.
#include "attention/hopper/backward_d64/long.h"

#include <algorithm>

#include "attention/hopper/backward_d64/long_products.cuh"
#include "attention/hopper/backward_d64/long_tiles.cuh"
#include "attention/hopper/shared/backward_launch.cuh"
#include "attention/hopper/shared/call.h"
#include "attention/op.h"
#include "common/cuda/hopper.cuh"
#include "common/cuda/reduce.cuh"

namespace fasttfm {
namespace cuda {
namespace hopper_backward {
namespace {

// Registers per thread of warpgroup 0, of warpgroups 1 and 2, and of warpgroup 3. Summed over the four warpgroups they
// are 512, the limit of an SM.
constexpr int kLongProducerRegisters = 32, kLongKeysRegisters = 208, kLongSumRegisters = 64;

template <class T, class G, Mask MASK, bool GROUPED>
__global__ void __launch_bounds__(kThreads, 1) backward_kernel_long(const __grid_constant__ Parameters p) {
  extern __shared__ __align__(1024) char bytes[];
  auto& memory = *reinterpret_cast<LongMemory<MASK, GROUPED>*>(bytes);
  const int warpgroup = warp_uniform(threadIdx.x / kWarpgroup);
  if (threadIdx.x == 0) {
    memory.init();
    memory.fp8.template init<G>(p.fp8);
    prefetch_tensormap(&p.q);
    prefetch_tensormap(&p.k);
    prefetch_tensormap(&p.v);
    prefetch_tensormap(&p.dout);
  }
  __syncthreads();
  if (warpgroup == 0) {
    setmaxnreg_dec<kLongProducerRegisters>();
    const int warp = warp_uniform(threadIdx.x / 32);
    if (warp == 0)
      load_tiles_long<MASK, GROUPED>(p, memory);
    else if (threadIdx.x % 32 == 0)
      add_dq_long<MASK, GROUPED>(p, memory, warp - 1);
  } else if (warpgroup == 3) {
    setmaxnreg_dec<kLongSumRegisters>();
    multiply_dq_long<T, G, MASK, GROUPED>(p, memory);
    memory.fp8.template finish<G>(p.fp8);
  } else {
    setmaxnreg_inc<kLongKeysRegisters>();
    LongKeyWarpgroup<T, G, MASK, GROUPED>(p, memory, warpgroup - 1).run();
    memory.fp8.template finish<G>(p.fp8);
  }
}

template <class T, class G, bool GROUPED>
Status launch_long(const AttentionBackward& call, Parameters p) {
  int processors = 0;
  Status status = count_multiprocessors(call.device, &processors);
  if (status.code != StatusCode::ok) return status;
  const bool causal = mask_of(call) == Mask::causal;
  const Units units = units_of(call, p.grouping.heads_per_unit);
  p.blocks = partition_of(units, causal, true, processors).blocks;
  status = launch_statistics<T, G, kHeadDim, GROUPED>(call, p, statistics_in(call, kMaxBlocks), p.dq_semaphores);
  if (status.code != StatusCode::ok) return status;
  const int64_t groups = std::min<int64_t>(units.count, processors / p.blocks);
  const dim3 grid(static_cast<unsigned>(groups * p.blocks)), block(kThreads);
  const auto start = [&](auto* kernel, size_t memory) {
    return p.blocks > 1 ? launch_together(kernel, grid, block, memory, call.stream, p)
                        : launch(kernel, grid, block, memory, call.stream, p);
  };
  status = causal ? start(backward_kernel_long<T, G, Mask::causal, GROUPED>, sizeof(LongMemory<Mask::causal, GROUPED>))
                  : start(backward_kernel_long<T, G, Mask::full, GROUPED>, sizeof(LongMemory<Mask::full, GROUPED>));
  return status.code == StatusCode::ok ? sum_columns(call, p) : status;
}

}  // namespace
}  // namespace hopper_backward

using namespace hopper_backward;

Status attention_backward_long(const AttentionBackward& call) {
  Parameters p{};
  const Status status = set_parameters_d64(call, &p);
  if (status.code != StatusCode::ok) return status;
  p.dq_semaphores = reinterpret_cast<int*>(p.sums + call.heads * static_cast<int64_t>(p.tiles) * kSumFloats);
  if (call.fp8.scale != nullptr) return launch_long<bf16_t, fp8_t, false>(call, p);
  if (is_grouped(call))
    return call.dtype == DType::bf16 ? launch_long<bf16_t, bf16_t, true>(call, p)
                                     : launch_long<f16_t, f16_t, true>(call, p);
  return call.dtype == DType::bf16 ? launch_long<bf16_t, bf16_t, false>(call, p)
                                   : launch_long<f16_t, f16_t, false>(call, p);
}

}  // namespace cuda
}  // namespace fasttfm
