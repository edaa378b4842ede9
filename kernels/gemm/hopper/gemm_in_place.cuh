// An epilogue of the Hopper GEMM (gemm.cuh) whose result TMA stores from shared memory: one thread issues the
// stores of whole parts of a tile, and no warp computes addresses or checks the bounds of the tensor.
#pragma once

#include <cstdint>

#include "gemm/hopper/gemm.cuh"

namespace fasttfm {
namespace cuda {

constexpr int kEpilogueStored = 2;  // the named barrier of the epilogue warps

// Issues a TMA store of the map's box at coordinates (c0, c1) from shared memory; see bulk_store().
__device__ __forceinline__ void tma_store(const CUtensorMap* map, uint32_t shared, int c0, int c1) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %4}], [%1];" ::"l"(map),
               "r"(shared), "r"(c0), "r"(c1), "r"(0)
               : "memory");
}

// Replaces each vector of eight sums in shared memory by body(row, column, sums, bias). TMA stores the parts of the
// tile from there to the tensor of `map`, without the rows and columns that the tensor does not have. body() is also
// called for such rows and columns; the number of such a row is at least p.rows.
template <class S, class P, class F>
__device__ __forceinline__ void finish_in_place(const P& p, const CUtensorMap* map, GemmMemory<S>& memory, int warp,
                                                F body) {
  static_assert(S::kWholeTiles, "TMA stores the parts of a tile from one slot");
  const EpilogueThread<S> thread(memory, warp);
  const bool stores = warp == 0 && thread.lane == 0;
  uint32_t parity = 0;
  GemmTileScheduler<S> tile(p);
  BiasVector next_bias(p, tile.column + thread.column);
  for (; tile.valid(p); tile.next(p)) {
    memory.result_full[0].wait(parity);
    const int parts = tile.parts(p);
#pragma unroll 1
    for (int part = 0; part < parts; ++part) {
      float bias[kVector];
      next_bias.widen_to(bias, p.bias_dtype);
      const int column = tile.column + part * kTileColumns;
      GemmTileScheduler<S> then = tile;
      if (part + 1 == parts) then.next(p);
      next_bias = BiasVector(p, (part + 1 == parts ? then.column : column + kTileColumns) + thread.column);
      constexpr int kBatch = 3;  // vectors in flight
#pragma unroll
      for (int first = 0; first < S::kVectors; first += kBatch) {
        uint4 sums[kBatch];
#pragma unroll
        for (int v = first; v < first + kBatch && v < S::kVectors; ++v) sums[v - first] = thread.vector(part, v);
#pragma unroll
        for (int v = first; v < first + kBatch && v < S::kVectors; ++v) {
          const int row = thread.in_tile(v) ? tile.row + thread.row + v * EpilogueThread<S>::kStep : p.rows;
          const uint4 result = body(row, column + thread.column, sums[v - first], bias);
          if (thread.in_tile(v)) store_vector(thread.address(part, v), result);
        }
      }
      fence_proxy_async();
      named_barrier_sync(kEpilogueStored, 32 * S::kEpilogueWarps);
      if (stores) {
        tma_store(map, shared_address(memory.result) + part * S::kPartBytes, column, tile.row);
        bulk_commit();
      }
    }
    if (stores) bulk_wait_read<0>();
    release_result(memory, thread);
    parity ^= 1;
  }
}

// The map with which finish_in_place() stores a result [rows, columns].
template <class S>
Status make_result_map(CUtensorMap* map, const void* result, DType dtype, int64_t rows, int64_t columns) {
  return make_tensor_map(map, {result, dtype, {columns, rows, 1, 1}, {columns, 0, 0}, {kTileColumns, S::kRows, 1, 1}});
}

}  // namespace cuda
}  // namespace fasttfm
