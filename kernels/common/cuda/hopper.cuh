// Wrappers of PTX instructions for Hopper (sm_90a): TMA copies and mbarriers, wgmma, setmaxnreg, clusters. Names follow
// PTX. A .cu file that includes this header is compiled for sm_90a only.
//
// Tiles in shared memory have rows of 64 16-bit elements (128 bytes) in the 128-byte swizzle that TMA writes and wgmma
// reads: the 16-byte chunk c of row r is stored in chunk c ^ (r % 8). Tiles are aligned to 1024 bytes. A wider matrix
// is stored as several tiles of 64 columns.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "common/cuda/convert.cuh"
#include "common/cuda/launch.cuh"
#include "common/dtype.h"
#include "common/status.h"

namespace fasttfm {
namespace cuda {

constexpr int kTileColumns = 64;  // of a swizzled tile of 16-bit elements
constexpr int kTileRowBytes = 128;
constexpr int kWarpgroup = 128;  // threads

// ---- host: tensor maps ----------------------------------------------------------------------------------------------

// A tensor of up to four dimensions as TMA sees it. The innermost dimension is contiguous. TMA reads elements outside
// of the sizes as 0 and does not write them.
struct TensorView {
  const void* data;   // aligned to 16 bytes
  DType dtype;        // bf16 or f16
  int64_t size[4];    // innermost first; 1 for unused dimensions
  int64_t stride[3];  // of dimensions 1 to 3, in elements; multiples of 8
  int box[4];         // the size of the box that one copy transfers; box[0] is kTileColumns
};

using EncodeTensorMap = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                     const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                     CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// Encodes the tensor map that kernels take as a __grid_constant__ parameter.
inline Status make_tensor_map(CUtensorMap* map, const TensorView& view) {
  static const auto encode = driver_function<EncodeTensorMap>("cuTensorMapEncodeTiled");
  if (encode == nullptr) return {StatusCode::cuda_error, "the CUDA driver has no cuTensorMapEncodeTiled"};
  cuuint64_t size[4], stride[3];
  cuuint32_t box[4], step[4];
  for (int i = 0; i < 4; ++i) {
    size[i] = static_cast<cuuint64_t>(view.size[i]);
    box[i] = static_cast<cuuint32_t>(view.box[i]);
    step[i] = 1;
  }
  for (int i = 0; i < 3; ++i) {  // a dimension of size 1 may have any stride, because it is never used
    const cuuint64_t natural = i == 0 ? 2 * size[0] : size[i] * stride[i - 1];
    stride[i] = view.size[i + 1] == 1 ? natural : 2 * static_cast<cuuint64_t>(view.stride[i]);
  }
  const CUtensorMapDataType type =
      view.dtype == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const CUresult result =
      encode(map, type, 4, const_cast<void*>(view.data), size, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) return {StatusCode::cuda_error, "the CUDA driver refused a tensor map"};
  return {};
}

// ---- barriers in shared memory --------------------------------------------------------------------------------------

// An mbarrier in shared memory. A phase completes when all expected arrivals have been made and all expected
// transaction bytes have been transferred. wait() takes the parity of a phase. The first phase has parity 0, so waiting
// for parity 1 on a new mbarrier returns immediately.
struct Mbarrier {
  uint64_t state;

  __device__ __forceinline__ uint32_t address() const { return shared_address(&state); }
  // Called by one thread, before fence_mbarrier_init() and __syncthreads().
  __device__ __forceinline__ void init(uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(arrivals) : "memory");
  }
  __device__ __forceinline__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address()) : "memory");
  }
  // Arrives and adds `bytes` to the transaction bytes that the phase expects.
  __device__ __forceinline__ void arrive_expect_tx(uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()), "r"(bytes) : "memory");
  }
  __device__ __forceinline__ bool test(uint32_t parity) const {
    uint32_t done;
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(address()), "r"(parity)
                 : "memory");
    return done != 0;
  }
  __device__ __forceinline__ void wait(uint32_t parity) const {
    while (!test(parity)) {
    }
  }
  // Arrives at the same mbarrier in another block of the cluster. The arrival has CTA scope, because a release at
  // cluster scope would fence all memory. CTA scope suffices to release a buffer that wgmma has read: the waiting
  // thread only issues a TMA copy into it.
  __device__ __forceinline__ void arrive_remote(uint32_t block) {
    asm volatile(
        "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1;"
        " mbarrier.arrive.shared::cluster.b64 _, [remote]; }" ::"r"(address()),
        "r"(block)
        : "memory");
  }
};

