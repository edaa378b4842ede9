// Divergence of a block of student logits from the teacher's. The gradient overwrites the student's logits. n rows of V
// logits; the formulas are in reference.py.
//
// Bytes per row: 8 V read and, with the gradient, 4 V written; both rows stay in L2 between the passes over them.
#pragma once

#include <cstdint>

#include "common/status.h"

namespace fasttfm {

struct DistillationLoss {
  float* student;             // [n, V], rows stride apart; overwritten by the gradient if `gradient`
  const float* teacher;       // [n, V], rows stride apart
  const float* student_bias;  // [V], or null
  const float* teacher_bias;  // [V], or null
  const int32_t* counted;     // [n]: 0 for rows that are ignored
  const float* coefficients;  // [n]: factors of the rows' gradients; null for 1
  float* losses;              // [n]
  int64_t rows;               // n
  int64_t vocabulary;         // V
  int64_t stride;             // columns from V to stride are set to 0 with the gradient
  float temperature;
  int gradient;  // 1 or 0
  int threads;
};

namespace cpu {
Status distillation_loss(const DistillationLoss&);
}  // namespace cpu

}  // namespace fasttfm
