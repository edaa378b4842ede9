// Variants of attention's backward for long sequences (kernels/attention/hopper/backward_d64/long.cu), as a library for
// backward_long.py:
//
//   nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -shared -Xcompiler -fPIC -Ikernels -o build/lab/long.so
//   benchmarks/lab/backward_long.cu
#include <algorithm>

#include "attention/hopper/shared/backward_launch.cuh"
#include "attention/hopper/backward_d64/long_products.cuh"
#include "attention/hopper/backward_d64/long_tiles.cuh"
#include "attention/hopper/shared/call.h"

namespace fasttfm {
namespace cuda {
namespace hopper_backward {
namespace {

enum Variant {
  kBase,       // the library's
  kRelaxed,    // counters with relaxed accesses: not correct, for what acquire and release cost
  kOneThread,  // one thread makes all additions of a block, and publishes an addition after it has issued the next one
  kPublisher,  // the same, and a thread of another warp releases the counters
  kVariants
};

__device__ __forceinline__ bool is_complete(const Mbarrier& barrier, uint32_t parity) {
  uint32_t done;
  asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done)
               : "r"(barrier.address()), "r"(parity)
               : "memory");
  return done != 0;
}

template <Variant VARIANT>
__device__ __forceinline__ int load_counter(const int* from) {
  if (VARIANT != kRelaxed) return load_acquire(from);
  int value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
// Called after bulk_wait().
template <Variant VARIANT>
__device__ __forceinline__ void store_counter(int* to, int value) {
  if (VARIANT != kRelaxed) return store_release(to, value);
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// add_dq_long() in one thread.
template <Variant VARIANT, Mask MASK>
__device__ __forceinline__ void add_dq_variant(const Parameters& p, LongMemory<MASK>& memory,
                                               Publications& publications) {
  RingPosition<1> publication;
  const auto publish = [&](int* to, int value) {
    if (VARIANT == kPublisher)
      publications.send(to, value, &publication);
    else
      store_counter<VARIANT>(to, value);
  };
  RingPosition<LongMemory<MASK>::kStagings> step, previous;
  int *counter = nullptr, done = 0;
  bool follows = false;
  const auto finish = [&] {
    if (counter == nullptr) return;
    bulk_wait<0>();
    publish(counter, done);
    counter = nullptr;
  };
  for_each_step<MASK>(
      p, [](const TurnUnit<MASK>&, int) {},
      [&](const TurnUnit<MASK>& unit, int round, int tile) {
        const int turn = unit.turn(round, tile);
        int* turns = p.turns + unit.tile + tile;
        float* sums = p.sums + static_cast<int64_t>(unit.tile + tile) * kSumFloats;
        const uint32_t staging = shared_address(memory.staging[step.slot]);
        const bool last = turn == unit.last_turn(tile);
        if (turn > 0) {
          if (load_counter<VARIANT>(turns) < turn) {
            finish();
            while (load_counter<VARIANT>(turns) < turn) {
            }
          }
          fence_proxy_async_global();
        }
        if (last && turn > 0) {
          bulk_load(memory.loaded[step.slot], staging, sums, 4 * kSumFloats);
          memory.loaded[step.slot].arrive_expect_tx(4 * kSumFloats);
        }
        if (!is_complete(memory.staging_full[step.slot], step.parity)) {
          finish();
          memory.staging_full[step.slot].wait(step.parity);
        }
        if (!last && turn == 0) bulk_store(sums, staging, 4 * kSumFloats);
        if (!last && turn > 0) bulk_reduce_add(sums, staging, 4 * kSumFloats);
        bulk_commit();
        if (counter != nullptr) {
          bulk_wait<1>();
          publish(counter, done);
        }
        counter = last ? nullptr : turns;
        done = turn + 1;
        bulk_wait_read<1>();
        if (follows) memory.staging_empty[previous.slot].arrive();
        follows = true;
        previous = step;
        step.next();
      });
  finish();
  if (VARIANT == kPublisher) publications.send(nullptr, 0, &publication);
}

template <Variant VARIANT, Mask MASK>
__global__ void __launch_bounds__(kThreads, 1) lab_kernel(const __grid_constant__ Parameters p) {
  extern __shared__ __align__(1024) char bytes[];
  __shared__ Publications publications;
  auto& memory = *reinterpret_cast<LongMemory<MASK>*>(bytes);
  const int warpgroup = warp_uniform(threadIdx.x / kWarpgroup);
  if (threadIdx.x == 0) {
    publications.init();
    memory.init();
    prefetch_tensormap(&p.q);
    prefetch_tensormap(&p.k);
    prefetch_tensormap(&p.v);
    prefetch_tensormap(&p.dout);
  }
  __syncthreads();
  if (warpgroup == 0) {
    setmaxnreg_dec<32>();
    const int warp = warp_uniform(threadIdx.x / 32);
    if (warp == 0) {
      load_tiles_long<MASK>(p, memory);
    } else if (threadIdx.x % 32 == 0) {
      if constexpr (VARIANT == kBase)
        add_dq_long<MASK>(p, memory, warp - 1);
      else if (warp == 1)
        add_dq_variant<VARIANT, MASK>(p, memory, publications);
      else if (VARIANT == kPublisher && warp == 2)
        publications.release_all();
    }
  } else if (warpgroup == 3) {
    setmaxnreg_dec<64>();
    multiply_dq_long<bf16_t, MASK>(p, memory);
  } else {
    setmaxnreg_inc<208>();
    LongKeyWarpgroup<bf16_t, MASK>(p, memory, warpgroup - 1).run();
  }
}

template <int VARIANT = 0>
Status launch_variant(int variant, bool causal, dim3 grid, void* stream, const Parameters& p) {
  if constexpr (VARIANT == kVariants) {
    return bad_size("no such variant");
  } else {
    if (variant != VARIANT) return launch_variant<VARIANT + 1>(variant, causal, grid, stream, p);
    constexpr auto V = static_cast<Variant>(VARIANT);
    const auto start = [&](auto* kernel, size_t memory) {
      return p.blocks > 1 ? launch_together(kernel, grid, dim3(kThreads), memory, stream, p)
                          : launch(kernel, grid, dim3(kThreads), memory, stream, p);
    };
    return causal ? start(lab_kernel<V, Mask::causal>, sizeof(LongMemory<Mask::causal>))
                  : start(lab_kernel<V, Mask::full>, sizeof(LongMemory<Mask::full>));
  }
}

}  // namespace
}  // namespace hopper_backward
}  // namespace cuda
}  // namespace fasttfm

