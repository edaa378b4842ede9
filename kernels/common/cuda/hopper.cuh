// What only Hopper (sm_90a) has: the tensor copy engine (TMA) and its barriers, warpgroup products (wgmma), registers
// that move between warpgroups. A .cu file that includes this is compiled for 90a alone.
//
// Tiles in shared memory are rows of 64 16-bit elements, 128 bytes, in the swizzle that TMA writes and wgmma reads: the
// 16-byte chunk c of row r stands in place c ^ (r % 8). They start at multiples of 1024 bytes. A wider matrix is
// several such tiles, 64 columns each.
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

constexpr int kTileColumns = 64;    // of a swizzled tile of 16-bit elements
constexpr int kTileRowBytes = 128;  // of one of its rows
constexpr int kWarpgroup = 128;     // threads

// ---- host: tensor maps -----------------------------------------------------------------------------------------------

// A view of up to four dimensions for TMA, the innermost contiguous: what lies past its sizes reads as 0 and is never
// written.
struct TensorView {
  const void* data;   // at a multiple of 16 bytes
  DType dtype;        // of 16 bits
  int64_t size[4];    // innermost first; trailing ones 1
  int64_t stride[3];  // of dimensions 1 to 3 in elements: multiples of 8
  int box[4];         // what one copy moves; box[0] is kTileColumns
};

using EncodeTensorMap = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                     const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                     CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// cuTensorMapEncodeTiled, found at run time: the library does not link the driver. Null where the driver lacks it.
inline EncodeTensorMap encode_tensor_map() {
  static const EncodeTensorMap function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
#else
    const cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result);
#endif
    if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) found = nullptr;
    return reinterpret_cast<EncodeTensorMap>(found);
  }();
  return function;
}

// The map that kernels take as a __grid_constant__ parameter.
inline Status make_tensor_map(CUtensorMap* map, const TensorView& view) {
  const EncodeTensorMap encode = encode_tensor_map();
  if (encode == nullptr) return {StatusCode::cuda_error, "the CUDA driver has no cuTensorMapEncodeTiled"};
  cuuint64_t size[4], stride[3];
  cuuint32_t box[4], step[4];
  for (int i = 0; i < 4; ++i) {
    size[i] = static_cast<cuuint64_t>(view.size[i]);
    box[i] = static_cast<cuuint32_t>(view.box[i]);
    step[i] = 1;
  }
  for (int i = 0; i < 3; ++i) {  // a dimension of size 1 may come with any stride: it is never taken
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

// ---- barriers in shared memory ---------------------------------------------------------------------------------------

// A phase ends when all arrivals have come and all announced bytes are there; the phase that is waited for is named by
// its parity. The first phase has parity 0, so waiting for parity 1 on a new barrier returns at once.
struct Barrier {
  uint64_t state;

  __device__ __forceinline__ uint32_t address() const { return shared_address(&state); }
  // One thread; then fence_barriers() and a barrier of the block.
  __device__ __forceinline__ void initialize(uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(arrivals) : "memory");
  }
  __device__ __forceinline__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address()) : "memory");
  }
  // Arrives, and announces bytes that copies will bring.
  __device__ __forceinline__ void arrive_expect(uint32_t bytes) {
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
  // Of the barrier of the same name in another block of the cluster. It orders nothing but what products have read (a
  // release to the cluster would be a fence of all memory); who waits copies to where they read.
  __device__ __forceinline__ void arrive_remote(uint32_t block) {
    asm volatile(
        "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1;"
        " mbarrier.arrive.shared::cluster.b64 _, [remote]; }" ::"r"(address()),
        "r"(block)
        : "memory");
  }
};

// Makes initialized barriers known to the copy engine and to the cluster.
__device__ __forceinline__ void fence_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Whether this is a build for compute-sanitizer, which does not follow everything that these kernels do.
#ifdef FASTTFM_SANITIZE_GPU
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

