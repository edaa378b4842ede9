// Spans of packed sequences for all boundaries of a few numbers: inside of the tensor, also if the boundaries are not
// valid, and those of the definition if they are.
#include "common/packed.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>

using namespace fasttfm;

namespace {

void require(bool holds, const char* what) {
  if (holds) return;
  std::printf("%s\n", what);
  std::exit(1);
}

void check(const int32_t (&bounds)[4], int size, int longest) {
  const bool valid = packed_valid(bounds, 3, size, longest);
  for (int i = 0; i < 3; ++i) {
    const Span span = packed_span(bounds, i, size, longest);
    require(span.first >= 0 && span.length >= 0 && span.length <= longest, "a span that starts or ends before 0");
    require(int64_t{span.first} + span.length <= size, "a span that ends after the tensor");
    if (valid) require(span.first == bounds[i] && span.length == bounds[i + 1] - bounds[i], "another span");
  }
  const int after = packed_first(bounds, 3, size);
  require(after >= 0 && after <= size && (!valid || after == bounds[3]), "the first row after all sequences");
  for (int row = 0; row < size && row < 8; ++row) {
    const RowPosition at = RowPositions{bounds, 3, 0}(row);
    require(at.sequence < 3, "a sequence that does not exist");
    if (valid && row < bounds[3])
      require(bounds[at.sequence] + static_cast<int>(at.token) == row && row < bounds[at.sequence + 1], "a position");
  }
}

}  // namespace

int main() {
  constexpr int32_t kNumbers[] = {INT32_MIN, -7, 0, 3, 5, 8, 1000, INT32_MAX};
  for (const int size : {0, 5, 8, INT32_MAX})
    for (const int longest : {0, 4, 8, INT32_MAX})
      for (const int32_t a : kNumbers)
        for (const int32_t b : kNumbers)
          for (const int32_t c : kNumbers)
            for (const int32_t d : kNumbers) check({a, b, c, d}, size, longest);
  require(packed_size(int64_t{1} << 40) == INT32_MAX && packed_size(7) == 7, "a number of rows");
  std::puts("ok");
}
