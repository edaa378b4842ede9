// Attention of short sequences (kernels/few_rows/short_attention.h) on the host: which calls have it, how its blocks
// are divided among the SMs, and that threads copy every chunk and store every column once.
#include "few_rows/short_attention.h"

#include <cstdio>
#include <cstdlib>
#include <set>
#include <vector>

using namespace fasttfm::few_rows;

namespace {

void require(bool holds, const char* what) {
  if (holds) return;
  std::printf("%s\n", what);
  std::exit(1);
}

void check_selection() {
  for (const int64_t head_dim : {32, 64}) {
    require(is_short_attention(head_dim, 1) && is_short_attention(head_dim, 128), "a short sequence is not selected");
    require(!is_short_attention(head_dim, 129), "a long sequence is selected");
  }
  for (const int64_t head_dim : {16, 48, 80, 128}) require(!is_short_attention(head_dim, 64), "another head dim");
}

// How many blocks with this much shared memory fit into an SM.
int64_t fitting(int64_t memory) { return kProcessorMemory / (memory + kReservedMemory); }

void check_memory() {
  require(fitting(kShortMemory) >= kShortBlocks, "fewer blocks fit into an SM than the kernel is compiled for");
  for (const int64_t processors : {1, 66, 114, 132})
    for (int64_t blocks = 1; blocks <= 12 * processors; ++blocks) {
      const int64_t memory = spread_memory(blocks, processors), share = (blocks + processors - 1) / processors;
      require(memory >= kShortMemory && memory <= kMostBlockMemory, "a block's shared memory");
      require(fitting(memory) >= std::min<int64_t>(share, kShortBlocks), "an SM has no room for its share");
      if (share < kShortBlocks) require(fitting(memory) == share, "an SM has room for more than its share");
    }
}

// The loop of copy_tile(): each chunk of data has its own place in shared memory, where wgmma reads it.
void check_copies(int chunks) {
  for (int end = 0; end <= kShortKeys; ++end) {
    std::set<std::pair<int, int>> copied;
    std::set<int> places;
    for (int thread = 0; thread < kShortThreads; ++thread) {
      const MatrixRow of = copied_chunk(thread, chunks);
      for (int row = of.row; row < end; row += copied_rows(chunks)) {
        const int place = chunk_offset(row, of.chunk, kTileChunks);
        require(place == row * kShortRowBytes + (of.chunk ^ row % 8) * 16, "a chunk is not where the swizzle has it");
        require(copied.insert({row, of.chunk}).second && places.insert(place).second, "a chunk is copied twice");
      }
    }
    require(static_cast<int>(copied.size()) == end * chunks, "a chunk is not copied");
  }
}

// The exchange in store_rows(), for one row of 16 columns; a word is the column of its first element.
void check_stores() {
  std::vector<int> stored(16, -1);
  for (int thread = 0; thread < 4; ++thread) {
    const bool odd = thread % 2 != 0;
    const auto word = [](int of, int i) { return 8 * i + 2 * of; };
    const int own = word(thread, odd ? 1 : 0), received = word(thread ^ 1, odd ? 1 : 0);
    const int words[2] = {odd ? received : own, odd ? own : received};
    for (int i = 0; i < 4; ++i) {
      int& place = stored[stored_column(thread) + i];
      require(place < 0, "a column is stored twice");
      place = words[i / 2] + i % 2;
    }
  }
  for (int column = 0; column < 16; ++column) require(stored[column] == column, "a column is stored elsewhere");
}

}  // namespace

int main() {
  check_selection();
  check_memory();
  for (const int head_dim : {32, 64}) check_copies(head_dim / kChunk);
  check_stores();
  std::printf("ok\n");
}
