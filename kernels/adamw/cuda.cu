// AdamW on NVIDIA GPUs. A block processes a chunk of one tensor, which it finds from its block index. Each thread has
// several vectors of four elements of gradient, parameter and moments in flight. The values that are the same for a
// whole tensor are computed in fp64 beforehand by a single block, which also adds the partial norms of the chunks in a
// fixed order.
#include "adamw/op.h"

#include <cmath>
#include <cstdint>

#include "common/cuda/convert.cuh"
#include "common/cuda/launch.cuh"
#include "common/cuda/reduce.cuh"

namespace fasttfm {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kDeep = 2;      // vectors that a thread has in flight
constexpr int kNormDeep = 4;  // the same in norm_kernel, which reads only gradients
constexpr int kPrepareThreads = 1024;
constexpr int kWords = 480;  // 8-byte words in a kernel's arguments, which are at most 4 KB

// The coefficients of a tensor's update.
struct alignas(16) Coefficients {
  float factor;
  float beta1;
  float rest1;  // 1 - beta1
  float beta2;
  float rest2;
  float epsilon;
  float step_size;     // lr / (1 - beta1^t)
  float inverse_root;  // 1 / sqrt(1 - beta2^t)
  float decay;         // lr * weight_decay
  int32_t skip;
};

struct Table {
  const int32_t* first_chunk;
  const AdamWTensor* tensors;
  const AdamWGroup* groups;
  Coefficients* coefficients;
};

int64_t starts_words(int64_t tensors) { return (tensors + 1) / 2; }
int64_t table_words(int64_t tensors, int64_t groups) {
  static_assert(sizeof(AdamWTensor) % 8 == 0 && sizeof(AdamWGroup) % 8 == 0, "whole words");
  return starts_words(tensors) + tensors * static_cast<int64_t>(sizeof(AdamWTensor) / 8) +
         groups * static_cast<int64_t>(sizeof(AdamWGroup) / 8);
}
int64_t coefficients_word(int64_t tensors, int64_t groups) { return (table_words(tensors, groups) + 1) / 2 * 2; }

Table table_of(const AdamW& p) {
  auto* words = static_cast<int64_t*>(p.workspace);
  auto* tensors = reinterpret_cast<AdamWTensor*>(words + starts_words(p.tensors));
  return {reinterpret_cast<int32_t*>(words), tensors, reinterpret_cast<AdamWGroup*>(tensors + p.tensors),
          reinterpret_cast<Coefficients*>(words + coefficients_word(p.tensors, p.groups))};
}

// ---- the table ------------------------------------------------------------------------------------------------------

struct Words {
  int64_t word[kWords];
};

__global__ void __launch_bounds__(kWords) fill_kernel(int64_t* to, int count, const __grid_constant__ Words words) {
  if (static_cast<int>(threadIdx.x) < count) to[threadIdx.x] = words.word[threadIdx.x];
}

Status fill_table(const AdamW& p) {
  const auto* from = static_cast<const int64_t*>(p.table);
  auto* to = static_cast<int64_t*>(p.workspace);
  const int64_t words = table_words(p.tensors, p.groups);
  for (int64_t begin = 0; begin < words; begin += kWords) {
    const int count = static_cast<int>(words - begin < kWords ? words - begin : kWords);
    Words part{};
    for (int i = 0; i < count; ++i) part.word[i] = from[begin + i];
    const Status status = launch(fill_kernel, 1, kWords, 0, p.stream, to + begin, count, part);
    if (status.code != StatusCode::ok) return status;
  }
  return {};
}

// A block's part of a tensor.
struct Chunk {
  int tensor;
  int64_t begin;
  int count;
};

__device__ __forceinline__ Chunk chunk_of(const Table& table, int tensors) {
  int begun = 0;  // tensors that begin here or before
  for (int first = 0; first < tensors; first += kThreads) {
    const int i = first + static_cast<int>(threadIdx.x);
    const int more = __syncthreads_count(i < tensors && table.first_chunk[i] <= static_cast<int>(blockIdx.x));
    begun += more;
    if (more < kThreads) break;
  }
  const int tensor = begun - 1;
  const int64_t begin = static_cast<int64_t>(blockIdx.x - table.first_chunk[tensor]) * kAdamWChunk;
  const int64_t left = table.tensors[tensor].size - begin;
  return {tensor, begin, static_cast<int>(left < kAdamWChunk ? left : kAdamWChunk)};
}

// ---- four elements --------------------------------------------------------------------------------------------------

struct NoCopy {};

__device__ __forceinline__ void load_four(const float* from, float (&to)[4]) {
  const float4 four = *reinterpret_cast<const float4*>(from);
  to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
}
template <class T>
__device__ __forceinline__ void load_four(const T* from, float (&to)[4]) {
  const uint2 words = *reinterpret_cast<const uint2*>(from);
  const float2 low = widen_word(words.x, T{}), high = widen_word(words.y, T{});
  to[0] = low.x, to[1] = low.y, to[2] = high.x, to[3] = high.y;
}
__device__ __forceinline__ void store_four(float* to, const float (&from)[4]) {
  *reinterpret_cast<float4*>(to) = make_float4(from[0], from[1], from[2], from[3]);
}
template <class T>
__device__ __forceinline__ void store_four(T* to, const float (&from)[4]) {
  const uint2 words = make_uint2(narrow_word(from[0], from[1], T{}), narrow_word(from[2], from[3], T{}));
  *reinterpret_cast<uint2*>(to) = words;
}
__device__ __forceinline__ void store_four(NoCopy*, const float (&)[4]) {}

__device__ __forceinline__ float load_one(DType dtype, const void* from, int64_t index) {
  if (dtype == DType::f32) return static_cast<const float*>(from)[index];
  const uint32_t bits = static_cast<const uint16_t*>(from)[index];
  return dtype == DType::bf16 ? widen_word(bits, bf16_t{}).x : widen_word(bits, f16_t{}).x;
}

__device__ __forceinline__ bool starts_at(const void* address, int bytes) {
  return reinterpret_cast<uintptr_t>(address) % bytes == 0;
}

// ---- norm -----------------------------------------------------------------------------------------------------------

template <class G>
__device__ __forceinline__ float sum_squares(const G* gradient, int count) {
  constexpr int kStep = kThreads * 4;
  float sum[kNormDeep] = {};
  for (int i = threadIdx.x * 4; i < count; i += kStep * kNormDeep) {
    float g[kNormDeep][4] = {};
#pragma unroll
    for (int d = 0; d < kNormDeep; ++d)
      if (i + d * kStep < count) load_four(gradient + i + d * kStep, g[d]);
#pragma unroll
    for (int d = 0; d < kNormDeep; ++d)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[d] = fmaf(g[d][e], g[d][e], sum[d]);
  }
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}
static_assert(kNormDeep == 4, "added up by name");

// A block per chunk.
__global__ void __launch_bounds__(kThreads, 4) norm_kernel(Table table, int tensors, float* partial_norms) {
  __shared__ float scratch[kThreads / 32];
  const Chunk chunk = chunk_of(table, tensors);
  const void* gradient = table.tensors[chunk.tensor].gradient;
  const DType dtype = table.tensors[chunk.tensor].gradient_dtype;
  float sum[1] = {};
  int done = 0;
  if (starts_at(gradient, dtype == DType::f32 ? 16 : 8)) {
    done = chunk.count & ~3;
    if (dtype == DType::f32)
      sum[0] = sum_squares(static_cast<const float*>(gradient) + chunk.begin, done);
    else if (dtype == DType::bf16)
      sum[0] = sum_squares(static_cast<const bf16_t*>(gradient) + chunk.begin, done);
    else
      sum[0] = sum_squares(static_cast<const f16_t*>(gradient) + chunk.begin, done);
  }
  for (int i = done + threadIdx.x; i < chunk.count; i += kThreads) {
    const float g = load_one(dtype, gradient, chunk.begin + i);
    sum[0] = fmaf(g, g, sum[0]);
  }
  group_sum<kThreads, kThreads>(sum, scratch);
  if (threadIdx.x == 0) partial_norms[blockIdx.x] = sum[0];
}

// The square root of the sum of all partial norms, in every thread of the block.
__device__ __forceinline__ float whole_norm(const float* partial_norms, int64_t chunks) {
  __shared__ double shares[kPrepareThreads / 32];
  double sum = 0.0;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < chunks; i += kPrepareThreads) sum += partial_norms[i];
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  if (threadIdx.x % 32 == 0) shares[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0.0;
  for (int warp = 0; warp < kPrepareThreads / 32; ++warp) sum += shares[warp];
  return static_cast<float>(sqrt(sum));
}

// ---- coefficients of a tensor ---------------------------------------------------------------------------------------

__device__ __forceinline__ float gradient_factor(const AdamW& p, float norm) {
  const float scale = p.grad_scale == nullptr ? 1.0f : *p.grad_scale;
  float clipping = 1.0f;
  if (p.norm != nullptr) clipping = p.max_norm / (norm / scale + 1e-6f);
  return (clipping > 1.0f ? 1.0f : clipping) / scale;  // a NaN norm makes all gradients NaN
}

// Grid (1). If `whole_step` is not set, it only writes the norm.
__global__ void __launch_bounds__(kPrepareThreads) prepare_kernel(AdamW p, Table table, bool whole_step) {
  float norm = 0.0f;
  if (p.norm != nullptr) {
    norm = whole_norm(p.partial_norms, p.chunks);
    if (threadIdx.x == 0) *p.norm = norm;
  }
  if (!whole_step) return;
  const float factor = gradient_factor(p, norm);
  const bool skip = p.found_inf != nullptr && (*p.found_inf == 1.0f || !isfinite(norm));
  for (int64_t i = threadIdx.x; i < p.tensors; i += kPrepareThreads) {
    const AdamWTensor& tensor = table.tensors[i];
    const AdamWGroup& group = table.groups[tensor.group];
    const double rate = group.learning_rate_on_device == nullptr ? group.learning_rate : *group.learning_rate_on_device;
    const float step = *tensor.step + (skip ? 0.0f : 1.0f);
    if (!skip) *tensor.step = step;
    Coefficients c;
    c.factor = factor;
    c.beta1 = static_cast<float>(group.beta1);
    c.rest1 = static_cast<float>(1.0 - group.beta1);
    c.beta2 = static_cast<float>(group.beta2);
    c.rest2 = static_cast<float>(1.0 - group.beta2);
    c.epsilon = static_cast<float>(group.epsilon);
    c.step_size = static_cast<float>(rate / (1.0 - pow(group.beta1, static_cast<double>(step))));
    c.inverse_root = static_cast<float>(1.0 / sqrt(1.0 - pow(group.beta2, static_cast<double>(step))));
    c.decay = static_cast<float>(rate * group.weight_decay);
    c.skip = skip;
    table.coefficients[i] = c;
  }
}

// ---- the step -------------------------------------------------------------------------------------------------------

// Square root with a relative error of 2^-23, without the branch that scales subnormal numbers.
__device__ __forceinline__ float square_root(float x) {
  float root;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(x));
  return root;
}

