// Kernels of the entity stream: copies of blocks with padding, the concatenation of rows of tokens and of their
// entities, and dropout_add_layer_norm of rows whose number of columns is not a multiple of 8. The entity stream is
// small compared to the token stream, so the kernels are simple: a warp computes a row, one column per lane at a time.
#include <cstdint>

#include "common/cuda/convert.cuh"
#include "common/cuda/launch.cuh"
#include "common/cuda/normalize.cuh"
#include "common/cuda/reduce.cuh"
#include "common/packed.h"
#include "common/philox.h"
#include "knowledge_block/op.h"

namespace fasttfm {
namespace cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kBlock = 32 * kWarps;

__device__ __forceinline__ float as_float(float x) { return x; }
__device__ __forceinline__ float as_float(bf16_t x) { return widen_word(x.bits, bf16_t{}).x; }
__device__ __forceinline__ float as_float(f16_t x) { return widen_word(x.bits, f16_t{}).x; }

template <class T>
__device__ __forceinline__ T as_stored(float x) {
  if constexpr (sizeof(T) == 4)
    return x;
  else
    return T{static_cast<uint16_t>(narrow_word(x, 0.0f, T{}))};
}

__device__ __forceinline__ float parameter_at(const void* from, DType dtype, int column, float otherwise) {
  if (from == nullptr) return otherwise;
  if (dtype == DType::f32) return static_cast<const float*>(from)[column];
  if (dtype == DType::bf16) return as_float(static_cast<const bf16_t*>(from)[column]);
  return as_float(static_cast<const f16_t*>(from)[column]);
}

// ---- copies ----------------------------------------------------------------------------------------------------------

template <class T>
__device__ __forceinline__ void copy_line(const BlockCopy& copy, int64_t row, int64_t group) {
  const int64_t from = copy.rows == nullptr ? row : copy.rows[row];
  const bool inside = from < copy.from_count && group < copy.from_groups;
  const T* read = static_cast<const T*>(copy.from) + from * copy.from_stride + group * copy.from_group_stride;
  const T* added = static_cast<const T*>(copy.added) + row * copy.added_stride;
  T* to = static_cast<T*>(copy.to) + row * copy.to_stride + group * copy.to_group_stride;
  for (int64_t column = threadIdx.x; column < copy.columns; column += blockDim.x) {
    T value = inside && column < copy.from_columns ? read[column] : T{};
    if (copy.added != nullptr) value = as_stored<T>(as_float(value) + as_float(added[column]));
    to[column] = value;
  }
}

// Grid (lines, copies). A line is the columns of one row and group.
__global__ void __launch_bounds__(kBlock) copy_blocks_kernel(const __grid_constant__ BlockCopies call) {
  const BlockCopy& copy = call.copy[blockIdx.y];
  if (copy.from == nullptr || copy.to == nullptr) return;
  const int64_t lines = copy.count * copy.groups;
  for (int64_t line = blockIdx.x; line < lines; line += gridDim.x) {
    const int64_t row = line / copy.groups, group = line % copy.groups;
    if (copy.dtype == DType::f32)
      copy_line<float>(copy, row, group);
    else if (copy.dtype == DType::bf16)
      copy_line<bf16_t>(copy, row, group);
    else
      copy_line<f16_t>(copy, row, group);
  }
}

// ---- rows of tokens and entities -------------------------------------------------------------------------------------

// One warp per row. All sizes are multiples of 8.
__global__ void __launch_bounds__(kBlock) align_rows_kernel(AlignRows call) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= call.count) return;
  const int lane = threadIdx.x % 32;
  int64_t low = 0, high = call.entity_count;  // finds the first position that is at least the row
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (call.positions[middle] < row)
      low = middle + 1;
    else
      high = middle;
  }
  const bool aligned = call.entities != nullptr && low < call.entity_count && call.positions[low] == row;
  const int width = static_cast<int>(call.width), f = static_cast<int>(call.entity_stride);
  using T = bf16_t;  // any type of 16 bits
  const T* tokens = static_cast<const T*>(call.tokens) + row * width;
  const T* entities = static_cast<const T*>(call.entities) + low * f;
  T* to = static_cast<T*>(call.to) + row * (width + f);
  for (int column = lane * kVector; column < width; column += 32 * kVector)
    store_packed(to + column, load_packed(tokens + column));
  for (int column = lane * kVector; column < f; column += 32 * kVector)
    store_packed(to + width + column, load_packed_if(aligned, entities + column));
}

// ---- dropout_add_layer_norm ------------------------------------------------------------------------------------------

// Dropout of a row. Column c corresponds to byte c % 16 of draw c / 16.
struct ColumnDropout {
  uint64_t seed = 0;
  RowPosition position{};
  uint32_t threshold;
  float scale;

