// How warps of the GEMMs for few rows (few_rows/cuda_gemm.cu) pass their results through
// shared memory, on the host: every accumulator is stored once and read as the element that it is, without bank
// conflicts, and a tile's result fits into its stages. With a residual, tiles have whole groups of columns, or the
// blocks of a cluster send each other their sums (few_rows/gemm_residual.cuh): every block receives those of its
// rows from all parts of K.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "few_rows/gemm_tiles.h"

using namespace fasttfm::few_rows;

namespace {

void require(bool holds, const char* what, int columns) {
  if (holds) return;
  std::printf("%s: %d columns\n", what, columns);
  std::exit(1);
}

// stmatrix.x4: lanes 8 m to 8 m + 7 give the addresses of the rows of matrix m; each lane holds two neighbouring
// elements of each matrix.
void store_matrices(std::vector<int>& memory, const int (&addresses)[32], const int (&words)[32][4][2]) {
  for (int lane = 0; lane < 32; ++lane)
    for (int m = 0; m < 4; ++m)
      for (int i = 0; i < 2; ++i) memory[addresses[8 * m + lane / 4] / 2 + 2 * (lane % 4) + i] = words[lane][m][i];
}

void check(int columns) {
  std::vector<int> memory(static_cast<size_t>(16 * result_pitch(columns) / 2), -1);
  for (int first = 0; first < columns; first += 16) {
    int addresses[32], words[32][4][2];
    for (int lane = 0; lane < 32; ++lane) {
      addresses[lane] = result_offset(lane, columns) + 2 * first;
      for (int k = 0; k < 4; ++k)
        for (int i = 0; i < 2; ++i) {
          const int row = accumulator_row(lane) + 8 * (k % 2), column = first + accumulator_column(lane) + 8 * (k / 2);
          words[lane][k][i] = row * columns + column + i;
        }
    }
    for (int m = 0; m < 4; ++m) {
      int banks = 0;
      for (int lane = 8 * m; lane < 8 * m + 8; ++lane) banks |= 1 << (addresses[lane] / 16 % 8);
      require(banks == 255, "bank conflict", columns);
    }
    store_matrices(memory, addresses, words);
  }
  for (int index = 0; index < 16 * columns / kChunk; ++index) {
    const ResultVector at = result_vector(index, columns);
    for (int i = 0; i < kChunk; ++i)
      require(memory[(at.row * result_pitch(columns) + 2 * at.column) / 2 + i] == at.row * columns + at.column + i,
              "wrong element", columns);
  }
}

// One of eight consecutive lanes that access 16 bytes each.
struct Banks {
  int used = 0;
  void access(int offset, int columns) {
    const int bank = 1 << (offset / 16 % 8);
    require((used & bank) == 0, "bank conflict of sums", columns);
    used |= bank;
  }
};

// The sums that a block receives: [parts, rows of its share, joined columns], where each is the number of the tile's
// element. They are in the memory of all blocks of a cluster.
class Exchange {
 public:
  Exchange(const GemmTile& tile, int multicast_blocks, int parts)
      : tile_(tile), multicast_blocks_(multicast_blocks), parts_(parts), joined_(joined_blocks(tile.columns)) {
    rows_ = tile.rows / (joined_ * parts);
    received_.assign(static_cast<size_t>(multicast_blocks * parts),
                     std::vector<int>(static_cast<size_t>(parts * rows_ * joined_ * tile.columns), -1));
  }

  void send() {
    for (int part = 0; part < parts_; ++part)
      for (int neighbour = 0; neighbour < multicast_blocks_; ++neighbour)
        for (int first = 0; first < tile_.rows; first += 8)
          for (int i = 0; i < tile_.columns / 8; i += 2) send_rows(part, neighbour, first, i);
  }

  void receive() const {
    for (int part = 0; part < parts_; ++part)
      for (int neighbour = 0; neighbour < multicast_blocks_; ++neighbour) {
        const int share = part * joined_ + neighbour % joined_;
        const std::vector<int>& memory = received_[static_cast<size_t>(part * multicast_blocks_ + neighbour)];
        for (int from = 0; from < parts_; ++from)
          for (int row = 0; row < rows_; ++row)
            for (int group = 0; group < joined_ * tile_.columns / kGroupColumns; ++group)
              receive_group(memory, from, row, group, share * rows_ + row);
      }
  }

 private:
  int line(int part, int row) const { return (part * rows_ + row) * joined_ * tile_.columns * 4; }
  int element(int part, int row, int column) const {
    return (part * tile_.rows + row) * joined_ * tile_.columns + column;
  }

  // Lanes of a warp: of tiles i and i + 1 of 8 columns, an even lane has four columns of the first, an odd one of the
  // second.
  void send_rows(int part, int neighbour, int first, int i) {
    const int to = first / rows_, own = neighbour % joined_;
    std::vector<int>& memory =
        received_[static_cast<size_t>(finishing_rank(to, joined_, multicast_blocks_, neighbour - own))];
    for (int lane = 0; lane < 32; lane += 8) {
      Banks banks;
      for (int l = lane; l < lane + 8; ++l) {
        const int row = first % rows_ + accumulator_row(l), chunk = sent_chunk(l, i) + own * (tile_.columns / 4);
        const int offset = line(part, row) + sums_offset(row, chunk);
        const int column = own * tile_.columns + 8 * (i + l % 2) + accumulator_column(l & ~1);
        banks.access(offset, tile_.columns);
        for (int c = 0; c < 4; ++c) {
          int& place = memory[static_cast<size_t>(offset / 4 + c)];
          require(place == -1, "sums are sent twice", tile_.columns);
          place = element(part, first + accumulator_row(l), column + c);
        }
      }
    }
  }

  void receive_group(const std::vector<int>& memory, int part, int row, int group, int tile_row) const {
    for (int half = 0; half < 2; ++half) {
      Banks banks;
      for (int lane = 0; lane < 8; ++lane) {
        const int column = group * kGroupColumns + 4 * lane + 32 * half;
        const int offset = line(part, row) + sums_offset(row, column / 4);
        banks.access(offset, tile_.columns);
        for (int c = 0; c < 4; ++c)
          require(memory[static_cast<size_t>(offset / 4 + c)] == element(part, tile_row, column + c), "wrong sum",
                  tile_.columns);
      }
    }
  }

  GemmTile tile_;
  int multicast_blocks_, parts_, joined_, rows_;
  std::vector<std::vector<int>> received_;
};

}  // namespace

int main() {
  for (const GemmTile& tile : kGemmTiles) {
    for (int multicast_blocks = 1; multicast_blocks <= kMostClusterBlocks; ++multicast_blocks)
      for (int parts = 1; parts <= kMostClusterBlocks; ++parts) {
        if (!takes_residual(tile, multicast_blocks, parts)) continue;
        Exchange exchange(tile, multicast_blocks, parts);
        exchange.send();
        exchange.receive();
      }
    check(tile.columns);
    require(!tile.adds || joined_blocks(tile.columns) * tile.columns == kGroupColumns, "one group", tile.columns);
    require(tile.rows * result_pitch(tile.columns) <= tile.stages * (tile.rows + tile.columns) * kInner * 2,
            "no room for the result", tile.columns);
    require(tile.rows % 64 == 0 && tile.rows / tile.cluster % 8 == 0, "rows", tile.columns);
  }
  std::printf("ok\n");
}
