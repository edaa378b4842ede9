// The GEMM kernel for few rows (kernels/few_rows/cuda_product.cu), emulated thread by thread on the host with the index
// arithmetic of tiles.h: copies into stages in TMA's layout, ldmatrix, mma, the reduction over groups of warps, and the
// stores.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "few_rows/tiles.h"

using namespace fasttfm::few_rows;

namespace {

// One stage of one operand; its elements have 2 bytes on the GPU and are floats here.
void copy_stage(std::vector<float>& memory, int base, int tile_rows, int threads, const float* from, int first_row,
                int all_rows, int first, int all_inner) {
  const int step = threads / kTileChunks;
  for (int thread = 0; thread < threads; ++thread)
    for (int row = thread / kTileChunks; row < tile_rows; row += step) {
      const int chunk = thread % kTileChunks, k = first + chunk * kChunk;
      const bool inside = first_row + row < all_rows && k < all_inner;
      const int to = base + chunk_offset(row, chunk, kTileChunks) / 2;
      for (int i = 0; i < kChunk; ++i)
        memory[to + i] = inside ? from[int64_t{first_row + row} * all_inner + k + i] : 0.0f;
    }
}

// ldmatrix: registers [lane][matrix][2] of 8 x 8 matrices; lanes 8 m to 8 m + 7 give the addresses of the rows of
// matrix m.
void ldmatrix(const std::vector<float>& memory, const int* addresses, int matrices, float (*words)[4][2]) {
  for (int lane = 0; lane < 32; ++lane)
    for (int m = 0; m < matrices; ++m)
      for (int i = 0; i < 2; ++i) words[lane][m][i] = memory[addresses[8 * m + lane / 4] + 2 * (lane % 4) + i];
}

// mma.m16n8k16: a [lane][4][2], b [lane][2][2], d [lane][4].
void multiply(float (*d)[4], const float (*a)[4][2], const float (*b)[2][2]) {
  float left[16][16], right[16][8];
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 2; ++i) {
      const int group = lane / 4, k = 2 * (lane % 4) + i;
      left[group][k] = a[lane][0][i];
      left[group + 8][k] = a[lane][1][i];
      left[group][k + 8] = a[lane][2][i];
      left[group + 8][k + 8] = a[lane][3][i];
      right[k][group] = b[lane][0][i];
      right[k + 8][group] = b[lane][1][i];
    }
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i)
      for (int k = 0; k < 16; ++k) d[lane][i] += left[lane / 4 + 8 * (i / 2)][k] * right[k][2 * (lane % 4) + i % 2];
}

// The sums of one warp, [m][n][lane][4].
void multiply_stage(const std::vector<float>& memory, const Tile& tile, int base, int warp_row, int warp_column,
                    int group, std::vector<float>& sums) {
  const int m_count = tile.rows / tile.warp_rows / 16, n_count = tile.columns / tile.warp_columns / 8;
  const int steps = kInner / 16 / tile.inner_groups;
  const int a_tile = base + warp_row * kInner, b_tile = base + (tile.rows + warp_column) * kInner;
  for (int i = 0; i < steps; ++i) {
    const int chunk = 2 * (group * steps + i);
    std::vector<float> b(static_cast<size_t>(n_count) * 32 * 4);
    for (int n = 0; n < n_count; n += 2) {
      int addresses[32];
      float words[32][4][2];
      const int matrices = n + 1 < n_count ? 4 : 2;
      for (int lane = 0; lane < 32; ++lane) {
        const MatrixRow of = matrix_row_b(lane);
        const int row = matrices == 4 ? of.row : lane % 8;
        addresses[lane] = b_tile + chunk_offset(8 * n + row, chunk + of.chunk, kTileChunks) / 2;
      }
      ldmatrix(memory, addresses, matrices, words);
      for (int lane = 0; lane < 32; ++lane)
        for (int word = 0; word < 2 * matrices; ++word)
          b[((n + word / 4) * 32 + lane) * 4 + word % 4] = words[lane][word / 2][word % 2];
    }
    for (int m = 0; m < m_count; ++m) {
      int addresses[32];
      float a[32][4][2];
      for (int lane = 0; lane < 32; ++lane) {
        const MatrixRow of = matrix_row_a(lane);
        addresses[lane] = a_tile + chunk_offset(16 * m + of.row, chunk + of.chunk, kTileChunks) / 2;
      }
      ldmatrix(memory, addresses, 4, a);
      for (int n = 0; n < n_count; ++n)
        multiply(reinterpret_cast<float (*)[4]>(&sums[(m * n_count + n) * 32 * 4]), a,
                 reinterpret_cast<const float (*)[2][2]>(&b[n * 32 * 4]));
    }
  }
}

}  // namespace

extern "C" int few_rows_tile_count() { return kTileCount; }

// parts [part_count, M, N] of x [M, K] times weight [N, K]^T.
extern "C" void few_rows_product_emulated(int index, int part_count, const float* x, const float* weight, float* parts,
                                          int rows, int columns, int inner) {
  const Tile& tile = kTiles[index];
  const int threads = threads_of(tile), warps = tile.warp_rows * tile.warp_columns;
  const int warp_rows = tile.rows / tile.warp_rows, warp_columns = tile.columns / tile.warp_columns;
  const int m_count = warp_rows / 16, n_count = warp_columns / 8, stages = (inner + kInner - 1) / kInner;
  std::vector<float> memory(static_cast<size_t>(stage_bytes(tile)) / 2);
  for (int part = 0; part < part_count; ++part)
    for (int first_row = 0; first_row < rows; first_row += tile.rows)
      for (int first_column = 0; first_column < columns; first_column += tile.columns) {
        std::vector<std::vector<float>> sums(static_cast<size_t>(warps * tile.inner_groups),
                                             std::vector<float>(static_cast<size_t>(m_count * n_count * 32 * 4)));
        for (int stage = first_stage(stages, part, part_count); stage < first_stage(stages, part + 1, part_count);
             ++stage) {
          copy_stage(memory, 0, tile.rows, threads, x, first_row, rows, stage * kInner, inner);
          copy_stage(memory, tile.rows * kInner, tile.columns, threads, weight, first_column, columns, stage * kInner,
                     inner);
          for (int warp = 0; warp < warps * tile.inner_groups; ++warp) {
            const int place = warp % warps;
            multiply_stage(memory, tile, 0, place / tile.warp_columns * warp_rows,
                           place % tile.warp_columns * warp_columns, warp / warps, sums[warp]);
          }
        }
        for (int group = 1; group < tile.inner_groups; ++group)
          for (int warp = 0; warp < warps; ++warp)
            for (size_t i = 0; i < sums[warp].size(); ++i) sums[warp][i] += sums[group * warps + warp][i];
        for (int warp = 0; warp < warps; ++warp)
          for (int i = 0; i < m_count * n_count * 32 * 4; ++i) {
            const int lane = i / 4 % 32, m = i / 128 / n_count, n = i / 128 % n_count;
            const int row =
                first_row + warp / tile.warp_columns * warp_rows + accumulator_row(lane) + 16 * m + 8 * (i % 4 / 2);
            const int column =
                first_column + warp % tile.warp_columns * warp_columns + accumulator_column(lane) + 8 * n + i % 2;
            if (row < rows && column < columns) parts[(int64_t{part} * rows + row) * columns + column] = sums[warp][i];
          }
      }
}

// The number of bank conflicts of ldmatrix (between the 16-byte chunks of eight rows that one phase reads), over all
// rows and chunks of a tile with rows of `chunks` chunks.
extern "C" int few_rows_bank_conflicts(int chunks) {
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
