// Cross entropy of a block of logits, its gradient written over them. n rows of V logits; the formulas are in
// kernels/vocabulary/cross_entropy.py.
//
// Bytes per row: 4 V read and, with the gradient, 4 V written; a row stays in the second-level cache between the sweeps
// over it. Labels name a word or are ignore_index: the caller has looked.
#pragma once

#include <cstdint>

#include "common/status.h"

namespace fasttfm {

struct LinearCrossEntropy {
  float* logits;              // [n, V], rows stride apart; the gradient after the call, where it is wanted
  const float* bias;          // [V], or null
  const int64_t* labels;      // [n]
  const float* coefficients;  // [n]: what rows' gradients are multiplied with; null for 1
  const int64_t* seed;        // [1], or null where no samples are wanted
  float* losses;              // [n]
  bool* correct;              // [n], or null when not wanted
  int64_t* samples;           // [n], or null when not wanted
  int64_t rows;               // n
  int64_t first_row;          // of these among all rows of the call: random numbers belong to a row
  int64_t vocabulary;         // V
  int64_t stride;             // columns from V to it become 0 with the gradient
  int64_t ignore_index;
  float label_smoothing;
  float z_loss;
  float temperature;
  int gradient;  // 1 or 0
  int threads;
};

namespace cpu {
Status linear_cross_entropy(const LinearCrossEntropy&);
}  // namespace cpu

}  // namespace fasttfm
