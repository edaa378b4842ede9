// The memory layout of a transformer layer: sizes, lifetimes and offsets of the tensors in its two buffers.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/count.h"
#include "transformer_block/op.h"

namespace fasttfm {
namespace FASTTFM_ISA {
namespace transformer {

// A tensor of one layer, in use from step `first` to step `last` of the layer.
struct Region {
  int64_t bytes = 0;
  int first = 0, last = 0;
  int64_t offset = 0;
};

constexpr int64_t kRegionAlignment = 256;

inline bool lifetimes_meet(const Region& a, const Region& b) { return a.first <= b.last && b.first <= a.last; }

// Assigns an offset to each region, the largest first: the lowest offset at which it overlaps no region that is in use
// at the same time. Returns the total number of bytes, or kTooMany if it does not fit into 64 bits.
inline int64_t place_regions(Region* regions, int count) {
  constexpr int kMax = 32;
  constexpr int64_t kBelow = kRegionAlignment - 1;
  int order[kMax], placed = 0;
  Count total = 0;
  for (int i = 0; i < count; ++i) {
    order[i] = i;
    // Rounds up; kTooMany stays kTooMany.
    const int64_t padded = (Count(regions[i].bytes) + kBelow).value;
    regions[i].bytes = padded == kTooMany ? kTooMany : padded / kRegionAlignment * kRegionAlignment;
    total = total + regions[i].bytes;
  }
  if (total.value == kTooMany) return kTooMany;
  std::stable_sort(order, order + count, [&](int a, int b) { return regions[a].bytes > regions[b].bytes; });
  int64_t end = 0;
  for (; placed < count; ++placed) {
    Region& region = regions[order[placed]];
    region.offset = 0;
    for (bool moved = true; moved;) {
      moved = false;
      for (int i = 0; i < placed; ++i) {
        const Region& other = regions[order[i]];
        if (!lifetimes_meet(region, other) || region.bytes == 0 || other.bytes == 0) continue;
        if (region.offset < other.offset + other.bytes && other.offset < region.offset + region.bytes) {
          region.offset = other.offset + other.bytes;
          moved = true;
        }
      }
    }
    end = std::max(end, region.offset + region.bytes);
  }
  return end;
}

// ---- tensors for the backward ---------------------------------------------------------------------------------------

enum KeptRegion {
  kKeptQkv,
  kKeptOut,
  kKeptLse,
  kKeptZ1,
  kKeptStatistics1,
  kKeptLeft,
  kKeptA,
  kKeptY1,
  kKeptZ,
  kKeptStatistics,
  kKeptRegions
};

struct ByteCounts {
  Count columns;     // [T, C], dtype
  Count inner;       // [T, I], dtype
  Count stream;      // [T, C], residual_dtype
  Count lse;         // [H, T], fp32
  Count statistics;  // [2, T], fp32
};

inline int64_t size_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

inline ByteCounts byte_counts(const TransformerShape& shape) {
  const Count tokens = shape.tokens, wide = tokens * shape.width;
  return {wide * size_of(shape.dtype), tokens * shape.intermediate * size_of(shape.dtype),
          wide * size_of(shape.residual_dtype), tokens * shape.heads * 4, tokens * 8};
}

// The tensors that a layer passes to the next one: y and, in a pre-LN model, the residual stream z. Those of the last
// layer are the caller's outputs.
enum BetweenRegion { kBetweenY, kBetweenZ, kBetweenRegions };

// The tensors of each layer are contiguous, in the order of the layers, and are followed by those that a layer passes
// to the next one.
struct KeptPlan {
  Region regions[kKeptRegions];
  Region between[kBetweenRegions];
  int64_t layer_bytes;
  int64_t between_bytes;
  int64_t bytes;
};

inline KeptPlan kept_plan(const TransformerShape& shape) {
  KeptPlan plan{};
  if (!shape.training) return plan;
  const ByteCounts counts = byte_counts(shape);
  const auto keep = [&](KeptRegion region, Count bytes) { plan.regions[region].bytes = bytes.value; };
  keep(kKeptQkv, counts.columns * 3);
  keep(kKeptOut, counts.columns);
  keep(kKeptLse, counts.lse);
  keep(kKeptZ1, counts.stream);
  keep(kKeptStatistics1, counts.statistics);
  keep(kKeptLeft, counts.inner);
  keep(kKeptA, shape.keep_activation ? counts.inner : 0);
  keep(kKeptY1, shape.recompute ? 0 : counts.columns);
  keep(kKeptZ, shape.pre_norm ? 0 : counts.stream);
  keep(kKeptStatistics, counts.statistics);
  plan.layer_bytes = place_regions(plan.regions, kKeptRegions);
  plan.between[kBetweenY].bytes = counts.columns.value;
  plan.between[kBetweenZ].bytes = shape.pre_norm ? counts.stream.value : 0;
  plan.between_bytes = place_regions(plan.between, kBetweenRegions);
  const Count layers = shape.layers;
  plan.bytes = plan.layer_bytes == kTooMany || plan.between_bytes == kTooMany
                   ? kTooMany
                   : (layers * plan.layer_bytes + (layers + (-1)) * plan.between_bytes).value;
  return plan;
}

// ---- scratch memory of a call ---------------------------------------------------------------------------------------

enum ForwardStep { kProjectQkv, kAttend, kProjectOut, kAddNormA, kProjectUp, kProjectDown, kAddNormB, kForwardSteps };

// In training, tensors that are kept for the backward are not among these.
enum ForwardRegion {
  kQkv,
  kOut,
  kLse,
  kBranchA,
  kY1,
  kZ1,
  kStatisticsA,
  kA,
  kBranchB,
  kStatisticsB,
  kY,
  kZ,
  kTileCounters,
  kForwardWorkspace,
  kForwardRegions
};

template <int COUNT>
struct ScratchPlan {
  Region regions[COUNT];
  int64_t bytes;
};

inline ScratchPlan<kForwardRegions> forward_plan(const TransformerShape& shape, int64_t workspace_bytes) {
  ScratchPlan<kForwardRegions> plan{};
  const ByteCounts counts = byte_counts(shape);
  const auto use = [&](ForwardRegion region, Count bytes, int first, int last) {
    plan.regions[region] = {bytes.value, first, last};
  };
  const bool pre = shape.pre_norm != 0, more = shape.layers > 1;
  if (!shape.training) {
    use(kQkv, counts.columns * 3, kProjectQkv, kAttend);
    use(kOut, counts.columns, kAttend, kProjectOut);
    use(kLse, counts.lse, kAttend, kAttend);
    if (pre) use(kZ1, counts.stream, kAddNormA, kAddNormB);
    use(kStatisticsA, counts.statistics, kAddNormA, kAddNormA);
    use(kStatisticsB, counts.statistics, kAddNormB, kAddNormB);
    // A layer's output is the input of the next layer and overwrites its own input.
    if (more) use(kY, counts.columns, kProjectQkv, kAddNormB);
    if (more && pre) use(kZ, counts.stream, kProjectQkv, kAddNormB);
  }
  if (!shape.training || shape.recompute) use(kY1, counts.columns, kAddNormA, pre ? kProjectUp : kAddNormB);
  if (!shape.training || !shape.keep_activation) use(kA, counts.inner, kProjectUp, kProjectDown);
  use(kBranchA, counts.columns, kProjectOut, kAddNormA);
  use(kBranchB, counts.columns, kProjectDown, kAddNormB);
  use(kTileCounters, Count(shape.layers) * 4, kProjectQkv, kAddNormB);
  use(kForwardWorkspace, workspace_bytes, kProjectQkv, kAddNormB);
  plan.bytes = place_regions(plan.regions, kForwardRegions);
  return plan;
}

enum BackwardStep {
  kNormB,
  kActivation,
  kDownGradient,
  kUpGradient,
  kMeetUp,
  kNormA,
  kOutGradient,
  kOutInput,
  kAttention,
  kQkvSums,
  kQkvGradient,
  kMeetQkv,
  kBackwardSteps
};

enum BackwardRegion {
  kStreamB,
  kDBranchB,
  kDa,
  kDh,
  kAAgain,
  kY1Again,
  kStatisticsAgain,
  kDy1,
  kStreamA,
  kDBranchA,
  kDout,
  kDqkv,
  kDx,
  kBackwardWorkspace,
  kBackwardRegions
};

inline bool separate_branch(const TransformerShape& shape, int threshold) {
  return threshold > 0 || shape.dtype != shape.residual_dtype;
}

// `fused_activation`: the GEMM before the activation also computes the activation's derivative.
inline ScratchPlan<kBackwardRegions> backward_plan(const TransformerShape& shape, int64_t workspace_bytes,
                                                   bool fused_activation) {
  ScratchPlan<kBackwardRegions> plan{};
  const ByteCounts counts = byte_counts(shape);
  const auto use = [&](BackwardRegion region, Count bytes, int first, int last) {
    plan.regions[region] = {bytes.value, first, last};
  };
  const bool pre = shape.pre_norm != 0, more = shape.layers > 1;
  use(kStreamB, counts.stream, kNormB, kNormA);
  use(kDBranchB, counts.columns, kNormB, kDownGradient);
  if (!fused_activation) use(kDa, counts.inner, kActivation, kActivation);
  use(kDh, counts.inner, kActivation, kMeetUp);
  if (!shape.keep_activation) use(kAAgain, counts.inner, kActivation, kDownGradient);
  if (shape.recompute) use(kY1Again, counts.columns, kUpGradient, kUpGradient);
  if (shape.recompute) use(kStatisticsAgain, counts.statistics, kUpGradient, kUpGradient);
  if (pre) use(kDy1, counts.columns, kMeetUp, kNormA);
  // The gradients of a layer's inputs are read by the first step of the previous layer. Those of the first layer are
  // the caller's outputs.
  if (more) use(kStreamA, counts.stream, kNormB, kMeetQkv);
  if (more && pre) use(kDx, counts.columns, kNormB, kMeetQkv);
  use(kDBranchA, counts.columns, kNormA, kOutInput);
  use(kDout, counts.columns, kOutInput, kAttention);
  use(kDqkv, counts.columns * 3, kAttention, kMeetQkv);
  use(kBackwardWorkspace, workspace_bytes, kNormB, kMeetQkv);
  plan.bytes = place_regions(plan.regions, kBackwardRegions);
  return plan;
}

}  // namespace transformer
}  // namespace FASTTFM_ISA
}  // namespace fasttfm
