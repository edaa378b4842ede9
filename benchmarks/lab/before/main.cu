// attention backward for Hopper, head dim 64: one pass with the five products. Formulas: reference.py.
//
// A block takes 128 keys of a (sequence, head) at a time, and for them it goes over all queries, 64 at a time. Four
// warpgroups share the work:
//
//   0  producer: warp 0 brings tiles in by TMA, warps 1 to 3 draw dropout's random bits
//   1, 2  64 keys each, keys by queries:  S^T = K Q^T, dP^T = V dO^T, then P^T and dS^T in registers, and from there
//         dV += P^T dO and dK += dS^T Q; dS^T is left in shared memory
//   3  dQ += dS K of all 128 keys.
//
// There are two forms. Up to kOnChipQueries queries, a block has one (sequence, head) after another, and dQ's sums over
// keys stand in shared memory, each thread's own in its own place (cuda_backward_products.cuh). Beyond, they stand in
// the workspace, where the copy engine adds to them; the two blocks of a cluster share a (sequence, head), take tiles
// of keys by turns and add in the order of the keys; who comes last takes the sum and writes dQ
// (cuda_backward_long.cuh). As they meet the same queries at about the same time, the second level cache has them and
// the sums: with a head for each block these are 134 MB at 2,048 queries.
//
// Every sum has one fixed order.
#include <algorithm>
#include <atomic>

// attention backward for Hopper: what comes before its kernels, for every head dim.

#include <algorithm>
#include <cstdint>

// attention backward for Hopper: what its warpgroups and its two forms share, and warpgroup 0, which brings tiles in
// and draws dropout's bits. See cuda_backward.cu.

#include <cstdint>

// What only Hopper (sm_90a) has: the tensor copy engine (TMA) and its barriers, warpgroup products (wgmma), registers
// that move between warpgroups. A .cu file that includes this is compiled for 90a alone.
//
// Tiles in shared memory are rows of 64 16-bit elements, 128 bytes, in the swizzle that TMA writes and wgmma reads: the
// 16-byte chunk c of row r stands in place c ^ (r % 8). They start at multiples of 1024 bytes. A wider matrix is
// several such tiles, 64 columns each.

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

// Eight elements at a time between memory and fp32 registers: one 16-byte access for 16-bit types, two for fp32.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

// Element types that kernels read and write. Python passes the numbers below (see fasttfm/_native.py).

#include <cstdint>

namespace fasttfm {

enum class DType : int32_t { f32 = 0, bf16 = 1, f16 = 2 };

// Storage only: arithmetic is always fp32, conversions live in simd.h (CPU) and convert.cuh (CUDA).
struct bf16_t {
  uint16_t bits;
};
struct f16_t {
  uint16_t bits;
};

// Calls `body(T{})` with the C++ type of `dtype`; returns whatever the body returns.
template <class Body, class Result>
inline Result with_dtype(DType dtype, Result unknown, Body body) {
  switch (dtype) {
    case DType::f32: return body(float{});
    case DType::bf16: return body(bf16_t{});
    case DType::f16: return body(f16_t{});
  }
  return unknown;
}

}  // namespace fasttfm

namespace fasttfm {
namespace cuda {

constexpr int kVector = 8;  // elements per vector, and what sizes and strides must be multiples of

// A vector as it lies in memory: kept packed while it waits, to save registers.
template <class T>
struct alignas(16) Packed {
  T element[kVector];
};

template <class T>
__device__ __forceinline__ Packed<T> load_packed(const T* from) {
  return *reinterpret_cast<const Packed<T>*>(from);
}
template <class T>
__device__ __forceinline__ void store_packed(T* to, const Packed<T>& value) {
  *reinterpret_cast<Packed<T>*>(to) = value;
}

// Global memory if `wanted`, as predicated instructions, and otherwise vectors of the words `otherwise`: branches
// around each of a row's vectors would cost about as much as the conversion of its elements.
template <class T>
__device__ __forceinline__ Packed<T> load_packed_if(bool wanted, const T* from, uint32_t otherwise = 0) {
  Packed<T> value;
  auto* word = reinterpret_cast<uint32_t*>(&value);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(value)) / 16; ++i)
    asm("{ .reg .pred p; setp.ne.b32 p, %4, 0; mov.b32 %0, %6; mov.b32 %1, %6; mov.b32 %2, %6; mov.b32 %3, %6;"
        " @p ld.global.v4.b32 {%0, %1, %2, %3}, [%5]; }"
        : "=&r"(word[4 * i]), "=&r"(word[4 * i + 1]), "=&r"(word[4 * i + 2]), "=&r"(word[4 * i + 3])
        : "r"(static_cast<int>(wanted)), "l"(reinterpret_cast<const char*>(from) + 16 * i), "r"(otherwise));
  return value;
}
template <class T>
__device__ __forceinline__ void store_packed_if(bool wanted, T* to, const Packed<T>& value) {
  const auto* word = reinterpret_cast<const uint32_t*>(&value);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(value)) / 16; ++i)
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %0, 0; @p st.global.v4.b32 [%1], {%2, %3, %4, %5}; }" ::"r"(
                     static_cast<int>(wanted)),
                 "l"(reinterpret_cast<char*>(to) + 16 * i), "r"(word[4 * i]), "r"(word[4 * i + 1]),
                 "r"(word[4 * i + 2]), "r"(word[4 * i + 3])
                 : "memory");
}

// A load from shared memory that the compiler may not merge with an earlier one of the same address: it frees the
// registers in between.
template <class T>
__device__ __forceinline__ Packed<T> reload_packed(const Packed<T>* shared) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  Packed<T> value;
  auto* word = reinterpret_cast<uint32_t*>(&value);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(value)) / 16; ++i)
    asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[4 * i]), "=r"(word[4 * i + 1]), "=r"(word[4 * i + 2]), "=r"(word[4 * i + 3])
                 : "r"(address + 16 * i));
  return value;
}

__device__ __forceinline__ uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// Starts a copy of one vector to an address in shared memory; it is there after wait_copies<N>() by the same thread.
template <class T>
__device__ __forceinline__ void start_copy(uint32_t shared, const T* global) {
#pragma unroll
  for (int offset = 0; offset < static_cast<int>(sizeof(Packed<T>)); offset += 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared + offset),
                 "l"(reinterpret_cast<const char*>(global) + offset)
                 : "memory");
}
// Closes the group of copies started since the last call.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most PENDING of the thread's latest groups are still under way.
template <int PENDING>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// The two elements of a 32-bit word, the lower address first. Written out per word: element by element the compiler
// extracts each half twice.
__device__ __forceinline__ float2 widen_word(uint32_t word, bf16_t) {
  return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
}
__device__ __forceinline__ float2 widen_word(uint32_t word, f16_t) {
  return __half22float2(*reinterpret_cast<const __half2*>(&word));
}
__device__ __forceinline__ uint32_t narrow_word(float low, float high, bf16_t) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ uint32_t narrow_word(float low, float high, f16_t) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

template <class T>
__device__ __forceinline__ void widen(const Packed<T>& from, float (&to)[kVector]) {
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) to[i] = from.element[i];
  } else {
    const uint4 words = *reinterpret_cast<const uint4*>(&from);
    const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = widen_word(word[i], T{});
      to[2 * i] = pair.x;
      to[2 * i + 1] = pair.y;
    }
  }
}

template <class T>
__device__ __forceinline__ Packed<T> narrow(const float (&from)[kVector]) {
  Packed<T> to;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) to.element[i] = from[i];
  } else {
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = narrow_word(from[2 * i], from[2 * i + 1], T{});
    *reinterpret_cast<uint4*>(&to) = make_uint4(word[0], word[1], word[2], word[3]);
  }
  return to;
}

__device__ __forceinline__ uint32_t word_of(float value, float) { return __float_as_uint(value); }
template <class T>
__device__ __forceinline__ uint32_t word_of(float value, T type) {
  return narrow_word(value, value, type);
}

// A parameter vector, or `fallback` if the pointer is null or the vector not wanted.
template <class P>
__device__ __forceinline__ void load_parameter(bool wanted, const P* from, int offset, float fallback,
                                               float (&to)[kVector]) {
  widen(load_packed_if(wanted && from != nullptr, from + offset, word_of(fallback, P{})), to);
}

// A parameter vector whose type is known at run time only.
__device__ __forceinline__ void load_parameter(const void* from, DType dtype, int offset, float fallback,
                                               float (&to)[kVector]) {
  if (dtype == DType::f32)
    load_parameter(true, static_cast<const float*>(from), offset, fallback, to);
  else if (dtype == DType::bf16)
    load_parameter(true, static_cast<const bf16_t*>(from), offset, fallback, to);
  else
    load_parameter(true, static_cast<const f16_t*>(from), offset, fallback, to);
}

// One element of a tensor whose type is known at run time only.
__device__ __forceinline__ void store_as(DType dtype, void* to, int64_t index, float value) {
  if (dtype == DType::f32)
    static_cast<float*>(to)[index] = value;
  else if (dtype == DType::bf16)
    static_cast<bf16_t*>(to)[index].bits = static_cast<uint16_t>(narrow_word(value, 0.0f, bf16_t{}));
  else
    static_cast<f16_t*>(to)[index].bits = static_cast<uint16_t>(narrow_word(value, 0.0f, f16_t{}));
}

}  // namespace cuda
}  // namespace fasttfm
// What every CUDA launcher does around its kernel: be on the right device, launch, and turn CUDA's answer into a
// status.

#include <cuda_runtime.h>

#include <cstddef>

// What a launcher returns. Launchers never throw and never print; csrc/ turns a status into an exception.

#include <cstdint>

namespace fasttfm {

enum class StatusCode : int32_t { ok, unknown_dtype, bad_size, bad_value, bad_alignment, cuda_error };

struct Status {
  StatusCode code = StatusCode::ok;
  const char* detail = "";  // a string with static lifetime: which size, or CUDA's own words
};

inline Status bad_size(const char* detail) { return {StatusCode::bad_size, detail}; }
inline Status unknown_dtype() {
  return {StatusCode::unknown_dtype, "dtype code is not 0 (fp32), 1 (bf16) or 2 (fp16)"};
}

}  // namespace fasttfm

namespace fasttfm {
namespace cuda {

inline Status status_of(cudaError_t error) {
  if (error == cudaSuccess) return {};
  return {StatusCode::cuda_error, cudaGetErrorString(error)};
}

// Makes `device` current for the lifetime of the guard.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    if (cudaGetDevice(&previous_) != cudaSuccess) previous_ = device;
    cudaSetDevice(device);  // also where it is the one: on a new thread no context is current until it has been set
    changed_ = previous_ != device;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

// Launches a kernel with `memory` bytes of dynamic shared memory.
template <class... Parameters, class... Arguments>
Status launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t memory, void* stream,
              const Arguments&... arguments) {
  if (memory > 48 * 1024) {  // above this a kernel has to ask
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(memory));
    if (error != cudaSuccess) return status_of(error);
  }
  kernel<<<grid, block, memory, static_cast<cudaStream_t>(stream)>>>(arguments...);
  return status_of(cudaGetLastError());
}

