// The Hopper GEMM of FP8 operands (gemm/hopper/gemm_ring.cuh) whose epilogue computes the gradient of the
// activation, with its casts: what gelu_backward_kernel in cuda.cu computes from the GEMM's result.
//
// A warp processes units of 64 rows and 32 columns, in two blocks of 32 rows, of which a thread has 4 rows and 8
// columns: four consecutive rows of a column are one word of the transposed results. These replace the sums of their
// block in shared memory, from where the warp writes 64 bytes of each column.
#include <cstdint>

#include "common/count.h"
#include "common/cuda/activation.cuh"
#include "common/cuda/fp8.cuh"
#include "common/cuda/hopper.cuh"
#include "common/cuda/launch.cuh"
#include "common/cuda/reduce.cuh"
#include "fp8/op.h"
#include "gemm/hopper/gemm.cuh"
#include "gemm/hopper/gemm_ring.cuh"

namespace fasttfm {
namespace cuda {
namespace {

using Shape = GemmShape<128, 4, 1, 11, 4, 5>;

constexpr int kUnitRows = 64, kUnitColumns = 32;  // of a warp
constexpr int kBlockRows = 32;
constexpr int kThreadRows = 4;  // of a block
constexpr int kBlocks = kUnitRows / kBlockRows;
constexpr int kBlockBytes = kBlockRows * kTileRowBytes;

struct Fp8BackwardParams : GemmSizes {
  const void* bias;  // or null
  const char* h;
  const float *dy_inverse, *weight_inverse, *a_scale, *scale;
  float* amax;
  uint8_t *rows_out, *columns_out, *a_columns;
  float* sums;  // [row units, columns], or null
  int64_t padded;
  DType bias_dtype;
};

// The first row and column of a warp's unit.
template <class S>
__device__ __forceinline__ int unit_row(const WarpUnits<S>& units) {
  return units.tile.row + units.unit / 2 * kUnitRows;
}
template <class S>
__device__ __forceinline__ int unit_column(const WarpUnits<S>& units) {
  return units.column() + units.unit % 2 * kUnitColumns;
}
// The shared address of an offset in the unit, which is given for the first unit of a slot.
template <class S>
__device__ __forceinline__ uint32_t unit_address(const GemmMemory<S>& memory, const WarpUnits<S>& units,
                                                 uint32_t offset) {
  const uint32_t slot = shared_address(memory.result) + units.at.slot * S::kPartBytes;
  return (slot + units.unit / 2 * (kUnitRows * kTileRowBytes) + offset) ^ (units.unit % 2 * 64);
}

// A thread's positions in a unit.
struct UnitThread {
  int row, column;          // of its first element
  uint32_t sums;            // byte offset of its first vector of sums
  uint32_t to, from;        // byte offsets of its words of transposed results, and of those that it writes
  int out_row, out_column;  // of the first element of the transposed results that it writes

