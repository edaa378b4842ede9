// Epilogues of the Hopper GEMM (gemm.cuh) with a ring buffer of 64-column parts between the consumers and the
// epilogue (GemmShape with RING). The consumers store a part as soon as its slot is empty, and the epilogue warps
// take turns with the units of the parts, so that none waits for the others at the end of a tile.
//
// This is for FP8 operands, whose epilogues take about as long as their GEMMs. The GEMMs of 16-bit operands, some of
// which are slower with a ring buffer, pass whole tiles.
#pragma once

#include <cstdint>

#include "common/cuda/hopper.cuh"
#include "gemm/hopper/gemm.cuh"

namespace fasttfm {
namespace cuda {

// The units of a warp, one after another: the warps take turns with the units of all parts of the block's tiles.
template <class S>
struct WarpUnits {
  GemmTileScheduler<S> tile;
  int part = 0, parts;  // of the tile
  int unit;             // of the part
  RingPosition<S::kSlots> at;

  __device__ __forceinline__ WarpUnits(const GemmSizes& p, int warp) : tile(p), parts(tile.parts(p)), unit(warp) {
    to_part(p);
  }
  __device__ __forceinline__ bool valid(const GemmSizes& p) const { return tile.valid(p); }
  __device__ __forceinline__ void next(const GemmSizes& p) {
    unit += S::kEpilogueWarps;
    to_part(p);
  }
  __device__ __forceinline__ int column() const { return tile.column + part * kTileColumns; }  // of the part

 private:
  // Steps to the part of the unit.
  __device__ __forceinline__ void to_part(const GemmSizes& p) {
    for (; unit >= S::kUnits && valid(p); unit -= S::kUnits) {
      at.next();
      if (++part < parts) continue;
      part = 0;
      tile.next(p);
      parts = tile.parts(p);
    }
  }
};

// Calls body(at, sums, bias) for each vector of eight sums that the thread processes. at: the position in the result;
// sums: in their 16-bit type; bias: of the vector's columns.
template <class S, class P, class F>
__device__ __forceinline__ void finish_vectors(const P& p, GemmMemory<S>& memory, int warp, F body) {
  WarpUnits<S> ahead(p, warp);
  const int column = 8 * (static_cast<int>(threadIdx.x) % 8);  // of the thread in a part
  BiasVector next_bias(p, ahead.column() + column);
#pragma unroll 1
  while (ahead.valid(p)) {
    const EpilogueThread<S> thread(memory, ahead.unit);
    PartWalk<S> at(p, thread, ahead.tile, ahead.part);
    const RingPosition<S::kSlots> from = ahead.at;
    float bias[kVector];
    next_bias.widen_to(bias, p.bias_dtype);
    ahead.next(p);
    next_bias = BiasVector(p, ahead.column() + column);
    memory.result_full[from.slot].wait(from.parity);
    constexpr int kBatch = 4;  // vectors in flight
#pragma unroll
    for (int first = 0; first < S::kVectors; first += kBatch) {
      uint4 sums[kBatch];
#pragma unroll
      for (int v = first; v < first + kBatch && v < S::kVectors; ++v) sums[v - first] = thread.vector(from.slot, v);
#pragma unroll
      for (int v = first; v < first + kBatch && v < S::kVectors; ++v) {
        body(at, sums[v - first], bias);
        at.next(p);
      }
    }
    release_result(memory, thread, from.slot);
  }
}

}  // namespace cuda
}  // namespace fasttfm