// A launch of clusters of `blocks` blocks of one kernel.
class ClusterLaunch {
 public:
  ClusterLaunch(dim3 grid, dim3 block, int blocks, size_t memory, void* stream) {
    attribute_.id = cudaLaunchAttributeClusterDimension;
    attribute_.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
    config_.gridDim = grid;
    config_.blockDim = block;
    config_.dynamicSmemBytes = memory;
    config_.stream = static_cast<cudaStream_t>(stream);
    config_.attrs = &attribute_;
    config_.numAttrs = 1;
  }
  ClusterLaunch(const ClusterLaunch&) = delete;
  ClusterLaunch& operator=(const ClusterLaunch&) = delete;

  // How many of its clusters the device runs at the same time.
  template <class... Parameters>
  cudaError_t resident(void (*kernel)(Parameters...), int* clusters) const {
    const cudaError_t error = allow_memory(kernel);
    return error == cudaSuccess ? cudaOccupancyMaxActiveClusters(clusters, kernel, &config_) : error;
  }

  template <class... Parameters, class... Arguments>
  Status operator()(void (*kernel)(Parameters...), const Arguments&... arguments) const {
    cudaError_t error = allow_memory(kernel);
    if (error == cudaSuccess) error = cudaLaunchKernelEx(&config_, kernel, arguments...);
    return status_of(error);
  }

 private:
  template <class Kernel>
  cudaError_t allow_memory(Kernel kernel) const {
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                static_cast<int>(config_.dynamicSmemBytes));
  }

  cudaLaunchAttribute attribute_{};
  cudaLaunchConfig_t config_{};
};

}  // namespace cuda
}  // namespace fasttfm

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

// How often a warp arrives where it hands something over as a whole. Once is enough: __syncwarp() orders all its lanes
// before the one that arrives. compute-sanitizer's racecheck does not follow that order, so that a build for it lets
// every lane arrive.
#ifdef FASTTFM_EVERY_LANE_ARRIVES
constexpr int kWarpArrivals = 32;
#else
constexpr int kWarpArrivals = 1;
#endif

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
// Counter-based random numbers (Philox 4x32, 7 rounds) and what dropout makes of them. The specification is philox.py;
// every backend draws the same bits.
//
// One 128-bit draw decides 16 neighbouring features, a byte each: feature f of a token is byte f % 16 of the draw with
// counter (f / 16, token, sequence, 0) and the seed as key, and is dropped when that byte is below the threshold, p *
// 256 rounded. Attention weights: see draw_weights().

#include <cstdint>

#ifdef __CUDACC__
#define FASTTFM_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FASTTFM_HOST_DEVICE inline
#endif

namespace fasttfm {

#ifdef FASTTFM_ISA
inline namespace FASTTFM_ISA {  // as in isa.h: no inline function is shared between instruction sets
#endif

// 16 random bytes; byte i is bits 8 * (i % 4) and up of word[i / 4].
struct Draw {
  uint32_t word[4];
};

// The product of 64 bits; nvcc makes more than one instruction of it otherwise.
FASTTFM_HOST_DEVICE uint64_t wide_product(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  uint64_t product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
#else
  return static_cast<uint64_t>(a) * b;
#endif
}

FASTTFM_HOST_DEVICE Draw philox(uint64_t seed, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 7; ++round) {
    const uint64_t product0 = wide_product(0xD2511F53u, c0);
    const uint64_t product1 = wide_product(0xCD9E8D57u, c2);
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ key0;
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ key1;
    c1 = static_cast<uint32_t>(product1);
    c3 = static_cast<uint32_t>(product0);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// The draw for 16 of an attention row's weights. Of the 64 keys of a block, draw d (0 to 3) decides the pairs d, d + 4,
// d + 8, ...: key k by byte 2 * (k / 8 % 8) + k % 2 of draw k / 2 % 4. That is how tensor cores spread a row over
// threads.
FASTTFM_HOST_DEVICE Draw draw_weights(uint64_t seed, uint32_t sequence, uint32_t head, uint32_t query, uint32_t block,
                                      uint32_t d) {
  return philox(seed, 4 * block + d, query, sequence, 1 + head);
}

// Where a row of activations stands in its batch.
struct RowPosition {
  uint32_t sequence, token;
};

// Dense batches ([B, S, C]): sequence and token follow from the row number. Packed ones: cu_seqlens[i] is the first row
// of sequence i.
struct RowPositions {
  const int32_t* cu_seqlens;  // [sequences + 1], or null when dense
  int64_t sequences;
  int64_t tokens_per_sequence;  // when dense

  FASTTFM_HOST_DEVICE RowPosition operator()(int64_t row) const {
    if (cu_seqlens == nullptr)
      return {static_cast<uint32_t>(row / tokens_per_sequence), static_cast<uint32_t>(row % tokens_per_sequence)};
    int64_t low = 0,
            high = sequences;  // the last sequence that starts at or before the row; empty ones are passed over
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      if (cu_seqlens[middle] <= row)
        low = middle;
      else
        high = middle;
    }
    return {static_cast<uint32_t>(low), static_cast<uint32_t>(row - cu_seqlens[low])};
  }
};

#ifdef FASTTFM_ISA
}  // namespace FASTTFM_ISA
#endif

}  // namespace fasttfm

namespace fasttfm {
namespace cuda {
namespace {

constexpr int kHeadDim = 64;
constexpr int kQueries = 64;  // of a tile
constexpr int kKeys = 128;    // of a tile; 64 for each of the two warpgroups
constexpr int kOnChipQueries = 512;
constexpr int kThreads = 4 * kWarpgroup;
constexpr int kQueryTileBytes = kQueries * kTileRowBytes;
constexpr int kKeyTileBytes = kKeys * kTileRowBytes;
constexpr int kStatisticsBytes = 2 * kQueries * 4;
constexpr int kSumFloats = kQueries * kHeadDim;  // of dQ, per tile

struct Output {
  void* data;
  int64_t sequence, token, head;  // strides in elements
};

struct Parameters {
  CUtensorMap q, k, v, dout;
  Output dq, dk, dv;
  const int32_t *cu_seqlens, *cu_seqlens_k, *lengths, *lengths_k;
  const int64_t* seed;
  const float* statistics;  // [heads, tiles, 2, kQueries]
  float* sums;              // [heads, tiles, kSumFloats] where they are not on chip
  int sequences, heads, queries, keys, max_seqlen, max_seqlen_k, tiles;
  int threshold;
  float score_scale;  // in units of log2
  float dq_scale;     // of dq and dk
  float dv_scale;
  int blocks;  // of a cluster, which shares a (sequence, head)
};

// Tokens of one sequence: the first row, how many count, and how many rows of results belong to it.
struct Span {
  int first, length, stored;
};

__device__ __forceinline__ Span span_of(const int32_t* cu_seqlens, const int32_t* lengths, int sequence, int size,
                                        int longest) {
  if (cu_seqlens != nullptr) {
    const int first = min(max(cu_seqlens[sequence], 0), size);
    const int length = min(max(min(cu_seqlens[sequence + 1], size) - first, 0), longest);
    return {first, length, length};
  }
  return {0, lengths == nullptr ? size : min(max(lengths[sequence], 0), size), size};
}

__device__ __forceinline__ int divide_up(int a, int b) { return (a + b - 1) / b; }

// First tile of a sequence in statistics and sums: tiles reach past a sequence's end.
__device__ __forceinline__ int first_tile(const int32_t* cu_seqlens, int sequence, int first, int queries) {
  return cu_seqlens == nullptr ? sequence * divide_up(queries, kQueries) : first / kQueries + sequence;
}

// One (sequence, head), and which tiles of queries meet which tiles of keys.
template <bool CAUSAL>
struct Unit {
  int sequence, head;
  Span q, k;
  int query_tiles, key_tiles, tile;  // tile: the first in statistics and sums

  Unit() = default;
  __device__ __forceinline__ Unit(const Parameters& p, int unit)
      : sequence(unit / p.heads),
        head(unit % p.heads),
        q(span_of(p.cu_seqlens, p.lengths, sequence, p.queries, p.max_seqlen)),
        k(span_of(p.cu_seqlens_k, p.lengths_k, sequence, p.keys, p.max_seqlen_k)),
        query_tiles(k.length > 0 ? divide_up(q.length, kQueries) : 0),
        key_tiles(q.length > 0 ? divide_up(k.length, kKeys) : 0),
        tile(head * p.tiles + first_tile(p.cu_seqlens, sequence, q.first, p.queries)) {}

  __device__ __forceinline__ int offset() const { return k.length - q.length; }
  // First tile of queries that attends to a tile of keys. The last one always does.
  __device__ __forceinline__ int begin(int key_tile) const {
    return CAUSAL ? max(key_tile * kKeys - offset(), 0) / kQueries : 0;
  }
  // Last tile of keys that a tile of queries attends to; -1: none.
  __device__ __forceinline__ int last_key_tile(int query_tile) const {
    if (!CAUSAL) return key_tiles - 1;
    const int last = query_tile * kQueries + kQueries - 1 + offset();
    return last < 0 ? -1 : min(last / kKeys, key_tiles - 1);
  }
};

// Barriers of what both forms of a block's memory have.
template <class Memory>
__device__ __forceinline__ void initialize_tiles(Memory& memory) {
  for (int i = 0; i < Memory::kStages; ++i) {
    memory.q_full[i].initialize(1);
    memory.q_empty[i].initialize(8 * kWarpArrivals);
  }
  for (int i = 0; i < 2; ++i) {
    memory.k_full[i].initialize(1);
    memory.k_empty[i].initialize(4 * kWarpArrivals);
  }
  for (int i = 0; i < Memory::kBuffers; ++i) {
    memory.kept_full[i][0].initialize(2 * kWarpArrivals);
    memory.kept_full[i][1].initialize(2 * kWarpArrivals);
    memory.kept_empty[i].initialize(8 * kWarpArrivals);
  }
  memory.v_full.initialize(1);
  memory.v_empty.initialize(8 * kWarpArrivals);
  memory.raw.initialize(1);
}

// Which (sequence, head)s and tiles of keys are a block's: every groups-th from group on, and of each of them every
// blocks-th tile of keys from rank on. Here: all keys.
struct WholeHeads {
  static constexpr int rank = 0, blocks = 1;
  int group, groups;