// The quotient is accurate to 2 ulp, because the square root of an fp32 number is neither subnormal nor above 2^64.
__device__ __forceinline__ void update(const Coefficients& c, float g, float& p, float& m, float& v) {
  g *= c.factor;
  m = fmaf(c.beta1, m, c.rest1 * g);
  v = fmaf(c.beta2, v, c.rest2 * g * g);
  const float change = __fdividef(m, fmaf(square_root(v), c.inverse_root, c.epsilon));
  p -= fmaf(c.decay, p, c.step_size * change);
}

// Updates the first `count` elements of a chunk, a multiple of 4, whose addresses are aligned for vectors.
template <class G, class C>
__device__ __forceinline__ void update_vectors(const AdamWTensor& tensor, const Coefficients& c, int64_t begin,
                                               int count) {
  constexpr int kStep = kThreads * 4;
  const G* gradient = static_cast<const G*>(tensor.gradient) + begin;
  float* parameter = tensor.parameter + begin;
  float* exp_avg = tensor.exp_avg + begin;
  float* exp_avg_sq = tensor.exp_avg_sq + begin;
  C* copy = static_cast<C*>(tensor.copy) + begin;
#pragma unroll 1
  for (int i = threadIdx.x * 4; i < count; i += kStep * kDeep) {
    float g[kDeep][4], p[kDeep][4], m[kDeep][4], v[kDeep][4];
#pragma unroll
    for (int d = 0; d < kDeep; ++d) {
      const int at = i + d * kStep;
      if (at >= count) continue;
      load_four(gradient + at, g[d]);
      load_four(parameter + at, p[d]);
      load_four(exp_avg + at, m[d]);
      load_four(exp_avg_sq + at, v[d]);
    }
#pragma unroll
    for (int d = 0; d < kDeep; ++d) {
      const int at = i + d * kStep;
      if (at >= count) continue;
#pragma unroll
      for (int e = 0; e < 4; ++e) update(c, g[d][e], p[d][e], m[d][e], v[d][e]);
      store_four(parameter + at, p[d]);
      store_four(exp_avg + at, m[d]);
      store_four(exp_avg_sq + at, v[d]);
      store_four(copy + at, p[d]);
    }
  }
}

