// attention backward for Hopper, head dims 80, 96 and 128: one pass with the five products. Formulas: reference.py.
// Products are of 128 columns: with the smaller head dims the last ones are zeros.
//
// A block processes tiles of 128 keys of a (sequence, head) pair. For each tile it iterates over all queries, 64 at a
// time. It has three warpgroups:
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

#include "attention/hopper/backward_d128_products.cuh"
#include "attention/hopper/backward_d128_tiles.cuh"
#include "attention/hopper/backward_launch.cuh"
#include "attention/hopper/call.h"
#include "attention/op.h"
#include "common/cuda/hopper.cuh"

namespace fasttfm {
namespace cuda {
namespace hopper_backward {
namespace {

// ---- the kernels ----------------------------------------------------------------------------------------------------

constexpr int kProducerRegistersD128 = 24, kConsumerRegistersD128 = 240;

template <class T, bool DROPOUT, Mask MASK, bool NARROW = false>
__global__ void __launch_bounds__(kThreadsD128, 1) backward_kernel_d128(const __grid_constant__ Parameters p) {
  extern __shared__ __align__(1024) char bytes[];
  auto& memory = *reinterpret_cast<MemoryD128<MASK>*>(bytes);
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
      load_tiles_d128<MASK>(p, memory);
    } else if (warp == 1) {
      if (threadIdx.x % 32 == 0) sum_dq_d128<DROPOUT, MASK>(p, memory);
    } else if constexpr (DROPOUT) {
      draw_keep_bits_d128<MASK>(p, memory, warp - 2);
    } else if (warp == 2 && threadIdx.x % 32 == 0 && p.blocks > 1) {
      memory.publications.release_all();
    }
  } else {
    setmaxnreg_inc<kConsumerRegistersD128>();
    KeyWarpgroupD128<T, DROPOUT, MASK, NARROW> keys(p, memory, warpgroup - 1);
    if (warpgroup == 2) keys.pass_turn();
    for (int round = 0;; ++round) {
      const int index = unit_of_round(round, blockIdx.x / p.blocks, gridDim.x / p.blocks);
      if (index >= p.sequences * p.heads) break;
      keys.process_unit(index);
    }
  }
}

// ---- launchers -------------------------------------------------------------------------------------------------------

// The number of blocks per (sequence, head) pair: the one that minimizes the time of the block with the most work. On
// average, a fraction `met` of the queries attends to a key tile. The blocks of a pair iterate over the same queries,
// about 2 steps apart. The queries, gradients and sums that they access take 1 KB per token. If those of all pairs in
// flight do not fit into L2, the first block to access them waits longer.
int parts_of(int64_t units, int64_t queries, int64_t keys, double met, int processors) {
  const int64_t key_tiles = std::max<int64_t>((keys + kKeys - 1) / kKeys, 1);
  const int64_t query_tiles = (queries + kQueries - 1) / kQueries;
  int best = 1;
  double least = 0;
  for (int parts = 1; parts <= std::min<int64_t>(key_tiles, processors); ++parts) {
    const int64_t groups = processors / parts;
    const int64_t rounds = (units + groups - 1) / groups * ((key_tiles + parts - 1) / parts);
    const bool fits = std::min(units, groups) * queries * (parts > 1 ? met : 1.0) <= 36 * 1024;
    const double time = (met * rounds * query_tiles + 2.1 * parts) * (fits ? 1.0 : 1.0 + 0.4 * met / parts);
    if (parts == 1 || time < least) {
      best = parts;
      least = time;
    }
  }
  return best;
}

template <class T>
Status launch_d128(const AttentionBackward& call, Parameters& p) {
  int processors = 0;
  Status status = count_multiprocessors(call.device, &processors);
  if (status.code != StatusCode::ok) return status;
  status = launch_statistics<T, T, kHeadDim128>(call, p, statistics_in(call, 0), p.turns);
  if (status.code != StatusCode::ok) return status;
  const int64_t units = call.sequences * call.heads;
  const Mask mask = mask_of(call);
  const int64_t queries = std::min(call.max_seqlen, call.queries);
  const double met = mask == Mask::full     ? 1.0
                     : mask == Mask::causal ? 0.5
                                            : std::min(1.0, (kKeys + p.window.left + p.window.right) / (queries + 1.0));
  p.blocks = parts_of(units, queries, std::min(call.max_seqlen_k, call.keys), met, processors);
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>(units, processors / p.blocks) * p.blocks));
  const auto start = [&](auto* kernel) {
    const dim3 block(kThreadsD128);
    constexpr size_t memory = sizeof(MemoryD128<Mask::window>);  // the largest
    return p.blocks > 1 ? launch_together(kernel, grid, block, memory, call.stream, p)
                        : launch(kernel, grid, block, memory, call.stream, p);
  };
  const bool causal = mask == Mask::causal;
  if (call.head_dim < kHeadDim128) {
    if (mask == Mask::window || call.seed != nullptr)
      return bad_size("attention: head dims 80 and 96 have neither dropout nor windows");
    return causal ? start(backward_kernel_d128<T, false, Mask::causal, true>)
                  : start(backward_kernel_d128<T, false, Mask::full, true>);
  }
  if (mask == Mask::window) return start(backward_kernel_d128<T, false, Mask::window>);
  if (call.seed != nullptr)
    return causal ? start(backward_kernel_d128<T, true, Mask::causal>)
                  : start(backward_kernel_d128<T, true, Mask::full>);
  return causal ? start(backward_kernel_d128<T, false, Mask::causal>)
                : start(backward_kernel_d128<T, false, Mask::full>);
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
  if (call.kv_heads != call.heads) return bad_size("kv_heads differs from heads");
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
  p.turns = reinterpret_cast<int*>(p.sums + (call.max_seqlen_k > kKeys ? tiles * kSumFloatsD128 : 0));
  return call.dtype == DType::bf16  ? launch_d128<bf16_t>(call, p)
         : call.dtype == DType::f16 ? launch_d128<f16_t>(call, p)
                                    : unknown_dtype();
}

}  // namespace cuda
}  // namespace fasttfm