  __device__ __forceinline__ UnitThread() {
    const int lane = static_cast<int>(threadIdx.x) % 32, chunk = lane % 4, group = lane / 4;
    row = kThreadRows * group;
    column = kVector * chunk;
    sums = row * kTileRowBytes + ((chunk ^ (4 * (group % 2))) << 4);
    // Column 8 * chunk + i of a block is in row i % 4 + 4 * (chunk % 2) + 8 * (i / 4) + 16 * (chunk / 2), in chunks
    // that depend on chunk / 2, so that the words that a warp writes at a time are in different banks.
    const int odd = chunk % 2, high = chunk / 2, low = group / 2;
    to = (4 * odd + 16 * high) * kTileRowBytes + (((2 * high + group / 4) ^ (4 * odd)) << 4) + 4 * (group % 4);
    // It writes 16 of the 64 rows, those of quarter `chunk`, of columns given by `group`.
    from = high * kBlockBytes + (low + 4 * (group % 2)) * kTileRowBytes +
           (((2 * high + odd) ^ (4 * (group % 2)) ^ low) << 4);
    out_row = 16 * chunk;
    out_column = kVector * (group % 2) + low;
  }
};

__device__ __forceinline__ void store_shared(uint32_t to, uint32_t word) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}

template <bool E5M2>
__device__ __forceinline__ uint32_t round_four(const float (&x)[kThreadRows]) {
  return round_pair<E5M2>(x[0], x[1]) | round_pair<E5M2>(x[2], x[3]) << 16;
}

// The eight column sums of the lanes of a chunk (lane % 4), one of which each lane returns: that of column
// sum_column(lane).
__device__ __forceinline__ int sum_column(int lane) {
  return kVector * (lane % 4) + lane / 16 * 4 + lane / 8 % 2 * 2 + lane / 4 % 2;
}
__device__ __forceinline__ float sum_lanes(const float (&sum)[kVector], int lane) {
  float four[4], two[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool upper = lane & 16;
    four[i] = (upper ? sum[i + 4] : sum[i]) + __shfl_xor_sync(0xffffffffu, upper ? sum[i] : sum[i + 4], 16);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool upper = lane & 8;
    two[i] = (upper ? four[i + 2] : four[i]) + __shfl_xor_sync(0xffffffffu, upper ? four[i] : four[i + 2], 8);
  }
  const bool upper = lane & 4;
  return (upper ? two[1] : two[0]) + __shfl_xor_sync(0xffffffffu, upper ? two[0] : two[1], 4);
}

// A thread's four rows of a block in the tensors [rows, columns].
struct BlockRows {
  int64_t offset;  // of the first element
  int left;        // number of valid rows from the first one on

  template <class S>
  __device__ __forceinline__ BlockRows(const Fp8BackwardParams& p, const UnitThread& thread, const WarpUnits<S>& units)
      : offset(static_cast<int64_t>(unit_row(units) + thread.row) * p.columns + unit_column(units) + thread.column),
        left(units.valid(p) && unit_column(units) + thread.column < p.columns ? p.rows - unit_row(units) - thread.row
                                                                              : 0) {}
  // Moves to the next block of the unit.
  __device__ __forceinline__ void next(const Fp8BackwardParams& p) {
    offset += static_cast<int64_t>(p.columns) * kBlockRows;
    left -= kBlockRows;
  }
  __device__ __forceinline__ void load(const Fp8BackwardParams& p, uint4 (&h)[kThreadRows]) const {
    const char* from = p.h + 2 * offset;
#pragma unroll
    for (int j = 0; j < kThreadRows; ++j, from += 2 * static_cast<int64_t>(p.columns))
      h[j] = load_stream_if(j < left, from);
  }
  __device__ __forceinline__ void store(const Fp8BackwardParams& p, const uint2 (&rows)[kThreadRows]) const {
    uint8_t* to = p.rows_out + offset;
#pragma unroll
    for (int j = 0; j < kThreadRows; ++j, to += p.columns)
      if (j < left) *reinterpret_cast<uint2*>(to) = rows[j];
  }
};

// What a thread keeps while it processes a unit.
struct UnitSums {
  float scale, a_scale;
  float most = 0.0f;                  // the largest |dh|, not scaled, of all units
  float bias[kVector], sum[kVector];  // of the unit's columns; the sums of dh are not scaled

  __device__ __forceinline__ UnitSums(float scale, float a_scale) : scale(scale), a_scale(a_scale) {}
  __device__ __forceinline__ void start(const Fp8BackwardParams& p, int column) {
    BiasVector(p, column).widen_to(bias, p.bias_dtype);
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum[i] = 0.0f;
  }
};

template <Activation A, bool E5M2>
struct Fp8GeluBackwardEpilogue {
  using Params = Fp8BackwardParams;
  static constexpr Major kB = Major::k;

