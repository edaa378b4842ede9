// The launcher of the Hopper attention forward, which selects tile sizes and the tile schedule for a call.
#include "attention/hopper/forward/kernel.cuh"

#include <algorithm>
#include <cstdint>

#include "attention/hopper/shared/call.h"
#include "attention/op.h"
#include "common/cuda/hopper.cuh"

namespace fasttfm {
namespace cuda {
namespace {

// Head dim 64: four warpgroups with small steps hide latency best. Without dropout, tiles of 128 queries are faster if
// all tiles of a call run in one wave, and tiles of 192 queries with steps of 128 keys are faster for long sequences.
template <bool DROPOUT>
using Shape64 = ForwardShape<64, 4, 64, 8, DROPOUT>;
using SmallShape64 = ForwardShape<64, 2, 128, 3, false>;
using LongShape64 = ForwardShape<64, 3, 128, 3, false>;
// Head dim 32 uses the shape of 64: the exponentials take longer than the products.
template <bool DROPOUT>
using Shape32 = ForwardShape<32, 4, 64, 8, DROPOUT>;
template <bool DROPOUT>
using Shape128 = ForwardShape<128, 2, 128, 2, DROPOUT>;

// Head dims 192 and 256: steps of 64 keys are faster than longer ones, except for long sequences with 192.
using Shape192 = ForwardShape<192, 2, 64, 3, false>;
using LongShape192 = ForwardShape<192, 2, 112, 2, false>;
using Shape256 = ForwardShape<256, 2, 64, 2, false>;

// With a window the steps are as small as for head dim 64, so that a warpgroup computes few scores outside of its
// queries' windows.
using WindowShape128 = ForwardShape<128, 2, 64, 4, false>;

int64_t round_up(int64_t count, int64_t step) { return (count + step - 1) / step * step; }

int64_t longest_of(const AttentionForward& call) { return call.cu_seqlens == nullptr ? call.queries : call.max_seqlen; }

// Whether all sequences have the same number of queries and the same number of keys.
bool is_even(const AttentionForward& call) {
  return call.cu_seqlens == nullptr && call.lengths == nullptr && call.lengths_k == nullptr;
}

bool is_small(const AttentionForward& call, int blocks) {
  return call.seed == nullptr && call.sequences * call.heads * (round_up(longest_of(call), 128) / 128) <= blocks;
}

// From this number of queries on, LongShape64 and LongShape192 are faster. LongShape192 is 2 to 5% faster from 4096 on;
// at 2048 it is 2% faster with the causal mask, and without a mask neither is clearly faster.
constexpr int64_t kLong = 2048;

bool is_long_192(const AttentionForward& call) { return longest_of(call) >= kLong; }

// With fewer queries, LongShape64's tiles of 192 queries are 5% faster per row, so they are used unless rounding the
// sequence length up to a multiple of 192 instead of 256 adds more than 5%.
bool is_long_64(const AttentionForward& call) {
  const int64_t longest = longest_of(call);
  if (call.seed != nullptr) return false;
  if (longest >= kLong) return true;
  return is_even(call) && call.window_right != 0 && longest > 256 &&
         19 * round_up(longest, 192) < 20 * round_up(longest, 256);
}

// counted: blocks fetch tiles from a counter as they become free; otherwise the assignment is static.
struct Order {
  bool counted;
  int batched;  // see ForwardParams
};

Order order_of(const AttentionForward& call, int blocks) {
  const int64_t heads = call.sequences * call.heads, rounds = (heads + blocks - 1) / blocks;
  // If a tile is a whole sequence and a block has many of them, the static assignment is balanced well enough. The
  // counter has to be reset, which costs a launch.
  if (!is_even(call)) return {call.head_dim > 64 || longest_of(call) > Shape64<false>::kQueries || rounds < 8, 1};
  // Tiles of a few heads are processed together. With one head only, all blocks would read the same keys at the same
  // time, which is slower.
  if (mask_of(call) == Mask::window) return {false, static_cast<int>(call.heads)};
  if (mask_of(call) == Mask::full) return {false, 4};
  constexpr int64_t kCached = 16 << 20;  // limit in bytes for k and v of the heads that are processed together
  const int64_t bytes = std::max<int64_t>(4 * call.head_dim * call.keys, 1);
  const int64_t batched = std::max<int64_t>(kCached / bytes, 1) * (call.heads / call.kv_heads);
  // Causal tiles have unequal work, but the totals of all heads are equal.
  return {rounds <= 3 || 20 * heads < 19 * rounds * blocks, static_cast<int>(std::min(batched, heads))};
}

template <class T, class S>
Status forward_of(const AttentionForward& call, int blocks, const TileSchedule& schedule) {
  // WarpSchedulerBarrier helps neither four warpgroups, nor three with a causal mask, whose work is too unequal.
  return mask_of(call) == Mask::causal ? launch_forward<T, S, Mask::causal, S::kGroups == 2>(call, blocks, schedule)
                                       : launch_forward<T, S, Mask::full, (S::kGroups < 4)>(call, blocks, schedule);
}

template <class T, template <bool> class SHAPE>
Status forward_of(const AttentionForward& call, int blocks, const TileSchedule& schedule) {
  return call.seed != nullptr ? forward_of<T, SHAPE<true>>(call, blocks, schedule)
                              : forward_of<T, SHAPE<false>>(call, blocks, schedule);
}

template <class T>
Status window_forward_of(const AttentionForward& call, int blocks, const TileSchedule& schedule) {
  return call.head_dim == 128 ? launch_forward<T, WindowShape128, Mask::window, false>(call, blocks, schedule)
                              : launch_forward<T, Shape64<false>, Mask::window, false>(call, blocks, schedule);
}

// Head dims between 64 and 128 use as much shared memory as 128, but less time of the tensor cores.
template <class T, int HEAD_DIM>
Status wide_forward_of(const AttentionForward& call, int blocks, const TileSchedule& schedule) {
  return forward_of<T, ForwardShape<HEAD_DIM, 2, 128, 2, false>>(call, blocks, schedule);
}

template <class T>
Status forward_of(const AttentionForward& call, int blocks, const TileSchedule& schedule) {
  if (has_window(call)) return window_forward_of<T>(call, blocks, schedule);
  if (call.head_dim == 32) return forward_of<T, Shape32>(call, blocks, schedule);
  if (call.head_dim == 80) return wide_forward_of<T, 80>(call, blocks, schedule);
  if (call.head_dim == 96) return wide_forward_of<T, 96>(call, blocks, schedule);
  if (call.head_dim == 128) return forward_of<T, Shape128>(call, blocks, schedule);
  if (call.head_dim == 192)
    return is_long_192(call) ? forward_of<T, LongShape192>(call, blocks, schedule)
                             : forward_of<T, Shape192>(call, blocks, schedule);
  if (call.head_dim == 256) return forward_of<T, Shape256>(call, blocks, schedule);
  if (is_small(call, blocks)) return forward_of<T, SmallShape64>(call, blocks, schedule);
  return is_long_64(call) ? forward_of<T, LongShape64>(call, blocks, schedule)
                          : forward_of<T, Shape64>(call, blocks, schedule);
}

Status check_forward_head_dim(const AttentionForward& call) {
  const int64_t size = call.head_dim;
  if (size == 64 || size == 128) return {};
  if (size != 32 && size != 80 && size != 96 && size != 192 && size != 256)
    return bad_size("attention: the Hopper forward supports head dims 32, 64, 80, 96, 128, 192 and 256");
  if (has_window(call) || (size != 32 && call.seed != nullptr))
    return bad_size(
        "attention: the Hopper forward has windows only for head dims 64 and 128, and dropout only for these and 32");
  return {};
}

}  // namespace

Status attention_forward(const AttentionForward& call) {
  Status status = check_hopper_call(call);
  if (status.code == StatusCode::ok) status = check_forward_head_dim(call);
  if (status.code != StatusCode::ok || call.queries == 0 || call.sequences == 0 && call.cu_seqlens == nullptr)
    return status;
  const DeviceGuard guard(call.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  int blocks = 0;
  status = count_multiprocessors(call.device, &blocks);
  if (status.code != StatusCode::ok) return status;
  const Order order = order_of(call, blocks);
  const bool has_counter = call.tile_counter != nullptr;
  int* counter = has_counter ? call.tile_counter : reinterpret_cast<int*>(call.workspace);
  const TileSchedule schedule = {order.counted ? counter : nullptr, order.batched};
  if (order.counted && !has_counter)
    status = status_of(cudaMemsetAsync(schedule.next, 0, sizeof(int), static_cast<cudaStream_t>(call.stream)));
  if (status.code != StatusCode::ok) return status;
  return call.dtype == DType::bf16 ? forward_of<bf16_t>(call, blocks, schedule)
                                   : forward_of<f16_t>(call, blocks, schedule);
}

}  // namespace cuda
}  // namespace fasttfm
