// AdamW's step over all parameters of an optimizer, and the norm of all their gradients.
//
//   g' = factor g                     factor = min(1, max_norm / (norm + 1e-6)) / grad_scale, 1 where neither is given
//   m <- b1 m + (1 - b1) g'           v <- b2 v + (1 - b2) g'^2           t <- t + 1
//   p <- p - lr (decay p + (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps))           copy <- p in 16 bits
//
// If *found_inf is 1, or if found_inf is given and the norm is not finite, nothing is updated. Bytes per parameter: 28
// (g, p, m, v read; p, m, v written), 2 less with 16-bit gradients, 2 more with a copy. For the norm, the gradients are
// read a second time: 4 or 2 bytes.
//
// Gradients have new addresses in every step, so each call passes a table of addresses. It is passed in kernel
// arguments, so nothing has to be synchronized, and a CUDA graph that captures the call also captures the table.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/status.h"

namespace fasttfm {

// Rows of the table. All memory is contiguous; fasttfm/optim.py has the same fields in the same order.
struct AdamWTensor {
  float* parameter;
  float* exp_avg;     // m
  float* exp_avg_sq;  // v
  float* step;        // t, one number
  const void* gradient;
  void* copy;    // or null
  int64_t size;  // elements
  int32_t group;
  DType gradient_dtype;
  DType copy_dtype;  // bf16 or f16
  int32_t unused;
};
struct AdamWGroup {
  double learning_rate;
  const float* learning_rate_on_device;  // used instead of learning_rate if it is not null
  double beta1;
  double beta2;
  double epsilon;
  double weight_decay;
};

struct AdamW {
  const void* table;     // on the host: int32 [tensors], each tensor's first chunk, padded to a multiple of 8 bytes;
                         // AdamWTensor [tensors]; AdamWGroup [groups]
  void* workspace;       // adamw_workspace(tensors, groups) times 8 bytes on the device
  float* partial_norms;  // [chunks]; null if norm is null
  float* norm;           // [1], output; null if it is not needed and nothing is clipped
  float max_norm;
  const float* grad_scale;  // [1] or null
  const float* found_inf;   // [1] or null
  int64_t tensors;
  int64_t groups;
  int64_t chunks;  // of all tensors
  int device;
  void* stream;
};

namespace cuda {
constexpr int kAdamWChunk = 16384;  // elements per block; every tensor starts a new chunk

Status adamw_step(const AdamW&);
Status adamw_norm(const AdamW&);                           // writes only the norm
int64_t adamw_workspace(int64_t tensors, int64_t groups);  // in units of 8 bytes
}  // namespace cuda

}  // namespace fasttfm
