// A layer of a token stream and an entity stream, backward.
#pragma once

#include "column_sum/op.h"
#include "knowledge_block/layer.h"
#include "transformer_block/layer_backward.h"

namespace fasttfm {
namespace FASTTFM_ISA {
namespace knowledge {

template <class Device>
class Backward : transformer::Backward<Device> {
  using Tokens = transformer::Backward<Device>;

 public:
  explicit Backward(const KnowledgeBackward& call)
      : Tokens(call),
        knowledge_(call),
        entities_(entity_call(call, call)),
        kept_regions_(kept_plan(call, call)),
        scratch_regions_(backward_plan<Device>(call, call)),
        gradients_(call) {}

  Status run() {
    const typename Device::Range range("backward with entities", 0);
    fusion();
    this->projection(0, knowledge_.dx);
    this->attention(0);
    this->input(0, knowledge_.dx, knowledge_.dx);
    if (knowledge_.entity_attention)
      attended();
    else
      gathered();
    gradients_.template run<Device>(&this->steps_);
    return this->steps_.status();
  }

 private:
  void* kept_at(KeptRegion region) const {
    return at(knowledge_.kept, kept_regions_.start + kept_regions_.regions[region].offset);
  }
  void* scratch_at(BackwardRegion region) const {
    return at(knowledge_.scratch, scratch_regions_.start + scratch_regions_.regions[region].offset);
  }
  const float* statistics_at(KeptRegion region) const { return static_cast<const float*>(kept_at(region)); }
  const void* entity_parameter(TransformerParameter which) const { return this->parameter(kEntityRow, which); }
  void* entity_gradient(TransformerParameter which) const { return this->gradient(kEntityRow, which); }
  void* entity_workspace() const { return scratch_at(kBackwardWorkspace); }
  bool has_entity_dy() const { return !knowledge_.last && knowledge_.entity_dy != nullptr; }

  // Computes the gradient of w~ (in kStreamB) and both parts of that of e~ from the gradients of both outputs.
  void fusion() {
    using namespace transformer;
    const int64_t width = knowledge_.width, inner = knowledge_.intermediate, f = knowledge_.entity_stride,
                  both = width + f;
    const bool separate = separate_branch(knowledge_, knowledge_.threshold_b);
    void *stream = this->scratch(kStreamB), *dbranch = separate ? this->scratch(kDBranchB) : stream;
    this->add_norm(0, kParametersB,
                   {knowledge_.dy, nullptr, this->kept(0, kKeptZ), this->statistics(0, kKeptStatistics), stream,
                    separate ? dbranch : nullptr});
    const void* entity_dbranch = nullptr;
    if (has_entity_dy()) {
      EntityNormBackward norm = entity_norm(2, kEntityZ, knowledge::kStatistics, kParametersB, kEntityStream);
      norm.dy = knowledge_.entity_dy;
      norm.dy_stride = knowledge_.entity_width;
      this->steps_(Device::entity_norm_backward, norm);
      entity_dbranch = norm.dx == nullptr ? norm.dresidual : norm.dx;
    }
    if (!knowledge_.last) {
      this->steps_(Device::align_rows, align_of(knowledge_, knowledge_, dbranch, entity_dbranch, scratch_at(kDBoth)));
      dbranch = scratch_at(kDBoth);
    }
    TransformerCall wide = knowledge_;
    wide.width = fused_width(knowledge_, knowledge_);
    const bool again = !knowledge_.keep_activation && knowledge_.ddown != nullptr;
    void* dh = this->scratch(kDh);
    Device::activation_backward(
        &this->steps_, wide,
        {dbranch, knowledge_.last ? this->parameter(kTokenRow, kDownWeight) : kept_at(kDown), kept_at(kBias),
         this->kept(0, kKeptLeft), this->scratch(kDa), dh, again ? this->scratch(kAAgain) : nullptr,
         this->gradient(kTokenRow, kUpBias), this->workspace()});
    const void* a = knowledge_.keep_activation ? this->kept(0, kKeptA) : this->scratch(kAAgain);
    weight_gradient(knowledge_, knowledge_.ddown, dbranch, a, wide.width, inner, this->workspace());
    void *dup = this->gradient(kTokenRow, kUpWeight), *entity_dup = entity_gradient(kUpWeight);
    if (dup != nullptr || entity_dup != nullptr) {
      weight_gradient(knowledge_, scratch_at(kDUp), dh, kept_at(kRows), inner, both, this->workspace());
      const int64_t size = size_of(knowledge_.parameter_dtype), e = knowledge_.entity_width;
      gradients_.add(knowledge_.parameter_dtype, scratch_at(kDUp), inner, width, dup, inner, width).from_stride = both;
      gradients_.add(knowledge_.parameter_dtype, at(scratch_at(kDUp), width * size), inner, e, entity_dup, inner, e)
          .from_stride = both;
    }
    this->steps_(Device::gemm, product_of(knowledge_, dh, kept_at(kEntityUp), false, scratch_at(kFound), f, inner,
                                          this->workspace()));
    this->meet(dh, this->parameter(kTokenRow, kUpWeight), inner, stream, nullptr);
  }

