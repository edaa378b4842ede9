// attention backward for Hopper, head dim 64, without dropout or window, for more than kOnChipQueries queries or for
// units of several query heads. attention_backward() forwards to it.
#pragma once

#include "attention/op.h"

namespace fasttfm {
namespace cuda {

Status attention_backward_long(const AttentionBackward&);

}  // namespace cuda
}  // namespace fasttfm
