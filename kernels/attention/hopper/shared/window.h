// Which query tiles attend to which key tiles within a window, and the chunks of keys of the windowed backward. The
// functions also compile for the host, so that tests cover them without a GPU.
//
// Query i of a sequence is at key position i + k_length - q_length. It attends to the keys from `left` before that
// position to `right` after it.
#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "common/packed.h"

namespace fasttfm {
namespace cuda {

// The masks for which there are kernels. `window`: there is a limit on the left, or a limit on the right other than 0.
enum class Mask { full, causal, window };

struct Window {
  int left, right;

  // No limit (-1), and limits above the number of tokens, are replaced by the number of tokens, so that positions fit
  // into 32 bits.
  static Window of(int64_t left, int64_t right, int64_t queries, int64_t keys) {
    return {static_cast<int>(left < 0 || left > keys ? keys : left),
            static_cast<int>(right < 0 || right > queries ? queries : right)};
  }
};

// The tiles [begin, end).
struct Tiles {
  int begin, end;
};

FASTTFM_HOST_DEVICE int least(int a, int b) { return a < b ? a : b; }
FASTTFM_HOST_DEVICE int most(int a, int b) { return a < b ? b : a; }

// The tiles of SIZE positions that contain the positions from `first` to `last`.
template <int SIZE>
FASTTFM_HOST_DEVICE Tiles tiles_of_positions(int first, int last) {
  if (last < first) return {0, 0};
  return {first / SIZE, last / SIZE + 1};
}

// The tiles of KEYS keys to which some of the `count` queries from `query` on attend.
template <int KEYS>
FASTTFM_HOST_DEVICE Tiles attended_tiles(const Window& window, int query, int count, int q_length, int k_length) {
  if (query >= q_length) return {0, 0};
  const int offset = k_length - q_length, last = least(query + count, q_length) - 1;
  return tiles_of_positions<KEYS>(most(query + offset - window.left, 0),
                                  least(last + offset + window.right, k_length - 1));
}

// The tiles of QUERIES queries that attend to some of the `count` keys from `key` on.
template <int QUERIES>
FASTTFM_HOST_DEVICE Tiles attending_tiles(const Window& window, int key, int count, int q_length, int k_length) {
  if (key >= k_length) return {0, 0};
  const int offset = k_length - q_length, last = least(key + count, k_length) - 1;
  return tiles_of_positions<QUERIES>(most(key - offset - window.right, 0),
                                     least(last - offset + window.left, q_length - 1));
}

// The first key to which any query attends. To every key after it, some query attends.
FASTTFM_HOST_DEVICE int first_attended_key(const Window& window, int q_length, int k_length) {
  return most(k_length - q_length - window.left, 0);
}

// ---- chunks of keys -------------------------------------------------------------------------------------------------

// The windowed backward for head dim 64 divides the keys of a sequence into chunks of kChunkKeys, and a block processes
// a chunk of one head. It accumulates dQ in a ring buffer in shared memory, which holds the queries that attend to one
// key tile. dQ of a query tile that attends to keys of two chunks is the sum of two partial sums.
constexpr int kChunkKeys = 512;
constexpr int kRingQueries = 512;

// Whether the queries that attend to a tile of `tile_keys` keys fit into the ring buffer, whatever their alignment. If
// so, no query tile attends to more than two chunks.
inline bool fits_ring(const Window& window, int64_t tile_queries, int64_t tile_keys) {
  const int64_t attending = tile_keys + static_cast<int64_t>(window.left) + window.right;
  return (attending + tile_queries - 2) / tile_queries + 1 <= kRingQueries / tile_queries;
}

// A chunk's slot is its index among the chunks of all sequences, in the order of their keys. Each sequence has at most
// one empty slot.
FASTTFM_HOST_DEVICE int first_slot(int sequence, int first_key, int chunk_keys) {
  return first_key / chunk_keys + sequence;
}
inline int64_t count_slots(bool packed, int64_t sequences, int64_t keys, int64_t chunk_keys) {
  return packed ? keys / chunk_keys + sequences : sequences * ((keys + chunk_keys - 1) / chunk_keys);
}

// The packed sequence to which a slot belongs: the last one whose first slot is not above it.
FASTTFM_HOST_DEVICE int sequence_of_slot(const int32_t* boundaries, int sequences, int keys, int chunk_keys, int slot) {
  int low = 0, high = sequences;  // the answer is in [low, high)
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (first_slot(middle, packed_first(boundaries, middle, keys), chunk_keys) <= slot)
      low = middle;
    else
      high = middle;
  }
  return low;
}

// The chunk of a slot. boundaries: cu_seqlens of the keys, or null if they are dense.
struct Chunk {
  int sequence, index;
  bool followed;  // whether the next slot belongs to the same sequence
};
FASTTFM_HOST_DEVICE Chunk chunk_of_slot(const int32_t* boundaries, int sequences, int keys, int chunk_keys, int slot) {
  if (boundaries == nullptr) {
    const int of_sequence = (keys + chunk_keys - 1) / chunk_keys;
    return {slot / of_sequence, slot % of_sequence, (slot + 1) % of_sequence != 0};
  }
  const int sequence = sequence_of_slot(boundaries, sequences, keys, chunk_keys, slot);
  // The second search guarantees that a block waits only for chunks that exist, even if boundaries are not sorted.
  return {sequence, slot - first_slot(sequence, packed_first(boundaries, sequence, keys), chunk_keys),
          sequence_of_slot(boundaries, sequences, keys, chunk_keys, slot + 1) == sequence};
}

// How a block accumulates dQ of a query tile for a key tile of its chunk. If the query tile attends to two chunks, the
// block with the lower chunk completes the sum.
struct ChunkStep {
  bool follows;            // the block has added to this dQ before
  bool last;               // this is the block's last addition to it
  bool sends_partial_sum;  // if last: another block completes the sum
  bool adds_partial_sum;   // if last: another block has computed a partial sum, which this block adds
};
// attended: the key tiles to which the query tile attends; has_next: whether another chunk follows.
FASTTFM_HOST_DEVICE ChunkStep chunk_step(const Tiles& attended, const Tiles& chunk, bool has_next, int key_tile) {
  return {key_tile > most(attended.begin, chunk.begin), key_tile == least(attended.end, chunk.end) - 1,
          attended.begin<chunk.begin, attended.end> chunk.end && has_next};
}

}  // namespace cuda
}  // namespace fasttfm
