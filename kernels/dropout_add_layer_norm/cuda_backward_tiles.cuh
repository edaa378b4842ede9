// The parts of dropout_add_layer_norm's backward that writes dx in FP8 (cuda_backward_cast.cu), a tile of rows at a
// time; the formulas are in reference.py.
#pragma once

#include <cstdint>

#include "common/cuda/dropout.cuh"
#include "common/cuda/fp8.cuh"
#include "common/cuda/hopper.cuh"
#include "common/cuda/rows.cuh"
#include "dropout_add_layer_norm/cuda_backward_rows.cuh"
#include "dropout_add_layer_norm/cuda_tile_rows.cuh"
#include "dropout_add_layer_norm/op.h"

namespace fasttfm {
namespace cuda {

constexpr int kThreadRows = 4;  // rows of a tile that a thread has in the second pass
constexpr int kUnitRows = 32;   // rows of which columns are written together

// Rows of type R of the stream, of up to 256 * VECTORS columns.
template <class R, int VECTORS>
struct TileShape {
  using Stream = R;
  static constexpr int kParts = 8 / VECTORS;  // threads that have the same columns in the second pass
  static constexpr int kBlock = 32 * VECTORS * kParts;
  static constexpr int kBlocks = sizeof(R) == 2 ? 2 : 1;  // per SM
  static constexpr int kTile = kThreadRows * kParts;      // rows
  static constexpr int kUnitTiles = kUnitRows / kTile;
  using Row = RowShape<32, VECTORS, kBlock>;         // the first pass: a warp per row
  using Stripe = RowShape<32 * VECTORS, 1, kBlock>;  // the second pass: a thread has one vector of columns
  static constexpr int kColumns = Row::kColumns;
  static_assert(kUnitRows % kTile == 0, "a unit has whole tiles");
};

// What the second pass needs of a row; zeros after the last row.
struct alignas(16) TileRow {
  float rstd, shift, slope, offset;
  float correction;
  uint32_t token, sequence, unused;
};

// The FP8 columns of a unit: word[k][c] has rows 4k to 4k + 3 of column c. Columns are exchanged within groups of 32,
// so that neither writing nor reading has bank conflicts.
template <class S>
struct alignas(16) StagedColumns {
  static constexpr int kParts = kUnitRows / kColumnRows;
  uint32_t word[kUnitRows / 4][S::kColumns];

  __device__ __forceinline__ static int place(int k, int column) {
    return column ^ (k / 4 * 16) ^ (column / 32 % 2 * 4);
  }

  // Writes a thread's 8 columns of rows 4k to 4k + 3, whose FP8 numbers are in `row`.
  __device__ __forceinline__ void put(int k, int column, const uint2 (&row)[kThreadRows]) {
    uint32_t transposed[2][4];
    transpose_rows(row, transposed);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto& words = transposed[half];
      *reinterpret_cast<uint4*>(&word[k][place(k, column + 4 * half)]) =
          make_uint4(words[0], words[1], words[2], words[3]);
    }
  }

  // Writes the columns from row `first` on, up to row `padded`, to [C, P], after a barrier.
  __device__ __forceinline__ void store(void* to, int columns, int64_t first, int64_t padded) const {
    for (int index = threadIdx.x; index < columns * kParts; index += S::kBlock) {
      const int column = index / kParts, part = index % kParts;
      if (first + kColumnRows * part >= padded) continue;
      uint32_t value[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) value[i] = word[4 * part + i][place(4 * part, column)];
      *reinterpret_cast<uint4*>(static_cast<uint8_t*>(to) + column * padded + first + kColumnRows * part) =
          make_uint4(value[0], value[1], value[2], value[3]);
    }
  }
};

template <class S>
struct TileMemory {
  struct Rows {
    bf16_t dy[S::kTile][S::kColumns];
    typename S::Stream z[S::kTile][S::kColumns];
  };
  union alignas(128) {
    Rows rows[2];
    float shares[S::kParts][S::kColumns];
  };
  StagedColumns<S> staged;
  float weight[S::kColumns];
  TileRow terms[S::kTile];
  Mbarrier full[2];
};

// ---- dropout of rounded vectors -------------------------------------------------------------------------------------

// The largest magnitude so far: for bf16, of the even and of the odd elements in the halves of a word, without signs.
template <class R>
struct Magnitude;

template <>
struct Magnitude<bf16_t> {
  uint32_t most = 0;

  __device__ __forceinline__ void add(uint32_t pair) {
    asm("max.xorsign.abs.bf16x2 %0, %0, %1;" : "+r"(most) : "r"(pair));
  }
  __device__ __forceinline__ float value() const {
    const float2 both = widen_word(most & 0x7fff7fffu, bf16_t{});
    return fmaxf(both.x, both.y);
  }
};

template <>
struct Magnitude<float> {
  float most = 0.0f;

