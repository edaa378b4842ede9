// A layer of a token stream and an entity stream on the CPU, in fp32.
#include <cstring>

#include "common/cpu/parallel.h"
#include "knowledge_block/layer_backward.h"
#include "knowledge_block/layer_forward.h"
#include "transformer_block/cpu_device.h"

namespace fasttfm {
namespace FASTTFM_ISA {
namespace {

using namespace knowledge;

constexpr int64_t kRowsOfAnItem = 64;

template <class Body>
void for_rows(int64_t count, int threads, Body body) {
  parallel_items((count + kRowsOfAnItem - 1) / kRowsOfAnItem, threads, [&](int64_t item) {
    const int64_t first = item * kRowsOfAnItem, end = first + kRowsOfAnItem;
    for (int64_t row = first; row < (end < count ? end : count); ++row) body(row);
  });
}

void copy_row(const BlockCopy& copy, int64_t row) {
  const auto* source = static_cast<const float*>(copy.from);
  const auto* added = static_cast<const float*>(copy.added);
  const int64_t from = copy.rows == nullptr ? row : copy.rows[row];
  for (int64_t group = 0; group < copy.groups; ++group) {
    float* to = static_cast<float*>(copy.to) + row * copy.to_stride + group * copy.to_group_stride;
    const float* read = source + from * copy.from_stride + group * copy.from_group_stride;
    const bool inside = from < copy.from_count && group < copy.from_groups;
    for (int64_t c = 0; c < copy.columns; ++c) {
      to[c] = inside && c < copy.from_columns ? read[c] : 0.0f;
      if (added != nullptr) to[c] += added[row * copy.added_stride + c];
    }
  }
}

// The first of the ascending positions that is at least `token`.
int64_t first_at_least(const int64_t* positions, int64_t count, int64_t token) {
  int64_t low = 0, high = count;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (positions[middle] < token)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

struct CpuWithEntities : transformer::Cpu {
  static Status copy_blocks(const BlockCopies& call) {
    for (int i = 0; i < call.count; ++i) {
      const BlockCopy& copy = call.copy[i];
      if (copy.from == nullptr || copy.to == nullptr) continue;
      for_rows(copy.count, call.threads, [&](int64_t row) { copy_row(copy, row); });
    }
    return {};
  }

  static Status align_rows(const AlignRows& call) {
    const int64_t f = call.entity_stride, both = call.width + f;
    for_rows(call.count, call.threads, [&](int64_t row) {
      float* to = static_cast<float*>(call.to) + row * both;
      std::memcpy(to, static_cast<const float*>(call.tokens) + row * call.width, call.width * sizeof(float));
      const int64_t entity = first_at_least(call.positions, call.entity_count, row);
      const bool aligned = entity < call.entity_count && call.positions[entity] == row && call.entities != nullptr;
      if (aligned)
        std::memcpy(to + call.width, static_cast<const float*>(call.entities) + entity * f, f * sizeof(float));
      else
        std::memset(to + call.width, 0, f * sizeof(float));
    });
    return {};
  }

  static Status entity_norm_forward(const EntityNormForward& call) {
    EntityNormForward norm = call;
    if (call.x_rows != nullptr) {
      auto* to = static_cast<float*>(call.gathered);
      for_rows(call.rows, call.threads, [&](int64_t row) {
        const float* from = static_cast<const float*>(call.x) + call.x_rows[row] * call.x_stride;
        std::memcpy(to + row * call.columns, from, call.columns * sizeof(float));
      });
      norm.x = to;
      norm.x_stride = call.columns;
    }
    return cpu::dropout_add_layer_norm_forward(norm);
  }

  static Status entity_norm_backward(const EntityNormBackward& call) {
    EntityNormBackward norm = call;
    if (call.more != nullptr) {
      auto* to = static_cast<float*>(call.gathered);
      for_rows(call.rows, call.threads, [&](int64_t row) {
        const float* more = static_cast<const float*>(call.more) + call.more_rows[row] * call.more_stride;
        const float* dy = call.dy == nullptr ? nullptr : static_cast<const float*>(call.dy) + row * call.dy_stride;
        for (int64_t c = 0; c < call.columns; ++c)
          to[row * call.columns + c] = more[c] + (dy == nullptr ? 0.0f : dy[c]);
      });
      norm.dy = to;
    }
    return cpu::dropout_add_layer_norm_backward(norm);
  }
};

// Rows of entities have no padding here: dropout_add_layer_norm writes contiguous rows.
Status check_call(const TransformerShape& tokens, const EntityShape& shape) {
  if (tokens.dtype != DType::f32) return unknown_dtype();
  if (shape.entity_stride != shape.entity_width) return bad_size("knowledge_block: rows have no padding on the CPU");
  return check_shape(tokens, shape);
}

}  // namespace

Status knowledge_block_sizes(const KnowledgeSizes& call) {
  const Status status = check_call(call, call);
  return status.code == StatusCode::ok ? write_sizes<CpuWithEntities>(call) : status;
}

Status knowledge_block_forward(const KnowledgeForward& call) {
  const Status status = check_call(call, call);
  return status.code == StatusCode::ok ? knowledge::Forward<CpuWithEntities>(call).run() : status;
}

Status knowledge_block_backward(const KnowledgeBackward& call) {
  const Status status = check_call(call, call);
  return status.code == StatusCode::ok ? knowledge::Backward<CpuWithEntities>(call).run() : status;
}

}  // namespace FASTTFM_ISA
}  // namespace fasttfm

FASTTFM_CPU_LAUNCHER(knowledge_block_sizes, KnowledgeSizes)
FASTTFM_CPU_LAUNCHER(knowledge_block_forward, KnowledgeForward)
FASTTFM_CPU_LAUNCHER(knowledge_block_backward, KnowledgeBackward)
