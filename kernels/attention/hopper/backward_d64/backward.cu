// attention backward for Hopper, head dims 64 and 32: one pass with the five products. Formulas: reference.py.
//
// A block processes tiles of 128 keys of a (sequence, head) pair. For each tile it iterates over all queries, 64 at a
// time. It has four warpgroups:
//   0  producer: warp 0 loads tiles by TMA, warps 1 to 3 generate dropout's keep bits
//   1, 2  consumers of 64 keys each: they compute S^T = K Q^T and dP^T = V dO^T, from these P^T and dS^T in registers,
//         and then dV += P^T dO and dK += dS^T Q. dS^T is stored in shared memory.
//   3  dQ += dS K of all 128 keys
//
// Up to kOnChipQueries queries, a block processes one (sequence, head) pair at a time and accumulates dQ over the keys
// in shared memory, where each thread has its own elements. If sequence lengths differ, blocks fetch the next pair from
// a counter in order of decreasing work.
//
// For more queries this kernel is used with dropout; without dropout it is that of backward_d64/long.cu. dQ is
// accumulated in the workspace by TMA reductions, and a group of blocks processes one pair: key tiles are assigned to
// the blocks round-robin, and the blocks add to dQ in the order of the keys; the last one loads the sum and writes dQ.
// The blocks of a group access the same queries at about the same time, so queries and sums stay in L2. With one pair
// per block, the sums of 2,048 queries would take 134 MB.
//
// With a window, blocks fetch chunks of keys (window.h) and accumulate dQ in shared memory, in a ring buffer of
// kRingQueries queries. If two chunks contribute to a tile of dQ, the block with the higher keys stores its partial sum
// in the workspace, and the block with the lower keys adds it.
//
// Head dim 32 is supported for up to kOnChipQueries queries, without a window. Its tiles are as large as those of head
// dim 64; TMA fills the missing columns with zeros.
//
// Every sum is accumulated in a fixed order.
#include <algorithm>
#include <type_traits>

#include "attention/hopper/backward_d128/backward.h"
#include "attention/hopper/backward_d256/backward.h"
#include "attention/hopper/backward_d64/long.h"
#include "attention/hopper/backward_d64/sums.cuh"
#include "attention/hopper/shared/backward_launch.cuh"
#include "attention/hopper/shared/backward_products.cuh"
#include "attention/hopper/shared/backward_tiles.cuh"
#include "attention/hopper/shared/call.h"
#include "attention/op.h"
#include "common/cuda/hopper.cuh"

