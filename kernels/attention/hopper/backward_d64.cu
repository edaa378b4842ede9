// attention backward for Hopper, head dim 64: one pass with the five products. Formulas: reference.py.
//
// A block processes tiles of 128 keys of a (sequence, head); for each it iterates over all queries, 64 at a time. Four
// warpgroups share the work:
//   0  producer: warp 0 loads tiles by TMA, warps 1 to 3 draw the random bits of dropout
//   1, 2  64 keys each, keys by queries:  S^T = K Q^T, dP^T = V dO^T, then P^T and dS^T in registers, and from there
//         dV += P^T dO and dK += dS^T Q; dS^T is stored in shared memory
//   3  dQ += dS K of all 128 keys.
//
// Up to kOnChipQueries queries, a block processes one (sequence, head) at a time and accumulates dQ over the keys in
// shared memory, where each thread has its own elements. If lengths differ, blocks fetch the next (sequence, head) from
// a counter, and those with the most work come first. For more queries, dQ is accumulated in the workspace by TMA
// reductions, and a group of blocks shares a (sequence, head): the blocks take tiles of keys in a cycle and add in the
// order of the keys; the last one loads the sum and writes dQ. The blocks of a group reach the same queries at about
// the same time, so the queries and the sums are in L2. With one head per block the sums of 2,048 queries would take
// 134 MB.
//
// Every sum has one fixed order.
#include <algorithm>

#include "attention/hopper/backward_d128.h"
#include "attention/hopper/backward_launch.cuh"
#include "attention/hopper/backward_products.cuh"
#include "attention/hopper/backward_tiles.cuh"
#include "attention/hopper/call.h"
#include "attention/op.h"
#include "common/cuda/hopper.cuh"
#include "common/cuda/reduce.cuh"

