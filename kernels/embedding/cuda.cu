// Embedding on NVIDIA GPUs; the formulas are in reference.py. The backward is for batches of few tokens, which are
// bound by launch latency.
//
// A block processes a token's row; in the forward of many tokens, a warp processes a row of up to 1,024 columns. The
// backward writes dx, the gradient of every token's sum of table rows, to the workspace. A table's gradient is computed
// without sorting: the block of a token returns if an earlier token has the same row of the table; otherwise it adds dx
// of all tokens that have this row, in order. Every token is compared with all others, so the number of tokens is
// limited.
#include <cstdint>

#include "common/count.h"
#include "common/cuda/dropout.cuh"
#include "common/cuda/launch.cuh"
#include "common/cuda/normalize.cuh"
#include "common/cuda/rows.cuh"
#include "embedding/op.h"

namespace fasttfm {
namespace cuda {
namespace {

constexpr int kBlock = 128;

// One token's rows of the tables. An index outside of its table is read as 0.
struct TokenIndices {
  int64_t word = 0, position = 0, segment = 0;
  bool bad_word = false, bad_position = false, bad_segment = false;

  __device__ __forceinline__ TokenIndices(const EmbeddingGpuRows& p, int64_t row) {
    word = inside(p.ids[row], p.word_rows, bad_word);
    if (p.position_table != nullptr) {
      const int64_t position_id = p.position_ids != nullptr ? p.position_ids[row] : int64_t{positions_of(p)(row).token};
      position = inside(position_id, p.position_rows, bad_position);
    }
    if (p.segment_table != nullptr && p.segment_ids != nullptr)
      segment = inside(p.segment_ids[row], p.segment_rows, bad_segment);
  }

  __device__ __forceinline__ bool bad() const { return bad_word || bad_position || bad_segment; }

  static __device__ __forceinline__ RowPositions positions_of(const EmbeddingGpuRows& p) {
    return {p.cu_seqlens, p.sequences, p.tokens_per_sequence};
  }

 private:
  static __device__ __forceinline__ int64_t inside(int64_t index, int64_t limit, bool& bad) {
    bad = index < 0 || index >= limit;
    return bad ? 0 : index;
  }
};

// Records the first row of an argument with an invalid index, in the format of common/index_errors.py.
__device__ __forceinline__ void note(bool bad, int64_t* errors, int argument, int64_t row, int64_t index,
                                     int64_t limit) {
  if (!bad) return;
  const int64_t saturated = index < INT32_MIN ? INT32_MIN : index > INT32_MAX ? INT32_MAX : index;
  const auto word = static_cast<long long>((row << 32) | (saturated & 0xffffffffll));
  atomicMin(reinterpret_cast<long long*>(errors) + argument, word);
  errors[kEmbeddingTables + argument] = limit;
}

// Computes the sum of a token's table rows, with zeros past their end.
template <class Table, class S>
__device__ __forceinline__ void look_up(const EmbeddingGpuRows& p, const TokenIndices& at,
                                        float (&x)[S::kVectors][kVector]) {
  const int columns = static_cast<int>(p.columns);
  const Table* const row[kEmbeddingTables] = {
      static_cast<const Table*>(p.word_table) + at.word * columns,
      static_cast<const Table*>(p.position_table) + at.position * columns,
      static_cast<const Table*>(p.segment_table) + at.segment * columns,
  };
  const bool present[kEmbeddingTables] = {true, p.position_table != nullptr, p.segment_table != nullptr};
#pragma unroll
  for (int v = 0; v < S::kVectors; ++v) {
    const bool inside = in_row<S>(v, columns);
    Packed<Table> packed[kEmbeddingTables];
#pragma unroll
    for (int t = 0; t < kEmbeddingTables; ++t)
      packed[t] = load_packed_if(inside && present[t], row[t] + column_of<S>(v));
    widen(packed[0], x[v]);
#pragma unroll
    for (int t = 1; t < kEmbeddingTables; ++t) {
      float added[kVector];
      widen(packed[t], added);
#pragma unroll
      for (int i = 0; i < kVector; ++i) x[v][i] += added[i];
    }
  }
}

// A row of parameters, or constants if there are none, in a group's registers.
template <class S>
struct ParameterRow {
  float value[S::kVectors][kVector];

