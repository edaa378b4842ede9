#include "layers/op.h"

#include "binding.h"
#include "common/cuda/device.h"

namespace fasttfm {

// Sizes that steps read, in the order of Python's Sizes.
#define LAYERS_SIZES(F)                                                                                       \
  F(int64_t, tokens), F(int64_t, sequences), F(int64_t, max_seqlen), F(int64_t, processors), F(DType, dtype), \
      F(DType, residual_dtype), F(DType, parameter_dtype)

namespace {

LayersCall call_of(const int64_t* words, int64_t word_count, LAYERS_SIZES(FASTTFM_PARAMETER)) {
  LayersCall call{};
  call.words = words;
  call.word_count = word_count;
  call.tokens = tokens;
  call.sequences = sequences;
  call.max_seqlen = max_seqlen;
  call.processors = processors;
  call.dtype = dtype;
  call.residual_dtype = residual_dtype;
  call.parameter_dtype = parameter_dtype;
  return call;
}

}  // namespace

// Writes the bytes of the workspace to `needed`.
FASTTFM_FUNCTION(Status, layers_workspace_cpu, const int64_t* words, int64_t word_count,
                 LAYERS_SIZES(FASTTFM_PARAMETER), int64_t* needed) {
  LayersCall call = call_of(words, word_count, LAYERS_SIZES(FASTTFM_NAME));
  call.needed = needed;
  return cpu::layers_workspace(call);
}

#ifdef FASTTFM_WITH_HOPPER
FASTTFM_FUNCTION(Status, layers_workspace_cuda, const int64_t* words, int64_t word_count,
                 LAYERS_SIZES(FASTTFM_PARAMETER), int64_t* needed) {
  LayersCall call = call_of(words, word_count, LAYERS_SIZES(FASTTFM_NAME));
  call.needed = needed;
  return cuda::layers_workspace(call);
}

FASTTFM_FUNCTION(int64_t, layers_names_ranges_cuda) { return cuda::layers_names_ranges(); }
#endif

// The tables of addresses are those of LayerTable.
FASTTFM_FUNCTION(Status, layers_run, const int64_t* words, int64_t word_count, LAYERS_SIZES(FASTTFM_PARAMETER),
                 const Tensor& cu_seqlens, const Tensor& workspace, const int64_t* buffers, const int64_t* parameters,
                 const int64_t* gradients, const int64_t* operands) {
  LayersCall call = call_of(words, word_count, LAYERS_SIZES(FASTTFM_NAME));
  call.tables[0] = buffers;
  call.tables[1] = parameters;
  call.tables[2] = gradients;
  call.tables[3] = operands;
  call.cu_seqlens = cu_seqlens.as<int32_t>();
  call.workspace = workspace.data;
  call.block_memory = cuda::block_memory(context.device);
  call.device = context.device;
  call.stream = context.stream;
  return FASTTFM_LAUNCH_HOPPER(layers_run, call);
}

// A call in parts: the numbers and addresses are those of LayersParts, `memory` has its bytes for each thread.
FASTTFM_FUNCTION(Status, layers_run_parts_cpu, const int64_t* words, int64_t word_count,
                 LAYERS_SIZES(FASTTFM_PARAMETER), const Tensor& cu_seqlens, const Tensor& memory,
                 const int64_t* buffers, const int64_t* parameters, const int64_t* operands, const int64_t* parts) {
  LayersParts call{};
  call.call = call_of(words, word_count, LAYERS_SIZES(FASTTFM_NAME));
  call.call.tables[0] = buffers;
  call.call.tables[1] = parameters;
  call.call.tables[3] = operands;
  call.call.cu_seqlens = cu_seqlens.as<int32_t>();
  call.memory = static_cast<char*>(memory.data);
  // Python's Parts.table(): six numbers, the bytes between tokens in each buffer, and the first sequences.
  call.parts = parts[0];
  call.rows = parts[1];
  call.buffers = parts[2];
  call.boundary_bytes = parts[3];
  call.workspace_bytes = parts[4];
  call.scratch_bytes = parts[5];
  call.token_bytes = parts + 6;
  call.first_sequences = parts + 6 + call.buffers;
  return cpu::layers_run_parts(call);
}

}  // namespace fasttfm