  explicit __device__ __forceinline__ WholeHeads(const Parameters&) : group(blockIdx.x), groups(gridDim.x) {}
};

// Of a block for up to kOnChipQueries queries.
struct Memory {
  using Share = WholeHeads;
  static constexpr int kStages = 2, kBuffers = 1;  // tiles of queries; what is kept
  alignas(1024) char q[kStages][kQueryTileBytes];
  char dout[kStages][kQueryTileBytes];
  char k[2][kKeyTileBytes];
  char v[kKeyTileBytes];
  char dscores[kKeyTileBytes];  // [keys, queries]
  float4 sums[kOnChipQueries * kHeadDim / 4];
  float statistics[kStages][2][kQueries];
  uint32_t kept[kBuffers][2][kWarpgroup];  // of each of the two warpgroups
  Barrier q_full[kStages], q_empty[kStages], k_full[2], k_empty[2], v_full, v_empty, raw, dscores_full, dscores_empty,
      kept_full[kBuffers][2], kept_empty[kBuffers];

  // One thread; then a barrier of the block.
  __device__ __forceinline__ void initialize() {
    initialize_tiles(*this);
    dscores_full.initialize(8 * kWarpArrivals);
    dscores_empty.initialize(4 * kWarpArrivals);
    fence_barriers();
  }
};
static_assert(sizeof(Memory) <= 227 * 1024);

// ---- warpgroup 0: tiles ----------------------------------------------------------------------------------------------

__device__ __forceinline__ void load_bytes(Barrier& full, uint32_t shared, const void* global, uint32_t bytes) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(full.address())
               : "memory");
}

// Zeros in rows `from` to `rows` of a tile. A whole warp.
__device__ __forceinline__ void clear_rows(char* tile, int from, int rows) {
  for (int i = 8 * from + threadIdx.x % 32; i < 8 * rows; i += 32)
    reinterpret_cast<uint4*>(tile)[i] = make_uint4(0, 0, 0, 0);
}

// Brings tiles to their places. Rows past a sequence's end that are others' numbers are replaced by zeros: they are
// multiplied by zeros, which a NaN would survive.
template <bool CAUSAL, class Memory>
__device__ __forceinline__ void bring_tiles(const Parameters& p, Memory& memory) {
  const typename Memory::Share share(p);
  const bool first_lane = threadIdx.x % 32 == 0;
  const bool foreign = p.cu_seqlens != nullptr || p.lengths != nullptr || p.lengths_k != nullptr;
  RingPosition<Memory::kStages> stage;
  RingPosition<2> k_stage;
  RingPosition<1> v_stage, raw;
  // Starts copies that bring `bytes` to `full`; if some of the rows are to be cleared, that comes in between.
  const auto bring = [&](Barrier& full, int valid, int rows, uint32_t bytes, auto start, auto clear) {
    const bool direct = !foreign || valid >= rows;
    Barrier& landed = direct ? full : memory.raw;
    if (first_lane) {
      landed.arrive_expect(bytes);
      start(landed);
    }
    if (direct) return;
    landed.wait(raw.parity);
    raw.next();
    clear();
    fence_async();
    __syncwarp();
    if (first_lane) full.arrive();
  };
  for (int index = share.group; index < p.sequences * p.heads; index += share.groups) {
    const Unit<CAUSAL> unit(p, index);
    const int batch = p.cu_seqlens == nullptr ? unit.sequence : 0;
    for (int key_tile = share.rank; key_tile < unit.key_tiles; key_tile += share.blocks) {
      const int valid_keys = unit.k.length - key_tile * kKeys, first_key = unit.k.first + key_tile * kKeys;
      char *k = memory.k[k_stage.slot], *v = memory.v;
      memory.k_empty[k_stage.slot].wait(k_stage.parity ^ 1);
      bring(
          memory.k_full[k_stage.slot], valid_keys, kKeys, kKeyTileBytes,
          [&](Barrier& full) { load_box(&p.k, full, shared_address(k), 0, unit.head, first_key, batch); },
          [&] { clear_rows(k, valid_keys, kKeys); });
      memory.v_empty.wait(v_stage.parity ^ 1);
      bring(
          memory.v_full, valid_keys, kKeys, kKeyTileBytes,
          [&](Barrier& full) { load_box(&p.v, full, shared_address(v), 0, unit.head, first_key, batch); },
          [&] { clear_rows(v, valid_keys, kKeys); });
      k_stage.next();
      v_stage.next();
      for (int query_tile = unit.begin(key_tile); query_tile < unit.query_tiles; ++query_tile) {
        const int valid = unit.q.length - query_tile * kQueries, first = unit.q.first + query_tile * kQueries;
        char *q = memory.q[stage.slot], *dout = memory.dout[stage.slot];
        memory.q_empty[stage.slot].wait(stage.parity ^ 1);
        bring(
            memory.q_full[stage.slot], valid, kQueries, 2 * kQueryTileBytes + kStatisticsBytes,
            [&](Barrier& full) {
              load_box(&p.q, full, shared_address(q), 0, unit.head, first, batch);
              load_box(&p.dout, full, shared_address(dout), 0, unit.head, first, batch);
              load_bytes(full, shared_address(memory.statistics[stage.slot]),
                         p.statistics + static_cast<int64_t>(unit.tile + query_tile) * 2 * kQueries, kStatisticsBytes);
            },
            [&] {
              clear_rows(q, valid, kQueries);
              clear_rows(dout, valid, kQueries);
            });
        stage.next();
      }
    }
  }
}

// ---- warpgroup 0: dropout --------------------------------------------------------------------------------------------

// Keeps bits for a tile of 128 keys by 64 queries, a word for each thread of warpgroups 1 and 2: bit 8 * (i / 8) + 4 *
// (1 - half) + i % 8 / 4 * 2 + c of element i + 2 * half + c, i a multiple of 4, of its scores (see hopper.cuh for the
// layout). Of 64 keys, draw d of a query holds the bytes of keys 2 * d + {0, 1} modulo 8; word w those of warp w.
//
// A task is half the words of a warpgroup: lane (d % 2, t, part) makes byte `part` of the words of the 8 threads with
// keys 2 * d + {0, 1} and queries 2 * t + {0, 1} modulo 8, from the draws of its 4 queries. The three warps take tasks
// in turn, each at least one of every tile, so that each of them waits for every phase of kept_empty: with a barrier
// for each warpgroup, a warp could miss a phase and take the one before it for the one after it.
template <bool CAUSAL, class Memory>
__device__ __forceinline__ void draw_kept(const Parameters& p, Memory& memory, int warp) {
  const typename Memory::Share share(p);
  const int lane = threadIdx.x % 32;
  const uint64_t seed = static_cast<uint64_t>(*p.seed);
  const uint32_t subtracted = (p.threshold & 127) * 0x01010101u;
  const uint32_t either = p.threshold < 128 ? 0xffffffffu : 0u;
  const uint32_t top = p.threshold < 256 ? 0x80808080u : 0u;
  RingPosition<Memory::kBuffers> step;
  int turn = warp;
  for (int index = share.group; index < p.sequences * p.heads; index += share.groups) {
    const Unit<CAUSAL> unit(p, index);
    for (int key_tile = share.rank; key_tile < unit.key_tiles; key_tile += share.blocks)
      for (int query_tile = unit.begin(key_tile); query_tile < unit.query_tiles; ++query_tile, step.next())
        for (int task = 0; task < 4; ++task) {
          if (--turn >= 0) continue;
          turn = 2;
          const int consumer = task / 2, d = task % 2 * 2 + lane / 16, t = lane / 4 % 4, part = lane % 4;
          const uint32_t block = key_tile * 2 + consumer, query = query_tile * kQueries + 16 * part + 2 * t;
          uint32_t bits[4] = {0, 0, 0, 0};
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const Draw drawn = draw_weights(seed, unit.sequence, unit.head, query + j / 2 * 8 + j % 2, block, d);
#pragma unroll
            for (int w = 0; w < 4; ++w) {
              const uint32_t x = drawn.word[w], z = (x | 0x80808080u) - subtracted;
              bits[w] |= (((x & z) | (either & (x | z))) & top) >> (3 - j);
            }
          }
          memory.kept_empty[step.slot].wait(step.parity ^ 1);
          auto* bytes = reinterpret_cast<uint8_t*>(memory.kept[step.slot][consumer]);
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            const uint32_t both = bits[w] | bits[w] >> 20;
            bytes[4 * (32 * w + 8 * d + t) + part] = static_cast<uint8_t>(both);
            bytes[4 * (32 * w + 8 * d + 4 + t) + part] = static_cast<uint8_t>(both >> 8);
          }
          arrive_warp(memory.kept_full[step.slot][consumer]);
        }
  }
}

}  // namespace
}  // namespace cuda
}  // namespace fasttfm
// attention in C++: what the launchers take. See reference.py for the formulas, problem.py for the letters.
//
// Dense tensors are [B, S, heads, D], packed ones [T, heads, D]: element (sequence b, token t, head h, d) of q stands
// at q[b * q_sequence_stride + t * q_token_stride + h * q_head_stride + d]; packed, with t counted from the first token
// of all and without b. The same goes for k, v and their gradients: slices of one qkv tensor are read and written in
// place.

#include <cstdint>


