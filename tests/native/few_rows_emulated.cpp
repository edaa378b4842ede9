// The GEMM kernel for up to 16 rows (kernels/few_rows/cuda_product.cu), emulated thread by thread on the host with the
// index arithmetic of tiles.h: copies into stages in TMA's layout, ldmatrix, mma, the reduction over groups of warps,
// and the stores.
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
void ldmatrix(const std::vector<float>& memory, const int* addresses, float (*words)[4][2]) {
  for (int lane = 0; lane < 32; ++lane)
    for (int m = 0; m < 4; ++m)
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

constexpr const Tile& kTile = kSmallTile;
constexpr int kWarpColumns = kTile.columns / kTile.warp_columns, kN = kWarpColumns / 8;

// The sums of one warp, [n][lane][4].
using Sums = std::vector<float>;

void multiply_stage(const std::vector<float>& memory, int warp_column, int group, Sums& sums) {
  constexpr int kSteps = kInner / 16 / kTile.inner_groups;
  const int b_tile = (kTile.rows + warp_column) * kInner;
  for (int i = 0; i < kSteps; ++i) {
    const int chunk = 2 * (group * kSteps + i);
    int addresses[32];
    float a[32][4][2], b[kN][32][2][2];
    for (int lane = 0; lane < 32; ++lane) {
      const MatrixRow of = matrix_row_a(lane);
      addresses[lane] = chunk_offset(of.row, chunk + of.chunk, kTileChunks) / 2;
    }
    ldmatrix(memory, addresses, a);
    for (int n = 0; n < kN; n += 2) {
      float words[32][4][2];
      for (int lane = 0; lane < 32; ++lane) {
        const MatrixRow of = matrix_row_b(lane);
        addresses[lane] = b_tile + chunk_offset(8 * n + of.row, chunk + of.chunk, kTileChunks) / 2;
      }
      ldmatrix(memory, addresses, words);
      for (int lane = 0; lane < 32; ++lane)
        for (int word = 0; word < 8; ++word)
          b[n + word / 4][lane][word / 2 % 2][word % 2] = words[lane][word / 2][word % 2];
    }
    for (int n = 0; n < kN; ++n) multiply(reinterpret_cast<float (*)[4]>(&sums[n * 32 * 4]), a, b[n]);
  }
}

}  // namespace

// parts [part_count, M, N] of x [M, K] times weight [N, K]^T.
extern "C" void few_rows_product_emulated(int part_count, const float* x, const float* weight, float* parts, int rows,
                                          int columns, int inner) {
  constexpr int kWarps = kTile.warp_columns, kThreads = threads_of(kTile);
  const int stages = (inner + kInner - 1) / kInner;
  std::vector<float> memory(static_cast<size_t>(stage_bytes(kTile)) / 2);
  for (int part = 0; part < part_count; ++part)
    for (int first_row = 0; first_row < rows; first_row += kTile.rows)
      for (int first_column = 0; first_column < columns; first_column += kTile.columns) {
        std::vector<Sums> sums(kWarps * kTile.inner_groups, Sums(kN * 32 * 4));
        for (int stage = first_stage(stages, part, part_count); stage < first_stage(stages, part + 1, part_count);
             ++stage) {
          copy_stage(memory, 0, kTile.rows, kThreads, x, first_row, rows, stage * kInner, inner);
          copy_stage(memory, kTile.rows * kInner, kTile.columns, kThreads, weight, first_column, columns,
                     stage * kInner, inner);
          for (int warp = 0; warp < kWarps * kTile.inner_groups; ++warp)
            multiply_stage(memory, warp % kWarps * kWarpColumns, warp / kWarps, sums[warp]);
        }
        for (int group = 1; group < kTile.inner_groups; ++group)
          for (int warp = 0; warp < kWarps; ++warp)
            for (size_t i = 0; i < sums[warp].size(); ++i) sums[warp][i] += sums[group * kWarps + warp][i];
        for (int warp = 0; warp < kWarps; ++warp)
          for (int i = 0; i < kN * 32 * 4; ++i) {
            const int lane = i / 4 % 32, n = i / 128;
            const int row = first_row + accumulator_row(lane) + 8 * (i % 4 / 2);
            const int column = first_column + warp * kWarpColumns + accumulator_column(lane) + 8 * n + i % 2;
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