// Makes initialized mbarriers visible to TMA and to the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Whether this is a build for compute-sanitizer, which does not track every kind of synchronization in these kernels.
#ifdef FASTTFM_SANITIZE_GPU
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

// The number of arrivals of a warp in arrive_warp(). One is enough, because __syncwarp() orders all lanes before the
// one that arrives. racecheck does not track that order, so in a build for compute-sanitizer every lane arrives.
constexpr int kWarpArrivals = kSanitized ? 32 : 1;

// A whole warp arrives at an mbarrier that expects kWarpArrivals arrivals per warp.
__device__ __forceinline__ void arrive_warp(Mbarrier& barrier) {
  __syncwarp();
  if (kWarpArrivals > 1 || threadIdx.x % 32 == 0) barrier.arrive();
}

// The position in a ring buffer of STAGES pipeline stages: the index of the stage, and the parity of the phase that
// fills it. Consumers wait for `full` with parity, the producer waits for `empty` with parity ^ 1.
template <int STAGES>
struct RingPosition {
  uint32_t slot = 0, parity = 0;
  __device__ __forceinline__ void next() {
    if (++slot == STAGES) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// Named barriers (PTX bar.sync and bar.arrive) for whole warps: `threads` is the total number of threads that sync or
// arrive. Barrier 0 is __syncthreads().
__device__ __forceinline__ void named_barrier_sync(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// ---- roles ----------------------------------------------------------------------------------------------------------

// setmaxnreg: the number of registers per thread from here on, a multiple of 8. All warps of a warpgroup execute it.
template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// elect.sync: true in exactly one thread of a converged warp.
__device__ __forceinline__ bool elect_one() {
  uint32_t chosen;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(chosen));
  return chosen != 0;
}

// Tells the compiler that a value is the same in all threads of a warp, so that it can use uniform registers.
__device__ __forceinline__ int warp_uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

// Reads threadIdx.x again at each call, so that values computed from it do not occupy registers between the calls.
__device__ __forceinline__ uint32_t reload_tid() {
  uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// ---- clusters -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ uint32_t cluster_size() {
  uint32_t blocks;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
  return blocks;
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// ---- copies ---------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void prefetch_tensormap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Issues a TMA copy of `bytes` adjacent bytes, a multiple of 16, into shared memory, which completes on `full`. Called
// by one thread.
__device__ __forceinline__ void bulk_load(Mbarrier& full, uint32_t shared, const void* global, uint32_t bytes) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(full.address())
               : "memory");
}

// Issues a TMA load of the map's box at coordinates (c0, c1, c2, c3) into shared memory, which completes on `full`.
// Called by one thread.
__device__ __forceinline__ void tma_load(const CUtensorMap* map, Mbarrier& full, uint32_t shared, int c0, int c1,
                                         int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(shared),
      "l"(map), "r"(full.address()), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
// The same with multicast: into the same shared address of every block of the cluster whose bit is set in `blocks`.
__device__ __forceinline__ void tma_load_multicast(uint16_t blocks, const CUtensorMap* map, Mbarrier& full,
                                                   uint32_t shared, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared),
      "l"(map), "r"(full.address()), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(blocks)
      : "memory");
}
// Issue a bulk copy, or a bulk reduction (add), of fp32 values from shared to global memory; `bytes` is a multiple of
// 16. Before it, the threads that wrote shared memory execute fence_proxy_async() and a barrier; after it, the calling
// thread executes bulk_commit().
__device__ __forceinline__ void bulk_store(float* global, uint32_t shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void bulk_reduce_add(float* global, uint32_t shared, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global), "r"(shared),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until at most PENDING of the thread's bulk groups still read shared memory.
template <int PENDING>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
// Waits until at most PENDING of the thread's bulk groups are incomplete.
template <int PENDING>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Orders the thread's accesses to shared memory before accesses by TMA and wgmma (the async proxy) that follow a
// barrier.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// The same for global memory.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// ---- matrices and vectors in shared memory --------------------------------------------------------------------------

// Load and store four 8 x 8 matrices of 16-bit elements. Each lane holds one 32-bit word of each matrix, and lane l
// passes the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void ldmatrix_x4(uint32_t* words, uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void stmatrix_x4(uint32_t address, const uint32_t* words) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// Load and store 16 bytes.
__device__ __forceinline__ uint4 load_vector(uint32_t shared) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(shared));
  return v;
}
__device__ __forceinline__ void store_vector(uint32_t shared, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// ---- wgmma ----------------------------------------------------------------------------------------------------------
//
// wgmma computes d [64, N] += a [64, 16] b [16, N] with the accumulator d in registers. Warp w of the warpgroup holds
// rows 16 * w to 16 * w + 15, of which lane l holds rows l / 4 and l / 4 + 8: element 4 * i + 2 * half + c of d is row
// l / 4 + 8 * half, column 8 * i + 2 * (l % 4) + c. An operand a in registers has the same layout, in 32-bit words {row
// l / 4, columns 2 * (l % 4) + {0, 1}}, {row + 8}, {columns + 8}, {row + 8, columns + 8}. So two neighbouring i of a
// result, rounded to 16 bits, can be used directly as operand a of another wgmma.

// The wgmma matrix descriptor of an operand in shared memory with 128-byte swizzle. `address`: of its first element;
// `stride`: bytes between groups of 8 rows of a tile; `leading`: bytes between tiles of 64 columns, if columns are the
// M or N dimension.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address, uint32_t leading, uint32_t stride) {
  return static_cast<uint64_t>((address & 0x3ffffu) >> 4) | static_cast<uint64_t>(leading >> 4) << 16 |
         static_cast<uint64_t>(stride >> 4) << 32 | 1ull << 62;
}
// K-major: the K dimension runs along the rows of the tile (as for q and k in q k^T). The next 16 elements of K are
// kKMajorStep bytes further, up to the end of the tile; the next 64 are in the next tile.
__device__ __forceinline__ uint64_t k_major(uint32_t tile) { return matrix_descriptor(tile, 16, 8 * kTileRowBytes); }
constexpr uint32_t kKMajorStep = 32;
// MN-major: the K dimension runs down the columns of the tile (as for v in P v). Columns past 64 are in tiles `leading`
// bytes apart. The next 16 elements of K are kMnMajorStep bytes further.
__device__ __forceinline__ uint64_t mn_major(uint32_t tile, uint32_t leading) {
  return matrix_descriptor(tile, leading, 8 * kTileRowBytes);
}
constexpr uint32_t kMnMajorStep = 16 * kTileRowBytes;
__device__ __forceinline__ uint64_t advance(uint64_t descriptor, uint32_t bytes) { return descriptor + (bytes >> 4); }