  __device__ __forceinline__ ParameterRow(const void* from, DType dtype, int columns, float fallback) {
#pragma unroll
    for (int v = 0; v < S::kVectors; ++v)
      if (in_row<S>(v, columns)) load_parameter(from, dtype, column_of<S>(v), fallback, value[v]);
  }
};

// Replaces a row by its normalized values and writes its mean and rstd.
template <class S>
__device__ __forceinline__ void normalize(const EmbeddingGpuForward& p, int64_t row, float (&x)[S::kVectors][kVector]) {
  __shared__ float scratch[2][2 * S::kBlock / 32];
  const int columns = static_cast<int>(p.columns);
  const float inverse_c = 1.0f / static_cast<float>(columns);
  // loaded before the sums, which take as long
  const ParameterRow<S> weight(p.weight, p.weight_dtype, columns, 1.0f), bias(p.bias, p.bias_dtype, columns, 0.0f);
  float mean[1] = {};
#pragma unroll
  for (int v = 0; v < S::kVectors; ++v)
#pragma unroll
    for (int i = 0; i < kVector; ++i) mean[0] += x[v][i];
  group_sum<S::kGroup, S::kBlock>(mean, scratch[0]);
  mean[0] *= inverse_c;
  float sums[2] = {};  // of the squared deviations, and of the deviations (zero except for the mean's rounding)
#pragma unroll
  for (int v = 0; v < S::kVectors; ++v) {
    const float center = in_row<S>(v, columns) ? mean[0] : 0.0f;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      x[v][i] -= center;
      sums[0] = fmaf(x[v][i], x[v][i], sums[0]);
      sums[1] += x[v][i];
    }
  }
  group_sum<S::kGroup, S::kBlock>(sums, scratch[1]);
  const float correction = sums[1] * inverse_c;
  const float rstd = inverse_root<float>(fmaxf(sums[0] * inverse_c - correction * correction, 0.0f) + p.eps);
  if (threadIdx.x % S::kGroup == 0) {
    p.statistics[row] = mean[0] + correction;
    p.statistics[p.rows + row] = rstd;
  }
#pragma unroll
  for (int v = 0; v < S::kVectors; ++v) {
    if (!in_row<S>(v, columns)) continue;
#pragma unroll
    for (int i = 0; i < kVector; ++i)
      x[v][i] = fmaf(fmaf(x[v][i], rstd, -correction * rstd), weight.value[v][i], bias.value[v][i]);
  }
}

// Records a token's invalid indices.
__device__ __forceinline__ void note_bad(const EmbeddingGpuForward& p, const TokenIndices& at, int64_t row) {
  note(at.bad_word, p.errors, 0, row, p.ids[row], p.word_rows);
  const int64_t position = p.position_ids != nullptr ? p.position_ids[row] : TokenIndices::positions_of(p)(row).token;
  note(at.bad_position, p.errors, 1, row, position, p.position_rows);
  if (at.bad_segment) note(true, p.errors, 2, row, p.segment_ids[row], p.segment_rows);
}

template <class Table, class Out, class S>
__global__ void __launch_bounds__(S::kBlock) forward_kernel(EmbeddingGpuForward p) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * S::kGroups + group_of_thread<S>();
  if (row >= p.rows) return;  // whole groups return together
  const TokenIndices at(p, row);
  float x[S::kVectors][kVector];
  look_up<Table, S>(p, at, x);
  if (at.bad()) {
    if (threadIdx.x % S::kGroup == 0) note_bad(p, at, row);
#pragma unroll
    for (int v = 0; v < S::kVectors; ++v)
#pragma unroll
      for (int i = 0; i < kVector; ++i) x[v][i] = __int_as_float(0x7fffffff);
  }
  if (p.layer_norm) normalize<S>(p, row, x);
  const Dropout dropout(p);
  RowDraws<S> draws;
  dropout.draw(row, draws);
  Out* y = static_cast<Out*>(p.y) + row * p.columns;
#pragma unroll
  for (int v = 0; v < S::kVectors; ++v) {
    if (p.seed != nullptr) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) x[v][i] = draws.kept(v, i, dropout.limit) ? x[v][i] * dropout.scale : 0.0f;
    }
    store_packed_if(in_row<S>(v, static_cast<int>(p.columns)), y + column_of<S>(v), narrow<Out>(x[v]));
  }
}

// ---- backward -------------------------------------------------------------------------------------------------------

