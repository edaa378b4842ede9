// The Hopper attention forward's tile sizes, and the parameters of its kernel.
#pragma once

#include <cstdint>

#include "attention/hopper/window.h"
#include "attention/op.h"
#include "common/cuda/hopper.cuh"

namespace fasttfm {
namespace cuda {

// GROUPS warpgroups of 64 queries each iterate over the keys in steps of KEYS; shared memory has STAGES stages of k and
// v.
template <int HEAD_DIM, int GROUPS, int KEYS, int STAGES, bool DROPOUT>
struct ForwardShape {
  static constexpr int kHeadDim = HEAD_DIM, kGroups = GROUPS, kKeys = KEYS, kStages = STAGES;
  static constexpr bool kDropout = DROPOUT;
  // Whether a tile's last step overlaps with the first one of the next tile. Two stages are too few for that.
  static constexpr bool kOverlapTiles = STAGES > 2;
  // With many stages, k and v of a step share a stage's mbarriers. With few, k is released as soon as its scores are
  // computed.
  static constexpr bool kSharedStages = STAGES > 3;
  // Whether to call prevent_hoist(). Four warpgroups do not need it: a wait of one overlaps with the work of the
  // others.
  static constexpr bool kPreventHoist = GROUPS < 4;
  static constexpr int kQueries = 64 * GROUPS;
  static constexpr int kThreads = kWarpgroup * (GROUPS + 1);
  // Swizzled tiles next to each other. TMA fills the columns of the last one that the head does not have with zeros.
  static constexpr int kParts = (HEAD_DIM + kTileColumns - 1) / kTileColumns;
  static constexpr uint32_t kQueryPart = kQueries * kTileRowBytes, kQueryBytes = kParts * kQueryPart;
  static constexpr uint32_t kKeyPart = KEYS * kTileRowBytes, kKeyBytes = kParts * kKeyPart;
  static constexpr int kMaxQuerySlots = (225 * 1024 - 2 * STAGES * kKeyBytes) / kQueryBytes;
  static constexpr int kQuerySlots = kOverlapTiles && kMaxQuerySlots > 2 ? 3 : kMaxQuerySlots > 1 ? 2 : 1;
  // Registers per thread, set by setmaxnreg. Summed over the warpgroups they are at most 512 (480 for five warpgroups);
  // all warpgroups start with an equal share.
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
  int* next;                    // the next tile, minus the number of blocks; null: static assignment
  int sequences, heads, group;  // group: query heads per key head
  int queries, keys, max_seqlen, max_seqlen_k;
  int tiles;    // of queries in a dense sequence
  int batched;  // number of heads whose tiles of queries are processed together; 0: a block has all tiles of a head
  float scale;  // of scores, in units of log2
  float dropout_scale;
  int threshold;
  Window window;  // for Mask::window

  __host__ __device__ bool packed() const { return cu_seqlens != nullptr; }
};

}  // namespace cuda
}  // namespace fasttfm
