// Embedding on the CPU. A token's row stays in L1 between the passes over it.
#include "embedding/op.h"

#include <cmath>

#include "common/cpu/dropout.h"
#include "common/cpu/moments.h"
#include "common/cpu/parallel.h"
#include "common/cpu/row_chunks.h"
#include "common/cpu/simd.h"

namespace fasttfm {
namespace FASTTFM_ISA {
namespace {

// Calls body(table, out) with values of the tables' and the output's type: tables are fp32, or of the output's type.
template <class Params, class Body>
Status with_types(const Params& p, Body body) {
  return with_dtype(p.dtype, unknown_dtype(), [&](auto out) {
    if (p.table_dtype == p.dtype) return body(out, out);
    if (p.table_dtype == DType::f32) return body(float{}, out);
    return bad_size("embedding: tables must be fp32 or of the output's type");
  });
}

RowPositions positions_of(const EmbeddingRows& p) { return {p.cu_seqlens, p.sequences, p.tokens_per_sequence}; }

// One token's rows of the three tables. A null table contributes nothing.
template <class Table>
struct TokenRows {
  const Table *word, *position, *segment;
  RowPosition at;
  int64_t position_index;

  TokenRows(const EmbeddingRows& p, int64_t row) : at(positions_of(p)(row)) {
    position_index = p.position_ids != nullptr ? p.position_ids[row] : static_cast<int64_t>(at.token);
    word = static_cast<const Table*>(p.word_table) + p.ids[row] * p.columns;
    position = from(p.position_table, position_index, p.columns);
    segment = from(p.segment_table, p.segment_ids != nullptr ? p.segment_ids[row] : 0, p.columns);
  }

  static const Table* from(const void* table, int64_t index, int64_t columns) {
    return table == nullptr ? nullptr : static_cast<const Table*>(table) + index * columns;
  }

  template <class Count>
  Lanes operator()(int64_t c, Count n) const {
    Lanes x = load(word + c, n);
    if (position != nullptr) x = x + load(position + c, n);
    if (segment != nullptr) x = x + load(segment + c, n);
    return x;
  }
};

Dropout dropout_of(const EmbeddingRows& p) {
  return {static_cast<uint64_t>(*p.seed), positions_of(p), p.threshold, p.scale};
}

// Calls body(column, lanes, result) for every block of columns, with the result of dropout on `value(column, lanes)`.
template <class Value, class Body>
inline void for_dropped_columns(const EmbeddingRows& p, RowPosition at, Value value, Body body) {
  if (p.seed == nullptr) {
    for_columns(p.columns, [&](int64_t c, auto n) { body(c, n, value(c, n)); });
    return;
  }
  const Dropout dropout = dropout_of(p);
  for_spans(p.columns, [&](int64_t first, int64_t width) {
    Dropout::Span span;
    span.draw(dropout, at, first);
    for_columns(width, [&](int64_t c, auto n) { body(first + c, n, span(value(first + c, n), c)); });
  });
}

template <class Table, class Out>
FASTTFM_KERNEL void forward_row(const EmbeddingForward& p, int64_t row) {
  const TokenRows<Table> x(p, row);
  Out* y = static_cast<Out*>(p.y) + row * p.columns;
  const auto write = [&](int64_t c, auto n, const Lanes& value) { store(y + c, value, n); };
  if (!p.layer_norm) {
    for_dropped_columns(p, x.at, x, write);
    return;
  }
  const Moments statistics = moments(p.columns, x);
  const float rstd = 1.0f / std::sqrt(statistics.variance + p.eps);
  const Lanes mean = broadcast(statistics.mean), scale = broadcast(rstd),
              shift = broadcast(-statistics.correction * rstd);
  const auto normalised = [&](int64_t c, auto n) {
    Lanes out = (x(c, n) - mean) * scale + shift;
    if (p.weight != nullptr) out = out * load(p.weight + c, n);
    if (p.bias != nullptr) out = out + load(p.bias + c, n);
    return out;
  };
  for_dropped_columns(p, x.at, normalised, write);
  p.mean[row] = statistics.mean;
  p.rstd[row] = rstd;
}

// Writes h, the gradient of dropout's input. Without LayerNorm it is dx.
template <class Out>
FASTTFM_KERNEL void undropped_row(const EmbeddingBackward& p, int64_t row, RowPosition at) {
  const Out* dy = static_cast<const Out*>(p.dy) + row * p.columns;
  float* h = p.dx + row * p.columns;
  for_dropped_columns(
      p, at, [&](int64_t c, auto n) { return load(dy + c, n); },
      [&](int64_t c, auto n, const Lanes& value) { store(h + c, value, n); });
}

// The row statistics that dx needs: with g = h * weight and d = x - mean - correction,
//   dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) = rstd * (g - mean_g) - slope * d
template <class Table>
struct BackwardRow {
  TokenRows<Table> x;
  float* h;  // overwritten by dx
  float mean, correction, rstd, mean_g, slope;

