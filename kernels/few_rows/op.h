// Inference on few tokens: GEMMs of 1 to a few hundred rows, the LayerNorm that adds their partial sums, and attention
// of short sequences. Consecutive kernels overlap by programmatic dependent launch: each starts while the previous one
// still runs, loads data that does not depend on it (weights), and then waits for it.
//
//   product      y = activation(rstd x weight^T + bias)  x [M, K], weight [N, K]; or fp32 partial sums (split-K); or
//                y = x weight^T + bias + (residual - mean) rstd residual_weight
//   add_norm     z = residual + sum of parts + bias,  y = LayerNorm(z); residual is given, or
//                (residual - mean) rstd residual_weight + residual_bias
//   attention    softmax(q k^T scale) v over packed sequences
//   layers       all layers of a post-LN encoder over up to 32 tokens in one kernel, or of a pre-LN decoder over one
//   new
//                token of each of up to 16 sequences
#pragma once

#include <cstdint>

#include "common/activation.h"
#include "common/dtype.h"
#include "common/status.h"

namespace fasttfm {

// `dependent`, in every struct: not 0 to start before the previous kernel in the stream ends. In that case weights,
// biases and cu_seqlens may be read before that. The first kernel of a chain is launched with 0, so that it waits for
// the kernels that write them.
struct FewRowsGemm {
  const void* x;       // [M, K], dtype, contiguous
  const void* weight;  // [N, K], dtype, contiguous
  const void* bias;    // [N], bias_dtype, or null for 0; null with parts
  void* y;             // [M, N], dtype, contiguous; null with parts
  float* parts;        // [part_count, M, N]: the partial sums over K, or null
  // mean and rstd are those of LayerNorm without its parameters, which are part of weight and bias
  // (few_rows/row_statistics.cuh): of the rows of residual, or, without it, of x.
  const float* statistics;       // [N / 64, M, 2], or [K / 64, M, 2] without residual; null for mean 0 and rstd 1
  const void* residual;          // [M, N], dtype, contiguous, or null; N is a multiple of 64
  const float* residual_weight;  // [N], or null for 1
  float* y_statistics;           // [N / 64, M, 2]: the statistics of y, or null; only with residual
  float* norms;                  // [M, 2]: mean and rstd of x, or null; only with statistics and without residual
  float eps;                     // of the LayerNorm
  int64_t rows;                  // M
  int64_t columns;               // N
  int64_t inner;                 // K
  int tile;                      // an index into few_rows::kGemmTiles
  int cluster;     // blocks with neighbouring columns that share the rows of x, 0 for the tile's own number
  int part_count;  // number of parts into which K is split; with residual, the blocks of a cluster add them;
                   // without it, and without `parts`, 1
  int activates;   // not 0 to apply the activation
  Activation activation;
  DType dtype;  // bf16 or f16
  DType bias_dtype;
  int dependent;
  int device;
  void* stream;
};

struct FewRowsAddNorm {
  const float* parts;       // [part_count, N, C]; not read if there are none
  const void* residual;     // [N, C], residual_dtype, contiguous
  const void* linear_bias;  // [C], parameter_dtype, or null for 0
  const void* weight;       // [C], parameter_dtype, or null for 1
  const void* bias;         // [C], parameter_dtype, or null for 0
  // LayerNorm of the residual, which has dtype:
  const float* norms;           // [N, 2]: mean and rstd, or null for a residual that is added as it is
  const void* residual_weight;  // [C], parameter_dtype, or null for 1
  const void* residual_bias;    // [C], parameter_dtype, or null for 0
  void* y;                      // [N, C], dtype, contiguous
  void* z;                      // [N, C], residual_dtype, contiguous, or null if not needed; may be residual
  int64_t rows;                 // N
  int64_t columns;              // C
  int part_count;
  float eps;
  DType dtype;  // bf16 or f16
  DType residual_dtype;
  DType parameter_dtype;
  int dependent;
  int device;
  void* stream;
};

struct FewRowsAttention {
  const void* qkv;            // [T, 3, H, D], dtype, contiguous
  void* out;                  // [T, H, D], dtype, contiguous; rows after the last sequence are set to 0
  const int32_t* cu_seqlens;  // [sequences + 1]
  int64_t tokens;             // T
  int64_t sequences;
  int64_t heads;         // H
  int64_t head_dim;      // D: 32, 64 or 128
  int64_t max_seqlen;    // an upper bound of the sequences' lengths
  int64_t window_left;   // as in attention/op.h
  int64_t window_right;  //
  float scale;           // multiplies the scores
  int split_keys;        // not 0 for blocks of 16 queries whose keys are divided among the warps; not used by the
                         // kernel for short sequences (short_attention.h)
  DType dtype;           // bf16 or f16
  int dependent;
  int device;
  void* stream;
};

// The first entries of a layer in the table of parameters: addresses of contiguous tensors. C columns, I columns in the
// feed-forward block.
enum LayerParameter {
  kQkvWeight,  // [3 C, C]
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
  kLayerParameters,
};

// The KV cache of a decoder: sequence t has lengths[t] tokens in it, which the new token attends to, with itself. The
// call appends the new keys and values. Lengths outside of [0, capacity) are clamped.
struct FewRowsCache {
  void* keys;              // [layers, sequences, H, capacity, D], bf16, contiguous; null for an encoder
  void* values;            // the same
  const int32_t* lengths;  // [T]
  int64_t sequences;       // at least T
  int64_t capacity;
  const void* norm_weight;  // [C], bf16: of the LayerNorm before the first layer
  const void* norm_bias;
};

// Layers in bf16, without dropout, over few tokens. An encoder's are post-LN and attend to all tokens of a sequence. A
// decoder's are pre-LN, x is the residual stream before the first LayerNorm, and LayerNorm b of a layer is the next
// layer's first one or the model's last. The workspace has few_rows::layers_workspace() bytes. It is zero before the
// first call, and no two calls use it at the same time.
struct FewRowsLayers {
  const int64_t* parameters;  // [layers, entries] addresses of bf16 tensors, in host memory; those read are not null
  int64_t entries;            // at least kLayerParameters
  const void* x;              // [T, C], bf16, contiguous
  void* y;                    // [T, C], bf16, contiguous
  const int32_t* cu_seqlens;  // [sequences + 1]; null for a decoder
  FewRowsCache cache;
  void* workspace;
  int64_t layers;        // up to few_rows::kMostLayers
  int64_t tokens;        // T: up to few_rows::kMostLayersRows
  int64_t width;         // C
  int64_t intermediate;  // columns in the feed-forward block
  int64_t heads;
  int64_t sequences;      // of an encoder
  Activation activation;  // GELU or its tanh form
  float eps_a;
  float eps_b;
  int polls;  // of a packet until the call gives up, with NaN as results and 1 as the workspace's second word
  int device;
  void* stream;
};

namespace cuda {
// Compute capability 9.0. N, K and C are multiples of 8, C is at most 8192; tensors are aligned to 16 bytes.
Status few_rows_gemm(const FewRowsGemm&);
Status few_rows_add_norm(const FewRowsAddNorm&);
Status few_rows_attention(const FewRowsAttention&);
// The sizes are those of few_rows::layers_workspace(). The status is does_not_fit if the blocks, which wait for one
// another, are not all resident at once; nothing has been launched then.
Status few_rows_layers(const FewRowsLayers&);
}  // namespace cuda

}  // namespace fasttfm
