// Enumerates the tiles of the windowed Hopper attention kernels on the host and compares them with all pairs of queries
// and keys: every pair of a window is in one step, every step has a pair, and sums of dQ are combined as the kernel
// assumes.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "attention/hopper/shared/window.h"

using namespace fasttfm::cuda;

namespace {

constexpr int kQueries = 64, kKeys = 128;  // of the backward's tiles

void require(bool holds, const char* what) {
  if (holds) return;
  std::printf("%s\n", what);
  std::exit(1);
}

struct Lengths {
  int q, k;
  bool attends(const Window& window, int query, int key) const {
    const int position = query + k - q;
    return position - window.left <= key && key <= position + window.right;
  }
};

// Which tiles have a pair, by enumerating all pairs.
std::set<std::pair<int, int>> met_tiles(const Lengths& lengths, const Window& window, int queries, int keys) {
  std::set<std::pair<int, int>> met;
  for (int i = 0; i < lengths.q; ++i)
    for (int j = 0; j < lengths.k; ++j)
      if (lengths.attends(window, i, j)) met.insert({i / queries, j / keys});
  return met;
}

// The forward: the steps of 64 queries are within those of their tile, and are the tiles of keys that have a pair.
template <int GROUPS>
void check_forward(const Lengths& lengths, const Window& window) {
  const auto met = met_tiles(lengths, window, 64, 64);
  size_t steps = 0;
  for (int first = 0; first < lengths.q; first += 64 * GROUPS) {
    const Tiles all = attended_tiles<64>(window, first, 64 * GROUPS, lengths.q, lengths.k);
    for (int part = 0; part < GROUPS; ++part) {
      const int query = first + 64 * part;
      const Tiles own = attended_tiles<64>(window, query, 64, lengths.q, lengths.k);
      if (own.begin == own.end) continue;
      require(all.begin <= own.begin && own.end <= all.end, "forward: steps outside of the tile's");
      require(own.begin - all.begin < GROUPS && all.end - own.end < GROUPS, "forward: more skipped steps than stages");
      for (int block = own.begin; block < own.end; ++block, ++steps)
        require(met.count({query / 64, block}) > 0, "forward: a step without a pair");
    }
  }
  require(steps == met.size(), "forward: steps are missing");
}

// The tiles of queries of a tile of keys and the other way around; only the first keys may have no queries.
void check_tiles(const Lengths& lengths, const Window& window) {
  const auto met = met_tiles(lengths, window, kQueries, kKeys);
  size_t of_keys = 0, of_queries = 0;
  for (int key = 0; key < lengths.k; key += kKeys) {
    const Tiles tiles = attending_tiles<kQueries>(window, key, kKeys, lengths.q, lengths.k);
    of_keys += tiles.end - tiles.begin;
    for (int tile = tiles.begin; tile < tiles.end; ++tile)
      require(met.count({tile, key / kKeys}) > 0, "backward: a tile of keys and one of queries without a pair");
    require((tiles.begin < tiles.end) == (key / kKeys >= first_attended_key(window, lengths.q, lengths.k) / kKeys),
            "backward: first_attended_key()");
  }
  for (int query = 0; query < lengths.q; query += kQueries) {
    const Tiles tiles = attended_tiles<kKeys>(window, query, kQueries, lengths.q, lengths.k);
    of_queries += tiles.end - tiles.begin;
  }
  require(of_keys == met.size() && of_queries == met.size(), "backward: tiles are missing");
}

// The chunks of packed or dense sequences, in the order in which blocks fetch them.
void check_chunks(const std::vector<Lengths>& batch, const Window& window, bool packed, int chunk_keys) {
  std::vector<int32_t> boundaries(1, 0);
  int keys = 0;
  for (const Lengths& lengths : batch) {
    boundaries.push_back(boundaries.back() + lengths.k);
    keys = std::max(keys, lengths.k);
  }
  if (packed) keys = boundaries.back() + 3;  // tokens after the last sequence
  const int sequences = static_cast<int>(batch.size());
  const int slots = static_cast<int>(count_slots(packed, sequences, keys, chunk_keys));
  std::set<std::pair<int, int>> chunks, steps;
  std::map<std::pair<int, int>, int> arrivals, stored;
  for (int slot = slots - 1; slot >= 0; --slot) {
    const Chunk chunk = chunk_of_slot(packed ? boundaries.data() : nullptr, sequences, keys, chunk_keys, slot);
    const Lengths& lengths = batch[chunk.sequence];
    require(chunks.insert({chunk.sequence, chunk.index}).second, "chunks: a chunk has two slots");
    if (lengths.q == 0 || lengths.k == 0) continue;
    const int tiles = chunk_keys / kKeys, key_tiles = (lengths.k + kKeys - 1) / kKeys;
    const Tiles own = {std::max(chunk.index * tiles, first_attended_key(window, lengths.q, lengths.k) / kKeys),
                       std::min((chunk.index + 1) * tiles, key_tiles)};
    const bool has_next = chunk.followed && (chunk.index + 1) * tiles < key_tiles;
    require(chunk.followed || (chunk.index + 1) * tiles >= key_tiles, "chunks: the next one is missing");
    std::map<int, int> ring;  // the tile of queries in each place
    for (int key_tile = own.begin; key_tile < own.end; ++key_tile) {
      const Tiles queries = attending_tiles<kQueries>(window, key_tile * kKeys, kKeys, lengths.q, lengths.k);
      for (int tile = queries.begin; tile < queries.end; ++tile) {
        steps.insert({chunk.sequence * 4096 + tile, key_tile});
        const Tiles attended = attended_tiles<kKeys>(window, tile * kQueries, kQueries, lengths.q, lengths.k);
        const ChunkStep step = chunk_step(attended, own, has_next, key_tile);
        const int place = tile % (kRingQueries / kQueries);
        const std::pair<int, int> name = {chunk.sequence, tile};
        require(step.follows == (ring.count(place) > 0), "chunks: a sum that is not there, or is lost");
        if (step.follows) require(ring[place] == tile, "chunks: another tile's sum");
        if (!step.last) {
          ring[place] = tile;
          continue;
        }
        ring.erase(place);
        require(!(step.sends_partial_sum && step.adds_partial_sum), "chunks: a tile of queries in three chunks");
        if (step.sends_partial_sum) {
          ++arrivals[name];
        } else {
          require(arrivals[name] == (step.adds_partial_sum ? 1 : 0), "chunks: a part of the sum is missing or unused");
          ++stored[name];
        }
      }
    }
    require(ring.empty(), "chunks: sums are left in the ring");
  }
  for (int sequence = 0; sequence < sequences; ++sequence) {
    const Lengths& lengths = batch[sequence];
    std::set<int> expected;
    for (const auto& [query, key] : met_tiles(lengths, window, kQueries, kKeys)) {
      expected.insert(query);
      require(steps.count({sequence * 4096 + query, key}) > 0, "chunks: a step is missing");
    }
    for (const int tile : expected) require(stored[{sequence, tile}] == 1, "chunks: dQ is not stored once");
  }
}

}  // namespace