// A block processes every gridDim.x-th row. It writes dx, the keys (the row of each table to which a token's dx is
// added, or -1), and its partial sums over rows.
template <class Table, class Out, class S>
__global__ void __launch_bounds__(S::kBlock) rows_kernel(EmbeddingGpuBackward p, EmbeddingGpuWorkspace workspace) {
  __shared__ float scratch[2][3 * S::kBlock / 32];
  const int columns = static_cast<int>(p.columns);
  const float inverse_c = 1.0f / static_cast<float>(columns);
  const Dropout dropout(p);
  float weight[S::kVectors][kVector];
#pragma unroll
  for (int v = 0; v < S::kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) weight[v][i] = 0.0f;
    if (in_row<S>(v, columns)) load_parameter(p.weight, p.weight_dtype, column_of<S>(v), 1.0f, weight[v]);
  }
  float dweight[S::kVectors][kVector] = {}, dbias[S::kVectors][kVector] = {};
  int round = 0;
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x, round ^= 1) {
    const TokenIndices at(p, row);
    if (threadIdx.x == 0) {
      const bool word = !at.bad_word && at.word != p.padding_index;
      workspace.keys[row] = word ? static_cast<int32_t>(at.word) : -1;
      workspace.keys[p.rows + row] = at.bad_position ? -1 : static_cast<int32_t>(at.position);
      workspace.keys[2 * p.rows + row] = at.bad_segment ? -1 : static_cast<int32_t>(at.segment);
    }
    RowDraws<S> draws;
    dropout.draw(row, draws);
    const Out* dy = static_cast<const Out*>(p.dy) + row * columns;
    float h[S::kVectors][kVector];
#pragma unroll
    for (int v = 0; v < S::kVectors; ++v) {
      widen(load_packed_if(in_row<S>(v, columns), dy + column_of<S>(v)), h[v]);
      if (p.seed != nullptr) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) h[v][i] = draws.kept(v, i, dropout.limit) ? h[v][i] * dropout.scale : 0.0f;
      }
    }
    float* dx = workspace.dx + row * columns;
    if (p.layer_norm) {
      float x[S::kVectors][kVector];
      look_up<Table, S>(p, at, x);
      const float mean = p.statistics[row], rstd = p.statistics[p.rows + row];
      float sums[3] = {};  // of the deviations (zero except for rounding), of g = h * weight and of their product
#pragma unroll
      for (int v = 0; v < S::kVectors; ++v) {
        const float center = in_row<S>(v, columns) ? mean : 0.0f;
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          x[v][i] -= center;
          const float g = __fmul_rn(h[v][i], weight[v][i]);
          sums[0] += x[v][i];
          sums[1] += g;
          sums[2] = fmaf(g, x[v][i], sums[2]);
        }
      }
      group_sum<S::kGroup, S::kBlock>(sums, scratch[round]);
      const float correction = sums[0] * inverse_c, mean_g = sums[1] * inverse_c;
      const float slope = rstd * (rstd * (rstd * (sums[2] * inverse_c - correction * mean_g)));
#pragma unroll
      for (int v = 0; v < S::kVectors; ++v) {
        float out[kVector];
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          const float deviation = x[v][i] - correction;
          // Rounded as in the sum, so that the difference is exactly zero where it should be.
          out[i] = rstd * (__fmul_rn(h[v][i], weight[v][i]) - mean_g) - slope * deviation;
          dweight[v][i] = fmaf(h[v][i] * rstd, deviation, dweight[v][i]);
          dbias[v][i] += h[v][i];
        }
        store_packed_if(in_row<S>(v, columns), dx + column_of<S>(v), narrow<float>(out));
      }
    } else {
#pragma unroll
      for (int v = 0; v < S::kVectors; ++v)
        store_packed_if(in_row<S>(v, columns), dx + column_of<S>(v), narrow<float>(h[v]));
    }
  }
  if (!p.layer_norm) return;
  float* part = workspace.parts + static_cast<int64_t>(blockIdx.x) * columns;
#pragma unroll
  for (int v = 0; v < S::kVectors; ++v) {
    const bool inside = in_row<S>(v, columns);
    store_packed_if(inside, part + column_of<S>(v), narrow<float>(dweight[v]));
    store_packed_if(inside, part + gridDim.x * p.columns + column_of<S>(v), narrow<float>(dbias[v]));
  }
}

constexpr int kSumVector = 4;  // columns per thread in the kernels that add dx
constexpr int kSliceColumns = kBlock * kSumVector;

__device__ __forceinline__ void add_row(const float* dx, bool inside, float (&total)[kSumVector]) {
  if (!inside) return;
  const float4 value = *reinterpret_cast<const float4*>(dx);
  total[0] += value.x;
  total[1] += value.y;
  total[2] += value.z;
  total[3] += value.w;
}