namespace fasttfm {
namespace cuda {
namespace hopper_backward {
namespace {

// ---- the kernel ------------------------------------------------------------------------------------------------------

// Registers per thread of warpgroup 0, of warpgroups 1 and 2, and of warpgroup 3. Summed over the four warpgroups they
// are 512, the limit of an SM. MORE_SUM: warpgroup 3 writes FP8 and adds to sums in the workspace, which takes more.
template <bool DROPOUT, bool MORE_SUM>
struct Registers {
  static constexpr int kKeys = DROPOUT ? 200 : 208, kSum = MORE_SUM ? 72 : 64, kProducer = 512 - 2 * kKeys - kSum;
};

// GROUPED: query heads share k and v. Each is processed on its own.
template <class T, class G, int HEAD_DIM, bool DROPOUT, Mask MASK, bool ON_CHIP, bool GROUPED>
__global__ void __launch_bounds__(kThreads, 1) backward_kernel(const __grid_constant__ Parameters p) {
  extern __shared__ __align__(1024) char bytes[];
  auto& memory = *reinterpret_cast<Memory<ON_CHIP, MASK>*>(bytes);
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
    setmaxnreg_dec<Registers<DROPOUT, kFp8<G> && !ON_CHIP>::kProducer>();
    const int warp = warp_uniform(threadIdx.x / 32);
    if (warp == 0)
      load_tiles<DROPOUT, GROUPED, MASK>(p, memory);
    else if constexpr (DROPOUT)
      draw_keep_bits<MASK>(p, memory, warp - 1);
  } else if (warpgroup == 3) {
    setmaxnreg_dec<Registers<DROPOUT, kFp8<G> && !ON_CHIP>::kSum>();
    sum_dq<T, G, HEAD_DIM, MASK>(p, memory);
    memory.fp8.template finish<G>(p.fp8);
  } else {
    setmaxnreg_inc<Registers<DROPOUT, kFp8<G> && !ON_CHIP>::kKeys>();
    KeyWarpgroup<T, G, HEAD_DIM, DROPOUT, MASK, ON_CHIP>(p, memory, warpgroup - 1).run();
    memory.fp8.template finish<G>(p.fp8);
  }
}

// ---- launchers -------------------------------------------------------------------------------------------------------

template <class T, class G, int HEAD_DIM, bool DROPOUT, Mask MASK, bool GROUPED>
Status launch_backward(const AttentionBackward& call, const Parameters& p, int processors) {
  const int64_t groups = std::min<int64_t>(call.sequences * call.heads, processors / p.blocks);
  const dim3 grid(static_cast<unsigned>(groups * p.blocks)), block(kThreads);
  if (call.max_seqlen <= kOnChipQueries)
    return launch(backward_kernel<T, G, HEAD_DIM, DROPOUT, MASK, true, GROUPED>, grid, block,
                  sizeof(Memory<true, MASK>), call.stream, p);
  if constexpr (HEAD_DIM == kHeadDim && DROPOUT) {
    auto* kernel = backward_kernel<T, G, HEAD_DIM, DROPOUT, MASK, false, GROUPED>;
    constexpr size_t memory = sizeof(Memory<false, MASK>);
    return p.blocks > 1 ? launch_together(kernel, grid, block, memory, call.stream, p)
                        : launch(kernel, grid, block, memory, call.stream, p);
  }
  return bad_size("attention: this Hopper backward supports up to 512 queries");
}

// A block may wait for a block that fetched its chunk earlier, so the launch is cooperative.
template <class T, bool GROUPED>
Status launch_window(const AttentionBackward& call, const Parameters& p, int processors) {
  const dim3 grid(static_cast<unsigned>(std::clamp<int64_t>(static_cast<int64_t>(p.slots) * p.heads, 1, processors)));
  return launch_together(backward_kernel<T, T, kHeadDim, false, Mask::window, true, GROUPED>, grid, dim3(kThreads),
                         sizeof(Memory<true, Mask::window>), call.stream, p);
}

template <class T, class G, int HEAD_DIM, bool GROUPED>
Status launch_kernel(const AttentionBackward& call, const Parameters& p, int processors) {
  const Mask mask = mask_of(call);
  if (HEAD_DIM == kHeadDim && std::is_same_v<T, G> && mask == Mask::window)
    return launch_window<T, GROUPED>(call, p, processors);
  const bool causal = mask == Mask::causal;
  if constexpr (!GROUPED) {
    if (call.seed != nullptr)
      return causal ? launch_backward<T, G, HEAD_DIM, true, Mask::causal, false>(call, p, processors)
                    : launch_backward<T, G, HEAD_DIM, true, Mask::full, false>(call, p, processors);
  }
  return causal ? launch_backward<T, G, HEAD_DIM, false, Mask::causal, GROUPED>(call, p, processors)
                : launch_backward<T, G, HEAD_DIM, false, Mask::full, GROUPED>(call, p, processors);
}

// Sets the parameters of a call with a window. If the queries of a key tile fit into the ring buffer, keys are divided
// into chunks; otherwise a chunk is a whole sequence.
Status set_window(const AttentionBackward& call, Parameters* p) {
  const bool chunks = fits_ring(p->window, kQueries, kKeys);
  if (!chunks && call.max_seqlen > kOnChipQueries)
    return bad_size("attention: the window is too wide for the Hopper backward of more than 512 queries");
  if (call.column_sums != nullptr) return bad_size("attention: column sums require full or causal attention");
  const int64_t longest = std::min(call.max_seqlen_k, call.keys);
  p->chunk_keys =
      chunks ? kChunkKeys : static_cast<int>(std::max<int64_t>((longest + kKeys - 1) / kKeys * kKeys, kKeys));
  p->slots = static_cast<int>(count_slots(call.cu_seqlens_k != nullptr, call.sequences, call.keys, p->chunk_keys));
  p->order = nullptr;
  p->taken = reinterpret_cast<int*>(call.workspace);
  if (longest > p->chunk_keys)
    p->arrivals = reinterpret_cast<int*>(p->sums + call.heads * static_cast<int64_t>(p->tiles) * kSumFloats);
  return {};
}

// compute-sanitizer's initcheck does not track the TMA writes of the sums of dQ and would report every read of them, so
// a build for compute-sanitizer initializes them first.
Status initialize_sums(const AttentionBackward& call, const Parameters& p) {
  if (!kSanitized || call.max_seqlen <= kOnChipQueries) return {};
  const size_t bytes = sizeof(float) * kSumFloats * p.tiles * call.heads;
  return status_of(cudaMemsetAsync(p.sums, 0, bytes, static_cast<cudaStream_t>(call.stream)));
}

Status check_fp8(const AttentionBackward& call) {
  if (call.fp8.scale == nullptr) return {};
  if (call.head_dim != kHeadDim || call.dtype != DType::bf16 || has_window(call))
    return {StatusCode::bad_value, "attention: FP8 gradients require head dim 64 and bf16, and no window"};
  if (call.cu_seqlens == nullptr || call.cu_seqlens != call.cu_seqlens_k || call.queries != call.keys)
    return {StatusCode::bad_value, "attention: FP8 gradients require packed self-attention"};
  if (call.fp8.padded % 16 != 0 || call.fp8.padded < call.queries)
    return bad_size("attention: the columns of FP8 gradients require a multiple of 16 tokens");
  return {};
}

template <class T, class G, int HEAD_DIM, bool GROUPED = false>
Status launch_typed(const AttentionBackward& call, Parameters p) {
  int processors = 0;
  Status status = count_multiprocessors(call.device, &processors);
  if (status.code != StatusCode::ok) return status;
  processors = std::min(processors, kMaxBlocks);
  const bool causal = mask_of(call) == Mask::causal;
  p.blocks = has_window(call) ? 1 : partition_of(units_of(call, 1), causal, false, processors).blocks;
  status = initialize_sums(call, p);
  if (status.code == StatusCode::ok)
    status = launch_statistics<T, G, HEAD_DIM>(call, p, statistics_in(call, kMaxBlocks), p.arrivals);
  if (status.code == StatusCode::ok) status = launch_kernel<T, G, HEAD_DIM, GROUPED>(call, p, processors);
  return status.code == StatusCode::ok ? sum_columns(call, p) : status;
}

}  // namespace
}  // namespace hopper_backward

using namespace hopper_backward;

int64_t attention_backward_workspace(int64_t sequences, int64_t heads, int64_t head_dim, int64_t tokens,
                                     int64_t longest, bool grouped) {
  if (is_wide_head_dim(head_dim)) return attention_backward_wide_workspace(sequences, heads, tokens);
  if (head_dim > kHeadDim) return attention_backward_d128_workspace(sequences, heads, tokens, longest);
  const int64_t tiles = tiles_of(sequences, tokens, true);  // at least as many as for dense sequences
  const bool sums = grouped || longest > kOnChipQueries;
  const int64_t of_tile = 2 * kQueries + (sums ? kSumFloats + 1 : 0);  // 1: Parameters::arrivals or dq_semaphores
  return (Count(heads) * tiles * of_tile + kMaxBlocks + order_floats(sequences)).value;
}

int64_t attention_column_parts(int64_t sequences, int64_t heads, int64_t head_dim, int64_t max_seqlen) {
  const Count units = Count(sequences) * heads;
  return (units * max_blocks(units.value, max_seqlen, true) * (3 * kColumnParts) * head_dim).value;
}

Status attention_backward(const AttentionBackward& call) {
  Status status = check_hopper_call(call);
  if (status.code == StatusCode::ok) status = check_heads(call);
  if (status.code != StatusCode::ok) return status;
  if (call.head_dim != 32 && call.head_dim != kHeadDim && call.head_dim != 80 && call.head_dim != 96 &&
      call.head_dim != kHeadDim128 && !is_wide_head_dim(call.head_dim))
    return bad_size("attention: the Hopper backward supports head dims 32, 64, 80, 96, 128, 192 and 256");
  if (call.head_dim == 32 && has_window(call)) return bad_size("attention: head dim 32 has no windows");
  if (call.column_sums != nullptr && call.head_dim != kHeadDim)
    return bad_size("attention: column sums require head dim 64");
  status = check_fp8(call);
  if (status.code != StatusCode::ok) return status;
  if (is_wide_head_dim(call.head_dim)) return attention_backward_wide(call);
  if (call.head_dim > kHeadDim) return attention_backward_d128(call);
  if (call.sequences == 0 || call.heads == 0) return {};
  if (call.sequences > 65535 || call.heads > 65535) return bad_size("more than 65535 sequences or heads");
  const DeviceGuard guard(call.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  const bool several_heads = gradient_heads_of(call) != call.heads;
  if (call.head_dim == kHeadDim && (several_heads || call.max_seqlen > kOnChipQueries) && call.seed == nullptr &&
      !has_window(call))
    return attention_backward_long(call);
  if (several_heads) return bad_size("attention: this Hopper backward has one query head per head of dk and dv");
  Parameters p{};
  status = set_parameters_d64(call, &p);
  if (status.code != StatusCode::ok) return status;
  p.progress = reinterpret_cast<uint32_t*>(call.workspace);
  p.taken = has_lengths(call) ? reinterpret_cast<int*>(call.workspace) : nullptr;
  if (has_window(call)) status = set_window(call, &p);
  if (status.code != StatusCode::ok) return status;
  if (call.fp8.scale != nullptr) return launch_typed<bf16_t, fp8_t, kHeadDim>(call, p);
  if (is_grouped(call))
    return call.dtype == DType::bf16 ? launch_typed<bf16_t, bf16_t, kHeadDim, true>(call, p)
                                     : launch_typed<f16_t, f16_t, kHeadDim, true>(call, p);
  if (call.dtype == DType::bf16)
    return call.head_dim == 32 ? launch_typed<bf16_t, bf16_t, 32>(call, p)
                               : launch_typed<bf16_t, bf16_t, kHeadDim>(call, p);
  return call.head_dim == 32 ? launch_typed<f16_t, f16_t, 32>(call, p) : launch_typed<f16_t, f16_t, kHeadDim>(call, p);
}

}  // namespace cuda
}  // namespace fasttfm
