// Transformer layers as a list of steps: each is a call of another op's kernels. The planner in
// python/fasttfm/ops/layers decides which steps there are and where tensors lie; run.h executes them.
//
// The functions allocate no memory and do not synchronize with the GPU.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/status.h"

namespace fasttfm {

// The numbers are those of steps.py. The fields of a step are described in run.h.
enum class LayerStep : int64_t {
  zero = 0,
  gemm = 1,
  weight_gradient = 2,
  projection = 3,
  rotary = 4,
  attention = 5,
  attention_backward = 6,
  add_norm = 7,
  add_norm_backward = 8,
  rms_norm = 9,
  rms_norm_backward = 10,
  gated_activation = 11,
  gated_activation_backward = 12,
  activation = 13,
  activation_backward = 14,
  gemm_activation = 15,
  column_sum = 16,
  head_norm = 17,
  head_norm_backward = 18,
  int8_gemm = 19,
  fp8_cast = 20,
  fp8_gemm = 21,
  fp8_gemm_activation = 22,
  gemm_activation_backward = 23,
  layer_norm = 24,
  range = 25,
  few_rows_gemm = 26,
  few_rows_add_norm = 27,
  few_rows_layers = 28,
  store_keys = 29,
  cached_attention = 30,
  packed_gemm = 31,
  selected_gemm = 32,
  adapted_gemm = 33,
};

// A step is its kind, the number of its words, these two included, and its fields: addresses, integers, and floating
// point numbers as the bits of a double. An address is -1 for null, or
//
//     table << 56 | index << 40 | units
//
// of an entry of one of the tables below. It is the entry plus `units` bytes for each row, where rows are the tokens
// rounded up to kLayerRows; null if the entry is null. So one list of steps serves any number of tokens.
enum class LayerTable : int64_t { buffers = 0, parameters = 1, gradients = 2, operands = 3 };
constexpr int kLayerTables = 4;
constexpr int64_t kLayerRows = 64;  // a multiple of 4 bytes per row is then a multiple of 256 bytes

struct LayersCall {
  const int64_t* words;
  int64_t word_count;
  const int64_t* tables[kLayerTables];  // addresses, in host memory
  const int32_t* cu_seqlens;            // [sequences + 1]
  void* workspace;                      // of the size that layers_workspace() returns, aligned to 256 bytes
  int64_t tokens;
  int64_t sequences;
  int64_t max_seqlen;     // at most the tokens
  int64_t processors;     // SMs of the GPU; threads on the CPU
  DType dtype;            // CUDA: bf16 or f16; CPU: f32
  DType residual_dtype;   // of the residual stream: dtype or f32
  DType parameter_dtype;  // of norms, biases and all gradients: f32 or dtype
  int64_t block_memory;   // CUDA: bytes of shared memory that a block may use
  int device;             // CUDA
  void* stream;           // CUDA
  int64_t* needed;        // layers_workspace(): [1], the number of bytes
};

// A call on a CPU in parts. A part is whole sequences, which one thread runs through all steps: between steps no thread
// waits for another one, and what a step writes stays in the cache of the core that reads it next. Only for steps that
// keep the tokens of different sequences apart: those of a forward.
struct LayersParts {
  LayersCall call;  // of all tokens, but the workspace is that of a part with `rows` tokens on one thread
  const int64_t* first_sequences;  // [parts + 1]: of each part, and at the end the number of sequences
  int64_t parts;
  int64_t rows;                // at least the tokens of each part
  const int64_t* token_bytes;  // [buffers]: how far apart tokens are in each entry of the table of buffers; 0 if shared
  int64_t buffers;
  // For each thread, at multiples of 256 bytes: boundaries of a part [sequences + 1], the workspace and the scratch
  // memory, which is the first entry of the table of buffers.
  char* memory;
  int64_t boundary_bytes;
  int64_t workspace_bytes;
  int64_t scratch_bytes;
};

namespace cpu {
Status layers_run(const LayersCall&);
Status layers_workspace(const LayersCall&);  // reads neither tables nor tensors
Status layers_run_parts(const LayersParts&);
}  // namespace cpu

namespace cuda {
// Requires compute capability 9.0 and what the kernels of the steps require.
Status layers_run(const LayersCall&);
Status layers_workspace(const LayersCall&);
// 1 if NVTX's header was available in the build, so that ranges name the layers in a profile.
int64_t layers_names_ranges();
}  // namespace cuda

}  // namespace fasttfm
