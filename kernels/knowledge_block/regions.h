// The memory layout of the entity stream: its tensors are after the regions of transformer_block/regions.h, in both
// buffers.
#pragma once

#include <cstdint>

#include "common/count.h"
#include "knowledge_block/op.h"
#include "transformer_block/layer.h"
#include "transformer_block/regions.h"

namespace fasttfm {
namespace FASTTFM_ISA {
namespace knowledge {

using transformer::Region;

enum KeptRegion {
  kRows,         // [T, C + F], dtype
  kEntityX,      // [A, F], dtype
  kEntityQkv,    // [A, 3, heads, D], dtype
  kEntityOut,    // [A, heads, D], dtype
  kEntityLse,    // [heads, A], fp32
  kEntityZ1,     // [A, E], dtype
  kStatistics1,  // [2, A], fp32
  kEntityZ,      // [A, E], dtype
  kStatistics,   // [2, A], fp32
  kEntityUp,     // [I, F], dtype
  kDown,         // [C + F, I], dtype
  kPaddedQkv,    // [3 heads D, F], dtype
  kPaddedOut,    // [F, heads D], dtype
  kBias,         // [I], parameter_dtype
  kKeptRegions
};

enum ForwardRegion {
  kUp,               // [I, C + F], dtype
  kPaddedQkvBias,    // [3 heads D], dtype
  kBoth,             // [T, C + F], dtype
  kEntityY1,         // [A, F], dtype
  kEntityBranch,     // [A, F], dtype
  kForwardGathered,  // [A, E], dtype
  kForwardWorkspace,
  kForwardRegions
};

enum BackwardRegion {
  kEntityStream,      // [A, F], dtype: the gradient of e~ that does not come through the fusion
  kEntityDBranch,     // [A, F], dtype
  kDBoth,             // [T, C + F], dtype
  kDUp,               // [I, C + F], parameter_dtype
  kFound,             // [T, F], dtype: the gradient of e~ that comes through the fusion
  kEntityStreamA,     // [A, F], dtype
  kEntityDOut,        // [A, heads, D], dtype
  kEntityDQkv,        // [A, 3, heads, D], dtype
  kPaddedDQkv,        // [3 heads D, F], parameter_dtype
  kPaddedDBias,       // [3 heads D], parameter_dtype
  kPaddedDOut,        // [F, heads D], parameter_dtype
  kBackwardGathered,  // [A, E], dtype
  kBackwardWorkspace,
  kBackwardRegions
};

template <int COUNT>
struct Plan {
  Region regions[COUNT];
  int64_t start;  // bytes of transformer_block's regions, which come first
  int64_t bytes;  // of all regions