// How often a warp arrives where it hands something over as a whole. Once is enough: __syncwarp() orders all its lanes
// before the one that arrives. racecheck does not follow that order, so that in a build for it every lane arrives.
constexpr int kWarpArrivals = kSanitized ? 32 : 1;

// A whole warp arrives at a barrier that counts kWarpArrivals for each of its warps.
__device__ __forceinline__ void arrive_warp(Barrier& barrier) {
  __syncwarp();
  if (kWarpArrivals > 1 || threadIdx.x % 32 == 0) barrier.arrive();
}

// Where a ring of STAGES slots stands: the slot, and the parity of the phase that fills it (wait for full: parity;
// wait for empty: parity ^ 1).
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

// Barriers of the hardware for whole warps: `threads` in all sync or arrive. Number 0 is __syncthreads().
__device__ __forceinline__ void sync_named(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
__device__ __forceinline__ void arrive_named(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// ---- roles -----------------------------------------------------------------------------------------------------------

// Registers of a warpgroup's threads from here on: whole warpgroups, a multiple of 8.
template <int REGISTERS>
__device__ __forceinline__ void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// True in one thread of a whole warp.
__device__ __forceinline__ bool elected() {
  uint32_t chosen;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(chosen));
  return chosen != 0;
}

// A number that is the same in all threads of a warp, made so for the compiler.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

// threadIdx.x, read anew wherever it stands: what is computed from it takes registers only there.
__device__ __forceinline__ uint32_t thread_here() {
  uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// ---- clusters --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ uint32_t cluster_blocks() {
  uint32_t blocks;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
  return blocks;
}
__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// ---- copies ----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Starts a copy of the map's box, from the place (c0, c1, c2, c3) on, into shared memory; its bytes arrive at `full`.
// One thread.
__device__ __forceinline__ void load_box(const CUtensorMap* map, Barrier& full, uint32_t shared, int c0, int c1, int c2,
                                         int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(shared),
      "l"(map), "r"(full.address()), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
// The same into the same place of every block of the cluster whose bit is set in `blocks`.
__device__ __forceinline__ void load_box_to(uint16_t blocks, const CUtensorMap* map, Barrier& full, uint32_t shared,
                                            int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared),
      "l"(map), "r"(full.address()), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(blocks)
      : "memory");
}
// Starts a copy of shared memory to the map's box; fence_async() and a barrier of its writers come before it.
__device__ __forceinline__ void store_box(const CUtensorMap* map, uint32_t shared, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
               "r"(shared), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}
// Start a copy, or an addition, of fp32 in shared memory to global memory: a multiple of 16 bytes. fence_async() of
// those who wrote them, and a barrier, come before it; commit_stores() after it.
__device__ __forceinline__ void store_bytes(float* global, uint32_t shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void add_bytes(float* global, uint32_t shared, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global), "r"(shared),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until at most PENDING of the thread's groups of stores still read shared memory.
template <int PENDING>
__device__ __forceinline__ void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
// Waits until at most PENDING of the thread's groups of stores have not ended.
template <int PENDING>
__device__ __forceinline__ void wait_stores() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Orders a thread's own accesses of shared memory before those of TMA and wgmma that follow a barrier.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// The same for global memory, of what a thread has seen done.
__device__ __forceinline__ void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// ---- products of a warpgroup -----------------------------------------------------------------------------------------
//
// d [64, N] += a [64, 16] b [16, N] with d in registers: warp w of the warpgroup holds the rows from 16 * w on, and its
// lane l of them l / 4 and l / 4 + 8: element 4 * i + 2 * half + c of d is row l / 4 + 8 * half, column 8 * i + 2 * (l
// % 4) + c. An operand a in registers is of the same layout: words {row l / 4, columns 2 * (l % 4) + {0, 1}}, {row +
// 8}, {columns + 8}, {row + 8, columns + 8}; so two neighbouring i of one product are an a of the next.

// A matrix in shared memory as wgmma takes it, 128-byte swizzle: `address` of its first element, `stride` bytes between
// groups of 8 rows of a tile, `leading` bytes between tiles of 64 columns where columns are M or N.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address, uint32_t leading, uint32_t stride) {
  return static_cast<uint64_t>((address & 0x3ffffu) >> 4) | static_cast<uint64_t>(leading >> 4) << 16 |
         static_cast<uint64_t>(stride >> 4) << 32 | 1ull << 62;
}
// K along the row (Q, and K in Q K^T): the rows are M or N. 16 elements of K further is kKMajorStep bytes further, up
// to the end of the tile; the next 64 are in the next tile.
__device__ __forceinline__ uint64_t k_major(uint32_t tile) { return matrix_descriptor(tile, 16, 8 * kTileRowBytes); }
constexpr uint32_t kKMajorStep = 32;
// K along the column (V in P V): the columns are M or N, and past 64 in tiles `leading` bytes apart. 16 elements of K
// further is kMnMajorStep bytes further.
__device__ __forceinline__ uint64_t mn_major(uint32_t tile, uint32_t leading) {
  return matrix_descriptor(tile, leading, 8 * kTileRowBytes);
}
constexpr uint32_t kMnMajorStep = 16 * kTileRowBytes;
__device__ __forceinline__ uint64_t advance(uint64_t descriptor, uint32_t bytes) { return descriptor + (bytes >> 4); }

