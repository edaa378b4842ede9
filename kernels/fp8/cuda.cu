// Casts to FP8 on Hopper. The specification is reference.py.
//
// A block computes a tile of 128 rows and 128 columns, of which a thread computes 8 x 8 elements. A thread reads 16
// bytes and writes 8 FP8 numbers of each of its rows, and transposes its elements in registers. The columns of the tile
// are staged in shared memory, so that 8 lanes write 128 bytes of a column, 16 bytes each.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "common/count.h"
#include "common/cuda/activation.cuh"
#include "common/cuda/convert.cuh"
#include "common/cuda/fp8.cuh"
#include "common/cuda/hopper.cuh"
#include "common/cuda/launch.cuh"
#include "common/cuda/reduce.cuh"
#include "common/cuda/rows.cuh"
#include "common/packed.h"
#include "common/philox.h"
#include "fp8/op.h"

namespace fasttfm {
namespace cuda {
namespace {

constexpr int kTile = 128;  // rows and columns
constexpr int kBlock = 256;
constexpr int kWarps = kBlock / 32;
constexpr int kTransposeBlocks = 6;       // per SM
constexpr int kGroups = kTile / kVector;  // groups of 8 columns, or of 8 rows, in a tile
static_assert(kGroups * kGroups == kBlock, "a thread has 8 x 8 elements");

// The activation's forward: a warp computes 256 columns, a block 32 rows.
constexpr int kStripeColumns = 32 * kVector;
constexpr int kStripeRows = 4;  // rows per thread

template <class T>
constexpr bool kExact = sizeof(T) == 4;

// ---- transposition --------------------------------------------------------------------------------------------------

// A tile's columns in shared memory, 128 bytes each: the 8 bytes of row group r of column c are in chunk
// r ^ (c / 8), so that neither writing nor reading has bank conflicts.
struct alignas(16) Columns {
  uint8_t byte[kTile * kTile];

  // Writes the thread's columns of 4 of its 8 rows, the first or second `half`.
  __device__ __forceinline__ void put(const uint2 (&row)[4], int column_group, int row_group, int half) {
    uint32_t column[2][4];
    transpose_rows(row, column);
    uint8_t* to = byte + column_group * kVector * kTile + (row_group ^ column_group) * 8 + 4 * half;
#pragma unroll
    for (int i = 0; i < kVector; ++i) *reinterpret_cast<uint32_t*>(to + i * kTile) = column[i / 4][i % 4];
  }

  // Writes the tile's columns to [C, P], after put() of all threads and a barrier.
  __device__ __forceinline__ void store(void* to, int64_t first_column, int64_t first_row, int64_t columns,
                                        int64_t padded) const {
#pragma unroll
    for (int i = 0; i < kTile * kTile / 16 / kBlock; ++i) {
      const int index = i * kBlock + static_cast<int>(threadIdx.x);
      const int column = index / (kTile / 16), part = index % (kTile / 16), group = column / kVector;
      uint4 value = *reinterpret_cast<const uint4*>(byte + column * kTile + ((2 * part) ^ (group & ~1)) * 8);
      if (group & 1) value = make_uint4(value.z, value.w, value.x, value.y);
      if (first_column + column < columns && first_row + part * 16 < padded)
        *reinterpret_cast<uint4*>(static_cast<uint8_t*>(to) + (first_column + column) * padded + first_row +
                                  part * 16) = value;
    }
  }
};

// The position of a thread's elements.
struct Place {
  int column_group, row_group;
  int64_t first_column, first_row;  // of the tile
  int64_t column, row;

  __device__ __forceinline__ Place(int64_t column_tile, int64_t row_tile)
      : column_group(threadIdx.x % kGroups),
        row_group(threadIdx.x / kGroups),
        first_column(column_tile * kTile),
        first_row(row_tile * kTile),
        column(first_column + column_group * kVector),
        row(first_row + row_group * kVector) {}
};

__device__ __forceinline__ void store_rows(void* to, const Place& at, int r, int64_t rows, int64_t columns,
                                           uint2 value) {
  if (at.column < columns && at.row + r < rows)
    *reinterpret_cast<uint2*>(static_cast<uint8_t*>(to) + (at.row + r) * columns + at.column) = value;
}

// ---- kernels --------------------------------------------------------------------------------------------------------

// Dropout of a thread's 8 columns, one row after another.
struct DroppedRows {
  const Fp8Cast& p;
  PhiloxKeys keys;
  RowPosition position;
  uint32_t length;  // of the sequence
  uint32_t limit;
  uint32_t draw, half;

