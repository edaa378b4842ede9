// The common part of forward and backward of a layer of a token stream and an entity stream.
// DEVICE has the launchers of transformer_block/layer.h, and those of the parts in knowledge_block/op.h.
#pragma once

#include <cmath>
#include <cstdint>

#include "attention/op.h"
#include "knowledge_block/op.h"
#include "knowledge_block/regions.h"
#include "transformer_block/layer.h"

namespace fasttfm {
namespace FASTTFM_ISA {
namespace knowledge {

using transformer::at;

constexpr int64_t kTokenRow = 0, kEntityRow = 1;  // in the tables of parameters and gradients

// The call for a layer's launchers on entities: a copy of `tokens` with the entities' sizes, boundaries and seeds.
inline TransformerCall entity_call(const TransformerCall& tokens, const EntityCall& entities) {
  TransformerCall call = tokens;
  set_entity_shape(entities, &call);
  call.cu_seqlens = entities.entity_cu_seqlens;
  call.seeds = tokens.seeds == nullptr ? nullptr : tokens.seeds + 3;
  call.window_left = call.window_right = -1;
  call.eps_a = entities.entity_eps_a;
  call.eps_b = entities.entity_eps_b;
  return call;
}

inline int64_t head_dim_of(const EntityShape& shape) { return shape.entity_width / shape.entity_heads; }

template <class Attention>
Attention attention_of(const TransformerCall& call, const EntityShape& shape, const void* qkv, void* workspace) {
  auto attention = transformer::attention_of<Attention>(call, 0, qkv, workspace);
  attention.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(head_dim_of(shape))));
  return attention;
}

// A list of copies, which one launch performs.
class Copies {
 public:
  explicit Copies(const TransformerCall& call) {
    copies_.threads = static_cast<int>(call.processors);
    transformer::set_device(call, &copies_);
  }

  // Adds a copy of a matrix to another, which is padded with zeros if it is larger.
  BlockCopy& add(DType dtype, const void* from, int64_t from_rows, int64_t from_columns, void* to, int64_t rows,
                 int64_t columns) {
    BlockCopy& copy = copies_.copy[copies_.count++];
    copy.from = from;
    copy.to = to;
    copy.count = rows;
    copy.columns = copy.to_stride = columns;
    copy.from_count = from_rows;
    copy.from_columns = copy.from_stride = from_columns;
    copy.groups = copy.from_groups = 1;
    copy.dtype = dtype;
    return copy;
  }

  template <class Device>
  void run(transformer::Steps* steps) const {
    (*steps)(Device::copy_blocks, copies_);
  }

 private:
  BlockCopies copies_{};
};

// Groups the rows of a qkv projection's weight [3 heads d, columns] or bias [3 heads d], or the columns of an output
// projection's weight [rows, heads d], by head. A head has `from_dim` of them in `from` and `to_dim` in `to`.
inline void group_rows(BlockCopy* copy, int64_t from_dim, int64_t to_dim) {
  copy->groups = to_dim;
  copy->from_groups = from_dim;
  copy->count /= to_dim;
  copy->from_count /= from_dim;
  copy->to_group_stride = copy->to_stride;
  copy->from_group_stride = copy->from_stride;
  copy->to_stride *= to_dim;
  copy->from_stride *= from_dim;
}
inline void group_columns(BlockCopy* copy, int64_t heads) {
  copy->groups = copy->from_groups = heads;
  copy->columns /= heads;
  copy->from_columns /= heads;
  copy->to_group_stride = copy->columns;
  copy->from_group_stride = copy->from_columns;
}

inline AlignRows align_of(const TransformerCall& call, const EntityCall& shape, const void* tokens,
                          const void* entities, void* to) {
  AlignRows align{};
  align.tokens = tokens;
  align.entities = entities;
  align.positions = shape.positions;
  align.to = to;
  align.count = call.tokens;
  align.width = call.width;
  align.entity_count = shape.entities;
  align.entity_stride = shape.entity_stride;
  align.dtype = call.dtype;
  align.threads = static_cast<int>(call.processors);
  transformer::set_device(call, &align);
  return align;
}

inline Status check_shape(const TransformerShape& tokens, const EntityShape& shape) {
  const Status status = transformer::check_shape(tokens);
  if (status.code != StatusCode::ok) return status;
  if (tokens.layers != 1 || tokens.pre_norm != 0 || tokens.recompute != 1)
    return {StatusCode::bad_value, "knowledge_block: takes one post-LN layer, with recompute"};
  if (shape.entities < 1 || shape.entity_heads < 1 || shape.entity_width < 1 ||
      shape.entity_width % shape.entity_heads != 0 || shape.entity_stride < shape.entity_width ||
      shape.entity_head_dim < head_dim_of(shape))
    return bad_size("knowledge_block: there are entities, heads divide their width, and padding adds columns");
  return {};
}

}  // namespace knowledge
}  // namespace FASTTFM_ISA
}  // namespace fasttfm
