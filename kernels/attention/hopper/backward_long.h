// attention backward for Hopper, head dim 64, for more than kOnChipQueries queries without dropout or window.
// attention_backward() forwards to it.
#pragma once

#include "attention/op.h"

namespace fasttfm {
namespace cuda {

Status attention_backward_long(const AttentionBackward&);

}  // namespace cuda
}  // namespace fasttfm
