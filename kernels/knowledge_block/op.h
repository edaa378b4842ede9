// A layer of a token stream and an entity stream in one call, forward and backward. The formulas are in
// python/fasttfm/nn/knowledge_layer.py, the op-by-op path in python/fasttfm/ops/layers/knowledge_block.py. It is a
// post-LN layer of transformer_block/op.h whose feed-forward block also reads and writes the entities of aligned
// tokens. There are A entities with E columns and a row stride of F >= E; the other letters are those of
// transformer_block/op.h.
//
// The feed-forward block reads rows [T, C + F]: a token's row, followed by its entity's row or zeros. Columns from E to
// F are zeros, which align rows to 16 bytes on a GPU.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/status.h"
#include "dropout_add_layer_norm/op.h"
#include "transformer_block/op.h"

namespace fasttfm {

struct EntityShape {
  int64_t entities;           // A
  int64_t entity_width;       // E
  int64_t entity_stride;      // F
  int64_t entity_heads;       // divide E
  int64_t entity_head_dim;    // at least E / entity_heads: heads are padded with zeros
  int64_t entity_max_seqlen;  // at most A
  int entity_attention;       // whether entities attend to each other, 1 or 0
  int last;                   // whether there is no output for entities, 1 or 0
};

// In all calls, layers is 1, pre_norm is 0 and recompute is 1: the output of the LayerNorm between the blocks is part
// of the rows that the feed-forward block reads.
struct KnowledgeSizes : TransformerShape, EntityShape {
  int64_t* sizes;  // [3]: bytes of kept, scratch of the forward, scratch of the backward
};

struct EntityCall : EntityShape {
  const void* entity_x;              // [A, E], dtype
  const int32_t* entity_cu_seqlens;  // [sequences + 1]
  const int64_t* positions;          // [A]: the indices of the aligned tokens, ascending
  float entity_eps_a;
  float entity_eps_b;
};

// The tables of parameters and gradients have two rows, for the tokens and for the entities; seeds are [2, 3]. `kept`
// is also used without training.
struct KnowledgeForward : TransformerForward, EntityCall {
  void* entity_y;  // [A, E], dtype; null in the last layer
};

// The gradient of the entities' up_bias is the same as that of the tokens'.
struct KnowledgeBackward : TransformerBackward, EntityCall {
  const void* entity_dy;  // [A, E], dtype, or null for 0
  void* entity_dx;        // [A, E], dtype
  void* ddown;            // [C + F, I], or [C, I] in the last layer, of parameter_dtype: both down_weights; or null
};

// ---- parts -----------------------------------------------------------------------------------------------------------

// to[r, g, c] = from[rows[r], g, c] + added[r, c], and 0 outside of `from`.
struct BlockCopy {
  const void* from;                               // null: nothing is copied
  const void* added;                              // [count, columns], or null for 0
  void* to;                                       // null: nothing is copied
  const int64_t* rows;                            // or null for r itself
  int64_t count, groups, columns;                 // of `to`
  int64_t from_count, from_groups, from_columns;  // of `from`
  int64_t from_stride, from_group_stride;         // in elements
  int64_t to_stride, to_group_stride;
  int64_t added_stride;
  DType dtype;
};

constexpr int kMaxCopies = 10;
struct BlockCopies {
  BlockCopy copy[kMaxCopies];
  int count;
  int threads;   // CPU
  int device;    // CUDA
  void* stream;  // CUDA
};

// to[t] = a token's row, followed by its entity's row or zeros.
struct AlignRows {
  const void* tokens;        // [T, C], dtype, contiguous
  const void* entities;      // [A, F], dtype, contiguous, or null for 0
  const int64_t* positions;  // [A]
  void* to;                  // [T, C + F], contiguous
  int64_t count;             // T
  int64_t width;             // C
  int64_t entity_count;      // A
  int64_t entity_stride;     // F
  DType dtype;
  int threads;   // CPU
  int device;    // CUDA
  void* stream;  // CUDA
};

// dropout_add_layer_norm of the entity stream, whose residual_dtype is dtype. Columns of an output from C on are set to
// 0.
struct EntityNormForward : DropoutAddLayerNormForward {
  const int64_t* x_rows;  // [N]: the rows of x, or null for 0, 1, ...
  int64_t y_stride;       // of y's rows
  void* gathered;         // CPU: [N, C], scratch
};

struct EntityNormBackward : DropoutAddLayerNormBackward {
  const void* more;          // [., C], dtype: its rows more_rows are added to dy (which may be null); null for 0
  const int64_t* more_rows;  // [N]
  int64_t dy_stride;
  int64_t more_stride;
  int64_t dx_stride;  // also of dresidual's rows
  void* gathered;     // CPU: [N, C], scratch
};

constexpr int64_t kMaxEntityWidth = 512;  // CUDA

namespace cpu {
Status knowledge_block_sizes(const KnowledgeSizes&);
Status knowledge_block_forward(const KnowledgeForward&);
Status knowledge_block_backward(const KnowledgeBackward&);
}  // namespace cpu

namespace cuda {
// Requirements as in transformer_block; E is at most kMaxEntityWidth, F a multiple of 8, and entity_head_dim 64 or 128.
Status knowledge_block_sizes(const KnowledgeSizes&);
Status knowledge_block_forward(const KnowledgeForward&);
Status knowledge_block_backward(const KnowledgeBackward&);

Status copy_blocks(const BlockCopies&);
Status align_rows(const AlignRows&);
Status entity_norm_forward(const EntityNormForward&);
Status entity_norm_backward(const EntityNormBackward&);
}  // namespace cuda

}  // namespace fasttfm
