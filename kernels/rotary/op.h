// Rotary position embedding. T tokens, H heads of D columns; see reference.py for the formula.
//
// Bytes per head (e = bytes of an element): reads x and writes y, 2*D*e. All heads of a token use the same rows of the
// tables.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/status.h"

namespace fasttfm {

struct Rotary {
  const void* x;             // [T, H, D], dtype; tokens token_stride and heads head_stride elements apart
  const float* cos;          // [positions, pairs]
  const float* sin;          // [positions, pairs]
  const int64_t* positions;  // [T], or null: a token's position is its index in its sequence
  void* y;                   // [T, H, D], dtype, contiguous; may be x, if that is contiguous
  int64_t tokens;            // T
  int64_t sequence;          // tokens of a sequence
  int64_t heads;             // H
  int64_t rotary_heads;      // number of heads that are rotated; the others are copied
  int64_t columns;           // D
  int64_t pairs;             // columns i and i + pairs are rotated; columns from 2 * pairs on are copied
  int64_t table_rows;        // positions: others give NaN
  int64_t token_stride;
  int64_t head_stride;
  float sign;  // 1, or -1 for the inverse rotation
  DType dtype;
  int threads;   // CPU
  int device;    // CUDA
  void* stream;  // CUDA
};

namespace cpu {
Status rotary(const Rotary&);
}  // namespace cpu

namespace cuda {
// Pairs and columns are multiples of 8; x and y start at multiples of 16 bytes, and so do their heads.
Status rotary(const Rotary&);
}  // namespace cuda

}  // namespace fasttfm
