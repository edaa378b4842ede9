// A stack of transformer layers in one call, forward and backward. The formulas are in
// python/fasttfm/ops/transformer_block.py, whose op-by-op path launches the same kernels. T packed tokens, C columns, I
// columns in the feed-forward block, H heads of dimension D.
//
// The functions allocate no memory and do not synchronize with the GPU. The caller provides two buffers of the sizes
// that transformer_block_sizes() returns: `kept` for the tensors that the backward reads, and `scratch` for the
// duration of a call.
#pragma once

#include <cstdint>

#include "common/activation.h"
#include "common/dtype.h"
#include "common/status.h"
#include "few_rows/plan.h"

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
  int few_rows;          // CUDA, without training and dropout: not 0 for the kernels of few_rows/op.h
  int short_attention;   // CUDA, without training and dropout: not 0 for attention by few_rows/op.h
};

// The addresses that a layer needs whose LayerNorms are folded into the GEMMs: weights [outputs, inputs] in dtype,
// vectors in fp32. ops/folded_layers.py computes them. With only the first LayerNorm, those of up are read. The
// first layer's x is normalized already: its weight and bias of qkv are the layer's own, its residual weight is 1.
enum TransformerFolded {
  kFoldedUpWeight,
  kFoldedUpBias,
  kFoldedQkvWeight,
  kFoldedQkvBias,
  kFoldedOutBias,
  kFoldedResidualA,  // the weight of the previous layer's LayerNorm b
  kFoldedDownBias,
  kFoldedResidualB,  // the weight of LayerNorm a
  kTransformerFolded,
};

// The forward of post-LN layers for inference, whose LayerNorms, of each layer the first or, except for the last one of
// all, both, are parts of the GEMMs.
struct TransformerFoldedForward : TransformerForward {
  const int64_t* folded;  // [layers, kTransformerFolded] addresses
  few_rows::FoldedNorms norms;
};

// A backward of one layer can be split in two if another backend computes attention's backward: the first part ends
// with the gradient of attention's output, the second starts with that of qkv.
enum class BackwardPart : int32_t { whole = 0, before_attention = 1, after_attention = 2 };

struct TransformerBackward : TransformerCall {
  const void* z;             // from the forward in a pre-LN model; else null
  const void* dy;            // [T, C], dtype
  const void* dz;            // [T, C], residual_dtype, or null for 0; null in a post-LN model
  void* dx;                  // [T, C], dtype
  void* dresidual;           // [T, C], residual_dtype, in a pre-LN model; else null
  const int64_t* gradients;  // [layers, kTransformerParameters] addresses
  int64_t block_memory;      // CUDA: bytes of shared memory that a block may use
  BackwardPart part;
  void* dout;        // [T, C], dtype: written by the first part; unused if the backward is not split
  const void* dqkv;  // [T, 3 C], dtype: read by the second part; unused if the backward is not split
};

namespace cpu {
// Requires that the process has loaded a BLAS: common/cpu/blas.h.
Status transformer_block_sizes(const TransformerSizes&);
Status transformer_block_forward(const TransformerForward&);
Status transformer_block_backward(const TransformerBackward&);
}  // namespace cpu

namespace cuda {
// Requires that the process has loaded cuBLASLt (gemm/op.h), compute capability 9.0, C and I that are multiples of 8, D
// of 64 or 128, full or causal attention, and tensors that are contiguous and aligned to 16 bytes. A forward with
// few_rows supports D of 32, 64 and 128, and every window.
Status transformer_block_sizes(const TransformerSizes&);
Status transformer_block_forward(const TransformerForward&);
Status transformer_block_backward(const TransformerBackward&);
// Requires a post-LN model, no training and no dropout; C is a multiple of 64, and T tokens are few, as for few_rows.
Status transformer_block_folded_forward(const TransformerFoldedForward&);
// 1 if NVTX's header was available in the build, so that ranges name the layers in a profile.
int64_t transformer_block_names_layers();
}  // namespace cuda

}  // namespace fasttfm