  template <class Params>
  __device__ __forceinline__ ColumnDropout(const Params& p, int64_t row)
      : threshold(p.seed == nullptr ? 0 : static_cast<uint32_t>(p.threshold)), scale(p.scale) {
    if (p.seed == nullptr) return;
    seed = static_cast<uint64_t>(*p.seed);
    position = RowPositions{p.cu_seqlens, p.sequences, p.tokens_per_sequence}(row);
  }

  __device__ __forceinline__ float operator()(float value, int column) const {
    if (threshold == 0) return value;
    const Draw drawn = philox(seed, static_cast<uint32_t>(column) / 16, position.token, position.sequence, 0);
    const int byte = column % 16;
    uint32_t word = drawn.word[0];
    if (byte / 4 == 1) word = drawn.word[1];
    if (byte / 4 == 2) word = drawn.word[2];
    if (byte / 4 == 3) word = drawn.word[3];
    return (word >> (8 * (byte % 4)) & 0xffu) < threshold ? 0.0f : value * scale;
  }
};

template <int COUNT>
__device__ __forceinline__ void warp_sum(float (&value)[COUNT]) {
  group_sum<32, kBlock>(value, nullptr);
}

// COLUMNS: columns per lane.
template <class T, int COLUMNS>
__global__ void __launch_bounds__(kBlock) entity_norm_forward_kernel(EntityNormForward p) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= p.rows) return;
  const int lane = threadIdx.x % 32, columns = static_cast<int>(p.columns);
  const float inverse_c = 1.0f / static_cast<float>(columns);
  const T* x = static_cast<const T*>(p.x) + (p.x_rows == nullptr ? row : p.x_rows[row]) * p.x_stride;
  const T* residual = static_cast<const T*>(p.residual) + row * p.residual_stride;
  const ColumnDropout dropout(p, row);
  float z[COLUMNS], mean[1] = {};
#pragma unroll
  for (int i = 0; i < COLUMNS; ++i) {
    const int column = lane + 32 * i;
    z[i] = 0.0f;
    if (column >= columns) continue;
    const float branch = as_float(x[column]) + parameter_at(p.linear_bias, p.parameter_dtype, column, 0.0f);
    const T rounded = as_stored<T>(as_float(residual[column]) + dropout(branch, column));
    z[i] = as_float(rounded);
    static_cast<T*>(p.z)[row * columns + column] = rounded;
    mean[0] += z[i];
  }
  warp_sum(mean);
  mean[0] *= inverse_c;
  float sums[2] = {};  // of the squared deviations, and of the deviations (zero except for the mean's rounding)
#pragma unroll
  for (int i = 0; i < COLUMNS; ++i) {
    if (lane + 32 * i >= columns) continue;
    z[i] -= mean[0];
    sums[0] = fmaf(z[i], z[i], sums[0]);
    sums[1] += z[i];
  }
  warp_sum(sums);
  const float correction = sums[1] * inverse_c;
  const float rstd = inverse_root<T>(fmaxf(sums[0] * inverse_c - correction * correction, 0.0f) + p.eps);
  if (lane == 0) {
    p.mean[row] = mean[0] + correction;
    p.rstd[row] = rstd;
  }
  T* y = static_cast<T*>(p.y) + row * p.y_stride;
#pragma unroll
  for (int i = 0; i < COLUMNS; ++i) {
    const int column = lane + 32 * i;
    if (column >= columns) continue;
    const float weight = parameter_at(p.weight, p.parameter_dtype, column, 1.0f);
    const float bias = parameter_at(p.bias, p.parameter_dtype, column, 0.0f);
    y[column] = as_stored<T>(fmaf((z[i] - correction) * rstd, weight, bias));
  }
  for (int column = columns + lane; column < p.y_stride; column += 32) y[column] = T{};
}

// Computes the gradient of a row: dz = rstd * (g - mean(g) - xhat * mean(g * xhat)) with g = dy * weight.
template <class T, int COLUMNS>
__device__ __forceinline__ void entity_norm_backward_row(const EntityNormBackward& p, int64_t row,
                                                         float (&sums)[3][COLUMNS]) {
  const int lane = threadIdx.x % 32, columns = static_cast<int>(p.columns);
  const float inverse_c = 1.0f / static_cast<float>(columns), mean = p.mean[row], rstd = p.rstd[row];
  const T* more = p.more == nullptr ? nullptr : static_cast<const T*>(p.more) + p.more_rows[row] * p.more_stride;
  const T* dy = p.dy == nullptr ? nullptr : static_cast<const T*>(p.dy) + row * p.dy_stride;
  const T* z = static_cast<const T*>(p.z) + row * columns;
  const ColumnDropout dropout(p, row);
  float g[COLUMNS], xhat[COLUMNS], totals[2] = {};
#pragma unroll
  for (int i = 0; i < COLUMNS; ++i) {
    const int column = lane + 32 * i;
    g[i] = xhat[i] = 0.0f;
    if (column >= columns) continue;
    float gradient = dy == nullptr ? 0.0f : as_float(dy[column]);
    if (more != nullptr) gradient += as_float(more[column]);
    xhat[i] = (as_float(z[column]) - mean) * rstd;
    g[i] = gradient * parameter_at(p.weight, p.weight_dtype, column, 1.0f);
    sums[0][i] = fmaf(gradient, xhat[i], sums[0][i]);
    sums[1][i] += gradient;
    totals[0] += g[i];
    totals[1] = fmaf(g[i], xhat[i], totals[1]);
  }
  warp_sum(totals);
  T* dresidual = static_cast<T*>(p.dresidual) + row * p.dx_stride;
  T* dx = p.dx == nullptr ? nullptr : static_cast<T*>(p.dx) + row * p.dx_stride;
#pragma unroll
  for (int i = 0; i < COLUMNS; ++i) {
    const int column = lane + 32 * i;
    if (column >= columns) continue;
    const float out = rstd * (g[i] - totals[0] * inverse_c - xhat[i] * totals[1] * inverse_c);
    const float branch = dropout(out, column);
    dresidual[column] = as_stored<T>(out);
    if (dx != nullptr) dx[column] = as_stored<T>(branch);
    sums[2][i] += branch;
  }
  for (int column = columns + lane; column < p.dx_stride; column += 32) {
    dresidual[column] = T{};
    if (dx != nullptr) dx[column] = T{};
  }
}

