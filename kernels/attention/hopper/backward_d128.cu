// attention backward for Hopper, head dim 128: one pass with the five products. Formulas: reference.py.
//
// A block takes 128 keys of a (sequence, head) at a time; for them it goes over all queries, 64 at a time. Three
// warpgroups share the work:
//
//   0  warp 0 brings tiles in by TMA, warp 1 adds dQ up in the workspace, warps 2 and 3 draw dropout's random bits
//   1, 2  64 keys each, keys by queries:  S^T = K Q^T, dP^T = V dO^T, then P^T and dS^T in registers, and from there
//         dV += P^T dO and dK += dS^T Q. dS^T meets in shared memory, and each of them computes 64 columns of dQ = dS K
//
// Warpgroups 1 and 2 take turns: one multiplies while the other computes. For every tile of queries each of them first
// computes dS, and the weights of the next tile; then, at its turn, it starts dK, dQ of the tile before, dP and dV of
// the next tile, and, when dQ has left, S of the one after that. So dS of both is there when dQ is computed from it. P
// is kept in 16 bits, and dK takes dS from shared memory: there are no registers for more.
//
// Blocks share a (sequence, head) where there are few, or where the second level cache profits; counters order their
// additions to dQ, so such blocks are launched to run at the same time (a cooperative launch). Every sum has one fixed
// order.
#include <algorithm>

#include "attention/hopper/backward_d128_products.cuh"
#include "attention/hopper/backward_d128_tiles.cuh"
#include "attention/hopper/backward_launch.cuh"
#include "attention/hopper/call.h"
#include "attention/op.h"
#include "common/cuda/hopper.cuh"