template <class C>
__device__ __forceinline__ void update_vectors(const AdamWTensor& tensor, const Coefficients& c, int64_t begin,
                                               int count) {
  if (tensor.gradient_dtype == DType::f32)
    update_vectors<float, C>(tensor, c, begin, count);
  else if (tensor.gradient_dtype == DType::bf16)
    update_vectors<bf16_t, C>(tensor, c, begin, count);
  else
    update_vectors<f16_t, C>(tensor, c, begin, count);
}

__device__ __forceinline__ void update_one(const AdamWTensor& tensor, const Coefficients& c, int64_t i) {
  const float g = load_one(tensor.gradient_dtype, tensor.gradient, i);
  float p = tensor.parameter[i], m = tensor.exp_avg[i], v = tensor.exp_avg_sq[i];
  update(c, g, p, m, v);
  tensor.parameter[i] = p;
  tensor.exp_avg[i] = m;
  tensor.exp_avg_sq[i] = v;
  if (tensor.copy != nullptr) store_as(tensor.copy_dtype, tensor.copy, i, p);
}

// A block per chunk.
__global__ void __launch_bounds__(kThreads, 3) update_kernel(Table table, int tensors) {
  const Chunk chunk = chunk_of(table, tensors);
  const AdamWTensor tensor = table.tensors[chunk.tensor];
  const Coefficients c = table.coefficients[chunk.tensor];
  if (c.skip) return;
  const bool vectors = starts_at(tensor.parameter, 16) && starts_at(tensor.exp_avg, 16) &&
                       starts_at(tensor.exp_avg_sq, 16) && starts_at(tensor.copy, 8) &&
                       starts_at(tensor.gradient, tensor.gradient_dtype == DType::f32 ? 16 : 8);
  const int done = vectors ? chunk.count & ~3 : 0;
  if (tensor.copy == nullptr)
    update_vectors<NoCopy>(tensor, c, chunk.begin, done);
  else if (tensor.copy_dtype == DType::bf16)
    update_vectors<bf16_t>(tensor, c, chunk.begin, done);
  else
    update_vectors<f16_t>(tensor, c, chunk.begin, done);
  for (int i = done + threadIdx.x; i < chunk.count; i += kThreads) update_one(tensor, c, chunk.begin + i);
}

