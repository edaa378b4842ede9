// Steps for few rows (few_rows/op.h), whose kernels overlap.
#pragma once

#include <algorithm>
#include <cstdint>

#include "few_rows/op.h"
#include "few_rows/plan.h"
#include "gemm/op.h"
#include "layers/op.h"

namespace fasttfm {
namespace cuda {

// The GEMMs of a layer, in the order of steps.py.
enum class LinearRole : int64_t { qkv = 0, out = 1, up = 2, down = 3 };

// The sizes of a layer that decide about the tiles of its GEMMs.
struct FewRowsSizes {
  int64_t width, intermediate;
  few_rows::FoldedNorms norms;
};

template <class Fields>
FewRowsSizes few_rows_sizes(Fields* fields) {
  const int64_t width = fields->integer(), intermediate = fields->integer();
  return {width, intermediate, static_cast<few_rows::FoldedNorms>(fields->integer())};
}

// The tiles of GEMMs, and the numbers of parts into which K is split, of the layers of a call. The parts are in the
// workspace, in its first half if LayerNorms are folded, unless the blocks of a cluster add them.
class FewRowsPlans {
 public:
  few_rows::Plan plan(const LayersCall& call, const FewRowsSizes& sizes, LinearRole role) {
    if (!is_of(sizes)) {
      sizes_ = sizes;
      layer_ = few_rows::plan_layer(sizes.norms, call.tokens, sizes.width, sizes.intermediate, call.processors);
      if (sizes.norms != few_rows::FoldedNorms::both) {
        limit_parts(call, &layer_.out);
        limit_parts(call, &layer_.down);
      }
    }
    switch (role) {
      case LinearRole::qkv: return layer_.qkv;
      case LinearRole::out: return layer_.out;
      case LinearRole::up: return layer_.up;
      case LinearRole::down: return layer_.down;
    }
    return layer_.down;
  }

 private:
  bool is_of(const FewRowsSizes& sizes) const {
    return sizes.width == sizes_.width && sizes.intermediate == sizes_.intermediate && sizes.norms == sizes_.norms;
  }
  void limit_parts(const LayersCall& call, few_rows::Plan* plan) const {
    const int64_t room = kGemmWorkspace / (sizes_.norms == few_rows::FoldedNorms::first ? 2 : 1);
    const int64_t most = room / (4 * std::max<int64_t>(1, call.tokens * sizes_.width));
    plan->parts = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(plan->parts, most)));
  }

  FewRowsSizes sizes_{};
  few_rows::LayerPlan layer_{};
};

}  // namespace cuda
}  // namespace fasttfm
