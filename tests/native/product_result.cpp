// How warps of the GEMMs for few rows (few_rows/cuda_product.cu) pass their results through
// shared memory, on the host: every accumulator is stored once and read as the element that it is, without bank
// conflicts, and a tile's result fits into its stages.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "few_rows/product_tiles.h"

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

}  // namespace

int main() {
  for (const ProductTile& tile : kProductTiles) {
    check(tile.columns);
    require(tile.rows * result_pitch(tile.columns) <= tile.stages * (tile.rows + tile.columns) * kInner * 2,
            "no room for the result", tile.columns);
    require(tile.rows % 64 == 0 && tile.rows / tile.cluster % 8 == 0, "rows", tile.columns);
  }
  std::printf("ok\n");
}