  // Writes the transposed results of a unit, [columns, padded].
  static __device__ __forceinline__ void store_columns(const Params& p, const UnitThread& thread, uint32_t from,
                                                       int row, int column) {
    const int64_t first = static_cast<int64_t>(column + thread.out_column) * p.padded + row + thread.out_row;
    const bool there = row + thread.out_row < p.padded;
    const bool has[2] = {there && column < p.columns, there && column + 16 < p.columns};
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int high = n / 2 % 2, is_a = n % 2, last = n / 4;
      const uint4 value = load_vector((from ^ ((is_a ^ high) << 5)) + (8 * last + 16 * high) * kTileRowBytes);
      uint8_t* to = is_a ? p.a_columns : p.columns_out;
      store_vector_if(has[high], to + first + (16 * high + 4 * last) * p.padded, value);
    }
  }

  // Computes a thread's elements of a block, 4 rows of 8 columns, with h and the sums of products: dh as rows, and the
  // transposed words at `staged`. halfway() is called after four columns.
  template <class T, class F>
  static __device__ __forceinline__ void compute(UnitSums& unit, int rows_left, const uint4 (&h)[kThreadRows],
                                                 const uint4 (&product)[kThreadRows], uint32_t staged,
                                                 uint2 (&rows)[kThreadRows], F halfway) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      float a[2][kThreadRows], dh[2][kThreadRows];
#pragma unroll
      for (int j = 0; j < kThreadRows; ++j) {
        const float2 u = widen_word(reinterpret_cast<const uint32_t*>(&h[j])[w], T{});
        const float2 g = widen_word(reinterpret_cast<const uint32_t*>(&product[j])[w], T{});
        const Activated both[2] = {activated<A, false>(u.x + unit.bias[2 * w]),
                                   activated<A, false>(u.y + unit.bias[2 * w + 1])};
        const float a_scale = j < rows_left ? unit.a_scale : 0.0f;  // zeros after the last row
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float gradient = (c == 0 ? g.x : g.y) * both[c].derivative;
          unit.sum[2 * w + c] += gradient;
          unit.most = fmaxf(unit.most, fabsf(gradient));
          a[c][j] = scaled(both[c].value, a_scale);
          dh[c][j] = scaled(gradient, unit.scale);
        }
        const uint32_t pair = round_pair<E5M2>(dh[0][j], dh[1][j]);
        uint32_t& word = w < 2 ? rows[j].x : rows[j].y;
        word = w % 2 == 0 ? pair : word | pair << 16;
      }
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int i = 2 * w + c, down = (i % 4 + 8 * (i / 4)) * kTileRowBytes;
        store_shared((staged ^ (i % 4 << 4)) + down, round_four<E5M2>(dh[c]));
        store_shared((staged ^ ((2 ^ i % 4) << 4)) + down, round_four<false>(a[c]));
      }
      if (w == 1) halfway();
    }
  }

  template <class T, class S>
  static __device__ __forceinline__ void finish(const Params& p, GemmMemory<S>& memory, int warp) {
    const float inverse = *p.dy_inverse * *p.weight_inverse;
    const UnitThread thread;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    UnitSums unit = {*p.scale * inverse, *p.a_scale};
    WarpUnits<S> ahead(p, warp);
    if (!ahead.valid(p)) return;
    BlockRows next(p, thread, ahead);
    uint4 h[kThreadRows];
    next.load(p, h);
#pragma unroll 1
    while (ahead.valid(p)) {
      const int row = unit_row(ahead), column = unit_column(ahead);
      const RingPosition<S::kSlots> slot = ahead.at;
      uint32_t sums = unit_address(memory, ahead, thread.sums), staged = unit_address(memory, ahead, thread.to);
      const uint32_t from = unit_address(memory, ahead, thread.from);
      unit.start(p, column + thread.column);
      memory.result_full[slot.slot].wait(slot.parity);
#pragma unroll 1
      for (int block = 0; block < kBlocks; ++block) {
        const BlockRows at = next;
        if (block == kBlocks - 1) {
          ahead.next(p);
          next = BlockRows(p, thread, ahead);
        } else {
          next.next(p);
        }
        uint4 value[kThreadRows], product[kThreadRows];
        uint2 rows[kThreadRows];
#pragma unroll
        for (int j = 0; j < kThreadRows; ++j) {
          value[j] = h[j];
          product[j] = load_vector((sums ^ (j << 4)) + j * kTileRowBytes);
        }
        __syncwarp();
        compute<T>(unit, at.left, value, product, staged, rows, [&] { next.load(p, h); });
        at.store(p, rows);
        sums += kBlockBytes;
        staged = (staged ^ 32) + kBlockBytes;
      }
      __syncwarp();
      store_columns(p, thread, from, row, column);
      __syncwarp();
      if (kWarpArrivals > 1 || lane == 0) memory.result_empty[slot.slot].arrive();
      const float total = sum_lanes(unit.sum, lane);
      const int lane_column = column + sum_column(lane);
      if (p.sums != nullptr && lane_column < p.columns && row < p.rows)
        p.sums[static_cast<int64_t>(row / kUnitRows) * p.columns + lane_column] = total * inverse;
    }
    record_warp(p.amax, unit.most * inverse);
  }
};

