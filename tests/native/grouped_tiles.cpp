// Checks how the attention backward numbers the query tiles of heads that share k and v: split() in
// attention/hopper/shared/work_partition.h.
#include <cstdint>
#include <cstdio>
#include <initializer_list>

#include "attention/hopper/shared/work_partition.h"

using namespace fasttfm::cuda::hopper_backward;

namespace {

bool is_exact(int64_t tile, int member, int heads_per_unit) {
  const int64_t index = tile * heads_per_unit + member;
  const HeadTile head_tile = split(static_cast<int>(index), heads_per_unit, half_reciprocal(heads_per_unit));
  return head_tile.tile == tile && head_tile.member == member;
}

// The number of query tiles up to which can_number() accepts them.
int64_t most_tiles(int64_t heads_per_unit) {
  int64_t low = 0, high = int64_t{1} << 31;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (can_number({1, heads_per_unit, middle * kQueries, 1}) ? low : high) = middle;
  }
  return low;
}

}  // namespace

int main() {
  for (int heads_per_unit = 1; heads_per_unit <= 300; ++heads_per_unit) {
    const int64_t most = most_tiles(heads_per_unit);
    for (int64_t first : {int64_t{0}, most / 3, most / 2, most - 200})
      for (int64_t tile = first < 0 ? 0 : first; tile < first + 200 && tile < most; ++tile)
        for (int member = 0; member < heads_per_unit; ++member)
          if (!is_exact(tile, member, heads_per_unit)) {
            std::printf("tile %lld, head %d of %d\n", static_cast<long long>(tile), member, heads_per_unit);
            return 1;
          }
  }
  std::puts("ok");
}
