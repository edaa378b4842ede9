// Token + position + segment embedding, LayerNorm, dropout. N tokens, C columns; the formula is in reference.py.
//
// Bytes per token (t, e = bytes of an element of the tables and of y): the forward reads a row of the token table and
// writes y, C*(t + e); the backward reads a row of the table and dy, and writes the complete gradients of the tables
// once. The caller has validated the indices.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/status.h"

namespace fasttfm {

// The parameters that forward and backward have in common.
struct EmbeddingRows {
  const void* word_table;       // [V, C], table_dtype
  const void* position_table;   // [positions, C], table_dtype, or null
  const void* segment_table;    // [segments, C], table_dtype, or null
  const int64_t* ids;           // [N]
  const int64_t* position_ids;  // [N], or null for a token's index in its sequence
  const int64_t* segment_ids;   // [N], or null for 0
  const int32_t* cu_seqlens;    // [sequences + 1], or null when all sequences have tokens_per_sequence
  const float* weight;          // [C], or null for 1
  const int64_t* seed;          // [1], or null for no dropout
  int64_t sequences;
  int64_t tokens_per_sequence;
  int64_t rows;     // N
  int64_t columns;  // C
  int threshold;    // common/philox.py; 1 to 256
  float scale;
  int layer_norm;  // 1 or 0
  DType table_dtype;
  DType dtype;  // of y and dy
  int threads;
};

struct EmbeddingForward : EmbeddingRows {
  const float* bias;  // [C], or null for 0
  void* y;            // [N, C], dtype
  float* mean;        // [N]; unused without LayerNorm
  float* rstd;        // [N]; unused without LayerNorm
  float eps;
};

// Computes dx, the gradient of every token's sum of table rows; embedding_table_backward() adds it to the gradients of
// the tables.
struct EmbeddingBackward : EmbeddingRows {
  const void* dy;      // [N, C], dtype
  const float* mean;   // [N]; unused without LayerNorm
  const float* rstd;   // [N]; unused without LayerNorm
  float* dx;           // [N, C]
  int64_t* positions;  // [N]: the rows of the position table that were used; null if not needed
  float* dweight;      // [C], or null if not needed
  float* dbias;        // [C], or null if not needed
  float* workspace;    // embedding_workspace(rows, columns) floats
};

// dtable[r] = sum of dx[n] over all n with indices[n] == r, in the order of n.
struct EmbeddingTableBackward {
  const float* dx;         // [N, C]
  const int64_t* indices;  // [N]
  void* dtable;            // [table_rows, C], dtype
  int32_t* first;          // [table_rows], workspace
  int32_t* next;           // [N], workspace
  int64_t rows;            // N
  int64_t columns;         // C
  int64_t table_rows;
  int64_t excluded;  // a row without gradient (padding_idx), or -1
  DType dtype;
  int threads;
};

// ---- CUDA -----------------------------------------------------------------------------------------------------------

constexpr int kEmbeddingTables = 3;
constexpr int64_t kEmbeddingSegments = 2;       // maximum number of rows of a segment table
constexpr int64_t kEmbeddingGpuRows = 8192;     // maximum number of tokens of the backward, which compares them all
constexpr int64_t kEmbeddingGpuColumns = 2048;  // maximum number of columns

struct EmbeddingGpuRows {
  const void* word_table;       // [word_rows, C], table_dtype
  const void* position_table;   // [position_rows, C], table_dtype, or null
  const void* segment_table;    // [segment_rows, C], table_dtype, or null
  const int64_t* ids;           // [N]; an index outside of its table results in NaN and gets no gradient
  const int64_t* position_ids;  // [N], or null for a token's index in its sequence
  const int64_t* segment_ids;   // [N], or null for 0
  const int32_t* cu_seqlens;    // [sequences + 1], or null when all sequences have tokens_per_sequence
  const void* weight;           // [C], weight_dtype, or null for 1
  const int64_t* seed;          // [1], or null for no dropout
  float* statistics;            // [2, N]: mean and 1 / sqrt(variance + eps); unused without LayerNorm
  int64_t word_rows;
  int64_t position_rows;
  int64_t segment_rows;
  int64_t sequences;
  int64_t tokens_per_sequence;
  int64_t rows;     // N
  int64_t columns;  // C
  int threshold;    // common/philox.py; 1 to 256
  float scale;
  bool layer_norm;
  DType table_dtype;
  DType dtype;  // of y and dy: table_dtype, or any if that is f32
  DType weight_dtype;
  DType bias_dtype;
  int device;
  void* stream;
};

struct EmbeddingGpuForward : EmbeddingGpuRows {
  const void* bias;  // [C], bias_dtype, or null for 0
  void* y;           // [N, C], dtype
  int64_t* errors;   // [2, 3], common/index_errors.py
  float eps;
};

struct EmbeddingGpuBackward : EmbeddingGpuRows {
  const void* dy;         // [N, C], dtype
  void* dword;            // [word_rows, C], table_dtype; null if not needed, as are the others
  void* dposition;        // [position_rows, C], table_dtype
  void* dsegment;         // [segment_rows, C], table_dtype
  void* dweight;          // [C], weight_dtype
  void* dbias;            // [C], bias_dtype
  float* workspace;       // embedding_gpu_workspace(rows, columns) floats
  int64_t padding_index;  // a row of the word table without gradient, or -1
};

// The parts of the backward's workspace.
struct EmbeddingGpuWorkspace {
  float* dx;             // [N, C]
  float* parts;          // [2, parts, C]: each block's sums for dweight and dbias
  float* segment_parts;  // [2, segment parts, C]
  int32_t* keys;         // [3, N]: the row of each table to which a token's dx is added, or -1

  EmbeddingGpuWorkspace(float* start, int64_t rows, int64_t columns, int64_t parts, int64_t segment_parts)
      : dx(start),
        parts(dx + rows * columns),
        segment_parts(this->parts + 2 * parts * columns),
        keys(reinterpret_cast<int32_t*>(this->segment_parts + 2 * segment_parts * columns)) {}
};

namespace cuda {
Status embedding_forward(const EmbeddingGpuForward&);
Status embedding_backward(const EmbeddingGpuBackward&);
int64_t embedding_gpu_workspace(int64_t rows, int64_t columns);  // in floats
}  // namespace cuda

namespace cpu {
Status embedding_forward(const EmbeddingForward&);
Status embedding_backward(const EmbeddingBackward&);
Status embedding_table_backward(const EmbeddingTableBackward&);
int64_t embedding_workspace(int64_t rows, int64_t columns);  // in floats
}  // namespace cpu

}  // namespace fasttfm