  // The gradient of the entities, if they do not attend to each other.
  void gathered() {
    const int64_t e = knowledge_.entity_width, f = knowledge_.entity_stride, rows = knowledge_.entities;
    BlockCopy& copy =
        gradients_.add(knowledge_.dtype, scratch_at(kFound), knowledge_.tokens, e, knowledge_.entity_dx, rows, e);
    copy.from_stride = copy.added_stride = f;
    copy.rows = knowledge_.positions;
    if (has_entity_dy()) copy.added = scratch_at(kEntityStream);
  }

  // The gradients of the entities' attention block.
  void attended() {
    const int64_t e = knowledge_.entity_width, f = knowledge_.entity_stride, padded = attention_width(knowledge_);
    const int64_t from_dim = knowledge_.entity_head_dim, to_dim = head_dim_of(knowledge_);
    const DType type = knowledge_.parameter_dtype;
    void *workspace = entity_workspace(), *stream = scratch_at(kEntityStreamA);
    EntityNormBackward norm = entity_norm(1, kEntityZ1, kStatistics1, transformer::kParametersA, kEntityStreamA);
    norm.dy = has_entity_dy() ? scratch_at(kEntityStream) : nullptr;
    norm.dy_stride = norm.more_stride = f;
    norm.more = scratch_at(kFound);
    norm.more_rows = knowledge_.positions;
    this->steps_(Device::entity_norm_backward, norm);
    const void* dbranch = norm.dx == nullptr ? norm.dresidual : norm.dx;
    if (void* dout = entity_gradient(kOutWeight); dout != nullptr) {
      weight_gradient(entities_, scratch_at(kPaddedDOut), dbranch, kept_at(kEntityOut), f, padded, workspace);
      group_columns(&gradients_.add(type, scratch_at(kPaddedDOut), e, padded, dout, e, e), knowledge_.entity_heads);
    }
    this->steps_(Device::gemm, transformer::product_of(entities_, dbranch, kept_at(kPaddedOut), false,
                                                       scratch_at(kEntityDOut), padded, f, workspace));
    entity_attention(workspace);
    if (void* bias = entity_gradient(kQkvBias); bias != nullptr) {
      entity_column_sums(workspace);
      group_rows(&gradients_.add(type, scratch_at(kPaddedDBias), 3 * padded, 1, bias, 3 * e, 1), from_dim, to_dim);
    }
    if (void* weight = entity_gradient(kQkvWeight); weight != nullptr) {
      weight_gradient(entities_, scratch_at(kPaddedDQkv), scratch_at(kEntityDQkv), kept_at(kEntityX), 3 * padded, f,
                      workspace);
      group_rows(&gradients_.add(type, scratch_at(kPaddedDQkv), 3 * padded, f, weight, 3 * e, e), from_dim, to_dim);
    }
    Gemm input = transformer::product_of(entities_, scratch_at(kEntityDQkv), kept_at(kPaddedQkv), false, stream, f,
                                         3 * padded, workspace);
    input.c = stream;
    this->steps_(Device::gemm, input);
    BlockCopy& copy =
        gradients_.add(knowledge_.dtype, stream, knowledge_.entities, e, knowledge_.entity_dx, knowledge_.entities, e);
    copy.from_stride = f;
  }