namespace fasttfm {
namespace cuda {
namespace hopper_backward {
namespace {

// ---- the kernel ------------------------------------------------------------------------------------------------------

// Registers per thread of warpgroup 0, of 1 and 2, and of 3. Over the four warpgroups they add up to 512.
template <bool DROPOUT>
struct Registers {
  static constexpr int kProducer = DROPOUT ? 48 : 32, kKeys = DROPOUT ? 200 : 208, kSum = 64;
};

template <class T, bool DROPOUT, bool CAUSAL, bool ON_CHIP>
__global__ void __launch_bounds__(kThreads, 1) backward_kernel(const __grid_constant__ Parameters p) {
  extern __shared__ __align__(1024) char bytes[];
  auto& memory = *reinterpret_cast<Memory<ON_CHIP>*>(bytes);
  const int warpgroup = warp_uniform(threadIdx.x / kWarpgroup);
  if (threadIdx.x == 0) {
    memory.init();
    prefetch_tensormap(&p.q);
    prefetch_tensormap(&p.k);
    prefetch_tensormap(&p.v);
    prefetch_tensormap(&p.dout);
  }
  __syncthreads();
  if (warpgroup == 0) {
    setmaxnreg_dec<Registers<DROPOUT>::kProducer>();
    const int warp = warp_uniform(threadIdx.x / 32);
    if (warp == 0)
      load_tiles<DROPOUT, CAUSAL>(p, memory);
    else if constexpr (DROPOUT)
      draw_keep_bits<CAUSAL>(p, memory, warp - 1);
  } else if (warpgroup == 3) {
    setmaxnreg_dec<Registers<DROPOUT>::kSum>();
    sum_dq<T, CAUSAL>(p, memory);
  } else {
    setmaxnreg_inc<Registers<DROPOUT>::kKeys>();
    KeyWarpgroup<T, DROPOUT, CAUSAL, ON_CHIP>(p, memory, warpgroup - 1).run();
  }
}

// ---- launchers -------------------------------------------------------------------------------------------------------

template <class T, bool DROPOUT, bool CAUSAL>
Status launch_backward(const AttentionBackward& call, const Parameters& p, int processors) {
  const int64_t groups = std::min<int64_t>(call.sequences * call.heads, processors / p.blocks);
  const dim3 grid(static_cast<unsigned>(groups * p.blocks)), block(kThreads);
  if (call.max_seqlen <= kOnChipQueries)
    return launch(backward_kernel<T, DROPOUT, CAUSAL, true>, grid, block, sizeof(Memory<true>), call.stream, p);
  auto* kernel = backward_kernel<T, DROPOUT, CAUSAL, false>;
  return p.blocks > 1 ? launch_together(kernel, grid, block, sizeof(Memory<false>), call.stream, p)
                      : launch(kernel, grid, block, sizeof(Memory<false>), call.stream, p);
}

template <class T>
Status launch_kernel(const AttentionBackward& call, const Parameters& p, bool causal, int processors) {
  if (call.seed != nullptr)
    return causal ? launch_backward<T, true, true>(call, p, processors)
                  : launch_backward<T, true, false>(call, p, processors);
  return causal ? launch_backward<T, false, true>(call, p, processors)
                : launch_backward<T, false, false>(call, p, processors);
}

// initcheck does not see that TMA writes the sums of dQ and would report every read of them, so a build for
// compute-sanitizer initializes them first.
Status initialize_sums(const AttentionBackward& call, const Parameters& p) {
  if (!kSanitized || call.max_seqlen <= kOnChipQueries) return {};
  const size_t bytes = sizeof(float) * kSumFloats * p.tiles * call.heads;
  return status_of(cudaMemsetAsync(p.sums, 0, bytes, static_cast<cudaStream_t>(call.stream)));
}

template <class T>
Status launch_typed(const AttentionBackward& call, Parameters p) {
  int processors = 0;
  Status status = count_multiprocessors(call.device, &processors);
  if (status.code != StatusCode::ok) return status;
  processors = std::min(processors, kMaxBlocks);
  const bool causal = call.window_right == 0;
  p.blocks = sharing_of(call, causal, processors).blocks;
  status = initialize_sums(call, p);
  if (status.code == StatusCode::ok)
    status = launch_statistics<T, kHeadDim>(call, p, statistics_in(call, kMaxBlocks), nullptr);
  if (status.code == StatusCode::ok) status = launch_kernel<T>(call, p, causal, processors);
  if (status.code != StatusCode::ok || call.column_sums == nullptr) return status;
  return sum_parts(call.column_parts, {call.column_sums, call.column_sums_dtype}, {},
                   static_cast<int>(call.sequences * p.blocks * kColumnPlaces), 3 * call.heads * kHeadDim, call.stream);
}

}  // namespace
}  // namespace hopper_backward

using namespace hopper_backward;

int64_t attention_backward_workspace(int64_t sequences, int64_t heads, int64_t head_dim, int64_t tokens,
                                     int64_t longest) {
  if (head_dim == kHeadDim128) return attention_backward_d128_workspace(sequences, heads, tokens, longest);
  const int64_t tiles = tiles_of(sequences, tokens, true);  // at least as many as for dense sequences
  const int64_t of_tile = 2 * kQueries + (longest > kOnChipQueries ? kSumFloats : 0);
  return (Count(heads) * tiles * of_tile + kMaxBlocks + order_floats(sequences)).value;
}

int64_t attention_column_parts(int64_t sequences, int64_t heads, int64_t head_dim, int64_t max_seqlen) {
  const Count units = Count(sequences) * heads;
  return (units * max_blocks(units.value, max_seqlen) * (3 * kColumnPlaces) * head_dim).value;
}

Status attention_backward(const AttentionBackward& call) {
  Status status = check_hopper_call(call);
  if (status.code != StatusCode::ok) return status;
  if (call.column_sums != nullptr && call.head_dim != kHeadDim)
    return bad_size("attention: column sums require head dim 64");
  if (call.head_dim == kHeadDim128) return attention_backward_d128(call);
  if (call.kv_heads != call.heads) return bad_size("kv_heads differs from heads");
  if (call.sequences == 0 || call.heads == 0) return {};
  if (call.sequences > 65535 || call.heads > 65535) return bad_size("more than 65535 sequences or heads");
  const DeviceGuard guard(call.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  Parameters p{};
  status = set_parameters(call, &p);
  if (status.code != StatusCode::ok) return status;
  p.column_parts = call.column_sums == nullptr ? nullptr : call.column_parts;
  p.progress = reinterpret_cast<uint32_t*>(call.workspace);
  p.order = order_in(call, kMaxBlocks);
  p.taken = has_lengths(call) ? reinterpret_cast<int*>(call.workspace) : nullptr;
  p.statistics = statistics_in(call, kMaxBlocks);
  p.sums = statistics_in(call, kMaxBlocks) + call.heads * static_cast<int64_t>(p.tiles) * 2 * kQueries;
  return call.dtype == DType::bf16  ? launch_typed<bf16_t>(call, p)
         : call.dtype == DType::f16 ? launch_typed<f16_t>(call, p)
                                    : unknown_dtype();
}

}  // namespace cuda
}  // namespace fasttfm