namespace fasttfm {
namespace cuda {
namespace {

// ---- the kernels ----------------------------------------------------------------------------------------------------

constexpr int kWideProducerRegisters = 24, kWideConsumerRegisters = 240;

template <class T, bool DROPOUT, bool CAUSAL>
__global__ void __launch_bounds__(kWideThreads, 1) wide_backward_kernel(const __grid_constant__ WideParameters p) {
  extern __shared__ __align__(1024) char bytes[];
  auto& memory = *reinterpret_cast<WideMemory<CAUSAL>*>(bytes);
  const int warpgroup = uniform(threadIdx.x / kWarpgroup);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kQueryStages; ++i) {
      memory.q_full[i].initialize(1);
      memory.q_empty[i].initialize(8 * kWarpArrivals);
    }
    for (int i = 0; i < kGradientStages; ++i) {
      memory.dout_full[i].initialize(1);
      memory.dout_empty[i].initialize(8 * kWarpArrivals);
    }
    for (int i = 0; i < kKeyStages; ++i) {
      memory.k_full[i].initialize(1);
      memory.k_empty[i].initialize(8 * kWarpArrivals);
    }
    for (int i = 0; i < 2; ++i) {
      memory.staging_free[i].initialize(1);
      memory.staging_done[i].initialize(4 * kWarpArrivals);
      memory.kept_full[i].initialize(kWarpArrivals);
      memory.kept_empty[i].initialize(4 * kWarpArrivals);
    }
    memory.v_full.initialize(1);
    memory.v_empty.initialize(8 * kWarpArrivals);
    memory.raw.initialize(1);
    for (int i = 0; i < kScoreStages; ++i) {
      memory.dscores_full[i].initialize(8 * kWarpArrivals);
      memory.dscores_empty[i].initialize(8 * kWarpArrivals);
    }
    fence_barriers();
    prefetch_map(&p.q);
    prefetch_map(&p.k);
    prefetch_map(&p.v);
    prefetch_map(&p.dout);
  }
  __syncthreads();
  if (warpgroup == 0) {
    lower_registers<kWideProducerRegisters>();
    const int warp = uniform(threadIdx.x / 32);
    if (warp == 0) {
      bring_wide_tiles<CAUSAL>(p, memory);
    } else if (warp == 1) {
      if (threadIdx.x % 32 == 0) sum_wide_dq<CAUSAL>(p, memory);
    } else if constexpr (DROPOUT) {
      draw_wide_kept<CAUSAL>(p, memory, warp - 2);
    }
  } else {
    raise_registers<kWideConsumerRegisters>();
    WideKeyWarpgroup<T, DROPOUT, CAUSAL> keys(p, memory, warpgroup - 1);
    if (warpgroup == 2) keys.give_turn();
    for (int round = 0;; ++round) {
      const int index = unit_of_round(round, blockIdx.x / p.parts, gridDim.x / p.parts);
      if (index >= p.sequences * p.heads) break;
      keys.over_unit(index);
    }
  }
}

// ---- launchers -------------------------------------------------------------------------------------------------------

// How many blocks share a (sequence, head): what takes the shortest time of the block that has most to do. A tile of
// keys meets `met` of the queries on average. Blocks that share follow one another some 2 steps apart, over the same
// queries. What they read and add to, queries, gradients and sums, takes 1 KB a token: if that does not fit into the
// second level cache for all that is under way, the first of the blocks that come to it waits longer.
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
Status launch_wide(const AttentionBackward& call, WideParameters& p) {
  int processors = 0;
  Status status = count_multiprocessors(call.device, &processors);
  if (status.code != StatusCode::ok) return status;
  status = launch_statistics<T, kWideDim>(call, p, statistics_in(call, 0), p.turns);
  if (status.code != StatusCode::ok) return status;
  const int64_t units = call.sequences * call.heads;
  const bool causal = call.window_right == 0;
  p.parts = parts_of(units, std::min(call.max_seqlen, call.queries), std::min(call.max_seqlen_k, call.keys),
                     causal ? 0.5 : 1.0, processors);
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>(units, processors / p.parts) * p.parts));
  const auto start = [&](auto* kernel) {
    const dim3 block(kWideThreads);
    return p.parts > 1 ? launch_together(kernel, grid, block, sizeof(WideMemory<false>), call.stream, p)
                       : launch(kernel, grid, block, sizeof(WideMemory<false>), call.stream, p);
  };
  if (call.seed != nullptr)
    return causal ? start(wide_backward_kernel<T, true, true>) : start(wide_backward_kernel<T, true, false>);
  return causal ? start(wide_backward_kernel<T, false, true>) : start(wide_backward_kernel<T, false, false>);
}

}  // namespace

int64_t attention_backward_wide_workspace(int64_t sequences, int64_t heads, int64_t tokens, int64_t max_seqlen_k) {
  const int64_t tiles = tiles_of(sequences, tokens, true);  // not fewer than those of dense sequences
  const int64_t of_tile = 2 * kQueries + 1 + (max_seqlen_k > kKeys ? kWideSumFloats : 0);
  return (Count(heads) * tiles * of_tile + order_floats(sequences)).value;
}

Status attention_backward_wide(const AttentionBackward& call) {
  if (call.kv_heads != call.heads) return bad_size("kv_heads differs from heads");
  if (call.sequences == 0 || call.heads == 0) return {};
  if (call.sequences > 65535 || call.heads > 65535) return bad_size("more than 65535 sequences or heads");
  const DeviceGuard guard(call.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  WideParameters p{};
  const Status status = set_parameters(call, &p);
  if (status.code != StatusCode::ok) return status;
  const int64_t tiles = call.heads * p.tiles;
  p.order = order_in(call, 0);
  p.statistics = statistics_in(call, 0);
  p.sums = statistics_in(call, 0) + tiles * 2 * kQueries;
  p.turns = reinterpret_cast<int*>(p.sums + (call.max_seqlen_k > kKeys ? tiles * kWideSumFloats : 0));
  return call.dtype == DType::bf16  ? launch_wide<bf16_t>(call, p)
         : call.dtype == DType::f16 ? launch_wide<f16_t>(call, p)
                                    : unknown_dtype();
}

}  // namespace cuda
}  // namespace fasttfm
