// Tile sizes and kernel parameters of the Hopper attention forward.
#pragma once

#include <cstdint>

#include "attention/hopper/shared/window.h"
#include "attention/op.h"
#include "common/cuda/hopper.cuh"

namespace fasttfm {
namespace cuda {

// GROUPS consumer warpgroups of 64 queries each iterate over the keys in steps of KEYS keys. Shared memory has STAGES
// pipeline stages of k and v.
template <int HEAD_DIM, int GROUPS, int KEYS, int STAGES, bool DROPOUT>
struct ForwardShape {
  static constexpr int kHeadDim = HEAD_DIM, kGroups = GROUPS, kKeys = KEYS, kStages = STAGES;
  static constexpr bool kDropout = DROPOUT;
  // Whether k and v of a step have common mbarriers. With few stages they are separate, so that k is released as soon
  // as its scores are computed.
  static constexpr bool kSharedStages = STAGES > 3;
  // Whether to call prevent_hoist(). Four warpgroups do not need it: a wait of one overlaps with the work of the
  // others.
  static constexpr bool kPreventHoist = GROUPS < 4;
  static constexpr int kQueries = 64 * GROUPS;
  static constexpr int kThreads = kWarpgroup * (GROUPS + 1);
  // Number of swizzled tiles of kTileColumns columns. TMA fills missing columns of the last one with zeros.
  static constexpr int kParts = (HEAD_DIM + kTileColumns - 1) / kTileColumns;
  static constexpr uint32_t kQueryPart = kQueries * kTileRowBytes, kQueryBytes = kParts * kQueryPart;
  static constexpr uint32_t kKeyPart = KEYS * kTileRowBytes, kKeyBytes = kParts * kKeyPart;
  static constexpr int kMaxQuerySlots = (225 * 1024 - 2 * STAGES * kKeyBytes) / kQueryBytes;
  // Whether each warpgroup's queries have their own mbarriers. Head dims 192 and 256 leave no room in shared memory for
  // the next tile's queries. A warpgroup's queries are therefore replaced by its next ones as soon as its last scores
  // are computed, without waiting for the other warpgroup's.
  static constexpr bool kSplitQueries = kMaxQuerySlots == 1;
  static constexpr int kQueryBarriers = kSplitQueries ? GROUPS : 1;
  // Whether the last step of a tile overlaps with the first step of the next tile, which requires more than two stages
  // and the next tile's queries.
  static constexpr bool kOverlapTiles = STAGES > 2 && !kSplitQueries;
  // Whether a tile's queries are loaded before the last kLateSteps steps of the previous tile, if it has more steps
  // than that, instead of after them. With more than two stages, those steps are loaded early enough.
  static constexpr bool kEarlyQueries = !kSplitQueries && STAGES == 2;
  static constexpr int kLateSteps = 3;
  // The next tile is fetched when this many steps are left to be loaded.
  static constexpr int kFetchSteps = 4;
  static constexpr int kQuerySlots = kOverlapTiles && kMaxQuerySlots > 2 ? 3 : kMaxQuerySlots > 1 ? 2 : 1;
  // Registers per thread, set by setmaxnreg. Summed over the warpgroups they are at most 512 (480 for five warpgroups),
  // because all warpgroups start with the same number.
  static constexpr int kProducerRegisters = GROUPS > 2 ? 32 : 40;
  static constexpr int kConsumerRegisters = GROUPS == 1 ? 216 : GROUPS == 2 ? 232 : GROUPS == 3 ? 160 : 112;
};

struct ForwardParams {
  void* out;
  float* lse;
  const int32_t* cu_seqlens;
  const int32_t* cu_seqlens_k;
  const int32_t* lengths;
  const int32_t* lengths_k;
  const int64_t* seed;
  int* next;                    // counter: index of the next tile, minus the grid size; null: static assignment
  int sequences, heads, group;  // group: query heads per key head
  int queries, keys, max_seqlen, max_seqlen_k;
  int tiles;    // query tiles per dense sequence
  int batched;  // number of heads whose tiles are processed together
  float scale;  // multiplies the scores; in units of log2
  float dropout_scale;
  int threshold;
  Window window;  // for Mask::window

  __host__ __device__ bool packed() const { return cu_seqlens != nullptr; }
};

}  // namespace cuda
}  // namespace fasttfm