namespace fasttfm {

// What both directions know.
struct AttentionCall {
  const void* q;  // [B, queries, heads, D] or [queries, heads, D], dtype, strided
  const void* k;  // [B, keys, kv_heads, D] or [keys, kv_heads, D], dtype, strided
  const void* v;  // as k
  int64_t q_sequence_stride, q_token_stride, q_head_stride;
  int64_t k_sequence_stride, k_token_stride, k_head_stride;
  int64_t v_sequence_stride, v_token_stride, v_head_stride;
  const int32_t* cu_seqlens;    // [sequences + 1], or null when dense
  const int32_t* cu_seqlens_k;  // packed: always given, may be cu_seqlens
  const int32_t* lengths;       // [sequences] when dense: queries that count, or null for all
  const int32_t* lengths_k;     // [sequences] when dense: keys that count, or null for all
  const int64_t* seed;          // [1], or null for no dropout
  int64_t sequences;
  int64_t heads;         // of q
  int64_t kv_heads;      // divides heads
  int64_t head_dim;      // D: 16 to 256 in steps of 8
  int64_t queries;       // dense: tokens of q per sequence; packed: of all sequences
  int64_t keys;          // the same for k and v
  int64_t max_seqlen;    // no sequence has more queries; of use when packed
  int64_t max_seqlen_k;  // no sequence has more keys
  int64_t window_left;   // keys before a query's own position that it attends to; -1: all
  int64_t window_right;  // keys after it; -1: all, 0: causal
  float scale;           // of the scores
  int threshold;         // of 256: see common/philox.h
  float dropout_scale;   // of the weights that are kept
  DType dtype;           // of every tensor but lse
  float* workspace;      // attention_forward_workspace() or attention_backward_workspace() floats
  int threads;           // CPU
  int device;            // CUDA
  void* stream;          // CUDA
};

// Every element of the results is written: rows that are no sequence's, or attend to nothing, get 0 and lse -infinity.
struct AttentionForward : AttentionCall {
  void* out;   // shape of q, contiguous
  float* lse;  // dense [B, heads, queries], packed [heads, queries]
};

struct AttentionBackward : AttentionCall {
  const void* dout;  // shape of q, contiguous
  const void* out;   // shape of q, contiguous
  const float* lse;  // the forward's
  void* dq;          // shapes of q, k and v, strided
  void* dk;
  void* dv;
  int64_t dq_sequence_stride, dq_token_stride, dq_head_stride;
  int64_t dk_sequence_stride, dk_token_stride, dk_head_stride;
  int64_t dv_sequence_stride, dv_token_stride, dv_head_stride;
};

namespace cpu {
Status attention_forward(const AttentionForward&);
Status attention_backward(const AttentionBackward&);
int64_t attention_forward_workspace(int64_t head_dim, int64_t threads);  // in floats
int64_t attention_backward_workspace(int64_t max_seqlen, int64_t max_seqlen_k, int64_t head_dim, int64_t threads);
}  // namespace cpu

namespace cuda {
// Hopper's own kernels (compute capability 9.0): bf16 and fp16, head dims of 64 and 128, attention to all keys or
// causal. q, k and v start at multiples of 16 bytes, their strides are multiples of 8 elements and not 0.
// The forward's workspace is one int32. The backward is for as many heads of k and v as of q; what
// is said of q, k and v holds for dout, out and the gradients, and its workspace is counted in floats,
// from the queries of all sequences (tokens) and the longest sequence of queries or keys.
Status attention_forward(const AttentionForward&);
Status attention_backward(const AttentionBackward&);
int64_t attention_backward_workspace(int64_t sequences, int64_t heads, int64_t head_dim, int64_t tokens,
                                     int64_t longest);
}  // namespace cuda

}  // namespace fasttfm

namespace fasttfm {
namespace cuda {
namespace {

constexpr int kStatisticsThreads = 256;

// lse in units of log2, +infinity for rows that attend to nothing or are not there, and sum(out * dout) over dropout's
// scale: a block for each tile of queries of each head, 8 elements a thread. Sets the tile's number in `turns`, if
// given, to 0.
template <class T, int HEAD_DIM>
__global__ void __launch_bounds__(kStatisticsThreads)
    statistics_kernel(Parameters p, const T* dout, const T* out, const float* lse, float* statistics, int* turns,
                      float delta_scale) {
  constexpr int kRow = HEAD_DIM / kVector;  // threads
  const int head = blockIdx.y, sequence = blockIdx.z;
  const Span q = span_of(p.cu_seqlens, p.lengths, sequence, p.queries, p.max_seqlen);
  const int first = blockIdx.x * kQueries;
  if (first >= q.length) return;
  const int64_t token = (p.cu_seqlens == nullptr ? static_cast<int64_t>(sequence) * p.queries : q.first);
  const float* own_lse = lse + (p.cu_seqlens == nullptr ? (static_cast<int64_t>(sequence) * p.heads + head) * p.queries
                                                        : static_cast<int64_t>(head) * p.queries + q.first);
  const int64_t tile = head * p.tiles + first_tile(p.cu_seqlens, sequence, q.first, p.queries) + blockIdx.x;
  float* to = statistics + tile * 2 * kQueries;
  if (turns != nullptr && threadIdx.x == 0) turns[tile] = 0;
#pragma unroll
  for (int part = 0; part < kQueries * kRow / kStatisticsThreads; ++part) {
    const int i = part * kStatisticsThreads + threadIdx.x, row = i / kRow;
    const bool there = first + row < q.length;
    const int64_t at = ((token + first + row) * p.heads + head) * HEAD_DIM + i % kRow * kVector;
    float a[kVector], b[kVector], sum = 0.0f;
    widen(load_packed_if(there, out + at, 0u), a);
    widen(load_packed_if(there, dout + at, 0u), b);
#pragma unroll
    for (int j = 0; j < kVector; ++j) sum += a[j] * b[j];
#pragma unroll
    for (int distance = 1; distance < kRow; distance *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (i % kRow == 0) {
      const float value = there ? own_lse[first + row] : -__int_as_float(0x7f800000);
      to[row] = value == -__int_as_float(0x7f800000) ? __int_as_float(0x7f800000) : value * 1.4426950408889634f;
      to[kQueries + row] = sum * delta_scale;
    }
  }
}

// Tiles of queries of all sequences: see first_tile().
inline int64_t tiles_of(int64_t sequences, int64_t queries, bool packed) {
  return packed ? queries / kQueries + sequences : sequences * ((queries + kQueries - 1) / kQueries);
}

template <class T, int HEAD_DIM>
Status launch_statistics(const AttentionBackward& call, const Parameters& p, float* statistics, int* turns) {
  const dim3 grid(static_cast<unsigned>((std::min(call.max_seqlen, call.queries) + kQueries - 1) / kQueries),
                  static_cast<unsigned>(call.heads), static_cast<unsigned>(call.sequences));
  if (grid.x == 0) return {};
  const float delta_scale = call.dropout_scale > 0 ? 1 / call.dropout_scale : 0.0f;
  return launch(statistics_kernel<T, HEAD_DIM>, grid, dim3(kStatisticsThreads), 0, call.stream, p,
                static_cast<const T*>(call.dout), static_cast<const T*>(call.out), call.lse, statistics, turns,
                delta_scale);
}

inline Status map_of(CUtensorMap* map, const AttentionCall& call, const void* data, const int64_t (&strides)[3],
                     int64_t tokens, int rows) {
  if (tokens == 0) return {};
  const bool packed = call.cu_seqlens != nullptr;
  return make_tensor_map(map, {data,
                               call.dtype,
                               {call.head_dim, call.heads, tokens, packed ? 1 : call.sequences},
                               {strides[2], strides[1], strides[0]},
                               {kTileColumns, 1, rows, 1}});
}

// All but what points into the workspace.
inline Status set_parameters(const AttentionBackward& call, Parameters* p) {
  const int64_t dout_strides[3] = {call.queries * call.heads * call.head_dim, call.heads * call.head_dim,
                                   call.head_dim};
  const int64_t q_strides[3] = {call.q_sequence_stride, call.q_token_stride, call.q_head_stride};
  const int64_t k_strides[3] = {call.k_sequence_stride, call.k_token_stride, call.k_head_stride};
  const int64_t v_strides[3] = {call.v_sequence_stride, call.v_token_stride, call.v_head_stride};
  Status status = map_of(&p->q, call, call.q, q_strides, call.queries, kQueries);
  if (status.code == StatusCode::ok) status = map_of(&p->dout, call, call.dout, dout_strides, call.queries, kQueries);
  if (status.code == StatusCode::ok) status = map_of(&p->k, call, call.k, k_strides, call.keys, kKeys);
  if (status.code == StatusCode::ok) status = map_of(&p->v, call, call.v, v_strides, call.keys, kKeys);
  p->dq = {call.dq, call.dq_sequence_stride, call.dq_token_stride, call.dq_head_stride};
  p->dk = {call.dk, call.dk_sequence_stride, call.dk_token_stride, call.dk_head_stride};
  p->dv = {call.dv, call.dv_sequence_stride, call.dv_token_stride, call.dv_head_stride};
  p->cu_seqlens = call.cu_seqlens;
  p->cu_seqlens_k = call.cu_seqlens_k;
  p->lengths = call.lengths;
  p->lengths_k = call.lengths_k;
  p->seed = call.seed;
  p->sequences = static_cast<int>(call.sequences);
  p->heads = static_cast<int>(call.heads);
  p->queries = static_cast<int>(call.queries);
  p->keys = static_cast<int>(call.keys);
  p->max_seqlen = static_cast<int>(call.max_seqlen);
  p->max_seqlen_k = static_cast<int>(call.max_seqlen_k);
  p->tiles = static_cast<int>(tiles_of(call.sequences, call.queries, call.cu_seqlens != nullptr));
  p->threshold = call.threshold;
  p->score_scale = call.scale * 1.4426950408889634f;
  p->dq_scale = call.scale * call.dropout_scale;
  p->dv_scale = call.dropout_scale;
  return status;
}

}  // namespace
}  // namespace cuda
}  // namespace fasttfm
// attention backward for Hopper, more than kOnChipQueries queries: sums of dQ in the workspace, and steps that overlap.
// See cuda_backward.cu.

// attention backward for Hopper, up to kOnChipQueries queries: warpgroups 1 and 2, which work on keys, and 3, which
// sums dQ up. See cuda_backward.cu.


namespace fasttfm {
namespace cuda {
namespace {

// ---- results ---------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void exchange(uint32_t& low, uint32_t& high, int bit) {
  const bool upper = (threadIdx.x & bit) != 0;
  const uint32_t received = __shfl_xor_sync(0xffffffffu, upper ? low : high, bit);
  if (upper)
    low = received;
  else
    high = received;
}

// Writes 64 rows by 64 columns of a product of a warpgroup, as far as there are `rows`. Four threads hold a row in
// pairs of columns; they swap them for runs of 8.
template <class T>
__device__ __forceinline__ void store_product(const float (&value)[32], float factor, T* to, int64_t stride, int rows) {
  const int lane = threadIdx.x % 32, row = threadIdx.x % kWarpgroup / 32 * 16 + lane / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      uint32_t word[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 16 * part + 4 * i + 2 * half;
        word[i] = narrow_word(value[at] * factor, value[at + 1] * factor, T{});
      }
      exchange(word[0], word[1], 1);
      exchange(word[2], word[3], 1);
      exchange(word[0], word[2], 2);
      exchange(word[1], word[3], 2);
      if (row + 8 * half < rows)
        *reinterpret_cast<uint4*>(to + (row + 8 * half) * stride + 32 * part + 8 * (lane % 4)) =
            make_uint4(word[0], word[1], word[2], word[3]);
    }
}

// Zeros in `rows` rows of 64. A whole warpgroup.
template <class T>
__device__ __forceinline__ void store_zeros(T* to, int64_t stride, int rows) {
  for (int i = threadIdx.x % kWarpgroup; i < 8 * rows; i += kWarpgroup)
    *reinterpret_cast<uint4*>(to + i / 8 * stride + i % 8 * 8) = make_uint4(0, 0, 0, 0);
}

template <class T>
__device__ __forceinline__ T* row_of(const Output& output, const Parameters& p, int sequence, int head, int row) {
  const int64_t batch = p.cu_seqlens == nullptr ? sequence : 0;
  return static_cast<T*>(output.data) + batch * output.sequence + head * output.head + row * output.token;
}

// ---- warpgroups 1 and 2 ----------------------------------------------------------------------------------------------

__device__ __forceinline__ void load_matrices(uint32_t* words, uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void store_matrices(uint32_t address, const uint32_t* words) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

__device__ __forceinline__ float power_of_two(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// What masks the scores of 64 keys from `key` on and 64 queries from `query` on.
template <bool CAUSAL>
__device__ __forceinline__ void mask_scores(float (&scores)[32], int key, int query, int keys, int offset) {
  const bool whole = key + 64 <= keys && (!CAUSAL || key + 63 <= query + offset);
  if (whole) return;
  const int lane = threadIdx.x % 32, row = key + threadIdx.x % kWarpgroup / 32 * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int own_key = row + i % 4 / 2 * 8, own_query = query + i / 4 * 8 + lane % 4 * 2 + i % 2;
    if (own_key >= keys || (CAUSAL && own_key > own_query + offset)) scores[i] = -__int_as_float(0x7f800000);
  }
}

template <class T, bool DROPOUT, bool CAUSAL>
struct KeyWarpgroup {
  const Parameters& p;
  Memory& memory;
  const int number;  // 0 or 1: which 64 keys of a tile
  RingPosition<Memory::kStages> stage;
  RingPosition<2> k_stage;
  RingPosition<1> v_stage, step;
  float dk[32], dv[32];
  uint32_t v[16];
  uint32_t k;  // where the tile of keys stands

  __device__ __forceinline__ KeyWarpgroup(const Parameters& p, Memory& memory, int number)
      : p(p), memory(memory), number(number) {}

  // Where a lane's row of the matrices of 16 rows and the columns from 0 on stands; those from 16 * c on: ^ 32 * c.
  __device__ __forceinline__ uint32_t matrix_address(const char* tile) const {
    const int lane = threadIdx.x % 32, row = number * 64 + threadIdx.x % kWarpgroup / 32 * 16 + lane % 16;
    return shared_address(tile) + row * kTileRowBytes + (lane / 16 ^ lane % 8) * 16;
  }

  // One tile of queries. `first`: it starts the sums of dk and dv.
  __device__ __forceinline__ void over_tile(const Unit<CAUSAL>& unit, int key, int query, bool first) {
    const uint32_t q = shared_address(memory.q[stage.slot]), dout = shared_address(memory.dout[stage.slot]);
    float scores[32], dweights[32];
    memory.q_full[stage.slot].wait(stage.parity);
    begin_products();
#pragma unroll
    for (int c = 0; c < 4; ++c)
      multiply<T>(scores, advance(k_major(k), c * kKMajorStep), advance(k_major(q), c * kKMajorStep), c > 0);
    commit_products();
#pragma unroll
    for (int c = 0; c < 4; ++c) multiply<T>(dweights, v + 4 * c, advance(k_major(dout), c * kKMajorStep), c > 0);
    commit_products();
    const float2* statistics = reinterpret_cast<const float2*>(memory.statistics[stage.slot]) + threadIdx.x % 4;
    uint32_t kept = 0xffffffffu;
    if constexpr (DROPOUT) {
      memory.kept_full[0][number].wait(step.parity);
      kept = memory.kept[0][number][threadIdx.x % kWarpgroup];
    }
    wait_products<1>();
    hold_registers(scores);
    // A load from shared memory has ended only when its value is used, and a barrier does not wait for it: what was
    // read is given free here, where the products have taken v.
    if (first) {
      arrive_warp(memory.v_empty);
    } else {  // dk and dv of the tile before are through with it
      arrive_warp(memory.q_empty[stage.slot == 0 ? Memory::kStages - 1 : stage.slot - 1]);
    }
    mask_scores<CAUSAL>(scores, key, query, unit.k.length, unit.offset());
    uint32_t operand[16];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 lse = statistics[4 * i];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float* pair = scores + 4 * i + 2 * half;
        pair[0] = power_of_two(pair[0] * p.score_scale - lse.x);
        pair[1] = power_of_two(pair[1] * p.score_scale - lse.y);
        operand[2 * i + half] = narrow_word(keep(pair[0], kept, i, half, 0), keep(pair[1], kept, i, half, 1), T{});
      }
    }
    if constexpr (DROPOUT) arrive_warp(memory.kept_empty[0]);  // the word is here: it was used
    begin_products();
#pragma unroll
    for (int c = 0; c < 4; ++c)
      multiply<T, Major::mn>(dv, operand + 4 * c, advance(mn_major(dout, 0), c * kMnMajorStep), c > 0 || !first);
    commit_products();
    wait_products<1>();
    hold_registers(dweights);
    asm volatile("" : "+r"(kept));  // or the compiler keeps the 32 predicates from above, in registers
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 delta = statistics[kQueries / 2 + 4 * i];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = 4 * i + 2 * half;
        dweights[at] = scores[at] * (keep(dweights[at], kept, i, half, 0) - delta.x);
        dweights[at + 1] = scores[at + 1] * (keep(dweights[at + 1], kept, i, half, 1) - delta.y);
      }
    }
    wait_products<0>();  // dv's operand gives its registers to dk's
    hold_registers(operand);
#pragma unroll
    for (int i = 0; i < 16; ++i) operand[i] = narrow_word(dweights[2 * i], dweights[2 * i + 1], T{});
    memory.dscores_empty.wait(step.parity ^ 1);
    const uint32_t to = matrix_address(memory.dscores);
#pragma unroll
    for (int c = 0; c < 4; ++c) store_matrices(to ^ 32 * c, operand + 4 * c);
    fence_async();
    arrive_warp(memory.dscores_full);
    begin_products();
#pragma unroll
    for (int c = 0; c < 4; ++c)
      multiply<T, Major::mn>(dk, operand + 4 * c, advance(mn_major(q, 0), c * kMnMajorStep), c > 0 || !first);
    commit_products();
    stage.next();
    step.next();
  }

  static __device__ __forceinline__ float keep(float value, uint32_t kept, int i, int half, int c) {
    return !DROPOUT || (kept >> (i / 2 * 8 + (1 - half) * 4 + i % 2 * 2 + c) & 1) ? value : 0.0f;
  }

  __device__ __forceinline__ void over_unit(const Unit<CAUSAL>& unit) {
    for (int key_tile = 0; key_tile < unit.key_tiles; ++key_tile) {
      memory.k_full[k_stage.slot].wait(k_stage.parity);
      k = shared_address(memory.k[k_stage.slot]) + number * 64 * kTileRowBytes;
      memory.v_full.wait(v_stage.parity);
#pragma unroll
      for (int c = 0; c < 4; ++c) load_matrices(v + 4 * c, matrix_address(memory.v) ^ 32 * c);
      k_stage.next();
      v_stage.next();
      const int key = key_tile * kKeys + number * 64, begin = unit.begin(key_tile);
      for (int tile = begin; tile < unit.query_tiles; ++tile) over_tile(unit, key, tile * kQueries, tile == begin);
      wait_products<0>();
      hold_registers(dk);
      hold_registers(dv);
      arrive_warp(memory.q_empty[stage.slot == 0 ? Memory::kStages - 1 : stage.slot - 1]);
      const int rows = unit.k.stored - key;
      store_product(dk, p.dq_scale, row_of<T>(p.dk, p, unit.sequence, unit.head, unit.k.first + key), p.dk.token, rows);
      store_product(dv, p.dv_scale, row_of<T>(p.dv, p, unit.sequence, unit.head, unit.k.first + key), p.dv.token, rows);
    }
    for (int key = unit.key_tiles * kKeys + number * 64; key < unit.k.stored; key += kKeys) {
      const int rows = min(unit.k.stored - key, 64);
      store_zeros(row_of<T>(p.dk, p, unit.sequence, unit.head, unit.k.first + key), p.dk.token, rows);
      store_zeros(row_of<T>(p.dv, p, unit.sequence, unit.head, unit.k.first + key), p.dv.token, rows);
    }
  }
};

