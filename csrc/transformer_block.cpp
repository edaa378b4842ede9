#include "transformer_block/op.h"

#include "binding.h"
#include "common/cuda/device.h"
#include "transformer_block/regions.h"
#include "transformer_call.h"

namespace fasttfm {

namespace transformer = baseline::transformer;

// Writes `table`, in the format of RegionsCall.
FASTTFM_FUNCTION(Status, transformer_block_regions, TRANSFORMER_SHAPE(FASTTFM_PARAMETER), int64_t workspace_bytes,
                 int fused_activation, int64_t* table, transformer::RegionsOf kind) {
  return transformer::list_regions(
      {shape_of(TRANSFORMER_SHAPE(FASTTFM_NAME)), workspace_bytes, fused_activation, table, kind});
}

// Writes three numbers of bytes to `sizes`.
FASTTFM_FUNCTION(Status, transformer_block_sizes_cpu, TRANSFORMER_SHAPE(FASTTFM_PARAMETER), int64_t* sizes) {
  return cpu::transformer_block_sizes({shape_of(TRANSFORMER_SHAPE(FASTTFM_NAME)), sizes});
}

#ifdef FASTTFM_WITH_HOPPER
FASTTFM_FUNCTION(Status, transformer_block_sizes_cuda, TRANSFORMER_SHAPE(FASTTFM_PARAMETER), int64_t* sizes) {
  return cuda::transformer_block_sizes({shape_of(TRANSFORMER_SHAPE(FASTTFM_NAME)), sizes});
}

FASTTFM_FUNCTION(int64_t, transformer_block_names_layers_cuda) { return cuda::transformer_block_names_layers(); }
#endif

FASTTFM_FUNCTION(Status, transformer_block_forward, TRANSFORMER_SHAPE(FASTTFM_PARAMETER),
                 TRANSFORMER_OPTIONS(FASTTFM_PARAMETER), TRANSFORMER_INPUTS(FASTTFM_PARAMETER),
                 const OptionalTensor& residual, const Tensor& y, const OptionalTensor& z, int few_rows,
                 int short_attention) {
  const TransformerForward params{TRANSFORMER_CALL, residual.data, y.data, z.data, few_rows, short_attention};
  return FASTTFM_LAUNCH_HOPPER(transformer_block_forward, params);
}

#ifdef FASTTFM_WITH_HOPPER
// `folded` is a table of addresses.
FASTTFM_FUNCTION(Status, transformer_block_folded_forward_cuda, TRANSFORMER_SHAPE(FASTTFM_PARAMETER),
                 TRANSFORMER_OPTIONS(FASTTFM_PARAMETER), TRANSFORMER_INPUTS(FASTTFM_PARAMETER), const Tensor& y,
                 int short_attention, const int64_t* folded, few_rows::FoldedNorms norms) {
  const TransformerForward forward{TRANSFORMER_CALL, nullptr, y.data, nullptr, 1, short_attention};
  return cuda::transformer_block_folded_forward({forward, folded, norms});
}
#endif

// `gradients` is a table of addresses.
FASTTFM_FUNCTION(Status, transformer_block_backward, TRANSFORMER_SHAPE(FASTTFM_PARAMETER),
                 TRANSFORMER_OPTIONS(FASTTFM_PARAMETER), TRANSFORMER_INPUTS(FASTTFM_PARAMETER), const OptionalTensor& z,
                 const Tensor& dy, const OptionalTensor& dz, const Tensor& dx, const OptionalTensor& dresidual,
                 const int64_t* gradients, BackwardPart part, const OptionalTensor& dout, const OptionalTensor& dqkv) {
  const TransformerBackward params{TRANSFORMER_CALL,
                                   z.data,
                                   dy.data,
                                   dz.data,
                                   dx.data,
                                   dresidual.data,
                                   gradients,
                                   cuda::block_memory(context.device),
                                   part,
                                   dout.data,
                                   dqkv.data};
  return FASTTFM_LAUNCH_HOPPER(transformer_block_backward, params);
}

}  // namespace fasttfm
