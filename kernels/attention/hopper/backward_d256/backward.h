// attention backward for Hopper, head dims 192 and 256. attention_backward() and its workspace function call these
// functions.
#pragma once

#include <cstdint>

#include "attention/op.h"

namespace fasttfm {
namespace cuda {

constexpr bool is_wide_head_dim(int64_t head_dim) { return head_dim == 192 || head_dim == 256; }

Status attention_backward_wide(const AttentionBackward&);
int64_t attention_backward_wide_workspace(int64_t sequences, int64_t heads, int64_t tokens);

}  // namespace cuda
}  // namespace fasttfm