enum class Major { k, mn };

// Before the first product, and after registers of d or a were touched otherwise.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most PENDING groups are under way; then hold_registers() on what they wrote or read.
template <int PENDING>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// No access of these registers is moved across it: products under way are nothing that the compiler sees.
template <int COUNT>
__device__ __forceinline__ void hold_registers(float (&value)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(value[i])::"memory");
}
template <int COUNT>
__device__ __forceinline__ void hold_registers(uint32_t (&value)[COUNT]) {
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
struct Products;

// COUNT = N / 2 registers of d come first among the operands; X0 to X6 are the numbers after them.
#define FASTTFM_PRODUCTS(N, COUNT, X0, X1, X2, X3, X4, X5, X6)                                                         \
  template <>                                                                                                          \
  struct Products<N> {                                                                                                 \
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

FASTTFM_PRODUCTS(64, 32, 32, 33, 34, 35, 36, 37, 38)
FASTTFM_PRODUCTS(80, 40, 40, 41, 42, 43, 44, 45, 46)
FASTTFM_PRODUCTS(96, 48, 48, 49, 50, 51, 52, 53, 54)
FASTTFM_PRODUCTS(112, 56, 56, 57, 58, 59, 60, 61, 62)
FASTTFM_PRODUCTS(128, 64, 64, 65, 66, 67, 68, 69, 70)
FASTTFM_PRODUCTS(160, 80, 80, 81, 82, 83, 84, 85, 86)
FASTTFM_PRODUCTS(176, 88, 88, 89, 90, 91, 92, 93, 94)
FASTTFM_PRODUCTS(192, 96, 96, 97, 98, 99, 100, 101, 102)
FASTTFM_PRODUCTS(256, 128, 128, 129, 130, 131, 132, 133, 134)

#undef FASTTFM_PRODUCTS
#undef FASTTFM_RESULTS_AT

// d = a b, or d += a b where `add`, over 16 elements of K: both operands in shared memory, as descriptors.
template <class T, Major A = Major::k, Major B = Major::k, int COUNT>
__device__ __forceinline__ void multiply(float (&d)[COUNT], uint64_t a, uint64_t b, bool add = true) {
  Products<2 * COUNT>::template shared<T, A, B>(d, a, b, add);
}
// The same with the four registers from `a` on as the operand a.
template <class T, Major B = Major::k, int COUNT>
__device__ __forceinline__ void multiply(float (&d)[COUNT], const uint32_t* a, uint64_t b, bool add = true) {
  Products<2 * COUNT>::template registers<T, B>(d, a, b, add);
}

}  // namespace cuda
}  // namespace fasttfm
