// Patterns that racecheck may report as races: shared memory that one warp passes to another by mbarriers, and barriers
// that only some warps of a block pass. Each kernel is correct under the PTX memory model, so a report is a false
// positive.
//
//   nvcc -std=c++17 -arch=sm_90a -Ikernels -o /tmp/patterns benchmarks/lab/racecheck_patterns.cu
//   compute-sanitizer --tool racecheck /tmp/patterns
#include <cstdio>

#include "common/cuda/hopper.cuh"

using namespace fasttfm::cuda;

namespace {

constexpr int kFloats = 128, kRounds = 4;
constexpr int kGroup = 64;

__device__ void copy_bytes(Mbarrier& full, void* to, const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(full.address())
               : "memory");
}

// The first warp fills a buffer, the second adds it up, kRounds times.
//   BULK      TMA writes, otherwise the warp's lanes do
//   ALL_FILL  every lane of the writing warp arrives, otherwise one after __syncwarp
//   ALL_FREE  every lane of the reading warp arrives, otherwise one after __syncwarp
template <bool BULK, bool ALL_FILL, bool ALL_FREE>
__global__ void hand_over(const float* from, float* to) {
  __shared__ alignas(128) float buffer[kFloats];
  __shared__ Mbarrier full, empty;
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    full.init(!BULK && ALL_FILL ? 32 : 1);
    empty.init(ALL_FREE ? 32 : 1);
    fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    for (int round = 0; round < kRounds; ++round) {
      empty.wait(round % 2 ^ 1);
      if (BULK) {
        if (lane == 0) {
          full.arrive_expect_tx(kFloats * 4);
          copy_bytes(full, buffer, from + round * kFloats, kFloats * 4);
        }
      } else {
        for (int i = lane; i < kFloats; i += 32) buffer[i] = from[round * kFloats + i];
        __syncwarp();
        if (ALL_FILL || lane == 0) full.arrive();
      }
    }
  } else {
    float sum = 0.0f;
    for (int round = 0; round < kRounds; ++round) {
      full.wait(round % 2);
      for (int i = 0; i < kFloats; i += 32) sum += buffer[(i + lane * 5) % kFloats];
      __syncwarp();
      if (ALL_FREE || lane == 0) empty.arrive();
    }
    to[lane] = sum;
  }
}

// Two groups of warps sync at their own named barriers (SAME: both equally often, otherwise only the first one), then
// the whole block exchanges values, kRounds times, between calls of __syncthreads().
template <bool SAME>
__global__ void meet_in_groups(const float* from, float* to) {
  __shared__ float buffer[2 * kGroup];
  const int group = threadIdx.x / kGroup;
  if (SAME || group == 0)
    for (int round = 0; round < 2; ++round) named_barrier_sync(group + 1, kGroup);
  float sum = 0.0f;
  for (int round = 0; round < kRounds; ++round) {
    __syncthreads();
    buffer[threadIdx.x] = from[threadIdx.x] + sum;
    __syncthreads();
    sum += buffer[threadIdx.x ^ kGroup];
  }
  to[threadIdx.x] = sum;
}

template <bool SAME>
void run_groups(const char* name, const float* from, float* to) {
  meet_in_groups<SAME><<<1, 2 * kGroup>>>(from, to);
  std::printf("%s: %s\n", name, cudaGetErrorString(cudaDeviceSynchronize()));
  std::fflush(stdout);
}

template <bool BULK, bool ALL_FILL, bool ALL_FREE>
void run(const char* name, const float* from, float* to) {
  hand_over<BULK, ALL_FILL, ALL_FREE><<<1, 64>>>(from, to);
  std::printf("%s: %s\n", name, cudaGetErrorString(cudaDeviceSynchronize()));
  std::fflush(stdout);
}

}  // namespace

int main() {
  float* data = nullptr;
  cudaMalloc(&data, (kRounds * kFloats + 2 * kGroup) * sizeof(float));
  cudaMemset(data, 0, (kRounds * kFloats + 2 * kGroup) * sizeof(float));
  float* to = data + kRounds * kFloats;
  run<false, true, true>("lanes write, all arrive, all free", data, to);
  run<false, false, true>("lanes write, one arrives, all free", data, to);
  run<false, true, false>("lanes write, all arrive, one frees", data, to);
  run<false, false, false>("lanes write, one arrives, one frees", data, to);
  run<true, false, true>("TMA writes, all free", data, to);
  run<true, false, false>("TMA writes, one frees", data, to);
  run_groups<true>("groups pass equally many barriers", data, to);
  run_groups<false>("groups pass different numbers of barriers", data, to);
}
