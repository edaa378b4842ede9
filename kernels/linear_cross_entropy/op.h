// Cross entropy of a block of logits. The gradient overwrites the logits. n rows of V logits; the formulas are in
// kernels/vocabulary/cross_entropy.py.
//
// Bytes per row: 4 V read and, with the gradient, 4 V written; a row stays in L2 between the passes over it. Labels are
// token ids or ignore_index; the caller has validated them.
#pragma once

#include <cstdint>

#include "common/status.h"

namespace fasttfm {

struct LinearCrossEntropy {
  float* logits;              // [n, V], rows stride apart; overwritten by the gradient if `gradient`
  const float* bias;          // [V], or null
  const int64_t* labels;      // [n]
  const float* coefficients;  // [n]: factors of the rows' gradients; null for 1
  const int64_t* seed;        // [1], or null if no samples are needed
  float* losses;              // [n]
  bool* correct;              // [n], or null if not needed
  int64_t* samples;           // [n], or null if not needed
  int64_t rows;               // n
  int64_t first_row;          // index of the first row among all rows of the call, for the random numbers
  int64_t vocabulary;         // V
  int64_t stride;             // columns from V to stride are set to 0 with the gradient
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
