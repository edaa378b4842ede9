// What the bindings of transformer layers share: lists of parameters, and the structs that they fill.
#pragma once

#include "binding.h"
#include "transformer_block/op.h"

// The fields of Python's Shape, in its order: those of TransformerShape.
#define TRANSFORMER_SHAPE(F)                                                                                     \
  F(int64_t, layers), F(int64_t, tokens), F(int64_t, width), F(int64_t, intermediate), F(int64_t, heads),        \
      F(int64_t, sequences), F(int64_t, max_seqlen), F(int64_t, processors), F(int, pre_norm), F(int, training), \
      F(int, recompute), F(int, keep_activation), F(DType, dtype), F(DType, residual_dtype)

// The fields of Python's LayerOptions, in its order.
#define TRANSFORMER_OPTIONS(F)                                                                                   \
  F(int64_t, window_left), F(int64_t, window_right), F(Activation, activation), F(int, attention_threshold),     \
      F(float, attention_scale), F(int, threshold_a), F(float, scale_a), F(int, threshold_b), F(float, scale_b), \
      F(float, eps_a), F(float, eps_b), F(DType, parameter_dtype)

// The inputs and the buffers of both directions; `parameters` is a table of addresses.
#define TRANSFORMER_INPUTS(F)                                                                                        \
  F(const int64_t*, parameters), F(const Tensor&, x), F(const Tensor&, cu_seqlens), F(const OptionalTensor&, seeds), \
      F(const Tensor&, kept), F(const Tensor&, scratch)

namespace fasttfm {

inline TransformerShape shape_of(TRANSFORMER_SHAPE(FASTTFM_PARAMETER)) { return {TRANSFORMER_SHAPE(FASTTFM_NAME)}; }

inline TransformerCall call_of(const CallContext& context, const TransformerShape& shape,
                               TRANSFORMER_OPTIONS(FASTTFM_PARAMETER), TRANSFORMER_INPUTS(FASTTFM_PARAMETER)) {
  return {
      shape,
      parameters,
      x.data,
      cu_seqlens.as<int32_t>(),
      seeds.as<int64_t>(),
      kept.data,
      scratch.data,
      TRANSFORMER_OPTIONS(FASTTFM_NAME),
      context.device,
      context.stream,
  };
}

}  // namespace fasttfm

#define TRANSFORMER_CALL                                                                         \
  call_of(context, shape_of(TRANSFORMER_SHAPE(FASTTFM_NAME)), TRANSFORMER_OPTIONS(FASTTFM_NAME), \
          TRANSFORMER_INPUTS(FASTTFM_NAME))