  __device__ __forceinline__ DroppedRows(const Fp8Cast& p, const Place& at)
      : p(p),
        keys(static_cast<uint64_t>(*p.seed)),
        position(RowPositions{p.cu_seqlens, p.sequences, 1}(at.row < p.rows ? at.row : p.rows - 1)),
        length(length_of(position.sequence)),
        limit((static_cast<uint32_t>(p.threshold) << 24) - 1),
        draw(static_cast<uint32_t>(at.column / 16)),
        half(at.column_group % 2) {}

  __device__ __forceinline__ uint32_t length_of(uint32_t sequence) const {
    const int rows = packed_size(p.rows);
    return static_cast<uint32_t>(packed_span(p.cu_seqlens, sequence, rows, rows).length);
  }

  // Sets the dropped elements of this row to 0, scales the others, and advances to the next row.
  __device__ __forceinline__ void apply(float (&value)[kVector]) {
    const Draw drawn = philox_rounds(keys, 0, {{draw, position.token, position.sequence, 0}});
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const uint32_t word = half ? drawn.word[2 + i / 4] : drawn.word[i / 4];
      value[i] = (word << (24 - 8 * (i % 4))) > limit ? value[i] * p.kept_scale : 0.0f;
    }
    ++position.token;
    while (position.token >= length && position.sequence + 1 < p.sequences) {
      length = length_of(++position.sequence);
      position.token = 0;
    }
  }
};

struct Nothing {
  __device__ __forceinline__ Nothing(const Fp8Cast&, const Place&) {}
};

// One tile of a matrix.
template <class T, bool E5M2, bool DROPS = false>
__device__ __forceinline__ void cast_tile(const Fp8Cast& p, const Place& at) {
  __shared__ Columns transposed;
  __shared__ uint32_t magnitude[kWarps];
  const T* x = static_cast<const T*>(p.x) + at.row * p.x_stride + at.column;
  Packed<T> packed[kVector];
#pragma unroll
  for (int r = 0; r < kVector; ++r)
    packed[r] = load_packed_if(at.column < p.columns && at.row + r < p.rows, x + r * p.x_stride);
  const float scale = *p.scale;
  float most = 0.0f;
  [[maybe_unused]] std::conditional_t<DROPS, DroppedRows, Nothing> dropped(p, at);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint2 row[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      float value[kVector];
      widen(packed[4 * half + r], value);
      if constexpr (DROPS) dropped.apply(value);
      most = largest(value, most);
      row[r] = round_vector<E5M2>(value, scale);
      if (p.as_rows != nullptr) store_rows(p.as_rows, at, 4 * half + r, p.rows, p.columns, row[r]);
    }
    transposed.put(row, at.column_group, at.row_group, half);
  }
  const uint32_t bits = __reduce_max_sync(0xffffffffu, __float_as_uint(most));
  if (threadIdx.x % 32 == 0) magnitude[threadIdx.x / 32] = bits;
  __syncthreads();
  if (p.as_columns != nullptr) transposed.store(p.as_columns, at.first_column, at.first_row, p.columns, p.padded);
  if (threadIdx.x < kWarps) {
    const uint32_t whole = __reduce_max_sync((1u << kWarps) - 1, magnitude[threadIdx.x]);
    if (threadIdx.x == 0) record(p.amax, whole);
  }
}

// Grid (column tiles, row tiles).
template <class T, bool E5M2, bool DROPS>
__global__ void __launch_bounds__(kBlock, sizeof(T) == 4 || DROPS ? 2 : 3) cast_kernel(Fp8Cast p) {
  cast_tile<T, E5M2, DROPS>(p, Place(blockIdx.x, blockIdx.y));
}

// Blocks take one tile after another, so that few blocks are started where there is nothing to do.
__global__ void __launch_bounds__(kBlock, kTransposeBlocks) transpose_kernel(Fp8Transpose p) {
  __shared__ Columns transposed;
  const int rows = packed_size(p.rows);
  const auto boundary = [&](int64_t i) { return packed_first(p.cu_seqlens, i, rows); };
  bool needed = threadIdx.x == 0 && (boundary(0) != 0 || boundary(p.sequences) != rows);
  for (int64_t i = threadIdx.x; i <= p.sequences; i += kBlock) needed |= boundary(i) % 16 != 0;
  if (!__syncthreads_or(needed)) return;
  const int64_t across = (p.columns + kTile - 1) / kTile, count = across * ((p.rows + kTile - 1) / kTile);
  for (int64_t tile = blockIdx.x; tile < count; tile += gridDim.x) {
    const Place at(tile % across, tile / across);
    const auto* from = static_cast<const uint8_t*>(p.as_rows) + at.row * p.columns + at.column;
    uint2 row[2][4];
#pragma unroll
    for (int r = 0; r < kVector; ++r) {
      const bool loads = at.column < p.columns && at.row + r < p.rows;
      row[r / 4][r % 4] = loads ? *reinterpret_cast<const uint2*>(from + r * p.columns) : make_uint2(0, 0);
    }
    transposed.put(row[0], at.column_group, at.row_group, 0);
    transposed.put(row[1], at.column_group, at.row_group, 1);
    __syncthreads();
    transposed.store(p.as_columns, at.first_column, at.first_row, p.columns, p.padded);
    __syncthreads();
  }
}

// Grid (tiles of all matrices).
template <bool E5M2>
__global__ void __launch_bounds__(kBlock, 2) cast_many_kernel(Fp8CastMany many) {
  const auto* rows = reinterpret_cast<const Fp8CastRow*>(many.table);
  int64_t low = 0, high = many.count;  // finds the last matrix whose first tile is not after this block's
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (rows[middle].first_tile <= blockIdx.x ? low : high) = middle;
  }
  const Fp8CastRow matrix = rows[low];
  const int64_t tile = blockIdx.x - matrix.first_tile, across = (matrix.columns + kTile - 1) / kTile;
  Fp8Cast p{};
  p.x = matrix.x;
  p.scale = matrix.scale;
  p.amax = matrix.amax;
  p.as_rows = matrix.as_rows;
  p.as_columns = matrix.as_columns;
  p.rows = p.padded = matrix.rows;
  p.columns = p.x_stride = matrix.columns;
  cast_tile<float, E5M2>(p, Place(tile % across, tile / across));
}

