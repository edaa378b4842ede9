// A layer of a token stream and an entity stream, forward.
#pragma once

#include "knowledge_block/layer.h"
#include "transformer_block/layer_forward.h"

namespace fasttfm {
namespace FASTTFM_ISA {
namespace knowledge {

template <class Device>
class Forward : transformer::Forward<Device> {
  using Tokens = transformer::Forward<Device>;

 public:
  explicit Forward(const KnowledgeForward& call)
      : Tokens(call),
        own_(call),
        entities_(entity_call(call, call)),
        kept_regions_(kept_plan(call, call)),
        scratch_regions_(forward_plan<Device>(call, call)) {}

  Status run() {
    const typename Device::Range range("forward with entities", 0);
    this->reset_tile_counters();
    prepare();
    transformer::ForwardTensors tensors = this->tensors_of(0);
    tensors.x = tensors.residual = own_.x;
    this->attention_block(0, tensors);
    const void* entities = kept_at(kEntityX);
    if (own_.entity_attention) {
      attend();
      entities = scratch_at(kEntityY1);
    }
    this->steps_(Device::align_rows, align_of(own_, own_, tensors.y1, entities, kept_at(kRows)));
    fuse(tensors, entities);
    return this->steps_.status();
  }

 private:
  void* kept_at(KeptRegion region) const {
    return at(own_.kept, kept_regions_.start + kept_regions_.regions[region].offset);
  }
  void* scratch_at(ForwardRegion region) const {
    return at(own_.scratch, scratch_regions_.start + scratch_regions_.regions[region].offset);
  }
  float* statistics_at(KeptRegion region) const { return static_cast<float*>(kept_at(region)); }
  const void* entity_parameter(TransformerParameter which) const { return this->parameter(kEntityRow, which); }

  // Prepares the operands of GEMMs: the weights of both streams, concatenated and padded with zeros.
  void prepare() {
    const int64_t width = own_.width, inner = own_.intermediate, e = own_.entity_width, f = own_.entity_stride;
    const int64_t both = width + f, padded = attention_width(own_), size = transformer::size_of(own_.dtype);
    Copies copies(own_);
    copies.add(own_.dtype, own_.entity_x, own_.entities, e, kept_at(kEntityX), own_.entities, f);
    copies.add(own_.dtype, this->parameter(kTokenRow, kUpWeight), inner, width, scratch_at(kUp), inner, width)
        .to_stride = both;
    copies.add(own_.dtype, entity_parameter(kUpWeight), inner, e, at(scratch_at(kUp), width * size), inner, f)
        .to_stride = both;
    copies.add(own_.dtype, entity_parameter(kUpWeight), inner, e, kept_at(kEntityUp), inner, f);
    copies.add(own_.parameter_dtype, this->parameter(kTokenRow, kUpBias), 1, inner, kept_at(kBias), 1, inner).added =
        entity_parameter(kUpBias);
    if (!own_.last) {
      void* down = kept_at(kDown);
      copies.add(own_.dtype, this->parameter(kTokenRow, kDownWeight), width, inner, down, width, inner);
      copies.add(own_.dtype, entity_parameter(kDownWeight), e, inner, at(down, width * inner * size), f, inner);
    }
    if (own_.entity_attention) {
      const int64_t from_dim = head_dim_of(own_), to_dim = own_.entity_head_dim;
      group_rows(&copies.add(own_.dtype, entity_parameter(kQkvWeight), 3 * e, e, kept_at(kPaddedQkv), 3 * padded, f),
                 from_dim, to_dim);
      group_rows(
          &copies.add(own_.dtype, entity_parameter(kQkvBias), 3 * e, 1, scratch_at(kPaddedQkvBias), 3 * padded, 1),
          from_dim, to_dim);
      group_columns(&copies.add(own_.dtype, entity_parameter(kOutWeight), e, e, kept_at(kPaddedOut), f, padded),
                    own_.entity_heads);
    }
    copies.run<Device>(&this->steps_);
  }

