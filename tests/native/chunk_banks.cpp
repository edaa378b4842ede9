// Rows of a tile that ldmatrix reads together (few_rows/tiles.h) are in different banks, on the host.
#include <cstdio>
#include <initializer_list>

#include "few_rows/tiles.h"

using namespace fasttfm::few_rows;

namespace {

// The number of conflicts between the 16-byte chunks of eight rows that one phase reads, over all rows and chunks of a
// tile with rows of `chunks` chunks.
int bank_conflicts(int chunks) {
  int conflicts = 0;
  for (int first = 0; first < 64; first += 8)
    for (int chunk = 0; chunk < chunks; ++chunk) {
      int seen = 0;
      for (int row = first; row < first + 8; ++row) {
        const int bank = 1 << (chunk_offset(row, chunk, chunks) / 16 % 8);
        conflicts += (seen & bank) != 0;
        seen |= bank;
      }
    }
  return conflicts;
}

}  // namespace

int main() {
  for (int chunks : {4, 8, 16})
    if (bank_conflicts(chunks) != 0) {
      std::printf("bank conflicts: %d chunks\n", chunks);
      return 1;
    }
  std::printf("ok\n");
}