enum class Major { k, mn };

// Required before the first wgmma, and before a wgmma after any other access to the registers of d or a.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most PENDING wgmma groups are in flight. fence_operand() follows, on the registers that they read or
// wrote.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Keeps the compiler from moving accesses to these registers across the call. It does not know that a wgmma in flight
// still uses them.
template <int COUNT>
__device__ __forceinline__ void fence_operand(float (&value)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(value[i])::"memory");
}
template <int COUNT>
__device__ __forceinline__ void fence_operand(uint32_t (&value)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+r"(value[i])::"memory");
}

#define FASTTFM_REGISTERS_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FASTTFM_REGISTERS_16 FASTTFM_REGISTERS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define FASTTFM_REGISTERS_24 FASTTFM_REGISTERS_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define FASTTFM_REGISTERS_32 FASTTFM_REGISTERS_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define FASTTFM_REGISTERS_40 FASTTFM_REGISTERS_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define FASTTFM_REGISTERS_48 FASTTFM_REGISTERS_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define FASTTFM_REGISTERS_56 FASTTFM_REGISTERS_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define FASTTFM_REGISTERS_64 FASTTFM_REGISTERS_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define FASTTFM_REGISTERS_72 FASTTFM_REGISTERS_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define FASTTFM_REGISTERS_80 FASTTFM_REGISTERS_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define FASTTFM_REGISTERS_88 FASTTFM_REGISTERS_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define FASTTFM_REGISTERS_96 FASTTFM_REGISTERS_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define FASTTFM_REGISTERS_104 FASTTFM_REGISTERS_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define FASTTFM_REGISTERS_112 FASTTFM_REGISTERS_104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define FASTTFM_REGISTERS_120 FASTTFM_REGISTERS_112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define FASTTFM_REGISTERS_128 FASTTFM_REGISTERS_120 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define FASTTFM_RESULTS_8 FASTTFM_RESULTS_AT(0)
#define FASTTFM_RESULTS_16 FASTTFM_RESULTS_8, FASTTFM_RESULTS_AT(8)
#define FASTTFM_RESULTS_24 FASTTFM_RESULTS_16, FASTTFM_RESULTS_AT(16)
#define FASTTFM_RESULTS_32 FASTTFM_RESULTS_24, FASTTFM_RESULTS_AT(24)
#define FASTTFM_RESULTS_40 FASTTFM_RESULTS_32, FASTTFM_RESULTS_AT(32)
#define FASTTFM_RESULTS_48 FASTTFM_RESULTS_40, FASTTFM_RESULTS_AT(40)
#define FASTTFM_RESULTS_56 FASTTFM_RESULTS_48, FASTTFM_RESULTS_AT(48)
#define FASTTFM_RESULTS_64 FASTTFM_RESULTS_56, FASTTFM_RESULTS_AT(56)
#define FASTTFM_RESULTS_72 FASTTFM_RESULTS_64, FASTTFM_RESULTS_AT(64)
#define FASTTFM_RESULTS_80 FASTTFM_RESULTS_72, FASTTFM_RESULTS_AT(72)
#define FASTTFM_RESULTS_88 FASTTFM_RESULTS_80, FASTTFM_RESULTS_AT(80)
#define FASTTFM_RESULTS_96 FASTTFM_RESULTS_88, FASTTFM_RESULTS_AT(88)
#define FASTTFM_RESULTS_104 FASTTFM_RESULTS_96, FASTTFM_RESULTS_AT(96)
#define FASTTFM_RESULTS_112 FASTTFM_RESULTS_104, FASTTFM_RESULTS_AT(104)
#define FASTTFM_RESULTS_120 FASTTFM_RESULTS_112, FASTTFM_RESULTS_AT(112)
#define FASTTFM_RESULTS_128 FASTTFM_RESULTS_120, FASTTFM_RESULTS_AT(120)
#define FASTTFM_RESULTS_AT(I)                                                                                 \
  "+f"(d[I]), "+f"(d[I + 1]), "+f"(d[I + 2]), "+f"(d[I + 3]), "+f"(d[I + 4]), "+f"(d[I + 5]), "+f"(d[I + 6]), \
      "+f"(d[I + 7])

