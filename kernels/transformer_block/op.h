// A transformer layer as a part of others' launchers (knowledge_block). The formulas are in
// python/fasttfm/ops/layers/transformer_block.py, whose op-by-op path launches the same kernels. T packed tokens, C
// columns, I columns in the feed-forward block, H heads of dimension D.
#pragma once

#include <cstdint>

#include "common/activation.h"
#include "common/dtype.h"
#include "common/status.h"

namespace fasttfm {

// The columns of the tables of parameters and gradients, which have a row per layer. They hold addresses, null for a
// missing bias or a gradient that is not needed. Weights are [outputs, inputs].
enum TransformerParameter {
  kQkvWeight,  // [3 C, C]; weights and qkv_bias have dtype, the others parameter_dtype
  kQkvBias,
  kOutWeight,  // [C, C]
  kOutBias,
  kNormAWeight,
  kNormABias,
  kUpWeight,  // [I, C]
  kUpBias,
  kDownWeight,  // [C, I]
  kDownBias,
  kNormBWeight,
  kNormBBias,
  kTransformerParameters,
};

// The parameters that determine the sizes.
struct TransformerShape {
  int64_t layers;
  int64_t tokens;        // T
  int64_t width;         // C
  int64_t intermediate;  // I
  int64_t heads;         // H
  int64_t sequences;
  int64_t max_seqlen;  // at most T
  int64_t processors;  // SMs of the GPU; threads on the CPU
  int pre_norm;        // 1 or 0, like the flags below
  int training;        // whether there will be a backward
  int recompute;       // whether the backward recomputes y1
  int keep_activation;
  DType dtype;           // CUDA: bf16 or f16; CPU: f32
  DType residual_dtype;  // of the residual stream: dtype or f32 in a pre-LN model, dtype in a post-LN model
};

// Sizes in bytes.
struct TransformerSizes : TransformerShape {
  int64_t* sizes;  // [3]: kept, scratch of the forward, scratch of the backward
};

struct TransformerCall : TransformerShape {
  const int64_t* parameters;  // [layers, kTransformerParameters] addresses
  const void* x;              // [T, C], dtype
  const int32_t* cu_seqlens;  // [sequences + 1]
  const int64_t* seeds;       // [layers, 3]: for attention and the two blocks; null without dropout
  void* kept;                 // aligned to 256 bytes, like scratch; unused unless training
  void* scratch;
  int64_t window_left;  // as in attention/op.h
  int64_t window_right;
  Activation activation;
  int attention_threshold;  // out of 256, 0 for no dropout: see common/philox.h
  float attention_scale;
  int threshold_a;
  float scale_a;
  int threshold_b;
  float scale_b;
  float eps_a;
  float eps_b;
  DType parameter_dtype;  // f32, or dtype if residual_dtype is dtype; also of all gradients of parameters
  int device;             // CUDA
  void* stream;           // CUDA
};

struct TransformerForward : TransformerCall {
  const void* residual;  // [T, C], residual_dtype, in a pre-LN model; else null
  void* y;               // [T, C], dtype
  void* z;               // [T, C], residual_dtype, in a pre-LN model; else null
};

struct TransformerBackward : TransformerCall {
  const void* z;             // from the forward in a pre-LN model; else null
  const void* dy;            // [T, C], dtype
  const void* dz;            // [T, C], residual_dtype, or null for 0; null in a post-LN model
  void* dx;                  // [T, C], dtype
  void* dresidual;           // [T, C], residual_dtype, in a pre-LN model; else null
  const int64_t* gradients;  // [layers, kTransformerParameters] addresses
  int64_t block_memory;      // CUDA: bytes of shared memory that a block may use
};

}  // namespace fasttfm