// ---- warpgroup 3 -----------------------------------------------------------------------------------------------------

template <class T, bool CAUSAL>
__device__ __forceinline__ void sum_dq(const Parameters& p, Memory& memory) {
  const int thread = threadIdx.x % kWarpgroup;
  const uint32_t dscores = shared_address(memory.dscores);
  RingPosition<2> k_stage;
  RingPosition<1> step;
  for (int index = blockIdx.x; index < p.sequences * p.heads; index += gridDim.x) {
    const Unit<CAUSAL> unit(p, index);
    for (int key_tile = 0; key_tile < unit.key_tiles; ++key_tile, k_stage.next()) {
      const uint32_t k = shared_address(memory.k[k_stage.slot]);
      memory.k_full[k_stage.slot].wait(k_stage.parity);
      for (int tile = unit.begin(key_tile); tile < unit.query_tiles; ++tile, step.next()) {
        float4* sums = memory.sums + tile * (kSumFloats / 4) + thread;
        float dq[32];
        if (key_tile > 0) {
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const float4 part = sums[i * kWarpgroup];
            dq[4 * i] = part.x;
            dq[4 * i + 1] = part.y;
            dq[4 * i + 2] = part.z;
            dq[4 * i + 3] = part.w;
          }
        } else {
#pragma unroll
          for (int i = 0; i < 32; ++i) dq[i] = 0.0f;
        }
        memory.dscores_full.wait(step.parity);
        begin_products();
#pragma unroll
        for (int c = 0; c < 8; ++c)
          multiply<T, Major::mn, Major::mn>(dq, advance(mn_major(dscores, 0), c * kMnMajorStep),
                                            advance(mn_major(k, 0), c * kMnMajorStep), true);
        commit_products();
        wait_products<0>();
        hold_registers(dq);
        arrive_warp(memory.dscores_empty);
        if (key_tile < unit.last_key_tile(tile)) {
#pragma unroll
          for (int i = 0; i < 8; ++i)
            sums[i * kWarpgroup] = make_float4(dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
        } else {
          const int query = tile * kQueries;
          store_product(dq, p.dq_scale, row_of<T>(p.dq, p, unit.sequence, unit.head, unit.q.first + query), p.dq.token,
                        unit.q.stored - query);
        }
      }
      arrive_warp(memory.k_empty[k_stage.slot]);
    }
    // Rows that attend to nothing: those before the first key's, and those past the sequence's end.
    const auto zeros = [&](int begin, int end) {
      if (begin < end)
        store_zeros(row_of<T>(p.dq, p, unit.sequence, unit.head, unit.q.first + begin), p.dq.token, end - begin);
    };
    if (CAUSAL && unit.key_tiles > 0) zeros(0, min(unit.begin(0) * kQueries, unit.q.stored));
    zeros(unit.query_tiles * kQueries, unit.q.stored);
  }
}

}  // namespace
}  // namespace cuda
}  // namespace fasttfm
// Sums in global memory that the blocks of a cluster add to, each element in one fixed order: tiles of fp32 go from a
// warpgroup's registers through shared memory to the copy engine, which adds them in the second level cache.
//
// Blocks walk over the same sequence of places (a number that only rises: unit, round, tile). At a place, the block of
// rank r adds to the place's tile after rank r - 1 has done so, and rank 0 after the last rank has at the place one
// round before. Each block tells the next one how far it has come (all its places below a number are done); nobody else
// has to know. One thread of a block starts all its additions, and takes its turns. If it has to wait, it first lets
// its own additions end and says so; so of all additions that are left the one that comes first (by unit, round and
// rank, then tile) can always be made, and as the blocks of a cluster run at the same time, none waits for ever. (With
// a thread for each quarter of a tile, one of them would wait while another one, which the first holds up by the
// products that they share, has not yet said how far it is.)