  void finish(int64_t first) {
    const int64_t region_bytes = transformer::place_regions(regions, COUNT);
    start = first;
    bytes = first == kTooMany || region_bytes == kTooMany ? kTooMany : (Count(first) + region_bytes).value;
  }
};

// The width of attention over entities, with padded head dims.
inline int64_t attention_width(const EntityShape& shape) { return shape.entity_heads * shape.entity_head_dim; }

// The number of columns of the fusion's output.
inline int64_t fused_width(const TransformerShape& tokens, const EntityShape& shape) {
  return tokens.width + (shape.last ? 0 : shape.entity_stride);
}

// Sets the sizes of a call such that the entities are the tokens of a transformer layer.
template <class Call>
inline void set_entity_shape(const EntityShape& shape, Call* call) {
  call->tokens = shape.entities;
  call->width = attention_width(shape);
  call->heads = shape.entity_heads;
  call->max_seqlen = shape.entity_max_seqlen;
}

inline Plan<kKeptRegions> kept_plan(const TransformerShape& tokens, const EntityShape& shape) {
  Plan<kKeptRegions> plan{};
  const int64_t size = transformer::size_of(tokens.dtype);
  const Count rows = shape.entities, both = Count(tokens.width) + shape.entity_stride, padded = attention_width(shape);
  const auto keep = [&](KeptRegion region, Count bytes) { plan.regions[region].bytes = bytes.value; };
  keep(kRows, Count(tokens.tokens) * both * size);
  keep(kEntityX, rows * shape.entity_stride * size);
  keep(kEntityZ, rows * shape.entity_width * size);
  keep(kStatistics, rows * 8);
  keep(kEntityUp, Count(tokens.intermediate) * shape.entity_stride * size);
  keep(kDown, shape.last ? 0 : both * tokens.intermediate * size);
  keep(kBias, Count(tokens.intermediate) * 4);
  if (shape.entity_attention) {
    keep(kEntityQkv, rows * padded * 3 * size);
    keep(kEntityOut, rows * padded * size);
    keep(kEntityLse, rows * shape.entity_heads * 4);
    keep(kEntityZ1, rows * shape.entity_width * size);
    keep(kStatistics1, rows * 8);
    keep(kPaddedQkv, padded * 3 * shape.entity_stride * size);
    keep(kPaddedOut, padded * shape.entity_stride * size);
  }
  plan.finish(transformer::kept_plan(tokens).bytes);
  return plan;
}

template <class Device>
Plan<kForwardRegions> forward_plan(const TransformerShape& tokens, const EntityShape& shape) {
  Plan<kForwardRegions> plan{};
  const int64_t size = transformer::size_of(tokens.dtype);
  const Count rows = shape.entities, both = Count(tokens.width) + shape.entity_stride;
  const auto use = [&](ForwardRegion region, Count bytes) { plan.regions[region].bytes = bytes.value; };
  TransformerShape entities = tokens;
  set_entity_shape(shape, &entities);
  use(kUp, Count(tokens.intermediate) * both * size);
  use(kPaddedQkvBias, Count(attention_width(shape)) * 3 * size);
  use(kBoth, Count(tokens.tokens) * both * size);
  use(kEntityY1, rows * shape.entity_stride * size);
  use(kEntityBranch, rows * shape.entity_stride * size);
  use(kForwardGathered, rows * shape.entity_width * size);
  use(kForwardWorkspace, Device::forward_workspace(entities));
  plan.finish(transformer::forward_plan(tokens, Device::forward_workspace(tokens)).bytes);
  return plan;
}

template <class Device>
Plan<kBackwardRegions> backward_plan(const TransformerShape& tokens, const EntityShape& shape) {
  Plan<kBackwardRegions> plan{};
  const int64_t size = transformer::size_of(tokens.dtype);
  const Count rows = shape.entities, both = Count(tokens.width) + shape.entity_stride, padded = attention_width(shape);
  const auto use = [&](BackwardRegion region, Count bytes) { plan.regions[region].bytes = bytes.value; };
  TransformerShape entities = tokens;
  set_entity_shape(shape, &entities);
  use(kEntityStream, rows * shape.entity_stride * size);
  use(kEntityDBranch, rows * shape.entity_stride * size);
  use(kDBoth, Count(tokens.tokens) * both * size);
  use(kDUp, Count(tokens.intermediate) * both * 4);
  use(kFound, Count(tokens.tokens) * shape.entity_stride * size);
  use(kEntityStreamA, rows * shape.entity_stride * size);
  use(kEntityDOut, rows * padded * size);
  use(kEntityDQkv, rows * padded * 3 * size);
  use(kPaddedDQkv, padded * 3 * shape.entity_stride * 4);
  use(kPaddedDBias, padded * 3 * 4);
  use(kPaddedDOut, padded * shape.entity_stride * 4);
  use(kBackwardGathered, rows * shape.entity_width * size);
  use(kBackwardWorkspace, Device::backward_workspace(entities));
  plan.finish(transformer::backward_plan(tokens, Device::backward_workspace(tokens), Device::kFusedActivation).bytes);
  return plan;
}

template <class Device>
Status write_sizes(const KnowledgeSizes& call) {
  call.sizes[0] = kept_plan(call, call).bytes;
  call.sizes[1] = forward_plan<Device>(call, call).bytes;
  call.sizes[2] = call.training ? backward_plan<Device>(call, call).bytes : 0;
  for (int i = 0; i < 3; ++i)
    if (call.sizes[i] == kTooMany)
      return bad_size("knowledge_block: expected sizes that 64 bits count, got larger ones");
  return {};
}

}  // namespace knowledge
}  // namespace FASTTFM_ISA
}  // namespace fasttfm
