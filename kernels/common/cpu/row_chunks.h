// Divides rows into chunks. The number of chunks depends only on the number of rows, not on the number of threads. Sums
// over rows (gradients of weights and biases) are computed per chunk and added in the order of the chunks, so results
// are bitwise identical for every number of threads.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/cpu/parallel.h"
#include "common/cpu/simd.h"

namespace fasttfm {

constexpr int64_t kMaxRowChunks = 64;
constexpr int64_t kMinRowsPerChunk = 8;

inline int64_t row_chunk_count(int64_t rows) {
  const int64_t chunks = (rows + kMinRowsPerChunk - 1) / kMinRowsPerChunk;
  return chunks < kMaxRowChunks ? chunks : kMaxRowChunks;
}

namespace FASTTFM_ISA {

struct RowChunks {
  explicit RowChunks(int64_t n) : rows(n), count(row_chunk_count(n)) {}
  int64_t begin(int64_t chunk) const { return rows * chunk / count; }
  int64_t end(int64_t chunk) const { return rows * (chunk + 1) / count; }

  int64_t rows, count;
};

// Calls body(row) for every row, with chunks in parallel.
template <class Body>
inline void parallel_rows(int64_t rows, int threads, const Body& body) {
  const RowChunks chunks(rows);
  parallel_items(chunks.count, threads, [&](int64_t chunk) {
    for (int64_t row = chunks.begin(chunk); row < chunks.end(chunk); ++row) body(row);
  });
}

// Calls body(row, count) for groups of R rows in [begin, end) with count = std::integral_constant<int, R>, and for the
// remaining rows one by one. Kernels that sum over rows keep a block of the sum in registers while they process a
// group.
template <int R, class Body>
inline void for_row_groups(int64_t begin, int64_t end, Body body) {
  int64_t row = begin;
  for (; row + R <= end; row += R) body(row, std::integral_constant<int, R>{});
  for (; row < end; ++row) body(row, std::integral_constant<int, 1>{});
}

// The same with a number that is known at run time, from 1 to R, for kernels whose loop over the rows of a group is not
// unrolled: they are compiled once.
template <int R, class Body>
inline void for_row_blocks(int64_t begin, int64_t end, Body body) {
  for (int64_t row = begin; row < end; row += R) body(row, static_cast<int>(end - row < R ? end - row : R));
}

// A sum over rows of [C] vectors: one partial vector per chunk in `parts` ([chunks, C] fp32), then their sum in `total`
// ([C] fp32). With a null `total` nothing is computed.
struct ColumnSums {
  float* total;
  float* parts;
  int64_t columns;

  // The chunk's partial sum, set to zero; null if the sum is not needed.
  float* start(int64_t chunk) const {
    if (total == nullptr) return nullptr;
    float* part = parts + chunk * columns;
    std::memset(part, 0, static_cast<size_t>(columns) * sizeof(float));
    return part;
  }

  void finish(int64_t chunks, int threads) const {
    if (total == nullptr) return;
    constexpr int64_t kSlice = 16 * kLanes;
    const int64_t slices = (columns + kSlice - 1) / kSlice;
    parallel_items(slices, chunks * columns < (1 << 16) ? 1 : threads, [&](int64_t slice) {
      const int64_t first = slice * kSlice;
      const int64_t width = columns - first < kSlice ? columns - first : kSlice;
      for_columns(width, [&](int64_t c, auto n) {
        Lanes sum = broadcast(0.0f);
        for (int64_t chunk = 0; chunk < chunks; ++chunk) sum = sum + load(parts + chunk * columns + first + c, n);
        store(total + first + c, sum, n);
      });
    });
  }
};

// Calls body(chunk, begin, end, parts) for every chunk of rows, with chunks in parallel. `parts` are the chunk's
// partial sums of the `totals` ([C] fp32, or null if not needed), in `memory` ([N, chunks, C] fp32); then adds them up.
template <size_t N, class Body>
inline void sum_over_chunks(int64_t rows, int64_t columns, int threads, float* memory, void* const (&totals)[N],
                            const Body& body) {
  const RowChunks chunks(rows);
  ColumnSums sums[N];
  for (size_t i = 0; i < N; ++i) {
    const auto offset = static_cast<int64_t>(i) * chunks.count * columns;
    sums[i] = {static_cast<float*>(totals[i]), memory + offset, columns};
  }
  parallel_items(chunks.count, threads, [&](int64_t chunk) {
    float* parts[N];
    for (size_t i = 0; i < N; ++i) parts[i] = sums[i].start(chunk);
    body(chunk, chunks.begin(chunk), chunks.end(chunk), parts);
  });
  for (const ColumnSums& sum : sums) sum.finish(chunks.count, threads);
}

}  // namespace FASTTFM_ISA
}  // namespace fasttfm