// Grid (tiles of rows * stripes of columns).
template <class T, bool E5M2, Activation A>
__global__ void __launch_bounds__(kBlock) gelu_forward_kernel(Fp8GeluForward p, unsigned stripes) {
  __shared__ uint32_t magnitude[kWarps];
  const int64_t column = static_cast<int64_t>(blockIdx.x % stripes) * kStripeColumns + threadIdx.x % 32 * kVector;
  const int64_t first = static_cast<int64_t>(blockIdx.x / stripes) * (kWarps * kStripeRows) + threadIdx.x / 32;
  const T* h = static_cast<const T*>(p.h) + first * p.columns + column;
  uint8_t* to = static_cast<uint8_t*>(p.as_rows) + first * p.columns + column;
  const int64_t step = kWarps * p.columns;
  float most = 0.0f;
  if (column < p.columns) {
    Packed<T> packed[kStripeRows];
#pragma unroll
    for (int r = 0; r < kStripeRows; ++r) packed[r] = load_packed_if(first + r * kWarps < p.rows, h + r * step);
    float bias[kVector];
    load_parameter(p.bias, p.bias_dtype, static_cast<int>(column), 0.0f, bias);
    const float scale = *p.scale;
#pragma unroll
    for (int r = 0; r < kStripeRows; ++r) {
      if (first + r * kWarps >= p.rows) break;
      float value[kVector];
      widen(packed[r], value);
#pragma unroll
      for (int i = 0; i < kVector; ++i) value[i] = activated<A, kExact<T>>(value[i] + bias[i]).value;
      most = largest(value, most);
      *reinterpret_cast<uint2*>(to + r * step) = round_vector<E5M2>(value, scale);
    }
  }
  const uint32_t bits = __reduce_max_sync(0xffffffffu, __float_as_uint(most));
  if (threadIdx.x % 32 == 0) magnitude[threadIdx.x / 32] = bits;
  __syncthreads();
  if (threadIdx.x < kWarps) {
    const uint32_t whole = __reduce_max_sync((1u << kWarps) - 1, magnitude[threadIdx.x]);
    if (threadIdx.x == 0) record(p.amax, whole);
  }
}