  FASTTFM_KERNEL BackwardRow(const EmbeddingBackward& p, int64_t row, const TokenRows<Table>& rows)
      : x(rows), h(p.dx + row * p.columns), mean(p.mean[row]), rstd(p.rstd[row]) {
    const float inverse_c = 1.0f / static_cast<float>(p.columns);
    // h is zero past the end of the row, so only the sum without a factor h needs keep().
    Lanes deviations = broadcast(0.0f), sum_g = broadcast(0.0f), sum_g_deviation = broadcast(0.0f);
    for_columns(p.columns, [&](int64_t c, auto n) {
      Lanes g = load(h + c, n);
      if (p.weight != nullptr) g = g * load(p.weight + c, n);
      const Lanes deviation = keep(x(c, n) - broadcast(mean), n);
      deviations = deviations + deviation;
      sum_g = sum_g + g;
      sum_g_deviation = sum_g_deviation + g * deviation;
    });
    correction = sum(deviations) * inverse_c;
    mean_g = sum(sum_g) * inverse_c;
    const float mean_g_d = sum(sum_g_deviation) * inverse_c - correction * mean_g;
    slope = rstd * (rstd * (rstd * mean_g_d));
  }
};

// Overwrites h with dx and adds the row's contribution to dweight and dbias (fp32 [C] each, null if not needed).
template <class Table>
FASTTFM_KERNEL void backward_row(const EmbeddingBackward& p, const BackwardRow<Table>& row, float* dweight,
                                 float* dbias) {
  for_columns(p.columns, [&](int64_t c, auto n) {
    const Lanes h = load(row.h + c, n);
    const Lanes d = row.x(c, n) - broadcast(row.mean) - broadcast(row.correction);
    // Rounded as in mean_g, so that the difference is exactly zero where it should be.
    const Lanes g = p.weight != nullptr ? product(h, load(p.weight + c, n)) : h;
    store(row.h + c, broadcast(row.rstd) * (g - broadcast(row.mean_g)) - broadcast(row.slope) * d, n);
    if (dweight != nullptr) store(dweight + c, load(dweight + c, n) + h * broadcast(row.rstd) * d, n);
    if (dbias != nullptr) store(dbias + c, load(dbias + c, n) + h, n);
  });
}

template <class Table, class Out>
void backward_chunk(const EmbeddingBackward& p, int64_t begin, int64_t end, float* dweight, float* dbias) {
  for (int64_t row = begin; row < end; ++row) {
    const TokenRows<Table> x(p, row);
    if (p.positions != nullptr) p.positions[row] = x.position_index;
    undropped_row<Out>(p, row, x.at);
    if (p.layer_norm) backward_row<Table>(p, BackwardRow<Table>(p, row, x), dweight, dbias);
  }
}

// ---- gradients of tables --------------------------------------------------------------------------------------------

constexpr int64_t kRowsPerItem = 16;
constexpr int64_t kColumnsPerItem = 128;  // for tables with few rows, whose lists are long
constexpr int64_t kFewRows = 1024;

// Builds a linked list of the tokens of each table row, in ascending order: first[row], then next[token], until -1.
void link_tokens(const EmbeddingTableBackward& p) {
  std::memset(p.first, -1, static_cast<size_t>(p.table_rows) * sizeof(int32_t));
  for (int64_t n = p.rows - 1; n >= 0; --n) {
    const int64_t index = p.indices[n];
    if (index == p.excluded || index < 0 || index >= p.table_rows) continue;
    p.next[n] = p.first[index];
    p.first[index] = static_cast<int32_t>(n);
  }
}

// Computes columns [begin, end) of one row of the table's gradient. The sums of four blocks of columns stay in
// registers while the list is traversed.
template <class T>
FASTTFM_KERNEL void sum_tokens(const EmbeddingTableBackward& p, int64_t row, int64_t begin, int64_t end) {
  T* out = static_cast<T*>(p.dtable) + row * p.columns;
  constexpr int kBlocks = 4;
  int64_t c = begin;
  for (; c + kBlocks * kLanes <= end; c += kBlocks * kLanes) {
    Lanes total[kBlocks] = {};
    for (int64_t n = p.first[row]; n >= 0; n = p.next[n])
      for (int i = 0; i < kBlocks; ++i) total[i] = total[i] + load(p.dx + n * p.columns + c + i * kLanes);
    for (int i = 0; i < kBlocks; ++i) store(out + c + i * kLanes, total[i]);
  }
  for_columns(end - c, [&](int64_t rest, auto count) {
    Lanes total = broadcast(0.0f);
    for (int64_t n = p.first[row]; n >= 0; n = p.next[n]) total = total + load(p.dx + n * p.columns + c + rest, count);
    store(out + c + rest, total, count);
  });
}

template <class T>
void sum_item(const EmbeddingTableBackward& p, int64_t first_row, int64_t begin, int64_t end) {
  const int64_t last_row = first_row + kRowsPerItem < p.table_rows ? first_row + kRowsPerItem : p.table_rows;
  for (int64_t row = first_row; row < last_row; ++row) {
    if (p.first[row] < 0)
      std::memset(static_cast<T*>(p.dtable) + row * p.columns + begin, 0, static_cast<size_t>(end - begin) * sizeof(T));
    else
      sum_tokens<T>(p, row, begin, end);
  }
}

}  // namespace

Status embedding_forward(const EmbeddingForward& p) {
  if (p.columns < 1) return bad_size("embedding: columns must be at least 1");
  return with_types(p, [&](auto table, auto out) {
    parallel_rows(p.rows, p.threads, [&](int64_t row) { forward_row<decltype(table), decltype(out)>(p, row); });
    return Status{};
  });
}

Status embedding_backward(const EmbeddingBackward& p) {
  if (p.columns < 1) return bad_size("embedding: columns must be at least 1");
  return with_types(p, [&](auto table, auto out) {
    const auto chunk = [&](int64_t, int64_t begin, int64_t end, float* const* parts) {
      backward_chunk<decltype(table), decltype(out)>(p, begin, end, parts[0], parts[1]);
    };
    sum_over_chunks(p.rows, p.columns, p.threads, p.workspace, {p.dweight, p.dbias}, chunk);
    return Status{};
  });
}

Status embedding_table_backward(const EmbeddingTableBackward& p) {
  if (p.rows > INT32_MAX) return bad_size("embedding: rows must be at most 2^31 - 1");
  link_tokens(p);
  return with_dtype(p.dtype, unknown_dtype(), [&](auto element) {
    const int64_t width = p.table_rows < kFewRows && p.columns > kColumnsPerItem ? kColumnsPerItem : p.columns;
    const int64_t slices = (p.columns + width - 1) / width;
    const int64_t blocks = (p.table_rows + kRowsPerItem - 1) / kRowsPerItem;
    parallel_items(blocks * slices, p.threads, [&](int64_t item) {
      const int64_t begin = item % slices * width, end = begin + width < p.columns ? begin + width : p.columns;
      sum_item<decltype(element)>(p, item / slices * kRowsPerItem, begin, end);
    });
    return Status{};
  });
}

}  // namespace FASTTFM_ISA

#ifdef FASTTFM_ISA_BASELINE
int64_t cpu::embedding_workspace(int64_t rows, int64_t columns) { return 2 * row_chunk_count(rows) * columns; }
#endif

}  // namespace fasttfm

FASTTFM_CPU_LAUNCHER(embedding_forward, EmbeddingForward)
FASTTFM_CPU_LAUNCHER(embedding_backward, EmbeddingBackward)
FASTTFM_CPU_LAUNCHER(embedding_table_backward, EmbeddingTableBackward)