#include <cstdint>


namespace fasttfm {
namespace cuda {
namespace {

// FLOATS of each thread, a multiple of 4; the tile's layout is private: each thread's numbers in its own places.
template <int FLOATS>
class OrderedSums {
 public:
  static constexpr int kTileFloats = FLOATS * kWarpgroup;
  static constexpr int kBuffers = 2;

  struct Memory {
    alignas(128) float4 staging[kBuffers][kTileFloats / 4];
    uint32_t passed;  // below this number the block before is done with all places. Starts as 0
  };

  // Between this and finish(), memory.passed of all blocks of the cluster has to be there. `barrier`: the number of the
  // hardware's barrier that is the warpgroup's own.
  __device__ __forceinline__ OrderedSums(Memory& memory, int barrier) : memory_(memory), barrier_(barrier) {}

  // Adds to the tile, or is the first to write it, at `place`; all additions before it are those that the block before
  // made up to the place `distance` before: 0, or a round's places for rank 0.
  __device__ __forceinline__ void add(const float (&value)[FLOATS], float* tile, uint32_t place, uint32_t distance,
                                      bool first) {
    float4* staging = memory_.staging[buffer_];
    const int thread = thread_here() % kWarpgroup;
#pragma unroll
    for (int i = 0; i < FLOATS / 4; ++i)
      staging[i * kWarpgroup + thread] =
          make_float4(value[4 * i], value[4 * i + 1], value[4 * i + 2], value[4 * i + 3]);
    fence_async();
    if (thread == 0) wait_stores_read<0>();  // the other buffer's, which is the next to be written
    sync_named(barrier_, kWarpgroup);
    if (thread_here() % kWarpgroup == 0) {
      if (!first) await(place, distance);
      if (first)
        store_bytes(tile, shared_address(staging), kTileFloats * 4);
      else
        add_bytes(tile, shared_address(staging), kTileFloats * 4);
      commit_stores();
      wait_stores<2>();  // this one and the one before it may be under way
      if (previous_ > done_) pass(previous_);
      previous_ = place;
    }
    buffer_ ^= 1;
  }

  // The thread's own part of a tile to which no more is added.
  __device__ __forceinline__ void load(float (&value)[FLOATS], const float* tile, uint32_t place, uint32_t distance) {
    if (thread_here() % kWarpgroup == 0) await(place, distance);
    sync_named(barrier_, kWarpgroup);
    const float4* from = reinterpret_cast<const float4*>(tile) + thread_here() % kWarpgroup;
#pragma unroll
    for (int i = 0; i < FLOATS / 4; ++i) {
      const float4 part = __ldcg(from + i * kWarpgroup);
      value[4 * i] = part.x;
      value[4 * i + 1] = part.y;
      value[4 * i + 2] = part.z;
      value[4 * i + 3] = part.w;
    }
  }

  // After the last place, which is below `place`.
  __device__ __forceinline__ void finish(uint32_t place) {
    if (thread_here() % kWarpgroup == 0) {
      wait_stores<0>();
      pass(place);
    }
  }

 private:
  __device__ __forceinline__ void await(uint32_t place, uint32_t distance) {
    const uint32_t needed = place + 1 - distance;
    if (reached() < needed) {
      wait_stores<0>();
      pass(place);
      while (reached() < needed) {
      }
    }
    asm volatile("fence.proxy.async.global;" ::: "memory");
  }

  // How far the block before is; that is the block itself where it is alone.
  __device__ __forceinline__ uint32_t reached() const {
    if (cluster_blocks() == 1) return done_;
    uint32_t number;
    asm volatile("ld.relaxed.cluster.shared::cta.u32 %0, [%1];"
                 : "=r"(number)
                 : "r"(shared_address(&memory_.passed))
                 : "memory");
    return number;
  }

  // Tells the next block that all places below `place` are done: the copy engine has said so, its additions are in the
  // second level cache, and there is nothing else that the message would have to stay behind.
  __device__ __forceinline__ void pass(uint32_t place) {
    done_ = place;
    const uint32_t blocks = cluster_blocks(), next = cluster_rank() + 1;
    if (blocks == 1) return;
    asm volatile(
        "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1;"
        " st.relaxed.cluster.shared::cluster.u32 [remote], %2; }" ::"r"(shared_address(&memory_.passed)),
        "r"(next == blocks ? 0 : next), "r"(place)
        : "memory");
  }

  Memory& memory_;
  const int barrier_;
  int buffer_ = 0;
  uint32_t previous_ = 0, done_ = 0;  // of the thread that adds
};

}  // namespace
}  // namespace cuda
}  // namespace fasttfm

namespace fasttfm {
namespace cuda {
namespace {

// A cluster's blocks share a (sequence, head): see WholeHeads.
struct SharedHeads {
  int rank, blocks, group, groups;

  explicit __device__ __forceinline__ SharedHeads(const Parameters& p) : blocks(p.blocks) {
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(group));
    asm volatile("mov.u32 %0, %%nclusterid.x;" : "=r"(groups));
  }
};

struct LongMemory {
  using Share = SharedHeads;
  static constexpr int kStages = 4, kBuffers = 2;  // tiles of queries; dS and what is kept
  alignas(1024) char q[kStages][kQueryTileBytes];
  char dout[kStages][kQueryTileBytes];
  char k[2][kKeyTileBytes];
  char v[kKeyTileBytes];
  char dscores[kBuffers][kKeyTileBytes];  // [keys, queries]
  OrderedSums<kSumFloats / kWarpgroup>::Memory sums;
  float statistics[kStages][2][kQueries];
  uint32_t kept[kBuffers][2][kWarpgroup];  // of each of the two warpgroups
  Unit<true> unit[kThreads / 32];          // of each warp: there are no registers for it
  Barrier q_full[kStages], q_empty[kStages], k_full[2], k_empty[2], v_full, v_empty, raw, dscores_full[kBuffers],
      dscores_empty[kBuffers], kept_full[kBuffers][2], kept_empty[kBuffers];

  // One thread; then a barrier of the cluster.
  __device__ __forceinline__ void initialize() {
    initialize_tiles(*this);
    for (int i = 0; i < kBuffers; ++i) {
      dscores_full[i].initialize(8 * kWarpArrivals);
      dscores_empty[i].initialize(4 * kWarpArrivals);
    }
    sums.passed = 0;
    fence_barriers();
  }
};
static_assert(sizeof(LongMemory) <= 227 * 1024);

// The warp's own unit in shared memory, where set_unit() puts it: a whole warp.
template <bool CAUSAL>
__device__ __forceinline__ const Unit<CAUSAL>& own_unit(const LongMemory& memory) {
  return reinterpret_cast<const Unit<CAUSAL>&>(memory.unit[thread_here() / 32]);
}
template <bool CAUSAL>
__device__ __forceinline__ void set_unit(const Parameters& p, LongMemory& memory, int index) {
  const Unit<CAUSAL> unit(p, index);
  __syncwarp();
  if (threadIdx.x % 32 == 0) reinterpret_cast<Unit<CAUSAL>&>(memory.unit[thread_here() / 32]) = unit;
  __syncwarp();
}

// advance() in 32 bits: a descriptor's address does not leave its field.
__device__ __forceinline__ uint64_t further(uint64_t descriptor, uint32_t bytes) {
  return (descriptor & 0xffffffff00000000ull) | static_cast<uint32_t>(static_cast<uint32_t>(descriptor) + (bytes >> 4));
}

// ---- warpgroups 1 and 2 ----------------------------------------------------------------------------------------------

// Two numbers as a 16-bit word, 0 in the place of negative ones.
__device__ __forceinline__ uint32_t narrow_positive(float low, float high, bf16_t) {
  uint32_t word;
  asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
__device__ __forceinline__ uint32_t narrow_positive(float low, float high, f16_t) {
  uint32_t word;
  asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

// The assembler moves a wait for products up, over computations that should run beside them, but not over a branch:
// this one, which is not taken, as no computation has that NaN for its result.
__device__ __forceinline__ void stay_behind(float value) {
  if (__any_sync(0xffffffffu, __float_as_uint(value) == 0x7fc0dead)) asm volatile("nanosleep.u32 0;");
}

// Steps are tiles of queries, one after another for a tile of keys, through all tiles of keys of all units. While a
// step's P and dS are computed, products of its neighbours are under way: S of the next step is started before dS is
// written, dP after it, beside dK. Whether a weight was dropped stands in its sign.
template <class T, bool DROPOUT, bool CAUSAL>
class LongKeyWarpgroup {
 public:
  // `number`: 0 or 1, which 64 keys of a tile.
  __device__ __forceinline__ LongKeyWarpgroup(const Parameters& p, LongMemory& memory, int number)
      : p(p), memory(memory), number(number), unit(own_unit<CAUSAL>(memory)) {
    const SharedHeads share(p);
    index = share.group;
    key_tile = share.rank - p.blocks;
    set_unit<CAUSAL>(p, memory, index);
  }

  __device__ __forceinline__ void run() {
    if (!next_key_tile()) return;
    int tile = unit.begin(key_tile);
    take_keys();
    take_values();
    memory.q_full[stage.slot].wait(stage.parity);
    begin_products();
    start_scores();
    commit_products();  // dK of a step before
    start_dweights();
    for (;;) {
      const int key = key_tile * kKeys + number * 64;
      const bool first = tile == unit.begin(key_tile);
      compute(key, tile * kQueries, first);
      const bool last = tile + 1 == unit.query_tiles;
      const Place own = {unit.sequence, unit.head, unit.k.first + key, unit.k.stored - key};
      const int slot = stage.slot;
      stage.next();
      if (last) {
        if (!next_key_tile()) {
          put_dscores();
          begin_products();
          start_dk(slot, first);
          wait_products<0>();
          store(own, slot);
          return;
        }
        take_keys();
      }
      memory.q_full[stage.slot].wait(stage.parity);
      begin_products();
      start_scores();
      put_dscores();
      if (last) take_values();
      begin_products();
      start_dk(slot, first);
      start_dweights();
      if (last) {
        wait_products<0>();  // dP of the next step as well: the assembler takes its sums for read here otherwise
        hold_registers(scores);
        hold_registers(dweights);
        store(own, slot);
      }
      tile = last ? unit.begin(key_tile) : tile + 1;
      step.next();
    }
  }

 private:
  // Where a lane's row of the matrices of 16 rows and the columns from 0 on stands; those from 16 * c on: ^ 32 * c.
  __device__ __forceinline__ uint32_t matrix_address(const char* tile) const {
    const int lane = threadIdx.x % 32, row = number * 64 + threadIdx.x % kWarpgroup / 32 * 16 + lane % 16;
    return shared_address(tile) + row * kTileRowBytes + (lane / 16 ^ lane % 8) * 16;
  }

  __device__ __forceinline__ bool next_key_tile() {
    const SharedHeads share(p);
    key_tile += p.blocks;
    while (key_tile >= unit.key_tiles) {
      index += share.groups;
      if (index >= p.sequences * p.heads) return false;
      set_unit<CAUSAL>(p, memory, index);
      key_tile = share.rank;
    }
    return true;
  }

  __device__ __forceinline__ void take_keys() {
    memory.k_full[k_stage.slot].wait(k_stage.parity);
    k = shared_address(memory.k[k_stage.slot]) + number * 64 * kTileRowBytes;
    k_stage.next();
  }
  __device__ __forceinline__ void take_values() {
    memory.v_full.wait(v_stage.parity);
#pragma unroll
    for (int c = 0; c < 4; ++c) load_matrices(v + 4 * c, matrix_address(memory.v) ^ 32 * c);
    v_stage.next();
  }

  __device__ __forceinline__ void start_scores() {
    const uint32_t q = shared_address(memory.q[stage.slot]);
#pragma unroll
    for (int c = 0; c < 4; ++c)
      multiply<T>(scores, further(k_major(k), c * kKMajorStep), further(k_major(q), c * kKMajorStep), c > 0);
    commit_products();
  }
  __device__ __forceinline__ void start_dweights() {
    const uint32_t dout = shared_address(memory.dout[stage.slot]);
#pragma unroll
    for (int c = 0; c < 4; ++c) multiply<T>(dweights, v + 4 * c, further(k_major(dout), c * kKMajorStep), c > 0);
    commit_products();
  }

  // P in the place of S.
  __device__ __forceinline__ void compute_weights(const float2* lse, uint32_t dropped) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 own = lse[4 * i];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float* pair = scores + 4 * i + 2 * half;
        pair[0] = power_of_two(pair[0] * p.score_scale - own.x);
        pair[1] = power_of_two(pair[1] * p.score_scale - own.y);
        if constexpr (DROPOUT) {
          const int bit = i / 2 * 8 + (1 - half) * 4 + i % 2 * 2;
          pair[0] = __uint_as_float(__float_as_uint(pair[0]) | (dropped << (31 - bit) & 0x80000000u));
          pair[1] = __uint_as_float(__float_as_uint(pair[1]) | (dropped << (30 - bit) & 0x80000000u));
        }
      }
    }
  }

