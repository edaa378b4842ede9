// attention backward for Hopper, head dims 80, 96 and 128. attention_backward() and its workspace function call these
// functions.
#pragma once

#include <cstdint>

#include "attention/op.h"

namespace fasttfm {
namespace cuda {

constexpr int kHeadDim128 = 128;

Status attention_backward_d128(const AttentionBackward&);
int64_t attention_backward_d128_workspace(int64_t sequences, int64_t heads, int64_t tokens, int64_t max_seqlen_k);

}  // namespace cuda
}  // namespace fasttfm
