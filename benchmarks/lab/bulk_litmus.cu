// Does a counter that is stored after cp.async.bulk.wait_group become visible before the bulk reduction it counts?
//
//   nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -Ikernels -o build/lab/litmus
//   benchmarks/lab/bulk_litmus.cu
//
// Blocks work in pairs. The first block of a pair adds 1 to 16 KB of global memory by TMA, waits, and stores the number
// of additions in a counter. The second one waits for the counter, loads the 16 KB by TMA and counts the values that
// lack the addition. Other warps of all blocks load L2 with reductions. PTX allows a lack unless the store is a
// release.
#include <cstdio>
#include <cstdlib>

#include "common/cuda/hopper.cuh"

using namespace fasttfm::cuda;

namespace {

constexpr int kFloats = 4096, kThreads = 512, kWorkers = 128;
constexpr int64_t kNoiseFloats = 8 << 20;

enum Publication { kReadRelaxed, kRelaxed, kRelease, kFenced };
const char* const kNames[] = {"wait_group.read, relaxed store", "wait_group, relaxed store",
                              "wait_group, release store", "wait_group, fences, release store"};

__device__ int load_acquire(const int* from) {
  int value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
template <bool RELEASE>
__device__ void store(int* to, int value) {
  if (RELEASE)
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
  else
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

template <Publication HOW>
__device__ void produce(float* data, int* added, const int* loaded, uint32_t ones, int rounds) {
  for (int round = 1; round <= rounds; ++round) {
    bulk_reduce_add(data, ones, 4 * kFloats);
    bulk_commit();
    if (HOW == kReadRelaxed)
      bulk_wait_read<0>();
    else
      bulk_wait<0>();
    if (HOW == kFenced) {
      fence_proxy_async_global();
      __threadfence();
    }
    store<(HOW >= kRelease)>(added, round);
    while (load_acquire(loaded) < round) {
    }
  }
}

// Called by kWorkers threads.
__device__ unsigned consume(float* data, const int* added, int* loaded, float* copy, Mbarrier& full, int rounds) {
  unsigned late = 0;
  for (int round = 1; round <= rounds; ++round) {
    if (threadIdx.x == 0) {
      while (load_acquire(added) < round) {
      }
      fence_proxy_async_global();
      full.arrive_expect_tx(4 * kFloats);
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                       shared_address(copy)),
                   "l"(data), "r"(4 * kFloats), "r"(full.address())
                   : "memory");
    }
    full.wait(round % 2 ^ 1);
    for (int i = threadIdx.x; i < kFloats; i += kWorkers) late += copy[i] != static_cast<float>(round);
    __syncwarp();
    named_barrier_sync(1, kWorkers);
    if (threadIdx.x == 0) store<true>(loaded, round);
  }
  return late;
}

template <Publication HOW>
__global__ void __launch_bounds__(kThreads, 1)
    litmus(float* data, int* added, int* loaded, float* noise, unsigned long long* late, int rounds, bool loud) {
  __shared__ alignas(128) float buffer[kFloats];
  __shared__ Mbarrier full;
  __shared__ volatile int over;
  const int pair = blockIdx.x / 2;
  for (int i = threadIdx.x; i < kFloats; i += kThreads) buffer[i] = 1.0f;
  if (threadIdx.x == 0) {
    over = 0;
    full.init(1);
    fence_mbarrier_init();
  }
  fence_proxy_async();
  __syncthreads();
  float* own = data + static_cast<int64_t>(pair) * kFloats;
  int *own_added = added + 32 * pair, *own_loaded = loaded + 32 * pair;
  if (threadIdx.x >= kWorkers) {
    uint32_t place = blockIdx.x * kThreads + threadIdx.x;
    while (loud && over == 0) {
      place = place * 1664525u + 1013904223u;
      float* to = noise + (place / 64 % (kNoiseFloats / 128)) * 128 + threadIdx.x % 32 * 4;
      asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %1, %1, %1};" ::"l"(to), "f"(1.0f) : "memory");
    }
    return;
  }
  if (blockIdx.x % 2 == 0) {
    if (threadIdx.x == 0) produce<HOW>(own, own_added, own_loaded, shared_address(buffer), rounds);
  } else {
    const unsigned found = consume(own, own_added, own_loaded, buffer, full, rounds);
    if (found > 0) atomicAdd(late, found);
  }
  __syncwarp();
  named_barrier_sync(2, kWorkers);
  if (threadIdx.x == 0) over = 1;
}

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::printf("%s\n", cudaGetErrorString(error));
  std::exit(1);
}

template <Publication HOW>
void run(int blocks, int rounds, bool loud) {
  static float *data = nullptr, *noise = nullptr;
  static int* counters = nullptr;
  static unsigned long long* late = nullptr;
  const size_t bytes = sizeof(float) * kFloats * blocks, places = sizeof(int) * 32 * blocks;
  check(cudaMalloc(&data, bytes));
  check(cudaMalloc(&noise, sizeof(float) * kNoiseFloats));
  check(cudaMalloc(&counters, 2 * places));
  check(cudaMalloc(&late, sizeof *late));
  check(cudaMemset(data, 0, bytes));
  check(cudaMemset(counters, 0, 2 * places));
  check(cudaMemset(late, 0, sizeof *late));
  int *added = counters, *loaded = counters + 32 * blocks;
  void* arguments[] = {&data, &added, &loaded, &noise, &late, &rounds, &loud};
  check(cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(litmus<HOW>), dim3(blocks), dim3(kThreads), arguments,
                                    0, nullptr));
  unsigned long long found = 0;
  check(cudaMemcpy(&found, late, sizeof found, cudaMemcpyDeviceToHost));
  std::printf("%s, %s: %llu values late in %lld loads of %d\n", kNames[HOW], loud ? "loaded L2" : "idle L2", found,
              static_cast<long long>(rounds) * (blocks / 2), kFloats);
  std::fflush(stdout);
  check(cudaFree(data));
  check(cudaFree(noise));
  check(cudaFree(counters));
  check(cudaFree(late));
}

}  // namespace

int main(int count, char** words) {
  const int rounds = count > 1 ? std::atoi(words[1]) : 50000;
  int blocks = 0;
  check(cudaDeviceGetAttribute(&blocks, cudaDevAttrMultiProcessorCount, 0));
  blocks -= blocks % 2;
  for (const bool loud : {false, true}) {
    run<kReadRelaxed>(blocks, rounds, loud);
    run<kRelaxed>(blocks, rounds, loud);
    run<kRelease>(blocks, rounds, loud);
    run<kFenced>(blocks, rounds, loud);
  }
}
