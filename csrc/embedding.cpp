#include "embedding/op.h"

#include "binding.h"

namespace fasttfm {

#ifdef FASTTFM_WITH_CUDA
namespace {

struct Inputs {
  const Tensor& ids;
  const Tensor& word_table;
  const OptionalTensor& position_table;
  const OptionalTensor& segment_table;
  const OptionalTensor& position_ids;
  const OptionalTensor& segment_ids;
  const OptionalTensor& cu_seqlens;
  const OptionalTensor& weight;
  const OptionalTensor& seed;
  const Tensor& statistics;
};

EmbeddingGpuRows rows_of(const Place& place, const Inputs& given, const Tensor& output, DType bias_dtype,
                         int64_t layer_norm, int64_t threshold, double scale) {
  const Tensor& ids = given.ids;
  return {
      .word_table = given.word_table.data,
      .position_table = given.position_table.data,
      .segment_table = given.segment_table.data,
      .ids = static_cast<const int64_t*>(ids.data),
      .position_ids = static_cast<const int64_t*>(given.position_ids.data),
      .segment_ids = static_cast<const int64_t*>(given.segment_ids.data),
      .cu_seqlens = static_cast<const int32_t*>(given.cu_seqlens.data),
      .weight = given.weight.data,
      .seed = static_cast<const int64_t*>(given.seed.data),
      .statistics = static_cast<float*>(given.statistics.data),
      .word_rows = given.word_table.rows(),
      .position_rows = given.position_table.given ? given.position_table.rows() : 0,
      .segment_rows = given.segment_table.given ? given.segment_table.rows() : 0,
      .sequences = given.cu_seqlens.given ? given.cu_seqlens.columns() - 1 : 0,
      .tokens_per_sequence = ids.columns() < 1 ? 1 : ids.columns(),
      .rows = ids.rows() * ids.columns(),
      .columns = given.word_table.columns(),
      .threshold = static_cast<int>(threshold),
      .scale = static_cast<float>(scale),
      .layer_norm = layer_norm != 0,
      .table_dtype = given.word_table.dtype(),
      .dtype = output.dtype(),
      .weight_dtype = given.weight.dtype(),
      .bias_dtype = bias_dtype,
      .device = place.device,
      .stream = place.stream,
  };
}

Status forward(const Place& place, const Tensor& ids, const Tensor& word_table, const OptionalTensor& position_table,
               const OptionalTensor& segment_table, const OptionalTensor& position_ids,
               const OptionalTensor& segment_ids, const OptionalTensor& cu_seqlens, const OptionalTensor& weight,
               const OptionalTensor& bias, const OptionalTensor& seed, const Tensor& y, const Tensor& statistics,
               const Tensor& errors, int64_t layer_norm, double eps, int64_t threshold, double scale) {
  const Inputs given{ids,         word_table, position_table, segment_table, position_ids,
                     segment_ids, cu_seqlens, weight,         seed,          statistics};
  return cuda::embedding_forward({rows_of(place, given, y, bias.dtype(), layer_norm, threshold, scale), bias.data,
                                  y.data, static_cast<int64_t*>(errors.data), static_cast<float>(eps)});
}

Status backward(const Place& place, const Tensor& dy, const Tensor& ids, const Tensor& word_table,
                const OptionalTensor& position_table, const OptionalTensor& segment_table,
                const OptionalTensor& position_ids, const OptionalTensor& segment_ids, const OptionalTensor& cu_seqlens,
                const OptionalTensor& weight, const OptionalTensor& seed, const Tensor& statistics,
                const OptionalTensor& dword, const OptionalTensor& dposition, const OptionalTensor& dsegment,
                const OptionalTensor& dweight, const OptionalTensor& dbias, const Tensor& workspace, int64_t layer_norm,
                int64_t threshold, double scale, int64_t padding_index) {
  const Inputs given{ids,         word_table, position_table, segment_table, position_ids,
                     segment_ids, cu_seqlens, weight,         seed,          statistics};
  return cuda::embedding_backward({rows_of(place, given, dy, dbias.dtype(), layer_norm, threshold, scale), dy.data,
                                   dword.data, dposition.data, dsegment.data, dweight.data, dbias.data,
                                   static_cast<float*>(workspace.data), padding_index});
}

}  // namespace
#endif

#define FORWARD(MEMBER) FASTTFM_FIELD(EmbeddingForward, MEMBER)
#define BACKWARD(MEMBER) FASTTFM_FIELD(EmbeddingBackward, MEMBER)
#define TABLE(MEMBER) FASTTFM_FIELD(EmbeddingTableBackward, MEMBER)
#define ROWS(FIELD)                                                                                                    \
  FIELD(word_table), FIELD(position_table), FIELD(segment_table), FIELD(ids), FIELD(position_ids), FIELD(segment_ids), \
      FIELD(cu_seqlens), FIELD(weight), FIELD(seed), FIELD(sequences), FIELD(tokens_per_sequence), FIELD(rows),        \
      FIELD(columns), FIELD(threshold), FIELD(scale), FIELD(layer_norm), FIELD(table_dtype), FIELD(dtype),             \
      FIELD(threads)

FASTTFM_BINDING(embedding) {
  bind_workspace(module, "embedding_workspace", &cpu::embedding_workspace);
  bind_launcher(module, "embedding_forward_cpu", &cpu::embedding_forward, ROWS(FORWARD), FORWARD(bias), FORWARD(y),
                FORWARD(mean), FORWARD(rstd), FORWARD(eps));
  bind_launcher(module, "embedding_backward_cpu", &cpu::embedding_backward, ROWS(BACKWARD), BACKWARD(dy),
                BACKWARD(mean), BACKWARD(rstd), BACKWARD(dx), BACKWARD(positions), BACKWARD(dweight), BACKWARD(dbias),
                BACKWARD(workspace));
  bind_launcher(module, "embedding_table_backward_cpu", &cpu::embedding_table_backward, TABLE(dx), TABLE(indices),
                TABLE(dtable), TABLE(first), TABLE(next), TABLE(rows), TABLE(columns), TABLE(table_rows),
                TABLE(excluded), TABLE(dtype), TABLE(threads));
  bind_constant(module, "embedding_gpu_rows", kEmbeddingGpuRows);
  bind_constant(module, "embedding_gpu_columns", kEmbeddingGpuColumns);
  bind_constant(module, "embedding_gpu_segments", kEmbeddingSegments);
#ifdef FASTTFM_WITH_CUDA
  bind_call(module, "embedding_forward_cuda",
            "ids, word_table, position_table, segment_table, position_ids, segment_ids, cu_seqlens, weight, bias, seed,"
            "y, statistics, errors, layer_norm, eps, threshold, scale",
            &forward);
  bind_call(module, "embedding_backward_cuda",
            "dy, ids, word_table, position_table, segment_table, position_ids, segment_ids, cu_seqlens, weight, seed,"
            "statistics, dword, dposition, dsegment, dweight, dbias, workspace, layer_norm, threshold, scale,"
            "padding_index",
            &backward);
  bind_workspace(module, "embedding_workspace_cuda", &cuda::embedding_gpu_workspace, {"rows", "columns"});
#endif
}

}  // namespace fasttfm
