// attention backward for Hopper, head dims 192 and 256: what both kernels do with tiles of 64 rows: loads, products,
// and stores of the gradients.
#pragma once

#include "attention/hopper/backward_d256/tasks.cuh"
#include "attention/hopper/shared/backward_keys.cuh"

namespace fasttfm {
namespace cuda {
namespace hopper_backward {

constexpr int kWideTileBytes = kWideRows * kTileRowBytes;  // 64 columns

// A ring buffer of tiles of 64 rows. A tile of which rows are replaced by zeros completes on `raw` first.
template <int HEAD_DIM, int STAGES>
struct WideRing {
  static constexpr int kBytes = HEAD_DIM / kTileColumns * kWideTileBytes;
  char tile[STAGES][kBytes];

  struct Barriers {
    Mbarrier full[STAGES], empty[STAGES], raw;

    // `warps`: the number of warps that release a stage.
    __device__ __forceinline__ void init(int warps) {
      for (int i = 0; i < STAGES; ++i) {
        full[i].init(kWarpArrivals);
        empty[i].init(warps * kWarpArrivals);
      }
      raw.init(kWarpArrivals);
    }
  };
};

// ---- loads ----------------------------------------------------------------------------------------------------------

template <Mask MASK>
__device__ __forceinline__ int batch_of(const Parameters& p, const Unit<MASK>& unit) {
  return p.cu_seqlens == nullptr ? unit.sequence : 0;
}

// Loads 64 rows of all columns into `tile` with one thread.
template <int HEAD_DIM>
__device__ __forceinline__ void load_wide_tile(const CUtensorMap& map, Mbarrier& landed, char* tile, int head, int row,
                                               int batch) {
  for (int c = 0; c < HEAD_DIM / kTileColumns; ++c)
    tma_load(&map, landed, shared_address(tile) + c * kWideTileBytes, c * kTileColumns, head, row, batch);
}

// The position of a warp that fills a WideRing.
template <int HEAD_DIM, int STAGES>
class WideRingLoader {
  using Ring = WideRing<HEAD_DIM, STAGES>;

 public:
  __device__ __forceinline__ WideRingLoader(Ring& ring, typename Ring::Barriers& barriers)
      : ring(ring), barriers(barriers) {}

  // Loads 64 rows from `row` on; called by a whole warp. Rows from `valid` on are replaced by zeros if `foreign`: they
  // may belong to another sequence, and 0 * NaN would be NaN. more(slot, landed) loads `more_bytes` bytes in addition.
  template <class More>
  __device__ __forceinline__ void load(const CUtensorMap& map, int head, int row, int batch, int valid, bool foreign,
                                       uint32_t more_bytes, More more) {
    const bool clears = foreign && valid < kWideRows;
    const uint32_t slot = stage.slot;
    barriers.empty[slot].wait(stage.parity ^ 1);
    start_loads(clears ? barriers.raw : barriers.full[slot], Ring::kBytes + more_bytes, [&](Mbarrier& landed) {
      load_wide_tile<HEAD_DIM>(map, landed, ring.tile[slot], head, row, batch);
      more(slot, landed);
    });
    stage.next();
    if (!clears) return;
    finish_loads(barriers.raw, raw_parity, barriers.full[slot], [&] {
      for (int c = 0; c < HEAD_DIM / kTileColumns; ++c)
        clear_rows(ring.tile[slot] + c * kWideTileBytes, valid, kWideRows);
    });
    raw_parity ^= 1;
  }

 private:
  Ring& ring;
  typename Ring::Barriers& barriers;
  RingPosition<STAGES> stage;
  uint32_t raw_parity = 0;
};

// ---- products -------------------------------------------------------------------------------------------------------

// product = a b^T for 64 rows of each. The first COUNT / 4 groups of 16 columns of a are in registers.
template <class T, int HEAD_DIM, int COUNT = 0>
__device__ __forceinline__ void multiply_wide_rows(float (&product)[32], uint32_t a, uint32_t b,
                                                   const uint32_t* in_registers = nullptr) {
  wgmma_fence();
#pragma unroll
  for (int c = 0; c < HEAD_DIM / 16; ++c) {
    const uint64_t columns = advance(k_major(b + c / 4 * kWideTileBytes), c % 4 * kKMajorStep);
    if (4 * c < COUNT)
      wgmma<T>(product, in_registers + 4 * c, columns, c > 0);
    else
      wgmma<T>(product, advance(k_major(a + c / 4 * kWideTileBytes), c % 4 * kKMajorStep), columns, c > 0);
  }
}
// sum += operand rows, or sum = operand rows, with an operand [64, 64] in registers.
template <class T, int COUNT>
__device__ __forceinline__ void multiply_wide_columns(float (&sum)[COUNT], const uint32_t (&operand)[16], uint32_t rows,
                                                      bool add) {
  wgmma_fence();
#pragma unroll
  for (int c = 0; c < 4; ++c)
    wgmma<T, Major::mn>(sum, operand + 4 * c, advance(mn_major(rows, kWideTileBytes), c * kMnMajorStep), c > 0 || add);
}

// ---- results --------------------------------------------------------------------------------------------------------

// Writes 64 rows of a gradient from row `first` of a sequence on: `sums` times `factor`, and zeros past the sequence's
// end; or only zeros if nothing was computed.
template <class T, int HEAD_DIM, Mask MASK>
__device__ __forceinline__ void store_wide(const Parameters& p, const Output& output, const Unit<MASK>& unit, int head,
                                           const StoredSpan& span, int first, float factor, bool computed,
                                           const float (&sums)[HEAD_DIM / 2]) {
  if (first >= span.stored) return;
  const int rows = computed ? min(max(span.length - first, 0), kWideRows) : 0;
  const int stored = min(span.stored - first, kWideRows);
  T* to = row_of<T>(output, p, unit.sequence, head, span.first + first);
  if (rows > 0) store_product(sums, factor, to, output.token, rows);
  if (rows < stored) store_zeros<kWarpgroup, HEAD_DIM>(to + rows * output.token, output.token, stored - rows);
}

}  // namespace hopper_backward
}  // namespace cuda
}  // namespace fasttfm
