// attention backward for Hopper, head dims 80, 96 and 128: one pass with the five products. Formulas: reference.py.
// Products are of 128 columns: with the smaller head dims the last ones are zeros.
//
// A block processes tiles of 128 keys of a (sequence, head) pair. For each tile it iterates over all queries, 64 at a
// time, of one query head or (GROUPED) of several that share k and v. It has three warpgroups:
//   0  warp 0 loads tiles by TMA, warp 1 accumulates dQ in the workspace, warps 2 and 3 generate dropout's keep bits;
//     without dropout, warp 2 releases the counters that order the additions to dQ
//   1, 2  consumers of 64 keys each: they compute S^T = K Q^T and dP^T = V dO^T, from these P^T and dS^T in registers,
//         and then dV += P^T dO and dK += dS^T Q. Both store dS^T in shared memory, and each computes 64 columns of
//         dQ = dS K.
//
// Warpgroups 1 and 2 alternate: one issues wgmma while the other does elementwise work. For every query tile a
// warpgroup first computes dS, and then the weights of the next tile. When it may issue, it issues dK, dQ of the
// previous tile, and dP and dV of the next tile; once that dQ has been stored, it issues S of the tile after the next.
// dS of both warpgroups is therefore in shared memory when dQ is computed from it. P is kept in 16 bits and dK reads dS
// from shared memory, because both save registers.
//
// With a window, a key tile is processed only for the query tiles that attend to it, in the same order.
//
// Several blocks process the key tiles of one (sequence, head) pair if there are few pairs, or if that improves L2
// reuse. Counters in global memory order their additions to dQ. Because blocks then wait for one another, the launch is
// cooperative. Every sum is accumulated in a fixed order.
#include <algorithm>

#include "attention/hopper/backward_d128/products.cuh"
#include "attention/hopper/backward_d128/tiles.cuh"
#include "attention/hopper/shared/backward_launch.cuh"
#include "attention/hopper/shared/call.h"
#include "attention/op.h"
#include "common/cuda/hopper.cuh"

