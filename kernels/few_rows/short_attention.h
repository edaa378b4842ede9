// Attention of short sequences (cuda_short_attention.cu): which calls it supports, its blocks, and which elements each
// thread copies and stores. The index arithmetic also compiles for the host, where tests cover it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "few_rows/tiles.h"

namespace fasttfm {
namespace few_rows {

constexpr int kShortKeys = 128;    // the longest sequence
constexpr int kShortQueries = 64;  // of a block
constexpr int kShortThreads = 128;
constexpr int kShortBlocks = 5;  // that fit into an SM

// A block has tiles of queries, keys and values in shared memory, whose rows have kTileChunks chunks, also with head
// dim 32, and 1024 bytes to align them.
constexpr int kShortRowBytes = kTileChunks * kChunk * 2;
constexpr int kShortMemory = (kShortQueries + 2 * kShortKeys) * kShortRowBytes + 1024;

constexpr bool is_short_attention(int64_t head_dim, int64_t max_seqlen) {
  return (head_dim == 32 || head_dim == 64) && max_seqlen <= kShortKeys;
}

// Shared memory of an SM of Hopper, what the system takes of it per block, and the most that a block can have.
constexpr int64_t kProcessorMemory = 228 * 1024, kReservedMemory = 1024, kMostBlockMemory = 227 * 1024;

// The bytes of shared memory of a block: as many that an SM has room for no more than its even share of the blocks. An
// SM that is free before others would otherwise take the blocks of several SMs.
inline int spread_memory(int64_t blocks, int64_t processors) {
  const int64_t share = steps(blocks, processors);
  const int64_t most = std::min((kProcessorMemory / share - kReservedMemory) / 128 * 128, kMostBlockMemory);
  return static_cast<int>(std::max<int64_t>(most, kShortMemory));
}

// The first row and the chunk that a thread copies of a tile with `chunks` chunks of data per row (head dim / kChunk).
// Its next rows are copied_rows() apart.
FASTTFM_HOST_DEVICE constexpr MatrixRow copied_chunk(int thread, int chunks) {
  return {thread / chunks, thread % chunks};
}
FASTTFM_HOST_DEVICE constexpr int copied_rows(int chunks) { return kShortThreads / chunks; }

// The four threads of a quad hold 16 columns of a row of a wgmma's result: each two neighbouring ones in either half. A
// thread sends a pair to its neighbour, an even one that of the second half, an odd one that of the first, and then
// stores four neighbouring columns. This is the first one of them.
FASTTFM_HOST_DEVICE constexpr int stored_column(int thread) { return thread % 2 * 8 + thread / 2 * 4; }

}  // namespace few_rows
}  // namespace fasttfm