  // LN(e + Attention(e))
  void attend() {
    const int64_t padded = attention_width(own_), f = own_.entity_stride;
    void* workspace = scratch_at(kForwardWorkspace);
    Gemm qkv = transformer::product_of(entities_, kept_at(kEntityX), kept_at(kPaddedQkv), true, kept_at(kEntityQkv),
                                       3 * padded, f, workspace);
    qkv.bias = scratch_at(kPaddedQkvBias);
    this->steps_(Device::gemm, qkv);
    auto attention = attention_of<AttentionForward>(entities_, own_, kept_at(kEntityQkv), workspace);
    attention.out = kept_at(kEntityOut);
    attention.lse = statistics_at(kEntityLse);
    this->steps_(Device::attention_forward, attention);
    this->steps_(Device::gemm, transformer::product_of(entities_, kept_at(kEntityOut), kept_at(kPaddedOut), true,
                                                       scratch_at(kEntityBranch), f, padded, workspace));
    EntityNormForward norm = entity_norm(1, kept_at(kEntityX), kept_at(kEntityZ1), statistics_at(kStatistics1));
    norm.x = scratch_at(kEntityBranch);
    norm.x_stride = f;
    norm.y = scratch_at(kEntityY1);
    norm.y_stride = f;
    norm.weight = entity_parameter(kNormAWeight);
    norm.bias = entity_parameter(kNormABias);
    norm.linear_bias = entity_parameter(kOutBias);
    norm.eps = entities_.eps_a;
    this->steps_(Device::entity_norm_forward, norm);
  }

  // h = act(...) for all tokens, and the outputs of both streams.
  void fuse(transformer::ForwardTensors tensors, const void* entities) {
    const int64_t out = fused_width(own_, own_);
    TransformerCall wide = own_;
    wide.width = own_.width + own_.entity_stride;
    const void *y1 = tensors.y1, *down = own_.last ? this->parameter(kTokenRow, kDownWeight) : kept_at(kDown);
    tensors.y1 = kept_at(kRows);
    Device::activation_forward(&this->steps_, wide, scratch_at(kUp), kept_at(kBias), tensors);
    this->steps_(Device::gemm, transformer::product_of(own_, tensors.a, down, true, scratch_at(kBoth), out,
                                                       own_.intermediate, tensors.workspace));
    auto norm = this->add_norm(0, 2, scratch_at(kBoth), y1, tensors.y, tensors.z, tensors.statistics_b);
    norm.x_stride = out;
    norm.weight = this->parameter(kTokenRow, kNormBWeight);
    norm.bias = this->parameter(kTokenRow, kNormBBias);
    norm.linear_bias = this->parameter(kTokenRow, kDownBias);
    norm.eps = own_.eps_b;
    this->steps_(Device::add_norm_forward, norm);
    if (own_.last) return;
    EntityNormForward entity = entity_norm(2, entities, kept_at(kEntityZ), statistics_at(kStatistics));
    entity.x = at(scratch_at(kBoth), own_.width * transformer::size_of(own_.dtype));
    entity.x_stride = out;
    entity.x_rows = own_.positions;
    entity.y = own_.entity_y;
    entity.y_stride = own_.entity_width;
    entity.weight = entity_parameter(kNormBWeight);
    entity.bias = entity_parameter(kNormBBias);
    entity.linear_bias = entity_parameter(kDownBias);
    entity.eps = entities_.eps_b;
    this->steps_(Device::entity_norm_forward, entity);
  }

  EntityNormForward entity_norm(int seed_index, const void* residual, void* z, float* statistics) const {
    auto norm = transformer::add_norm_of<EntityNormForward>(entities_, 0, seed_index);
    norm.columns = own_.entity_width;
    norm.residual = residual;
    norm.residual_stride = own_.entity_stride;
    norm.z = z;
    norm.mean = statistics;
    norm.rstd = statistics + own_.entities;
    norm.parameter_dtype = own_.parameter_dtype;
    norm.gathered = scratch_at(kForwardGathered);
    return norm;
  }

  const KnowledgeForward& own_;
  const TransformerCall entities_;
  const Plan<kKeptRegions> kept_regions_;
  const Plan<kForwardRegions> scratch_regions_;
};

}  // namespace knowledge
}  // namespace FASTTFM_ISA
}  // namespace fasttfm