template <class T, int COLUMNS>
__global__ void __launch_bounds__(kBlock, 1) entity_norm_backward_kernel(EntityNormBackward p) {
  __shared__ float shares[kWarps][32 * COLUMNS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, columns = static_cast<int>(p.columns);
  float sums[3][COLUMNS] = {};  // dweight, dbias, dlinear_bias
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + warp; row < p.rows;
       row += static_cast<int64_t>(gridDim.x) * kWarps)
    entity_norm_backward_row<T, COLUMNS>(p, row, sums);
#pragma unroll
  for (int kind = 0; kind < 3; ++kind) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) shares[warp][lane + 32 * i] = sums[kind][i];
    __syncthreads();
    for (int column = threadIdx.x; column < columns; column += kBlock) {
      float total = 0.0f;
#pragma unroll
      for (int part = 0; part < kWarps; ++part) total += shares[part][column];
      p.workspace[(static_cast<int64_t>(kind) * gridDim.x + blockIdx.x) * columns + column] = total;
    }
  }
}

template <class Body>
Status for_entity_types(DType dtype, int64_t columns, Body body) {
  const auto by_columns = [&](auto type) {
    if (columns <= 128) return body(type, std::integral_constant<int, 4>{});
    if (columns <= 256) return body(type, std::integral_constant<int, 8>{});
    if (columns <= kMaxEntityWidth) return body(type, std::integral_constant<int, 16>{});
    return bad_size("knowledge_block: entities have up to 512 columns");
  };
  if (dtype == DType::bf16) return by_columns(bf16_t{});
  if (dtype == DType::f16) return by_columns(f16_t{});
  return unknown_dtype();
}

unsigned blocks_of(int64_t rows) { return static_cast<unsigned>((rows + kWarps - 1) / kWarps); }

}  // namespace

Status copy_blocks(const BlockCopies& call) {
  int64_t lines = 1;
  for (int i = 0; i < call.count; ++i)
    if (call.copy[i].from != nullptr && call.copy[i].to != nullptr && call.copy[i].count * call.copy[i].groups > lines)
      lines = call.copy[i].count * call.copy[i].groups;
  if (call.count == 0) return {};
  const dim3 grid(static_cast<unsigned>(lines < 4096 ? lines : 4096), static_cast<unsigned>(call.count));
  return launch(copy_blocks_kernel, grid, 128, 0, call.stream, call);
}

Status align_rows(const AlignRows& call) {
  return launch(align_rows_kernel, blocks_of(call.count), kBlock, 0, call.stream, call);
}

Status entity_norm_forward(const EntityNormForward& call) {
  return for_entity_types(call.dtype, call.columns, [&](auto type, auto count) {
    constexpr int kColumns = decltype(count)::value;
    return launch(entity_norm_forward_kernel<decltype(type), kColumns>, blocks_of(call.rows), kBlock, 0, call.stream,
                  call);
  });
}

Status entity_norm_backward(const EntityNormBackward& call) {
  const unsigned row_blocks = blocks_of(call.rows), most = static_cast<unsigned>(call.blocks);
  const unsigned blocks = row_blocks < most ? row_blocks : most;
  const Status status = for_entity_types(call.dtype, call.columns, [&](auto type, auto count) {
    constexpr int kColumns = decltype(count)::value;
    return launch(entity_norm_backward_kernel<decltype(type), kColumns>, blocks, kBlock, 0, call.stream, call);
  });
  if (status.code != StatusCode::ok) return status;
  return sum_parts(call.workspace, {call.dweight, call.weight_dtype}, {call.dbias, call.bias_dtype},
                   static_cast<int>(blocks), call.columns, call.stream, {call.dlinear_bias, call.linear_bias_dtype});
}

}  // namespace cuda
}  // namespace fasttfm