int main() {
  std::mt19937 random(1);
  const auto below = [&](int n) { return static_cast<int>(random() % n); };
  const std::vector<Window> windows = {{0, 0},  {64, 64},   {127, 0}, {0, 127},   {13, 200},  {200, 13},
                                       {1, 63}, {160, 161}, {63, 64}, {5000, 10}, {10, 5000}, {300, 300}};
  for (const Window& window : windows)
    for (int round = 0; round < 6; ++round) {
      const Lengths lengths = {1 + below(900), 1 + below(1200)}, equal = {lengths.q, lengths.q};
      for (const Lengths& own : {lengths, equal, Lengths{1 + below(70), lengths.k}}) {
        check_forward<4>(own, window);
        check_forward<2>(own, window);
        check_tiles(own, window);
      }
      std::vector<Lengths> batch = {lengths, {0, 5}, equal, {7, 0}, {1 + below(500), 1 + below(2000)}, {1, 1}};
      std::shuffle(batch.begin(), batch.end(), random);
      for (const bool packed : {true, false}) {
        if (fits_ring(window, kQueries, kKeys)) check_chunks(batch, window, packed, kChunkKeys);
        for (Lengths& own : batch) own.q = std::min(own.q, kRingQueries);  // fits whatever the window
        check_chunks(batch, window, packed, 2048);
      }
    }
  require(fits_ring({160, 161}, kQueries, kKeys) && !fits_ring({161, 161}, kQueries, kKeys), "fits_ring()");
  const Window clamped = Window::of(-1, int64_t{1} << 40, 10, 20);
  require(clamped.left == 20 && clamped.right == 10, "Window::of()");
  std::printf("ok\n");
}