template <int N>
struct Wgmma;

// The asm operands begin with the COUNT = N / 2 registers of d; X0 to X6 are the numbers of the operands after them.
#define FASTTFM_WGMMA(N, COUNT, X0, X1, X2, X3, X4, X5, X6)                                                            \
  template <>                                                                                                          \
  struct Wgmma<N> {                                                                                                    \
    template <class T, Major A, Major B>                                                                               \
    static __device__ __forceinline__ void shared(float (&d)[COUNT], uint64_t a, uint64_t b, bool add) {               \
      if constexpr (std::is_same_v<T, bf16_t>)                                                                         \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #X2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N                \
                     "k16.f32.bf16.bf16 {" FASTTFM_REGISTERS_##COUNT "}, %" #X0 ", %" #X1 ", p, 1, 1, %" #X3 ", %" #X4 \
                                                                     "; }"                                             \
                     : FASTTFM_RESULTS_##COUNT                                                                         \
                     : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(A == Major::mn), "n"(B == Major::mn));          \
      else                                                                                                             \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #X2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N                \
                     "k16.f32.f16.f16 {" FASTTFM_REGISTERS_##COUNT "}, %" #X0 ", %" #X1 ", p, 1, 1, %" #X3 ", %" #X4   \
                                                                   "; }"                                               \
                     : FASTTFM_RESULTS_##COUNT                                                                         \
                     : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(A == Major::mn), "n"(B == Major::mn));          \
    }                                                                                                                  \
    template <class T, Major B>                                                                                        \
    static __device__ __forceinline__ void registers(float (&d)[COUNT], const uint32_t* a, uint64_t b, bool add) {     \
      if constexpr (std::is_same_v<T, bf16_t>)                                                                         \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #X5 ", 0; wgmma.mma_async.sync.aligned.m64n" #N                \
                     "k16.f32.bf16.bf16 {" FASTTFM_REGISTERS_##COUNT "}, {%" #X0 ", %" #X1 ", %" #X2 ", %" #X3         \
                                                                     "}, %" #X4 ", p, 1, 1, %" #X6 "; }"               \
                     : FASTTFM_RESULTS_##COUNT                                                                         \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)),                 \
                       "n"(B == Major::mn));                                                                           \
      else                                                                                                             \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #X5 ", 0; wgmma.mma_async.sync.aligned.m64n" #N                \
                     "k16.f32.f16.f16 {" FASTTFM_REGISTERS_##COUNT "}, {%" #X0 ", %" #X1 ", %" #X2 ", %" #X3           \
                                                                   "}, %" #X4 ", p, 1, 1, %" #X6 "; }"                 \
                     : FASTTFM_RESULTS_##COUNT                                                                         \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)),                 \
                       "n"(B == Major::mn));                                                                           \
    }                                                                                                                  \
  };