int64_t units(int64_t rows) { return (rows + kUnitRows - 1) / kUnitRows; }

}  // namespace

int64_t fp8_gelu_gemm_workspace(int64_t rows, int64_t columns) {
  return (baseline::Count(units(rows)) * columns).value;
}

Status fp8_gelu_gemm_backward(const Fp8GeluGemmBackward& call) {
  if (call.inputs % 16 != 0 || call.columns % 16 != 0 || call.padded % 16 != 0 || call.padded < call.rows)
    return bad_size("fp8: sizes must be multiples of 16");
  const GemmOperands operands = {call.dy,     call.weight, call.inputs / 2, call.inputs / 2,
                                 DType::bf16, call.device, call.stream};
  const Status status =
      check_gemm(operands, call.rows, call.columns,
                 {call.dy, call.weight, call.bias, call.h, call.as_rows, call.as_columns, call.a_columns});
  if (status.code != StatusCode::ok || call.rows == 0) return status;
  const DeviceGuard guard(call.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  Fp8BackwardParams p = {};
  p.bias = call.bias;
  p.h = static_cast<const char*>(call.h);
  p.dy_inverse = call.dy_inverse;
  p.weight_inverse = call.weight_inverse;
  p.a_scale = call.a_scale;
  p.scale = call.scale;
  p.amax = call.amax;
  p.rows_out = static_cast<uint8_t*>(call.as_rows);
  p.columns_out = static_cast<uint8_t*>(call.as_columns);
  p.a_columns = static_cast<uint8_t*>(call.a_columns);
  p.sums = call.dbias == nullptr ? nullptr : call.workspace;
  p.rows = static_cast<int>(call.rows);
  p.columns = static_cast<int>(call.columns);
  p.padded = call.padded;
  p.bias_dtype = call.bias_dtype;
  const Status launched = with_activation(call.activation, [&](auto activation) {
    constexpr Activation kActivation = decltype(activation)::value;
    return call.e5m2 ? run_fp8_gemm<e5m2_t, Shape, Fp8GeluBackwardEpilogue<kActivation, true>>(operands, p)
                     : run_fp8_gemm<e4m3_t, Shape, Fp8GeluBackwardEpilogue<kActivation, false>>(operands, p);
  });
  if (launched.code != StatusCode::ok || call.dbias == nullptr) return launched;
  return sum_parts(call.workspace, {call.dbias, call.bias_dtype}, {}, static_cast<int>(units(call.rows)), call.columns,
                   call.stream);
}

}  // namespace cuda
}  // namespace fasttfm