  void entity_attention(void* workspace) {
    const int64_t part = entities_.width * transformer::size_of(knowledge_.dtype);
    auto attention = attention_of<AttentionBackward>(entities_, knowledge_, kept_at(kEntityQkv), workspace);
    void* to = scratch_at(kEntityDQkv);
    attention.dout = scratch_at(kEntityDOut);
    attention.out = kept_at(kEntityOut);
    attention.lse = statistics_at(kEntityLse);
    attention.dq = to;
    attention.dk = at(to, part);
    attention.dv = at(to, 2 * part);
    attention.dq_token_stride = attention.dk_token_stride = attention.dv_token_stride = 3 * entities_.width;
    attention.dq_head_stride = attention.dk_head_stride = attention.dv_head_stride = attention.head_dim;
    this->steps_(Device::attention_backward, attention);
  }

  void entity_column_sums(void* workspace) {
    ColumnSum columns{};
    columns.x = scratch_at(kEntityDQkv);
    columns.sum = scratch_at(kPaddedDBias);
    columns.workspace = static_cast<float*>(workspace);
    columns.rows = knowledge_.entities;
    columns.columns = columns.x_stride = 3 * entities_.width;
    columns.dtype = knowledge_.dtype;
    columns.sum_dtype = knowledge_.parameter_dtype;
    columns.threads = static_cast<int>(knowledge_.processors);
    columns.parts = Device::column_sum_parts(entities_);
    transformer::set_device(knowledge_, &columns);
    this->steps_(Device::column_sum, columns);
  }

  // dy^T x [rows, columns] in the parameters' type, with `call`'s tokens.
  void weight_gradient(const TransformerCall& call, void* to, const void* dy, const void* x, int64_t rows,
                       int64_t columns, void* workspace) {
    if (to == nullptr) return;
    Gemm product{};
    product.a = dy;
    product.b = x;
    product.d = to;
    product.workspace = workspace;
    product.rows = rows;
    product.columns = columns;
    product.inner = call.tokens;
    product.transposed_a = 1;
    product.dtype = call.dtype;
    product.out_dtype = call.parameter_dtype;
    transformer::set_device(call, &product);
    this->steps_(Device::gemm, product);
  }

  // The fields that both LayerNorms of the entities have in common; the gradient of the residual is written to
  // `stream`.
  EntityNormBackward entity_norm(int seed_index, KeptRegion z, KeptRegion statistics,
                                 const transformer::NormParameters& parameters, BackwardRegion stream) const {
    auto norm = transformer::add_norm_of<EntityNormBackward>(entities_, 0, seed_index);
    norm.columns = knowledge_.entity_width;
    norm.z = kept_at(z);
    norm.mean = statistics_at(statistics);
    norm.rstd = norm.mean + knowledge_.entities;
    norm.weight = entity_parameter(parameters.weight);
    norm.dresidual = scratch_at(stream);
    norm.dx = norm.threshold > 0 ? scratch_at(kEntityDBranch) : nullptr;
    norm.dx_stride = knowledge_.entity_stride;
    norm.dweight = entity_gradient(parameters.weight);
    norm.dbias = entity_gradient(parameters.bias);
    norm.dlinear_bias = entity_gradient(parameters.linear_bias);
    norm.weight_dtype = norm.bias_dtype = norm.linear_bias_dtype = knowledge_.parameter_dtype;
    norm.workspace = static_cast<float*>(entity_workspace());
    norm.gathered = scratch_at(kBackwardGathered);
    norm.blocks = static_cast<int>(knowledge_.processors);
    return norm;
  }

  const KnowledgeBackward& knowledge_;
  const TransformerCall entities_;
  const Plan<kKeptRegions> kept_regions_;
  const Plan<kBackwardRegions> scratch_regions_;
  Copies gradients_;
};

}  // namespace knowledge
}  // namespace FASTTFM_ISA
}  // namespace fasttfm