// Grid (tokens, slices of columns, tables). The block of token n computes the gradient of the token's row of the table,
// if n is the first token with this row.
__global__ void __launch_bounds__(kBlock) tables_kernel(EmbeddingGpuBackward p, EmbeddingGpuWorkspace workspace) {
  __shared__ unsigned matches[kBlock / 32];
  void* dtable = blockIdx.z == 0 ? p.dword : p.dposition;
  if (dtable == nullptr) return;
  const int32_t* keys = workspace.keys + blockIdx.z * p.rows;
  const int rows = static_cast<int>(p.rows), first = static_cast<int>(blockIdx.x);
  const int32_t key = keys[first];
  if (key < 0) return;
  bool earlier = false;
  for (int n = static_cast<int>(threadIdx.x); n < first; n += kBlock) earlier |= keys[n] == key;
  if (__syncthreads_or(earlier)) return;

  const int64_t column = static_cast<int64_t>(blockIdx.y) * kSliceColumns + threadIdx.x * kSumVector;
  const bool inside = column < p.columns;
  float total[kSumVector] = {};
  for (int start = first; start < rows; start += kBlock) {
    const int n = start + static_cast<int>(threadIdx.x);
    const unsigned mine = __ballot_sync(0xffffffffu, n < rows && keys[n < rows ? n : first] == key);
    if (threadIdx.x % 32 == 0) matches[threadIdx.x / 32] = mine;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < kBlock / 32; ++warp)
      for (unsigned left = matches[warp]; left != 0; left &= left - 1) {
        const int64_t token = start + 32 * warp + __ffs(static_cast<int>(left)) - 1;
        add_row(workspace.dx + token * p.columns + column, inside, total);
      }
    __syncthreads();
  }
  if (!inside) return;
#pragma unroll
  for (int i = 0; i < kSumVector; ++i) store_as(p.table_dtype, dtable, key * p.columns + column + i, total[i]);
}

// Grid (parts, slices of columns). Computes the part's sums of dx over the tokens of segments 0 and 1.
__global__ void __launch_bounds__(kBlock) segments_kernel(EmbeddingGpuBackward p, EmbeddingGpuWorkspace workspace) {
  const int64_t column = static_cast<int64_t>(blockIdx.y) * kSliceColumns + threadIdx.x * kSumVector;
  if (column >= p.columns) return;
  const int64_t span = (p.rows + gridDim.x - 1) / gridDim.x, begin = blockIdx.x * span;
  const int64_t end = begin + span < p.rows ? begin + span : p.rows;
  float total[kEmbeddingSegments][kSumVector] = {};
  for (int64_t n = begin; n < end; ++n) {
    const int32_t segment = workspace.keys[2 * p.rows + n];
#pragma unroll
    for (int s = 0; s < kEmbeddingSegments; ++s) add_row(workspace.dx + n * p.columns + column, segment == s, total[s]);
  }
#pragma unroll
  for (int s = 0; s < kEmbeddingSegments; ++s)
#pragma unroll
    for (int i = 0; i < kSumVector; ++i)
      workspace.segment_parts[(s * static_cast<int64_t>(gridDim.x) + blockIdx.x) * p.columns + column + i] =
          total[s][i];
}

// ---- launchers ------------------------------------------------------------------------------------------------------

Status check(const EmbeddingGpuRows& p) {
  if (p.columns < kVector || p.columns % kVector != 0 || p.columns > kEmbeddingGpuColumns)
    return bad_size("embedding: the CUDA kernels take columns that are a multiple of 8, from 8 to 2048");
  if (p.segment_rows > kEmbeddingSegments) return bad_size("embedding: the CUDA kernels take up to 2 segments");
  for (const void* tensor : {p.word_table, p.position_table, p.segment_table, p.weight})
    if (!rows_aligned(tensor, 0)) return misaligned_rows();
  return {};
}

// Calls use(table element, output element).
template <class Use>
Status for_types(const EmbeddingGpuRows& p, Use use) {
  return with_dtype(p.dtype, unknown_dtype(), [&](auto out) {
    if (p.table_dtype == p.dtype) return use(out, out);
    if (p.table_dtype == DType::f32) return use(float{}, out);
    return bad_size("embedding: the CUDA kernels take tables in fp32 or in the output's type");
  });
}

// Calls use(RowShape{}) with the shape in which a block has a row.
template <class Use>
Status with_block_rows(int64_t columns, Use use) {
  return columns <= kVector * kBlock ? use(RowShape<kBlock, 1, kBlock>{}) : use(RowShape<kBlock, 2, kBlock>{});
}

// Up to this many rows, for which all blocks are resident at once on an H200, the forward has a block for each. It
// takes 3.8 us instead of 4.9 for 576 rows of 768 columns, and for 2,304 rows 8.5 instead of 6.1.
constexpr int64_t kBlockRows = 2048;