  __device__ __forceinline__ void add(float x) { most = fmaxf(most, fabsf(x)); }
  __device__ __forceinline__ float value() const { return most; }
};

// Which elements dropout keeps, by the top bits of their bytes: see reaching_bytes(). For a threshold of 256, which no
// byte reaches, `low` clears every top bit.
struct KeptBytes {
  uint32_t low, either;

  __device__ __forceinline__ explicit KeptBytes(int threshold)
      : low((threshold == 256 ? 0x80u : static_cast<uint32_t>(threshold) & 0x7fu) * 0x01010101u),
        either(threshold < 128 ? 0xffffffffu : 0u) {}
  __device__ __forceinline__ uint32_t operator()(uint32_t bytes) const { return reaching_bytes(bytes, low, either); }
};

// Replaces each byte by its sign: byte j of the result has the sign of byte i in all bits if hexadecimal digit j of
// SELECTOR is 8 + i.
template <uint32_t SELECTOR>
__device__ __forceinline__ uint32_t spread_signs(uint32_t bytes) {
  uint32_t spread;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(spread) : "r"(bytes), "n"(SELECTOR));
  return spread;
}

// The elements of a vector whose bytes in `reached` have the top bit, and 0 for the others.
__device__ __forceinline__ void keep(const Packed<bf16_t>& vector, const uint32_t (&reached)[2],
                                     Magnitude<bf16_t>& magnitude, float (&value)[kVector]) {
  const auto* word = reinterpret_cast<const uint32_t*>(&vector);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t mask = i % 2 == 0 ? spread_signs<0x9988>(reached[i / 2]) : spread_signs<0xbbaa>(reached[i / 2]);
    const uint32_t kept = word[i] & mask;
    magnitude.add(kept);
    const float2 pair = widen_word(kept, bf16_t{});
    value[2 * i] = pair.x;
    value[2 * i + 1] = pair.y;
  }
}
__device__ __forceinline__ void keep(const Packed<float>& vector, const uint32_t (&reached)[2],
                                     Magnitude<float>& magnitude, float (&value)[kVector]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t mask[4] = {spread_signs<0x8888>(reached[half]), spread_signs<0x9999>(reached[half]),
                              spread_signs<0xaaaa>(reached[half]), spread_signs<0xbbbb>(reached[half])};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      value[4 * half + i] = __uint_as_float(__float_as_uint(vector.element[4 * half + i]) & mask[i]);
      magnitude.add(value[4 * half + i]);
    }
  }
}

// ---- the passes -----------------------------------------------------------------------------------------------------

// The tiles of a block. Units are distributed over blocks in turn, so that blocks write neighbouring parts of a column
// at about the same time.
template <class S>
struct BlockTiles {
  int rows, count;

  __device__ __forceinline__ explicit BlockTiles(int64_t all_rows) : rows(static_cast<int>(all_rows)) {
    const int units = (rows + kUnitRows - 1) / kUnitRows;
    const int block_units = units > static_cast<int>(blockIdx.x) ? (units - 1 - blockIdx.x) / gridDim.x + 1 : 0;
    count = block_units * S::kUnitTiles;
  }
  __device__ __forceinline__ int first_row(int tile) const {
    return (static_cast<int>(blockIdx.x) + tile / S::kUnitTiles * static_cast<int>(gridDim.x)) * kUnitRows +
           tile % S::kUnitTiles * S::kTile;
  }
};

// A thread's part of both passes. DZ: whether there is a gradient of z.
template <class S, bool E5M2, bool DZ>
struct TileBackward {
  using R = typename S::Stream;
  using Row = typename S::Row;
  const DropoutAddLayerNormBackwardFp8& p;
  TileMemory<S>& memory;
  const int columns;
  float dweight[1][kVector], dbias[1][kVector], dlinear_bias[1][kVector];  // sums over rows
  Magnitude<R> magnitude;

  __device__ __forceinline__ TileBackward(const DropoutAddLayerNormBackwardFp8& params, TileMemory<S>& shared)
      : p(params), memory(shared), columns(static_cast<int>(params.columns)), dweight{}, dbias{}, dlinear_bias{} {}

  // Starts copying the tile from row `first` on. Called by one thread.
  __device__ __forceinline__ void load(int first, int rows, int slot) {
    const int present = max(min(rows - first, S::kTile), 0);
    auto& full = memory.full[slot];
    full.arrive_expect_tx(present * columns * static_cast<int>(sizeof(bf16_t) + sizeof(R)));
    const int adjacent = columns == S::kColumns ? present : 1;  // rows that are adjacent in shared memory too
#pragma unroll 1
    for (int row = 0; row < present; row += adjacent) {
      const int64_t offset = static_cast<int64_t>(first + row) * columns;
      const uint32_t elements = adjacent * columns;
      bulk_load(full, shared_address(memory.rows[slot].dy[row]), static_cast<const bf16_t*>(p.dy) + offset,
                elements * sizeof(bf16_t));
      bulk_load(full, shared_address(memory.rows[slot].z[row]), static_cast<const R*>(p.z) + offset,
                elements * sizeof(R));
    }
  }

