// Enumerates the tiles of the Hopper GEMM's clusters on the host: together they compute every part of 64 columns of all
// rows once, and in the last round every cluster has at most one tile.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "gemm/hopper/schedule.h"

using namespace fasttfm::cuda;

namespace {

template <int COLUMNS, int CLUSTER>
struct Shape {
  static constexpr int kRows = 128, kColumns = COLUMNS, kCluster = CLUSTER, kParts = COLUMNS / 64;
};

void require(bool holds, const char* what, const GemmSizes& p) {
  if (holds) return;
  std::printf("%s: %d rows, %d columns\n", what, p.rows, p.columns);
  std::exit(1);
}

template <class S>
void check(int rows, int columns, int multiprocessors) {
  constexpr int kTileRows = S::kRows * S::kCluster;
  const int clusters = multiprocessors / S::kCluster;
  GemmSizes p = {};
  p.rows = rows;
  p.columns = columns;
  plan_cluster_tiles<S>(&p, 768, clusters);
  const int groups = (rows + kTileRows - 1) / kTileRows, parts = (columns + 63) / 64;
  const int launched = clusters < p.cluster_tiles ? clusters : p.cluster_tiles;
  std::vector<int> computed(static_cast<size_t>(groups) * parts);
  for (int cluster = 0; cluster < launched; ++cluster) {
    int in_last = 0;
    for (int cluster_tile = cluster; cluster_tile < p.cluster_tiles;
         cluster_tile = next_cluster_tile(cluster_tile, launched)) {
      const ClusterTile at = cluster_tile_at<S>(p, cluster_tile);
      const int count = cluster_tile_parts<S>(p, cluster_tile, at.column), first = at.column / 64;
      require(at.row >= 0 && at.row % kTileRows == 0 && at.row < rows, "a tile outside of the rows", p);
      require(at.column % 64 == 0 && count > 0 && first + count <= parts, "a tile outside of the columns", p);
      for (int part = first; part < first + count; ++part) ++computed[at.row / kTileRows * parts + part];
      in_last += cluster_tile >= p.whole ? 1 : 0;
    }
    require(in_last <= 1, "a cluster with two tiles in the last round", p);
  }
  for (const int times : computed) require(times == 1, "a part that is not computed once", p);
}

template <class S>
void check_sizes(int multiprocessors) {
  for (int rows : {1, 128, 129, 257, 576, 1152, 2304, 3000, 4608, 9216, 12288, 36864})
    for (int columns : {8, 64, 72, 192, 200, 768, 1000, 2304, 3072, 4096}) check<S>(rows, columns, multiprocessors);
}

}  // namespace

int main() {
  for (int multiprocessors : {2, 3, 16, 114, 132}) {
    check_sizes<Shape<192, 1>>(multiprocessors);
    check_sizes<Shape<192, 2>>(multiprocessors);
    check_sizes<Shape<256, 2>>(multiprocessors);
  }
  std::puts("ok");
}
