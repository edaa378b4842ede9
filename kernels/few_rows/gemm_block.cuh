// What the parts of the GEMM for few rows (cuda_gemm.cu) share: its shapes, its shared memory, and the block's place
// in the grid.
#pragma once

#include <cstdint>

#include "common/cuda/hopper.cuh"
#include "few_rows/dependent.cuh"
#include "few_rows/gemm_tiles.h"
#include "few_rows/op.h"
#include "few_rows/row_statistics.cuh"

namespace fasttfm {
namespace cuda {
namespace product {

using namespace few_rows;

static_assert(kGroupColumns == kStatisticsColumns, "columns of a group of statistics");

constexpr int kMostMemory = 227 * 1024;

// A kernel's code for LayerNorms: it multiplies by the deviation of rows, of which it reads statistics, it adds a
// residual of normalized rows, or it has both (gemm_residual.cuh). A kernel's instructions take time to load
// (plan.h), so calls have a kernel with no more than they need.
template <int ROWS, int COLUMNS, int STAGES, bool READS_STATISTICS, bool ADDS>
struct Shape {
  static constexpr int kRows = ROWS, kColumns = COLUMNS, kStages = STAGES;
  static constexpr int kConsumers = 2 * kRows;  // threads
  static constexpr int kThreads = kConsumers + 32;
  static constexpr int kSums = kColumns / 2;  // a consumer's accumulators
  static constexpr uint32_t kABytes = kRows * kTileRowBytes, kStageBytes = (kRows + kColumns) * kTileRowBytes;
  static_assert(kRows * result_pitch(kColumns) <= kStages * static_cast<int>(kStageBytes), "room for the result");

  static constexpr bool kReadsStatistics = READS_STATISTICS, kAdds = ADDS, kExchanges = READS_STATISTICS && ADDS;

  // These are for results with a residual. If blocks exchange sums, an octet of lanes finishes a group of 64 columns of
  // a row.
  static constexpr int kJoined = kExchanges ? joined_blocks(kColumns) : 1, kJoinedColumns = kJoined * kColumns;
  static_assert(!kAdds || kJoinedColumns == kStatisticsColumns, "one group in a row");
  static constexpr int kOctets = kConsumers / 8;
  static constexpr int kPartBytes = kRows * kColumns * 4;
};

template <class S>
struct Memory {
  Mbarrier full[S::kStages], empty[S::kStages], received;
  alignas(16) float bias[S::kJoinedColumns];
  alignas(16) float weight[S::kExchanges ? S::kJoinedColumns : 4];  // of the residual
  float2 norm[S::kReadsStatistics ? S::kRows : 1];                  // mean and rstd
  alignas(1024) char stage[S::kStages][S::kStageBytes];

  // `multicast_blocks`: the number of blocks that share the rows of x; `bytes`: what other blocks send to this one.
  __device__ __forceinline__ void init(int multicast_blocks, uint32_t bytes) {
    for (int slot = 0; slot < S::kStages; ++slot) {
      full[slot].init(1);
      empty[slot].init(S::kConsumers / 32 * multicast_blocks);
    }
    received.init(1);
    fence_mbarrier_init();
    received.arrive_expect_tx(bytes);
  }
};

// Blocks that exchange sums keep them after the stages.
template <class S>
constexpr size_t kExchangeMemory = sizeof(Memory<S>) + (S::kExchanges ? S::kPartBytes : 0);

// The block's tile and part of K.
struct Place {
  int row, column;
  int part, start, stages;          // of K: `stages` stages from `start` on
  int multicast_blocks, neighbour;  // the number of blocks to which rows of x are multicast, and which of them this is
  int first_rank;                   // of these blocks in the cluster
};

constexpr int kConsumerBarrier = 1;

}  // namespace product
}  // namespace cuda
}  // namespace fasttfm