namespace fasttfm {
namespace cuda {
namespace hopper_backward {
namespace {

// ---- the kernels ----------------------------------------------------------------------------------------------------

constexpr int kProducerRegistersD128 = 24, kConsumerRegistersD128 = 240;

template <class T, bool DROPOUT, Mask MASK, bool GROUPED, bool NARROW = false>
__global__ void __launch_bounds__(kThreadsD128, 1) backward_kernel_d128(const __grid_constant__ Parameters p) {
  extern __shared__ __align__(1024) char bytes[];
  auto& memory = *reinterpret_cast<MemoryD128<MASK, GROUPED>*>(bytes);
  const int warpgroup = warp_uniform(threadIdx.x / kWarpgroup);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kQueryStages; ++i) {
      memory.q_full[i].init(1);
      memory.q_empty[i].init(8 * kWarpArrivals);
    }
    for (int i = 0; i < kGradientStages; ++i) {
      memory.dout_full[i].init(1);
      memory.dout_empty[i].init(8 * kWarpArrivals);
    }
    for (int i = 0; i < kKeyStages; ++i) {
      memory.k_full[i].init(1);
      memory.k_empty[i].init(8 * kWarpArrivals);
    }
    for (int i = 0; i < 2; ++i) {
      memory.staging_free[i].init(1);
      memory.staging_done[i].init(4 * kWarpArrivals);
      memory.kept_full[i].init(kWarpArrivals);
      memory.kept_empty[i].init(4 * kWarpArrivals);
    }
    memory.v_full.init(1);
    memory.v_empty.init(8 * kWarpArrivals);
    memory.raw.init(1);
    memory.publications.init();
    for (int i = 0; i < kScoreStages; ++i) {
      memory.dscores_full[i].init(8 * kWarpArrivals);
      memory.dscores_empty[i].init(8 * kWarpArrivals);
    }
    fence_mbarrier_init();
    prefetch_tensormap(&p.q);
    prefetch_tensormap(&p.k);
    prefetch_tensormap(&p.v);
    prefetch_tensormap(&p.dout);
  }
  __syncthreads();
  if (warpgroup == 0) {
    setmaxnreg_dec<kProducerRegistersD128>();
    const int warp = warp_uniform(threadIdx.x / 32);
    if (warp == 0) {
      load_tiles_d128<MASK, GROUPED>(p, memory);
    } else if (warp == 1) {
      if (threadIdx.x % 32 == 0) sum_dq_d128<DROPOUT, MASK, GROUPED>(p, memory);
    } else if constexpr (DROPOUT) {
      draw_keep_bits_d128<MASK>(p, memory, warp - 2);
    } else if (warp == 2 && threadIdx.x % 32 == 0 && p.blocks > 1) {
      memory.publications.release_all();
    }
  } else {
    setmaxnreg_inc<kConsumerRegistersD128>();
    KeyWarpgroupD128<T, DROPOUT, MASK, GROUPED, NARROW> keys(p, memory, warpgroup - 1);
    if (warpgroup == 2) keys.scheduler_barrier_arrive();
    for (int round = 0;; ++round) {
      const int index = unit_of_round(round, blockIdx.x / p.blocks, gridDim.x / p.blocks);
      if (index >= p.sequences * gradient_heads<GROUPED>(p)) break;
      keys.process_unit(index);
    }
  }
}

// ---- launchers -------------------------------------------------------------------------------------------------------

// Starts the kernel of a call without dropout. Query heads that share k and v have one kernel for all head dims.
template <class T, class Start>
Status start_without_dropout(const AttentionBackward& call, Start start) {
  const Mask mask = mask_of(call);
  const bool causal = mask == Mask::causal;
  if (is_grouped(call)) {
    if (mask == Mask::window) return start(backward_kernel_d128<T, false, Mask::window, true>);
    return causal ? start(backward_kernel_d128<T, false, Mask::causal, true, true>)
                  : start(backward_kernel_d128<T, false, Mask::full, true, true>);
  }
  if (call.head_dim < kHeadDim128)
    return causal ? start(backward_kernel_d128<T, false, Mask::causal, false, true>)
                  : start(backward_kernel_d128<T, false, Mask::full, false, true>);
  if (mask == Mask::window) return start(backward_kernel_d128<T, false, Mask::window, false>);
  return causal ? start(backward_kernel_d128<T, false, Mask::causal, false>)
                : start(backward_kernel_d128<T, false, Mask::full, false>);
}

template <class T>
Status launch_d128(const AttentionBackward& call, Parameters& p) {
  int processors = 0;
  Status status = count_multiprocessors(call.device, &processors);
  if (status.code != StatusCode::ok) return status;
  if (call.head_dim < kHeadDim128 && (has_window(call) || call.seed != nullptr))
    return bad_size("attention: head dims 80 and 96 have neither dropout nor windows");
  float* statistics = statistics_in(call, 0);
  status = is_grouped(call) ? launch_statistics<T, T, kHeadDim128, true>(call, p, statistics, p.dq_semaphores)
                            : launch_statistics<T, T, kHeadDim128>(call, p, statistics, p.dq_semaphores);
  if (status.code != StatusCode::ok) return status;
  const Units units = units_of(call, p.grouping.heads_per_unit);
  p.blocks = partition_of_d128(units, attending_fraction(call), processors).blocks;
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>(units.count, processors / p.blocks) * p.blocks));
  const auto start = [&](auto* kernel) {
    const dim3 block(kThreadsD128);
    constexpr size_t memory = sizeof(MemoryD128<Mask::window, true>);  // the largest
    return p.blocks > 1 ? launch_together(kernel, grid, block, memory, call.stream, p)
                        : launch(kernel, grid, block, memory, call.stream, p);
  };
  if (call.seed == nullptr) return start_without_dropout<T>(call, start);
  return mask_of(call) == Mask::causal ? start(backward_kernel_d128<T, true, Mask::causal, false>)
                                       : start(backward_kernel_d128<T, true, Mask::full, false>);
}

}  // namespace
}  // namespace hopper_backward

using namespace hopper_backward;

int64_t attention_backward_d128_workspace(int64_t sequences, int64_t heads, int64_t tokens, int64_t max_seqlen_k) {
  const int64_t tiles = tiles_of(sequences, tokens, true);  // at least as many as for dense sequences
  const int64_t of_tile = 2 * kQueries + 1 + (max_seqlen_k > kKeys ? kSumFloatsD128 : 0);
  return (Count(heads) * tiles * of_tile + order_floats(sequences)).value;
}

Status attention_backward_d128(const AttentionBackward& call) {
  if (call.sequences == 0 || call.heads == 0) return {};
  if (call.sequences > 65535 || call.heads > 65535) return bad_size("more than 65535 sequences or heads");
  const DeviceGuard guard(call.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  Parameters p{};
  const Status status = set_parameters(call, &p);
  if (status.code != StatusCode::ok) return status;
  const int64_t tiles = call.heads * p.tiles;
  p.order = order_in(call, 0);
  p.statistics = statistics_in(call, 0);
  p.sums = statistics_in(call, 0) + tiles * 2 * kQueries;
  p.dq_semaphores = reinterpret_cast<int*>(p.sums + (call.max_seqlen_k > kKeys ? tiles * kSumFloatsD128 : 0));
  return call.dtype == DType::bf16  ? launch_d128<bf16_t>(call, p)
         : call.dtype == DType::f16 ? launch_d128<f16_t>(call, p)
                                    : unknown_dtype();
}

}  // namespace cuda
}  // namespace fasttfm