Status check(const AdamW& p) {
  constexpr int64_t kMax = (int64_t{1} << 31) - 1;
  if (p.tensors < 0 || p.tensors > kMax || p.groups < 0 || p.groups > kMax)
    return bad_size("adamw: tensors and groups must be from 0 to 2^31 - 1");
  if (p.chunks < 0 || p.chunks > kMax) return bad_size("adamw: chunks must be from 0 to 2^31 - 1");
  return {};
}

// Fills the table, computes the partial norms if the norm is needed, and prepares the step.
Status prepare(const AdamW& p, bool whole_step) {
  Status status = fill_table(p);
  const Table table = table_of(p);
  if (status.code == StatusCode::ok && p.norm != nullptr && p.chunks > 0)
    status = launch(norm_kernel, static_cast<unsigned>(p.chunks), kThreads, 0, p.stream, table,
                    static_cast<int>(p.tensors), p.partial_norms);
  if (status.code != StatusCode::ok) return status;
  return launch(prepare_kernel, 1, kPrepareThreads, 0, p.stream, p, table, whole_step);
}

}  // namespace

Status adamw_step(const AdamW& p) {
  Status status = check(p);
  if (status.code != StatusCode::ok) return status;
  const DeviceGuard guard(p.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  status = prepare(p, true);
  if (status.code != StatusCode::ok || p.chunks == 0) return status;
  return launch(update_kernel, static_cast<unsigned>(p.chunks), kThreads, 0, p.stream, table_of(p),
                static_cast<int>(p.tensors));
}

Status adamw_norm(const AdamW& p) {
  const Status status = check(p);
  if (status.code != StatusCode::ok) return status;
  const DeviceGuard guard(p.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  return prepare(p, false);
}

int64_t adamw_workspace(int64_t tensors, int64_t groups) {
  static_assert(sizeof(Coefficients) % 16 == 0, "whole 16 bytes");
  return coefficients_word(tensors, groups) + tensors * static_cast<int64_t>(sizeof(Coefficients) / 8);
}

}  // namespace cuda
}  // namespace fasttfm