constexpr int64_t kMostParts = 256;
constexpr int64_t kMostSegmentParts = 64;
int64_t parts_of(int64_t rows) { return rows < kMostParts ? rows : kMostParts; }
int64_t segment_parts_of(int64_t rows) { return rows < kMostSegmentParts ? rows : kMostSegmentParts; }

int64_t element_bytes(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

Status clear(void* table, int64_t rows, const EmbeddingGpuBackward& p) {
  if (table == nullptr) return {};
  const auto bytes = static_cast<size_t>(rows * p.columns * element_bytes(p.table_dtype));
  return status_of(cudaMemsetAsync(table, 0, bytes, static_cast<cudaStream_t>(p.stream)));
}

Status sum_segments(const EmbeddingGpuBackward& p, const EmbeddingGpuWorkspace& workspace, unsigned slices) {
  const int64_t parts = segment_parts_of(p.rows);
  const Status status =
      launch(segments_kernel, dim3(static_cast<unsigned>(parts), slices), kBlock, 0, p.stream, p, workspace);
  if (status.code != StatusCode::ok) return status;
  SumOutput second{};
  if (p.segment_rows > 1)
    second = {static_cast<char*>(p.dsegment) + p.columns * element_bytes(p.table_dtype), p.table_dtype};
  return sum_parts(workspace.segment_parts, {p.dsegment, p.table_dtype}, second, static_cast<int>(parts), p.columns,
                   p.stream);
}

}  // namespace

Status embedding_forward(const EmbeddingGpuForward& p) {
  Status status = check(p);
  if (status.code != StatusCode::ok || p.rows == 0) return status;
  if (!rows_aligned(p.bias, 0) || !rows_aligned(p.y, 0)) return misaligned_rows();
  const DeviceGuard guard(p.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  return for_types(p, [&](auto table, auto out) {
    const auto start = [&](auto shape) {
      using S = decltype(shape);
      const auto blocks = static_cast<unsigned>((p.rows + S::kGroups - 1) / S::kGroups);
      return launch(forward_kernel<decltype(table), decltype(out), S>, blocks, S::kBlock, 0, p.stream, p);
    };
    return p.rows <= kBlockRows ? with_block_rows(p.columns, start) : for_row_shape<0>(p.columns, start);
  });
}

Status embedding_backward(const EmbeddingGpuBackward& p) {
  Status status = check(p);
  if (status.code != StatusCode::ok) return status;
  if (p.rows > kEmbeddingGpuRows) return bad_size("embedding: the CUDA backward takes up to 8192 tokens");
  if (!rows_aligned(p.dy, 0)) return misaligned_rows();
  const DeviceGuard guard(p.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  const int64_t parts = parts_of(p.rows);
  const EmbeddingGpuWorkspace workspace(p.workspace, p.rows, p.columns, parts, segment_parts_of(p.rows));
  status = clear(p.dword, p.word_rows, p);
  if (status.code == StatusCode::ok) status = clear(p.dposition, p.position_rows, p);
  if (p.rows > 0 && status.code == StatusCode::ok)
    status = for_types(p, [&](auto table, auto out) {
      return with_block_rows(p.columns, [&](auto shape) {
        const auto kernel = rows_kernel<decltype(table), decltype(out), decltype(shape)>;
        return launch(kernel, static_cast<unsigned>(parts), kBlock, 0, p.stream, p, workspace);
      });
    });
  if (status.code == StatusCode::ok && (p.dweight != nullptr || p.dbias != nullptr))
    status = sum_parts(workspace.parts, {p.dweight, p.weight_dtype}, {p.dbias, p.bias_dtype}, static_cast<int>(parts),
                       p.columns, p.stream);
  const auto slices = static_cast<unsigned>((p.columns + kSliceColumns - 1) / kSliceColumns);
  if (status.code == StatusCode::ok && p.dsegment != nullptr)
    status = p.rows == 0 ? clear(p.dsegment, p.segment_rows, p) : sum_segments(p, workspace, slices);
  if (status.code != StatusCode::ok || p.rows == 0 || (p.dword == nullptr && p.dposition == nullptr)) return status;
  const unsigned tables = p.dposition == nullptr ? 1 : 2;
  return launch(tables_kernel, dim3(static_cast<unsigned>(p.rows), slices, tables), kBlock, 0, p.stream, p, workspace);
}

int64_t embedding_gpu_workspace(int64_t rows, int64_t columns) {
  using baseline::Count;
  const Count parts = 2 * (parts_of(rows) + segment_parts_of(rows));
  return (Count(rows) * columns + parts * columns + Count(rows) * kEmbeddingTables).value;
}

}  // namespace cuda
}  // namespace fasttfm