using namespace fasttfm;
using namespace fasttfm::cuda;
using namespace fasttfm::cuda::hopper_backward;

// q, k, v, out, dout, dq, dk and dv are contiguous bf16 [sequences, length, heads, 64], lse is [sequences, heads,
// length]. `blocks`: how many share a head; 0: as the library chooses. Returns a StatusCode.
extern "C" int lab_backward(int variant, const void* q, const void* k, const void* v, const void* out, const void* dout,
                            const float* lse, void* dq, void* dk, void* dv, float* workspace, int64_t sequences,
                            int64_t length, int64_t heads, int causal, int blocks, void* stream) {
  AttentionBackward call{};
  const int64_t token = heads * kHeadDim, sequence = length * token, head = kHeadDim;
  call.q = q, call.k = k, call.v = v, call.out = out, call.dout = dout, call.lse = lse;
  call.dq = dq, call.dk = dk, call.dv = dv, call.workspace = workspace, call.stream = stream;
  call.q_sequence_stride = call.k_sequence_stride = call.v_sequence_stride = sequence;
  call.dq_sequence_stride = call.dk_sequence_stride = call.dv_sequence_stride = sequence;
  call.q_token_stride = call.k_token_stride = call.v_token_stride = token;
  call.dq_token_stride = call.dk_token_stride = call.dv_token_stride = token;
  call.q_head_stride = call.k_head_stride = call.v_head_stride = head;
  call.dq_head_stride = call.dk_head_stride = call.dv_head_stride = head;
  call.sequences = sequences, call.heads = call.kv_heads = heads, call.head_dim = kHeadDim;
  call.queries = call.keys = call.max_seqlen = call.max_seqlen_k = length;
  call.window_left = -1, call.window_right = causal ? 0 : -1;
  call.scale = 0.125f, call.threshold = 256, call.dropout_scale = 1.0f, call.dtype = DType::bf16;
  Parameters p{};
  Status status = set_parameters_d64(call, &p);
  if (status.code != StatusCode::ok) return static_cast<int>(status.code);
  p.turns = reinterpret_cast<int*>(p.sums + call.heads * static_cast<int64_t>(p.tiles) * kSumFloats);
  int processors = 0;
  status = count_multiprocessors(call.device, &processors);
  if (status.code != StatusCode::ok) return static_cast<int>(status.code);
  p.blocks = blocks > 0 ? blocks : sharing_of(call, causal != 0, true, processors).blocks;
  status = launch_statistics<bf16_t, kHeadDim>(call, p, statistics_in(call, kMaxBlocks), p.turns);
  if (status.code != StatusCode::ok) return static_cast<int>(status.code);
  const int64_t groups = std::min<int64_t>(sequences * heads, processors / p.blocks);
  return static_cast<int>(
      launch_variant(variant, causal != 0, dim3(static_cast<unsigned>(groups * p.blocks)), stream, p).code);
}