FASTTFM_WGMMA(32, 16, 16, 17, 18, 19, 20, 21, 22)
FASTTFM_WGMMA(64, 32, 32, 33, 34, 35, 36, 37, 38)
FASTTFM_WGMMA(80, 40, 40, 41, 42, 43, 44, 45, 46)
FASTTFM_WGMMA(96, 48, 48, 49, 50, 51, 52, 53, 54)
FASTTFM_WGMMA(112, 56, 56, 57, 58, 59, 60, 61, 62)
FASTTFM_WGMMA(128, 64, 64, 65, 66, 67, 68, 69, 70)
FASTTFM_WGMMA(160, 80, 80, 81, 82, 83, 84, 85, 86)
FASTTFM_WGMMA(176, 88, 88, 89, 90, 91, 92, 93, 94)
FASTTFM_WGMMA(192, 96, 96, 97, 98, 99, 100, 101, 102)
FASTTFM_WGMMA(256, 128, 128, 129, 130, 131, 132, 133, 134)

#undef FASTTFM_WGMMA
#undef FASTTFM_RESULTS_AT

// d = a b, or d += a b if `add`, over 16 elements of K. Both operands are in shared memory, given by descriptors.
template <class T, Major A = Major::k, Major B = Major::k, int COUNT>
__device__ __forceinline__ void wgmma(float (&d)[COUNT], uint64_t a, uint64_t b, bool add = true) {
  Wgmma<2 * COUNT>::template shared<T, A, B>(d, a, b, add);
}
// The same with operand a in four registers.
template <class T, Major B = Major::k, int COUNT>
__device__ __forceinline__ void wgmma(float (&d)[COUNT], const uint32_t* a, uint64_t b, bool add = true) {
  Wgmma<2 * COUNT>::template registers<T, B>(d, a, b, add);
}

}  // namespace cuda
}  // namespace fasttfm
