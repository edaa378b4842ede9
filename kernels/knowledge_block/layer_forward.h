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
        knowledge_(call),
        entities_(entity_call(call, call)),
        kept_regions_(kept_plan(call, call)),
        scratch_regions_(forward_plan<Device>(call, call)) {}

  Status run() {
    const typename Device::Range range("forward with entities", 0);
    this->reset_tile_counters();
    prepare();
    transformer::ForwardTensors tensors = this->tensors_of(0);
    tensors.x = tensors.residual = knowledge_.x;
    this->attention_block(0, tensors);
    const void* entities = kept_at(kEntityX);
    if (knowledge_.entity_attention) {
      attend();
      entities = scratch_at(kEntityY1);
    }
    this->steps_(Device::align_rows, align_of(knowledge_, knowledge_, tensors.y1, entities, kept_at(kRows)));
    fuse(tensors, entities);
    return this->steps_.status();
  }

 private:
  void* kept_at(KeptRegion region) const {
    return at(knowledge_.kept, kept_regions_.start + kept_regions_.regions[region].offset);
  }
  void* scratch_at(ForwardRegion region) const {
    return at(knowledge_.scratch, scratch_regions_.start + scratch_regions_.regions[region].offset);
  }
  float* statistics_at(KeptRegion region) const { return static_cast<float*>(kept_at(region)); }
  const void* entity_parameter(TransformerParameter which) const { return this->parameter(kEntityRow, which); }

  // Prepares the operands of GEMMs: the weights of both streams, concatenated and padded with zeros.
  void prepare() {
    const int64_t width = knowledge_.width, inner = knowledge_.intermediate, e = knowledge_.entity_width,
                  f = knowledge_.entity_stride;
    const int64_t both = width + f, padded = attention_width(knowledge_), size = transformer::size_of(knowledge_.dtype);
    Copies copies(knowledge_);
    copies.add(knowledge_.dtype, knowledge_.entity_x, knowledge_.entities, e, kept_at(kEntityX), knowledge_.entities,
               f);
    copies.add(knowledge_.dtype, this->parameter(kTokenRow, kUpWeight), inner, width, scratch_at(kUp), inner, width)
        .to_stride = both;
    copies.add(knowledge_.dtype, entity_parameter(kUpWeight), inner, e, at(scratch_at(kUp), width * size), inner, f)
        .to_stride = both;
    copies.add(knowledge_.dtype, entity_parameter(kUpWeight), inner, e, kept_at(kEntityUp), inner, f);
    copies.add(knowledge_.parameter_dtype, this->parameter(kTokenRow, kUpBias), 1, inner, kept_at(kBias), 1, inner)
        .added = entity_parameter(kUpBias);
    if (!knowledge_.last) {
      void* down = kept_at(kDown);
      copies.add(knowledge_.dtype, this->parameter(kTokenRow, kDownWeight), width, inner, down, width, inner);
      copies.add(knowledge_.dtype, entity_parameter(kDownWeight), e, inner, at(down, width * inner * size), f, inner);
    }
    if (knowledge_.entity_attention) {
      const int64_t from_dim = head_dim_of(knowledge_), to_dim = knowledge_.entity_head_dim;
      group_rows(
          &copies.add(knowledge_.dtype, entity_parameter(kQkvWeight), 3 * e, e, kept_at(kPaddedQkv), 3 * padded, f),
          from_dim, to_dim);
      group_rows(&copies.add(knowledge_.dtype, entity_parameter(kQkvBias), 3 * e, 1, scratch_at(kPaddedQkvBias),
                             3 * padded, 1),
                 from_dim, to_dim);
      group_columns(&copies.add(knowledge_.dtype, entity_parameter(kOutWeight), e, e, kept_at(kPaddedOut), f, padded),
                    knowledge_.entity_heads);
    }
    copies.run<Device>(&this->steps_);
  }

  // LN(e + Attention(e))
  void attend() {
    const int64_t padded = attention_width(knowledge_), f = knowledge_.entity_stride;
    void* workspace = scratch_at(kForwardWorkspace);
    Gemm qkv = transformer::product_of(entities_, kept_at(kEntityX), kept_at(kPaddedQkv), true, kept_at(kEntityQkv),
                                       3 * padded, f, workspace);
    qkv.bias = scratch_at(kPaddedQkvBias);
    this->steps_(Device::gemm, qkv);
    auto attention = attention_of<AttentionForward>(entities_, knowledge_, kept_at(kEntityQkv), workspace);
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
    const int64_t out = fused_width(knowledge_, knowledge_);
    TransformerCall wide = knowledge_;
    wide.width = knowledge_.width + knowledge_.entity_stride;
    const void *y1 = tensors.y1, *down = knowledge_.last ? this->parameter(kTokenRow, kDownWeight) : kept_at(kDown);
    tensors.y1 = kept_at(kRows);
    Device::activation_forward(&this->steps_, wide, scratch_at(kUp), kept_at(kBias), tensors);
    this->steps_(Device::gemm, transformer::product_of(knowledge_, tensors.a, down, true, scratch_at(kBoth), out,
                                                       knowledge_.intermediate, tensors.workspace));
    auto norm = this->add_norm(0, 2, scratch_at(kBoth), y1, tensors.y, tensors.z, tensors.statistics_b);
    norm.x_stride = out;
    norm.weight = this->parameter(kTokenRow, kNormBWeight);
    norm.bias = this->parameter(kTokenRow, kNormBBias);
    norm.linear_bias = this->parameter(kTokenRow, kDownBias);
    norm.eps = knowledge_.eps_b;
    this->steps_(Device::add_norm_forward, norm);
    if (knowledge_.last) return;
    EntityNormForward entity = entity_norm(2, entities, kept_at(kEntityZ), statistics_at(kStatistics));
    entity.x = at(scratch_at(kBoth), knowledge_.width * transformer::size_of(knowledge_.dtype));
    entity.x_stride = out;
    entity.x_rows = knowledge_.positions;
    entity.y = knowledge_.entity_y;
    entity.y_stride = knowledge_.entity_width;
    entity.weight = entity_parameter(kNormBWeight);
    entity.bias = entity_parameter(kNormBBias);
    entity.linear_bias = entity_parameter(kDownBias);
    entity.eps = entities_.eps_b;
    this->steps_(Device::entity_norm_forward, entity);
  }

  EntityNormForward entity_norm(int seed_index, const void* residual, void* z, float* statistics) const {
    auto norm = transformer::add_norm_of<EntityNormForward>(entities_, 0, seed_index);
    norm.columns = knowledge_.entity_width;
    norm.residual = residual;
    norm.residual_stride = knowledge_.entity_stride;
    norm.z = z;
    norm.mean = statistics;
    norm.rstd = statistics + knowledge_.entities;
    norm.parameter_dtype = knowledge_.parameter_dtype;
    norm.gathered = scratch_at(kForwardGathered);
    return norm;
  }

  const KnowledgeForward& knowledge_;
  const TransformerCall entities_;
  const Plan<kKeptRegions> kept_regions_;
  const Plan<kForwardRegions> scratch_regions_;
};

}  // namespace knowledge
}  // namespace FASTTFM_ISA
}  // namespace fasttfm