  // dS in the place of dP.
  __device__ __forceinline__ void compute_dscores(const float2* delta) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 own = delta[4 * i];
#pragma unroll
      for (int at = 4 * i; at < 4 * i + 4; ++at) {
        const float mean = at % 2 == 0 ? own.x : own.y;
        dweights[at] = DROPOUT ? fmaxf(scores[at], 0.0f) * dweights[at] - fabsf(scores[at]) * mean
                               : scores[at] * (dweights[at] - mean);
      }
    }
  }

  // From S and dP of a step, which are under way, to dS as an operand; starts dV. `first` of a tile of keys.
  __device__ __forceinline__ void compute(int key, int query, bool first) {
    const int slot = stage.slot;
    const float2* statistics = reinterpret_cast<const float2*>(memory.statistics[slot]) + threadIdx.x % 4;
    uint32_t dropped = 0;
    if constexpr (DROPOUT) {
      memory.kept_full[step.slot][number].wait(step.parity);
      dropped = ~memory.kept[step.slot][number][threadIdx.x % kWarpgroup];
    }
    wait_products<2>();
    hold_registers(scores);
    mask_scores<CAUSAL>(scores, key, query, unit.k.length, unit.offset());
    compute_weights(statistics, dropped);
    stay_behind(scores[31]);
    wait_products<1>();  // dK's operand gives its registers to dV's
    hold_registers(operand);
#pragma unroll
    for (int i = 0; i < 16; ++i)
      operand[i] = DROPOUT ? narrow_positive(scores[2 * i], scores[2 * i + 1], T{})
                           : narrow_word(scores[2 * i], scores[2 * i + 1], T{});
    if constexpr (DROPOUT) arrive_warp(memory.kept_empty[step.slot]);  // the word is here: it was used
    begin_products();
    const uint32_t dout = shared_address(memory.dout[slot]);
#pragma unroll
    for (int c = 0; c < 4; ++c)
      multiply<T, Major::mn>(dv, operand + 4 * c, further(mn_major(dout, 0), c * kMnMajorStep), c > 0 || !first);
    commit_products();
    wait_products<1>();
    hold_registers(dweights);
    // A load from shared memory has ended only when its value is used, and a barrier does not wait for it: v is given
    // free here, where products have taken it.
    if (first)
      arrive_warp(memory.v_empty);
    else  // dK of the step before is through with it
      arrive_warp(memory.q_empty[slot == 0 ? LongMemory::kStages - 1 : slot - 1]);
    compute_dscores(statistics + kQueries / 2);
    stay_behind(dweights[31]);
    wait_products<0>();  // dV's operand gives its registers to dK's
    hold_registers(operand);
#pragma unroll
    for (int i = 0; i < 16; ++i) operand[i] = narrow_word(dweights[2 * i], dweights[2 * i + 1], T{});
  }

  // Leaves dS to warpgroup 3.
  __device__ __forceinline__ void put_dscores() {
    memory.dscores_empty[step.slot].wait(step.parity ^ 1);
    const uint32_t to = matrix_address(memory.dscores[step.slot]);
#pragma unroll
    for (int c = 0; c < 4; ++c) store_matrices(to ^ 32 * c, operand + 4 * c);
    fence_async();
    arrive_warp(memory.dscores_full[step.slot]);
  }

  __device__ __forceinline__ void start_dk(int slot, bool first) {
    const uint32_t q = shared_address(memory.q[slot]);
#pragma unroll
    for (int c = 0; c < 4; ++c)
      multiply<T, Major::mn>(dk, operand + 4 * c, further(mn_major(q, 0), c * kMnMajorStep), c > 0 || !first);
    commit_products();
  }

  // Where a tile of keys has its gradients.
  struct Place {
    int sequence, head, row, rows;
  };
  // After the last step of a tile of keys, whose queries are in `slot`.
  __device__ __forceinline__ void store(const Place& at, int slot) {
    hold_registers(dk);
    hold_registers(dv);
    arrive_warp(memory.q_empty[slot]);
    store_product(dk, p.dq_scale, row_of<T>(p.dk, p, at.sequence, at.head, at.row), p.dk.token, at.rows);
    store_product(dv, p.dv_scale, row_of<T>(p.dv, p, at.sequence, at.head, at.row), p.dv.token, at.rows);
  }

  const Parameters& p;
  LongMemory& memory;
  const int number;
  const Unit<CAUSAL>& unit;
  int index;
  int key_tile;
  RingPosition<LongMemory::kStages> stage;
  RingPosition<2> k_stage, step;
  RingPosition<1> v_stage;
  float dk[32], dv[32], scores[32], dweights[32];
  uint32_t v[16], operand[16];
  uint32_t k;  // where the tile of keys stands
};

// ---- warpgroup 3 -----------------------------------------------------------------------------------------------------

// Zeros where nothing is computed: for queries that attend to nothing, those before the first key's, and for rows past
// the sequence's end.
template <class T, bool CAUSAL>
__device__ __forceinline__ void store_rest(const Parameters& p, const Unit<CAUSAL>& unit) {
  const auto zeros = [&](const Output& output, const Span& span, int begin, int end) {
    if (begin < end)
      store_zeros(row_of<T>(output, p, unit.sequence, unit.head, span.first + begin), output.token, end - begin);
  };
  if (CAUSAL && unit.key_tiles > 0) zeros(p.dq, unit.q, 0, min(unit.begin(0) * kQueries, unit.q.stored));
  zeros(p.dq, unit.q, unit.query_tiles * kQueries, unit.q.stored);
  zeros(p.dk, unit.k, unit.key_tiles * kKeys, unit.k.stored);
  zeros(p.dv, unit.k, unit.key_tiles * kKeys, unit.k.stored);
}

template <class T, bool CAUSAL>
__device__ __forceinline__ void sum_long_dq(const Parameters& p, LongMemory& memory) {
  OrderedSums<kSumFloats / kWarpgroup> sums(memory.sums, 1);
  const Unit<CAUSAL>& unit = own_unit<CAUSAL>(memory);
  RingPosition<2> k_stage, step;
  uint32_t place = 0;  // of the round's first tile
  for (int index = SharedHeads(p).group; index < p.sequences * p.heads; index += SharedHeads(p).groups) {
    set_unit<CAUSAL>(p, memory, index);
    for (int round = 0; round < unit.key_tiles; round += p.blocks, place += unit.query_tiles) {
      const int key_tile = round + SharedHeads(p).rank;
      if (key_tile >= unit.key_tiles) continue;
      memory.k_full[k_stage.slot].wait(k_stage.parity);
      for (int tile = unit.begin(key_tile); tile < unit.query_tiles; ++tile, step.next()) {
        float* sum = p.sums + static_cast<int64_t>(unit.tile + tile) * kSumFloats;
        const bool last = key_tile == unit.last_key_tile(tile), load = last && key_tile > 0;
        float dq[32];
        if (load) sums.load(dq, sum, place + tile, SharedHeads(p).rank == 0 ? unit.query_tiles : 0);
        memory.dscores_full[step.slot].wait(step.parity);
        const uint32_t dscores = shared_address(memory.dscores[step.slot]);
        uint32_t k = shared_address(memory.k[k_stage.slot]);
        asm volatile("" : "+r"(k));  // or the compiler keeps descriptors of all its parts, in registers
        begin_products();
#pragma unroll
        for (int c = 0; c < 8; ++c)
          multiply<T, Major::mn, Major::mn>(dq, further(mn_major(dscores, 0), c * kMnMajorStep),
                                            further(mn_major(k, 0), c * kMnMajorStep), c > 0 || load);
        commit_products();
        wait_products<0>();
        hold_registers(dq);
        arrive_warp(memory.dscores_empty[step.slot]);
        if (last) {
          const int query = tile * kQueries;
          store_product(dq, p.dq_scale, row_of<T>(p.dq, p, unit.sequence, unit.head, unit.q.first + query), p.dq.token,
                        unit.q.stored - query);
        } else {
          sums.add(dq, sum, place + tile, SharedHeads(p).rank == 0 ? unit.query_tiles : 0, key_tile == 0);
        }
      }
      arrive_warp(memory.k_empty[k_stage.slot]);
      k_stage.next();
    }
    if (SharedHeads(p).rank == 0) store_rest<T>(p, unit);
  }
  sums.finish(place);
}

}  // namespace
}  // namespace cuda
}  // namespace fasttfm
// attention backward for Hopper, head dim 128: attention_backward() and its workspace go there.

