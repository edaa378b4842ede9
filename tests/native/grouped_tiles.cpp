// Checks how the attention backward numbers the query tiles of heads that share k and v: split() in
// attention/hopper/sharing.h.
#include <cstdint>
#include <cstdio>
#include <initializer_list>

#include "attention/hopper/sharing.h"

using namespace fasttfm::cuda::hopper_backward;

namespace {

bool is_exact(int64_t tile, int member, int together) {
  const int64_t index = tile * together + member;
  const HeadTile found = split(static_cast<int>(index), together, half_reciprocal(together));
  return found.tile == tile && found.member == member;
}

// The number of query tiles up to which can_number() accepts them.
int64_t most_tiles(int64_t together) {
  int64_t low = 0, high = int64_t{1} << 31;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (can_number({1, together, middle * kQueries, 1}) ? low : high) = middle;
  }
  return low;
}

}  // namespace

int main() {
  for (int together = 1; together <= 300; ++together) {
    const int64_t most = most_tiles(together);
    for (int64_t first : {int64_t{0}, most / 3, most / 2, most - 200})
      for (int64_t tile = first < 0 ? 0 : first; tile < first + 200 && tile < most; ++tile)
        for (int member = 0; member < together; ++member)
          if (!is_exact(tile, member, together)) {
            std::printf("tile %lld, head %d of %d\n", static_cast<long long>(tile), member, together);
            return 1;
          }
  }
  std::puts("ok");
}
