// Times the CUDA LayerNorm kernels over thread groupings and block counts; prints microseconds and the share of the
// copy bandwidth.
//
//   nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -I kernels -o /tmp/shapes
//   benchmarks/lab/layer_norm_shapes.cu && /tmp/shapes
#include "../../kernels/layer_norm/cuda.cu"

#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

using namespace fasttfm;
using namespace fasttfm::cuda;

static void check(cudaError_t error) {
  if (error != cudaSuccess) {
    std::printf("%s\n", cudaGetErrorString(error));
    std::exit(1);
  }
}

__global__ void fill(bf16_t* to, int64_t count, uint32_t seed) {
  for (int64_t i = blockIdx.x * 1024ll + threadIdx.x; i < count; i += gridDim.x * 1024ll) {
    const uint32_t hash = (static_cast<uint32_t>(i) * 2654435761u) ^ seed;
    to[i].bits = static_cast<uint16_t>(narrow_word((hash >> 8) * (2.0f / (1 << 24)) - 1.0f, 0.0f, bf16_t{}));
  }
}

// Median microseconds of one call, with the inputs rotating past the L2 cache.
template <class Call>
static float time_us(Call call) {
  constexpr int kRepeats = 40;
  cudaEvent_t start, stop;
  check(cudaEventCreate(&start));
  check(cudaEventCreate(&stop));
  for (int i = 0; i < 6; ++i) call(i);
  std::vector<float> times;
  for (int sample = 0; sample < 5; ++sample) {
    check(cudaEventRecord(start));
    for (int i = 0; i < kRepeats; ++i) call(i);
    check(cudaEventRecord(stop));
    check(cudaEventSynchronize(stop));
    float ms;
    check(cudaEventElapsedTime(&ms, start, stop));
    times.push_back(ms * 1000.0f / kRepeats);
  }
  for (size_t i = 0; i < times.size(); ++i)
    for (size_t j = i + 1; j < times.size(); ++j)
      if (times[j] < times[i]) std::swap(times[i], times[j]);
  return times[times.size() / 2];
}

constexpr int kSets = 3;
static bf16_t *x[kSets], *dy[kSets], *out[kSets];
static float *mean, *rstd, *weight, *dweight, *dbias, *workspace;
static float copy_rate;  // bytes per microsecond

template <class S>
static void forward(int64_t rows, int64_t columns) {
  const float us = time_us([&](int i) {
    LayerNormForward p{};
    p.x = x[i % kSets], p.y = out[i % kSets], p.weight = weight, p.bias = weight, p.mean = mean, p.rstd = rstd;
    p.rows = rows, p.columns = columns, p.x_stride = columns, p.eps = 1e-5f, p.dtype = DType::bf16;
    launch(norm_forward_kernel<bf16_t, bf16_t, S, LayerNormForward>,
           static_cast<unsigned>((rows + S::kGroups - 1) / S::kGroups), S::kBlock, 0, nullptr, p);
  });
  check(cudaGetLastError());
  std::printf("forward  %5lld x %4lld group %3d vectors %d block %3d             %7.1f us  %.3f of copy\n",
              (long long)rows, (long long)columns, S::kGroup, S::kVectors, S::kBlock, us,
              rows * columns * 4 / copy_rate / us);
}

template <class S>
static void backward(int64_t rows, int64_t columns, int per_sm) {
  const int blocks = 132 * per_sm;
  const float us = time_us([&](int i) {
    LayerNormBackward p{};
    p.x = x[i % kSets], p.dy = dy[i % kSets], p.dx = out[i % kSets], p.weight = weight, p.mean = mean, p.rstd = rstd;
    p.dweight = dweight, p.dbias = dbias, p.workspace = workspace;
    p.rows = rows, p.columns = columns, p.x_stride = columns, p.dtype = DType::bf16;
    launch(norm_backward_kernel<bf16_t, S, LayerNormBackward>, blocks, S::kBlock, sizeof(NormBackwardMemory<bf16_t, S>),
           nullptr, p);
    sum_parts(workspace, {dweight, DType::bf16}, {dbias, DType::bf16}, blocks, columns, nullptr);
  });
  check(cudaGetLastError());
  std::printf("backward %5lld x %4lld group %3d vectors %d block %3d blocks/SM %2d %7.1f us  %.3f of copy\n",
              (long long)rows, (long long)columns, S::kGroup, S::kVectors, S::kBlock, per_sm, us,
              rows * columns * 6 / copy_rate / us);
}

int main() {
  const int64_t elements = 32768ll * 4096;
  for (int i = 0; i < kSets; ++i) {
    for (bf16_t** buffer : {&x[i], &dy[i], &out[i]}) {
      check(cudaMalloc(buffer, elements * 2));
      fill<<<1024, 1024>>>(*buffer, elements, 17u * i);
    }
  }
  for (float** buffer : {&mean, &rstd, &weight, &dweight, &dbias}) {
    check(cudaMalloc(buffer, 32768 * 4));
    check(cudaMemset(*buffer, 1, 32768 * 4));
  }
  check(cudaMalloc(&workspace, 2ll * 132 * 16 * 4096 * 4));
  const float copy_us = time_us(
      [&](int i) { check(cudaMemcpyAsync(out[i % kSets], x[i % kSets], elements * 2, cudaMemcpyDeviceToDevice)); });
  copy_rate = elements * 4 / copy_us;
  std::printf("copy %.2f TB/s\n", copy_rate / 1e6);

  forward<RowShape<32, 4, 32>>(32768, 1024);
  forward<RowShape<32, 4, 64>>(32768, 1024);
  forward<RowShape<32, 4, 128>>(32768, 1024);
  forward<RowShape<64, 2, 64>>(32768, 1024);
  forward<RowShape<32, 3, 64>>(32768, 768);
  forward<RowShape<32, 3, 128>>(32768, 768);
  forward<RowShape<128, 4, 128>>(32768, 4096);
  forward<RowShape<256, 2, 256>>(32768, 4096);
  backward<RowShape<32, 4, 384>>(32768, 1024, 1);
  backward<RowShape<32, 4, 352>>(32768, 1024, 1);
  backward<RowShape<32, 3, 512>>(32768, 768, 1);
  backward<RowShape<32, 3, 384>>(32768, 768, 1);
  backward<RowShape<128, 4, 384>>(32768, 4096, 1);
  return 0;
}