#include <cstdint>


namespace fasttfm {
namespace cuda {

constexpr int kWideDim = 128;

Status attention_backward_wide(const AttentionBackward&);
int64_t attention_backward_wide_workspace(int64_t sequences, int64_t heads, int64_t tokens, int64_t max_seqlen_k);

}  // namespace cuda
}  // namespace fasttfm
// What Hopper's attention kernels take, checked once for both directions.

#include <cuda_runtime.h>

#include <cstdint>


namespace fasttfm {
namespace cuda {

inline Status check_hopper_call(const AttentionCall& call) {
  if (call.dtype != DType::bf16 && call.dtype != DType::f16) return unknown_dtype();
  if (call.head_dim != 64 && call.head_dim != 128) return bad_size("attention: Hopper's head dims are 64 and 128");
  if (call.window_left != -1 || call.window_right > 0 || !(call.scale > 0.0f))
    return {StatusCode::bad_value, "attention: Hopper's kernels attend to all keys or causally, scale is above 0"};
  if (call.sequences > 0x7fffffff / 2 || call.queries > 0x7fffffff / 2 || call.keys > 0x7fffffff / 2)
    return bad_size("attention: more tokens than 32 bits count");
  for (const void* tensor : {call.q, call.k, call.v})
    if (reinterpret_cast<uintptr_t>(tensor) % 16 != 0)
      return {StatusCode::bad_alignment, "attention: tensors start at multiples of 16 bytes"};
  for (int64_t stride :
       {call.q_sequence_stride, call.q_token_stride, call.q_head_stride, call.k_sequence_stride, call.k_token_stride,
        call.k_head_stride, call.v_sequence_stride, call.v_token_stride, call.v_head_stride})
    if (stride % 8 != 0) return {StatusCode::bad_alignment, "attention: strides are multiples of 8 elements"};
  int major = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, call.device);
  if (error != cudaSuccess) return status_of(error);
  if (major != 9) return {StatusCode::bad_value, "attention: these kernels are for compute capability 9.0 alone"};
  return {};
}

}  // namespace cuda
}  // namespace fasttfm

namespace fasttfm {
namespace cuda {
namespace {

// ---- the kernels -----------------------------------------------------------------------------------------------------

template <class Memory>
__device__ __forceinline__ void begin_block(const Parameters& p, Memory& memory) {
  if (threadIdx.x == 0) {
    memory.initialize();
    prefetch_map(&p.q);
    prefetch_map(&p.k);
    prefetch_map(&p.v);
    prefetch_map(&p.dout);
  }
  __syncthreads();
}

template <class T, bool DROPOUT, bool CAUSAL>
__global__ void __launch_bounds__(kThreads, 1) backward_kernel(const __grid_constant__ Parameters p) {
  extern __shared__ __align__(1024) char bytes[];
  auto& memory = *reinterpret_cast<Memory*>(bytes);
  const int warpgroup = uniform(threadIdx.x / kWarpgroup);
  begin_block(p, memory);
  if (warpgroup == 0) {
    lower_registers<48>();
    const int warp = uniform(threadIdx.x / 32);
    if (warp == 0)
      bring_tiles<CAUSAL>(p, memory);
    else if constexpr (DROPOUT)
      draw_kept<CAUSAL>(p, memory, warp - 1);
  } else if (warpgroup == 3) {
    lower_registers<64>();
    sum_dq<T, CAUSAL>(p, memory);
  } else {
    raise_registers<200>();
    KeyWarpgroup<T, DROPOUT, CAUSAL> keys(p, memory, warpgroup - 1);
    for (int index = blockIdx.x; index < p.sequences * p.heads; index += gridDim.x)
      keys.over_unit(Unit<CAUSAL>(p, index));
  }
}

template <class T, bool DROPOUT, bool CAUSAL>
__global__ void __launch_bounds__(kThreads, 1) long_backward_kernel(const __grid_constant__ Parameters p) {
  extern __shared__ __align__(1024) char bytes[];
  auto& memory = *reinterpret_cast<LongMemory*>(bytes);
  const int warpgroup = uniform(threadIdx.x / kWarpgroup);
  begin_block(p, memory);
  if (p.blocks > 1) sync_cluster();
  if (warpgroup == 0) {
    lower_registers<DROPOUT ? 48 : 32>();
    const int warp = uniform(threadIdx.x / 32);
    if (warp == 0)
      bring_tiles<CAUSAL>(p, memory);
    else if constexpr (DROPOUT)
      draw_kept<CAUSAL>(p, memory, warp - 1);
  } else if (warpgroup == 3) {
    lower_registers<64>();
    sum_long_dq<T, CAUSAL>(p, memory);
  } else {
    raise_registers<DROPOUT ? 200 : 208>();
    LongKeyWarpgroup<T, DROPOUT, CAUSAL>(p, memory, warpgroup - 1).run();
  }
  if (p.blocks > 1) {  // who is told how far another one is has to be there
    __syncwarp();
    sync_cluster();
  }
}

// ---- launchers -------------------------------------------------------------------------------------------------------

// How many blocks share a (sequence, head), for more than kOnChipQueries queries (measured; clusters of 4 and 8 leave
// multiprocessors without work, as these do not come in multiples of that).
int blocks_of(const AttentionCall& call, bool causal, int processors) {
  const bool few = call.sequences * call.heads * 2 <= processors, longer = call.max_seqlen > 1024;
  return call.max_seqlen_k > kKeys && (!causal || longer || few) ? 2 : 1;
}

// How many clusters of `blocks` blocks run at the same time; asked once for a device.
template <class Kernel>
cudaError_t resident_clusters(Kernel kernel, int device, int blocks, int* clusters) {
  static std::atomic<int> known[16][3];
  std::atomic<int>* own = device < 16 ? &known[device][blocks] : nullptr;
  *clusters = own == nullptr ? 0 : own->load();
  if (*clusters > 0) return cudaSuccess;
  const ClusterLaunch launch(dim3(static_cast<unsigned>(blocks)), dim3(kThreads), blocks, sizeof(LongMemory), nullptr);
  const cudaError_t error = launch.resident(kernel, clusters);
  if (error == cudaSuccess && own != nullptr) own->store(*clusters);
  return error;
}

template <class T, bool DROPOUT, bool CAUSAL>
Status launch_long(const AttentionBackward& call, Parameters p, int processors) {
  const auto kernel = long_backward_kernel<T, DROPOUT, CAUSAL>;
  const int64_t units = call.sequences * call.heads;
  p.blocks = blocks_of(call, CAUSAL, processors);
  if (p.blocks == 1) {
    const dim3 grid(static_cast<unsigned>(std::min<int64_t>(units, processors)));
    return launch(kernel, grid, dim3(kThreads), sizeof(LongMemory), call.stream, p);
  }
  int clusters = 0;
  const cudaError_t error = resident_clusters(kernel, call.device, p.blocks, &clusters);
  if (error != cudaSuccess) return status_of(error);
  if (clusters == 0) return {StatusCode::cuda_error, "attention: the device runs no cluster of two blocks"};
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>(units, clusters)) * p.blocks);
  return ClusterLaunch(grid, dim3(kThreads), p.blocks, sizeof(LongMemory), call.stream)(kernel, p);
}

template <class T, bool DROPOUT, bool CAUSAL>
Status launch_backward(const AttentionBackward& call, const Parameters& p, int processors) {
  if (call.max_seqlen > kOnChipQueries) return launch_long<T, DROPOUT, CAUSAL>(call, p, processors);
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>(call.sequences * call.heads, processors)));
  return launch(backward_kernel<T, DROPOUT, CAUSAL>, grid, dim3(kThreads), sizeof(Memory), call.stream, p);
}

template <class T>
Status launch_typed(const AttentionBackward& call, const Parameters& p, float* statistics) {
  int processors = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, call.device);
  if (error != cudaSuccess) return status_of(error);
  const Status status = launch_statistics<T, kHeadDim>(call, p, statistics, nullptr);
  if (status.code != StatusCode::ok) return status;
  const bool causal = call.window_right == 0;
  if (call.seed != nullptr)
    return causal ? launch_backward<T, true, true>(call, p, processors)
                  : launch_backward<T, true, false>(call, p, processors);
  return causal ? launch_backward<T, false, true>(call, p, processors)
                : launch_backward<T, false, false>(call, p, processors);
}

}  // namespace

int64_t attention_backward_workspace(int64_t sequences, int64_t heads, int64_t head_dim, int64_t tokens,
                                     int64_t longest) {
  if (head_dim == kWideDim) return attention_backward_wide_workspace(sequences, heads, tokens, longest);
  const int64_t tiles = tiles_of(sequences, tokens, true);  // not fewer than those of dense sequences
  return heads * tiles * (2 * kQueries + (longest > kOnChipQueries ? kSumFloats : 0));
}

Status attention_backward(const AttentionBackward& call) {
  Status status = check_hopper_call(call);
  if (status.code != StatusCode::ok) return status;
  if (call.head_dim == kWideDim) return attention_backward_wide(call);
  if (call.kv_heads != call.heads) return bad_size("kv_heads differs from heads");
  if (call.sequences == 0 || call.heads == 0) return {};
  if (call.sequences > 65535 || call.heads > 65535) return bad_size("more than 65535 sequences or heads");
  const DeviceGuard guard(call.device);
  Parameters p{};
  status = set_parameters(call, &p);
  if (status.code != StatusCode::ok) return status;
  p.statistics = call.workspace;
  p.sums = call.workspace + call.heads * static_cast<int64_t>(p.tiles) * 2 * kQueries;
  return call.dtype == DType::bf16  ? launch_typed<bf16_t>(call, p, call.workspace)
                                    : unknown_dtype();
}

}  // namespace cuda
}  // namespace fasttfm

namespace fasttfm::cuda {
Status attention_backward_wide(const AttentionBackward&) { return {}; }
int64_t attention_backward_wide_workspace(int64_t, int64_t, int64_t, int64_t) { return 0; }
}

extern "C" int backward(const fasttfm::AttentionBackward* call, const char** detail) {
  const fasttfm::Status status = fasttfm::cuda::attention_backward(*call);
  *detail = status.detail;
  return static_cast<int>(status.code);
}
extern "C" int64_t workspace(int64_t sequences, int64_t heads, int64_t tokens, int64_t max_seqlen) {
  return fasttfm::cuda::attention_backward_workspace(sequences, heads, 64, tokens, max_seqlen);
}