// Grid (column tiles, row tiles).
template <class T, bool E5M2, Activation A>
__global__ void __launch_bounds__(kBlock, std::is_same_v<T, bf16_t> ? 3 : 2) gelu_backward_kernel(Fp8GeluBackward p) {
  __shared__ Columns a_transposed, transposed;
  __shared__ __align__(16) float sums[kGroups][kTile];
  __shared__ uint32_t magnitude[kWarps];
  const Place at(blockIdx.x, blockIdx.y);
  const int64_t offset = at.row * p.columns + at.column;
  const T* h = static_cast<const T*>(p.h) + offset;
  const T* da = static_cast<const T*>(p.da) + offset;
  const bool inside = at.column < p.columns;
  const float scale = *p.scale, a_scale = *p.a_scale;
  float bias[kVector] = {}, sum[kVector] = {};
  if (inside) load_parameter(p.bias, p.bias_dtype, static_cast<int>(at.column), 0.0f, bias);
  float most = 0.0f;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    Packed<T> value_packed[4], gradient_packed[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const bool loads = inside && at.row + 4 * half + r < p.rows;
      value_packed[r] = load_packed_if(loads, h + (4 * half + r) * p.columns);
      gradient_packed[r] = load_packed_if(loads, da + (4 * half + r) * p.columns);
    }
    uint2 again[4], gradient[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      float value[kVector], out[kVector];
      widen(value_packed[r], value);
      widen(gradient_packed[r], out);
      const float own_scale = at.row + 4 * half + r < p.rows ? a_scale : 0.0f;  // zeros after the last row
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const auto at_u = activated<A, kExact<T>>(value[i] + bias[i]);
        value[i] = at_u.value;
        out[i] *= at_u.derivative;
        sum[i] += out[i];
      }
      most = largest(out, most);
      again[r] = round_vector<false>(value, own_scale);
      gradient[r] = round_vector<E5M2>(out, scale);
      store_rows(p.as_rows, at, 4 * half + r, p.rows, p.columns, gradient[r]);
    }
    a_transposed.put(again, at.column_group, at.row_group, half);
    transposed.put(gradient, at.column_group, at.row_group, half);
  }
  const uint32_t bits = __reduce_max_sync(0xffffffffu, __float_as_uint(most));
  if (threadIdx.x % 32 == 0) magnitude[threadIdx.x / 32] = bits;
  store_packed(&sums[at.row_group][at.column_group * kVector], narrow<float>(sum));
  __syncthreads();
  a_transposed.store(p.a_columns, at.first_column, at.first_row, p.columns, p.padded);
  transposed.store(p.as_columns, at.first_column, at.first_row, p.columns, p.padded);
  if (p.dbias != nullptr && threadIdx.x < kTile && at.first_column + threadIdx.x < p.columns) {
    float total = 0.0f;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) total += sums[group][threadIdx.x];
    p.workspace[static_cast<int64_t>(blockIdx.y) * p.columns + at.first_column + threadIdx.x] = total;
  }
  if (threadIdx.x < kWarps) {
    const uint32_t whole = __reduce_max_sync((1u << kWarps) - 1, magnitude[threadIdx.x]);
    if (threadIdx.x == 0) record(p.amax, whole);
  }
}

// ---- launches -------------------------------------------------------------------------------------------------------

int64_t tiles(int64_t size) { return (size + kTile - 1) / kTile; }

Status check(int64_t rows, int64_t columns, int64_t padded) {
  if (columns % 16 != 0 || padded % 16 != 0 || padded < rows) return bad_size("fp8: sizes must be multiples of 16");
  if (tiles(rows) > 65535) return bad_size("fp8: at most 65535 * 128 rows");
  return {};
}

dim3 grid_of(int64_t rows, int64_t columns) {
  return dim3(static_cast<unsigned>(tiles(columns)), static_cast<unsigned>(tiles(rows)));
}

// Calls body(T{}, E5M2) with both as compile-time constants.
template <class Body>
Status with_types(DType dtype, int e5m2, Body body) {
  return with_dtype(dtype, unknown_dtype(), [&](auto element) {
    return e5m2 ? body(element, std::true_type{}) : body(element, std::false_type{});
  });
}

}  // namespace

