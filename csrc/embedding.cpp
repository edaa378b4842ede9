#include "embedding/op.h"

#include <algorithm>

#include "binding.h"

namespace fasttfm {

// The inputs of both directions.
// clang-format off: it lays out macros without commas differently each time.
#define INPUTS(F) \
  F(const Tensor&, ids) F(const Tensor&, word_table) F(const OptionalTensor&, position_table) \
  F(const OptionalTensor&, segment_table) F(const OptionalTensor&, position_ids) F(const OptionalTensor&, segment_ids) \
  F(const OptionalTensor&, cu_seqlens) F(const OptionalTensor&, weight) F(const OptionalTensor&, seed) \
  F(const Tensor&, statistics) F(int, layer_norm) F(int, threshold) F(float, scale)
// clang-format on
FASTTFM_STRUCT(EmbeddingInputs, INPUTS)

// ---- CPU ------------------------------------------------------------------------------------------------------------

namespace {

EmbeddingRows rows_of(const CallContext& context, const Tensor& output, const EmbeddingInputs& inputs) {
  return {
      .word_table = inputs.word_table.data,
      .position_table = inputs.position_table.data,
      .segment_table = inputs.segment_table.data,
      .ids = inputs.ids.as<int64_t>(),
      .position_ids = inputs.position_ids.as<int64_t>(),
      .segment_ids = inputs.segment_ids.as<int64_t>(),
      .cu_seqlens = inputs.cu_seqlens.as<int32_t>(),
      .weight = inputs.weight.as<float>(),
      .seed = inputs.seed.as<int64_t>(),
      .sequences = inputs.cu_seqlens.given ? inputs.cu_seqlens.shape[0] - 1 : 0,
      .tokens_per_sequence = std::max<int64_t>(1, inputs.ids.columns()),
      .rows = inputs.ids.rows() * inputs.ids.columns(),
      .columns = inputs.word_table.columns(),
      .threshold = inputs.threshold,
      .scale = inputs.scale,
      .layer_norm = inputs.layer_norm,
      .table_dtype = inputs.word_table.dtype(),
      .dtype = output.dtype(),
      .threads = context.threads,
  };
}

}  // namespace

FASTTFM_FUNCTION(Status, embedding_forward_cpu, const EmbeddingInputs& inputs, const OptionalTensor& bias,
                 const Tensor& y, float eps) {
  const EmbeddingRows rows = rows_of(context, y, inputs);
  float* mean = inputs.statistics.as<float>();
  return cpu::embedding_forward({rows, bias.as<float>(), y.data, mean, inputs.statistics.from<float>(rows.rows), eps});
}

FASTTFM_FUNCTION(int64_t, embedding_workspace_cpu, int64_t rows, int64_t columns) {
  return cpu::embedding_workspace(rows, columns);
}

FASTTFM_FUNCTION(Status, embedding_backward_cpu, const Tensor& dy, const EmbeddingInputs& inputs, const Tensor& dx,
                 const OptionalTensor& positions, const OptionalTensor& dweight, const OptionalTensor& dbias,
                 const Tensor& workspace) {
  const EmbeddingRows rows = rows_of(context, dy, inputs);
  return cpu::embedding_backward({rows, dy.data, inputs.statistics.as<float>(),
                                  inputs.statistics.from<float>(rows.rows), dx.as<float>(), positions.as<int64_t>(),
                                  dweight.as<float>(), dbias.as<float>(), workspace.as<float>()});
}

FASTTFM_FUNCTION(Status, embedding_table_backward_cpu, const Tensor& dx, const Tensor& indices, const Tensor& dtable,
                 const Tensor& first, const Tensor& next, int64_t excluded) {
  return cpu::embedding_table_backward({
      .dx = dx.as<float>(),
      .indices = indices.as<int64_t>(),
      .dtable = dtable.data,
      .first = first.as<int32_t>(),
      .next = next.as<int32_t>(),
      .rows = dx.shape[0],
      .columns = dx.shape[1],
      .table_rows = dtable.shape[0],
      .excluded = excluded,
      .dtype = dtable.dtype(),
      .threads = context.threads,
  });
}

// ---- CUDA, for batches of few tokens --------------------------------------------------------------------------------

FASTTFM_CONSTANT(embedding_gpu_rows, kEmbeddingGpuRows)
FASTTFM_CONSTANT(embedding_gpu_columns, kEmbeddingGpuColumns)
FASTTFM_CONSTANT(embedding_gpu_segments, kEmbeddingSegments)

#ifdef FASTTFM_WITH_CUDA
namespace {

EmbeddingGpuRows gpu_rows_of(const CallContext& context, const Tensor& output, DType bias_dtype,
                             const EmbeddingInputs& inputs) {
  return {
      .word_table = inputs.word_table.data,
      .position_table = inputs.position_table.data,
      .segment_table = inputs.segment_table.data,
      .ids = inputs.ids.as<int64_t>(),
      .position_ids = inputs.position_ids.as<int64_t>(),
      .segment_ids = inputs.segment_ids.as<int64_t>(),
      .cu_seqlens = inputs.cu_seqlens.as<int32_t>(),
      .weight = inputs.weight.data,
      .seed = inputs.seed.as<int64_t>(),
      .statistics = inputs.statistics.as<float>(),
      .word_rows = inputs.word_table.rows(),
      .position_rows = inputs.position_table.given ? inputs.position_table.rows() : 0,
      .segment_rows = inputs.segment_table.given ? inputs.segment_table.rows() : 0,
      .sequences = inputs.cu_seqlens.given ? inputs.cu_seqlens.shape[0] - 1 : 0,
      .tokens_per_sequence = std::max<int64_t>(1, inputs.ids.columns()),
      .rows = inputs.ids.rows() * inputs.ids.columns(),
      .columns = inputs.word_table.columns(),
      .threshold = inputs.threshold,
      .scale = inputs.scale,
      .layer_norm = inputs.layer_norm != 0,
      .table_dtype = inputs.word_table.dtype(),
      .dtype = output.dtype(),
      .weight_dtype = inputs.weight.dtype(),
      .bias_dtype = bias_dtype,
      .device = context.device,
      .stream = context.stream,
  };
}

}  // namespace

FASTTFM_FUNCTION(Status, embedding_forward_cuda, const EmbeddingInputs& inputs, const OptionalTensor& bias,
                 const Tensor& y, float eps, const Tensor& errors) {
  return cuda::embedding_forward(
      {gpu_rows_of(context, y, bias.dtype(), inputs), bias.data, y.data, errors.as<int64_t>(), eps});
}

FASTTFM_FUNCTION(int64_t, embedding_workspace_cuda, int64_t rows, int64_t columns) {
  return cuda::embedding_gpu_workspace(rows, columns);
}

FASTTFM_FUNCTION(Status, embedding_backward_cuda, const Tensor& dy, const EmbeddingInputs& inputs,
                 const OptionalTensor& dword, const OptionalTensor& dposition, const OptionalTensor& dsegment,
                 const OptionalTensor& dweight, const OptionalTensor& dbias, const Tensor& workspace,
                 int64_t padding_index) {
  return cuda::embedding_backward({gpu_rows_of(context, dy, dbias.dtype(), inputs), dy.data, dword.data, dposition.data,
                                   dsegment.data, dweight.data, dbias.data, workspace.as<float>(), padding_index});
}
#endif

}  // namespace fasttfm