  // Zeroes the tile's rows from `present` on, or the columns after the last one if `present` is negative. All threads.
  __device__ __forceinline__ void clear(int slot, int present) {
    const int first = present < 0 ? columns : 0;
#pragma unroll 1
    for (int row = max(present, 0); row < S::kTile; ++row)
#pragma unroll 1
      for (int column = first + kVector * static_cast<int>(threadIdx.x); column < S::kColumns;
           column += kVector * S::kBlock) {
        store_packed(&memory.rows[slot].dy[row][column], Packed<bf16_t>{});
        store_packed(&memory.rows[slot].z[row][column], Packed<R>{});
      }
  }

  // The sums over row `number` of the tile; called by a warp.
  __device__ __forceinline__ void sum_row(int number, int slot, float mean, float rstd, RowPosition position) {
    const bf16_t* dy = memory.rows[slot].dy[number];
    const R* z = memory.rows[slot].z[number];
    const float shift = -mean * rstd;
    float sums[3] = {0.0f, 0.0f, 0.0f};  // of xhat (zero except for rounding), of g and of g * xhat
#pragma unroll
    for (int v = 0; v < Row::kVectors; ++v) {
      const bool inside = in_row<Row>(v, columns);
      float gradient[kVector], value[kVector], weight[kVector];
      widen(load_packed(dy + column_of<Row>(v)), gradient);
      widen(load_packed(z + column_of<Row>(v)), value);
      widen(load_packed(memory.weight + column_of<Row>(v)), weight);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const float xhat = fmaf(value[i], rstd, shift);
        const float g = __fmul_rn(gradient[i], weight[i]);
        if (inside) sums[0] += xhat;  // the other sums have dy as a factor, which is zero past the end
        sums[1] += g;
        sums[2] = fmaf(g, xhat, sums[2]);
      }
    }
    group_sum<32, S::kBlock>(sums, nullptr);
    if (threadIdx.x % 32 != 0) return;
    const RowTerms terms(sums, rstd, 1.0f / static_cast<float>(columns));
    memory.terms[number] = {rstd, shift, terms.slope, terms.offset, terms.correction, position.token, position.sequence,
                            0};
  }

  // The bytes of rows `number` and `number` + 1 for this thread's columns: the even one of two neighbouring lanes draws
  // for the first row, the other for the second, and they exchange halves.
  __device__ __forceinline__ void draw(const PhiloxKeys& keys, int number, int column, uint32_t (&bytes)[2][2]) {
    const bool odd = threadIdx.x % 2 == 1;
    const TileRow& terms = memory.terms[number + (odd ? 1 : 0)];
    const Draw drawn = philox_rounds(keys, 0, {{static_cast<uint32_t>(column) / 16, terms.token, terms.sequence, 0}});
    exchange_halves(drawn, odd, bytes[0], bytes[1]);
  }

  // Computes a vector of row `number` of the tile, and returns it in FP8.
  __device__ __forceinline__ uint2 vector(int number, int slot, int column, bool stores, int64_t to,
                                          const float (&weight)[kVector], const Packed<R>& dz,
                                          const uint32_t (&reached)[2], float scale) {
    const float4 terms = *reinterpret_cast<const float4*>(&memory.terms[number]);
    const float rstd = terms.x, shift = terms.y, slope = terms.z, offset = terms.w;
    const float correction = memory.terms[number].correction;
    float gradient[kVector], value[kVector], out[kVector];
    widen(load_packed(&memory.rows[slot].dy[number][column]), gradient);
    widen(load_packed(&memory.rows[slot].z[number][column]), value);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const float xhat = fmaf(value[i], rstd, shift);
      out[i] = fmaf(__fmul_rn(gradient[i], weight[i]), rstd, fmaf(xhat, slope, offset));
      dweight[0][i] = fmaf(gradient[i], xhat - correction, dweight[0][i]);
      dbias[0][i] += gradient[i];
    }
    if constexpr (DZ) {
      float stream[kVector];
      widen(dz, stream);
#pragma unroll
      for (int i = 0; i < kVector; ++i) out[i] += stream[i];
    }
    const Packed<R> rounded = narrow<R>(out);
    store_packed_if(stores, static_cast<R*>(p.dresidual) + to, rounded);
    keep(rounded, reached, magnitude, value);
#pragma unroll
    for (int i = 0; i < kVector; ++i) dlinear_bias[0][i] += value[i];
    return round_vector<E5M2>(value, scale);
  }
};

}  // namespace cuda
}  // namespace fasttfm