int64_t fp8_gelu_workspace(int64_t rows, int64_t columns) { return (baseline::Count(tiles(rows)) * columns).value; }

Status fp8_cast(const Fp8Cast& p) {
  if (!rows_aligned(p.x, p.x_stride)) return misaligned_rows();
  if (const Status status = check(p.rows, p.columns, p.padded); status.code != StatusCode::ok) return status;
  if (p.rows == 0) return {};
  const DeviceGuard guard(p.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  return with_types(p.dtype, p.e5m2, [&](auto element, auto e5m2) {
    using T = decltype(element);
    constexpr bool kE5M2 = decltype(e5m2)::value;
    return launch(p.seed == nullptr ? cast_kernel<T, kE5M2, false> : cast_kernel<T, kE5M2, true>,
                  grid_of(p.rows, p.columns), kBlock, 0, p.stream, p);
  });
}

Status fp8_transpose(const Fp8Transpose& p) {
  if (!rows_aligned(p.as_rows, p.columns / 2)) return misaligned_rows();
  if (const Status status = check(p.rows, p.columns, p.padded); status.code != StatusCode::ok) return status;
  if (p.rows == 0) return {};
  int processors = 0;
  if (const Status status = count_multiprocessors(p.device, &processors); status.code != StatusCode::ok) return status;
  const DeviceGuard guard(p.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  const int64_t blocks = std::min<int64_t>(tiles(p.rows) * tiles(p.columns), processors * kTransposeBlocks);
  return launch(transpose_kernel, static_cast<unsigned>(blocks), kBlock, 0, p.stream, p);
}

int64_t fp8_cast_tiles(int64_t rows, int64_t columns) { return tiles(rows) * tiles(columns); }

Status fp8_cast_many(const Fp8CastMany& p) {
  if (p.tiles > INT32_MAX) return bad_size("fp8: the matrices are too large for one launch");
  if (p.tiles == 0) return {};
  const DeviceGuard guard(p.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  return launch(p.e5m2 ? cast_many_kernel<true> : cast_many_kernel<false>, static_cast<unsigned>(p.tiles), kBlock, 0,
                p.stream, p);
}

Status fp8_gelu_forward(const Fp8GeluForward& p) {
  if (!rows_aligned(p.h, p.columns) || !rows_aligned(p.bias, 0)) return misaligned_rows();
  if (const Status status = check(0, p.columns, 0); status.code != StatusCode::ok) return status;
  if (p.rows == 0) return {};
  const DeviceGuard guard(p.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  const auto stripes = static_cast<unsigned>((p.columns + kStripeColumns - 1) / kStripeColumns);
  const int64_t blocks = (p.rows + kWarps * kStripeRows - 1) / (kWarps * kStripeRows) * stripes;
  if (blocks > INT32_MAX) return bad_size("fp8: h is too large for one launch");
  return with_types(p.dtype, p.e5m2, [&](auto element, auto e5m2) {
    return with_activation(p.activation, [&](auto activation) {
      return launch(gelu_forward_kernel<decltype(element), decltype(e5m2)::value, decltype(activation)::value>,
                    static_cast<unsigned>(blocks), kBlock, 0, p.stream, p, stripes);
    });
  });
}

Status fp8_gelu_backward(const Fp8GeluBackward& p) {
  if (!rows_aligned(p.h, p.columns) || !rows_aligned(p.da, p.columns) || !rows_aligned(p.bias, 0))
    return misaligned_rows();
  if (const Status status = check(p.rows, p.columns, p.padded); status.code != StatusCode::ok) return status;
  if (p.rows == 0) return {};
  const DeviceGuard guard(p.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  return with_types(p.dtype, p.e5m2, [&](auto element, auto e5m2) {
    return with_activation(p.activation, [&](auto activation) {
      using T = decltype(element);
      const Status status = launch(gelu_backward_kernel<T, decltype(e5m2)::value, decltype(activation)::value>,
                                   grid_of(p.rows, p.columns), kBlock, 0, p.stream, p);
      if (status.code != StatusCode::ok || p.dbias == nullptr) return status;
      return sum_parts(p.workspace, {p.dbias, p.bias_dtype}, {}, static_cast<int>(tiles(p.rows)), p.columns, p.stream);
    });
  });
}

}  // namespace cuda
}  // namespace fasttfm
