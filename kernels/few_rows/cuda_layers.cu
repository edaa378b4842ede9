// All layers of a post-LN encoder over up to 32 tokens in one kernel, bf16, for inference.
//
// The grid stays on its SMs. A warp of each block loads weights a whole layer ahead; the other eight compute. A half of
// a layer has two handovers through L2, as packets with tags (layers_handover.cuh):
//   sums  each cluster writes its part of the sums of the output projection (or of the second GEMM of the feed-forward
//         block) for all columns; the block that owns a row adds the parts in a fixed order, bias and residual, and
//         normalizes
//   rows  the owners write the normalized rows, which all blocks read
// Between these, the blocks of a cluster exchange q, k and v of their head, or their columns of the activation, by
// st.async to each other's shared memory.
//
// A packet may be overwritten because every block has read it: an owner writes a row after it has all blocks' sums,
// and a block writes sums after it has read all rows. The same holds for the memory that the cluster exchanges.
#include <cmath>
#include <cstdint>

#include "common/cuda/activation.cuh"
#include "common/cuda/hopper.cuh"
#include "common/cuda/launch_clusters.cuh"
#include "common/packed.h"
#include "few_rows/layers_attention.cuh"
#include "few_rows/layers_block.cuh"
#include "few_rows/layers_cached_attention.cuh"
#include "few_rows/layers_norm.cuh"
#include "few_rows/op.h"

namespace fasttfm {
namespace cuda {
namespace {

using namespace layers;

// ---- weights --------------------------------------------------------------------------------------------------------

// Loads rows of a weight, `source(i)`, into a slot.
template <class Source>
__device__ __forceinline__ void load_slot(Mbarrier& full, const char* to, int rows, int bytes, int pitch,
                                          Source source) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (lane == 0) full.arrive_expect_tx(static_cast<uint32_t>(rows * bytes));
  __syncwarp();
  for (int i = lane; i < rows; i += 32) bulk_load(full, shared_address(to) + i * pitch, source(i), bytes);
}

// Prefetches a layer's biases and LayerNorm parameters into L2: each block has some of the lines.
template <class S>
__device__ __forceinline__ void prefetch_vectors(const Params& p, const Place<S>& at, int layer) {
  constexpr int kLine = 64;
  const int which = at.lane;
  if (layer >= p.layers || which >= kLayerParameters) return;
  const bool matrix = which == kQkvWeight || which == kOutWeight || which == kUpWeight || which == kDownWeight;
  const int length = matrix ? 0 : which == kQkvBias ? 3 * S::kWidth : which == kUpBias ? S::kInner : S::kWidth;
  for (int i = at.block * kLine; i < length; i += S::kBlocks * kLine) prefetch_l2(p.parameters[layer][which] + i);
}

// Executed by one warp.
template <class S>
__device__ __forceinline__ void load_weights(const Params& p, Memory<S>& memory, const Place<S>& at) {
  prefetch_vectors<S>(p, at, 0);
  for (int layer = 0; layer < p.layers; ++layer) {
    prefetch_vectors<S>(p, at, layer + 1);
    if constexpr (S::kDecodes) prefetch_cache<S>(p, memory, at, layer);
    const auto* of = p.parameters[layer];
    const auto release = [&](int slot) {
      if (layer > 0) memory.empty[slot].wait((layer - 1) & 1);
      __syncwarp();
    };
    release(kQkvSlot);
    load_slot(memory.full[kQkvSlot], memory.qkv, S::kQkv, 2 * S::kWidth, S::kWidthPitch,
              [&](int i) { return of[kQkvWeight] + static_cast<int64_t>(S::qkv_row(at.block, i)) * S::kWidth; });
    release(kOutSlot);
    load_slot(memory.full[kOutSlot], memory.out, S::kOut, 2 * S::kHeadDim, S::kHeadPitch, [&](int i) {
      return of[kOutWeight] + static_cast<int64_t>(S::out_row(at.block, i)) * S::kWidth + at.head * S::kHeadDim;
    });
    release(kUpSlot);
    load_slot(memory.full[kUpSlot], memory.up, S::kUp, 2 * S::kWidth, S::kWidthPitch,
              [&](int i) { return of[kUpWeight] + static_cast<int64_t>(S::up_row(at.block, i)) * S::kWidth; });
    release(kDownSlot);
    load_slot(memory.full[kDownSlot], memory.down, S::kOut, 2 * S::kDown, S::kDownPitch, [&](int i) {
      return of[kDownWeight] + static_cast<int64_t>(S::out_row(at.block, i)) * S::kInner + at.head * S::kDown;
    });
  }
}

// ---- rows -----------------------------------------------------------------------------------------------------------

// Copies the rows of the call's input; those after the last token are zeros.
template <class S>
__device__ __forceinline__ void load_input(const Params& p, Memory<S>& memory, const Place<S>& at) {
  constexpr int kChunks = S::kWidth / kChunk;
  for (int row = at.warp; row < S::kRows; row += kLayersWarps)
    for (int chunk = at.lane; chunk < kChunks; chunk += 32) {
      uint4 v = make_uint4(0, 0, 0, 0);
      if (row < p.tokens) v = reinterpret_cast<const uint4*>(p.x)[row * kChunks + chunk];
      store_vector(shared_address(memory.rows) + row * S::kWidthPitch + chunk * 16, v);
    }
}

// Waits for the rows with this tag and copies them; those after the last token are zeros. A warp has every eighth row.
template <class S>
__device__ __forceinline__ void receive_rows(const Params& p, Memory<S>& memory, const Place<S>& at, uint32_t tag) {
  constexpr int kEach = S::kPackets / 32, kCount = S::kRows / kLayersWarps * kEach;
  uint4 v[kCount];
  const auto row_of = [&](int i) { return at.warp + i / kEach * kLayersWarps; };
  const auto from = [&](int i) { return p.rows + S::row_packet(row_of(i), i % kEach * 32 + at.lane); };
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    v[i] = make_uint4(0, 0, 0, tag);
    if (row_of(i) < p.tokens) v[i] = load_packet(from(i));
  }
  wait_for_packets(v, from, tag, p.limit);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const uint32_t to =
        shared_address(memory.rows) + row_of(i) * S::kWidthPitch + (i % kEach * 32 + at.lane) * 2 * kPacketElements;
    store_word(to, v[i].x);
    store_word(to + 4, v[i].y);
    store_word(to + 8, v[i].z);
  }
}

// ---- halves of a layer ----------------------------------------------------------------------------------------------

template <class S>
__device__ __forceinline__ void attention_half(const Params& p, Memory<S>& memory, const Place<S>& at, Owner<S>& owner,
                                               int layer, uint32_t tag) {
  const auto* of = p.parameters[layer];
  const uint32_t parity = layer & 1;
  const Quad<S, S::kQkv> quad(at.thread);
  const int rows = rows_of<S>(p);
  owner.prepare(of[kOutBias], of[kNormAWeight], of[kNormABias]);
  float value[4] = {};
  if (quad.active()) load_quad(of[kQkvBias] + S::qkv_row(at.block, 4 * quad.quad), value);
  [[maybe_unused]] const Division<S> division(p.tokens, at);
  [[maybe_unused]] KeysAndValues<S> keys;
  if constexpr (S::kDecodes)  // before the block waits for rows
    if (division.first_row < p.tokens) keys.load(p, memory, at, layer, division.first_row, division.first_group);
  if (layer > 0)
    receive_rows<S>(p, memory, at, tag - 1);
  else if constexpr (S::kDecodes)
    normalize_input<S>(p, memory, at);
  else
    load_input<S>(p, memory, at);
  sync_consumers();
  multiply_rows<S, S::kQkv / 8>(memory, at, memory.qkv, kQkvSlot, parity);
  if (at.thread == 0) memory.gathered.arrive_expect_tx(S::kCluster * rows * S::kQkv * 2);
  if (quad.active()) {
    add_parts<S>(memory, quad.row, quad.quad, value);
    send<S>(memory, at, S::qkv_place(quad.quad / 2, quad.row, at.rank), value, quad.row < rows);
  }
  memory.gathered.wait(0);
  if constexpr (S::kDecodes)
    attend_cached<S>(p, memory, at, division, keys, layer);
  else
    attend<S>(p, memory, at);
  sync_consumers();
  const MatrixRow row = matrix_row_a(at.lane);
  const uint32_t a =
      shared_address(memory.gather) + S::kAttentionAt + (at.row_tile * 16 + row.row) * S::kHeadPitch + row.chunk * 16;
  multiply_part<S, S::kHeadDim / 16>(
      p, memory, at, [&](int step) { return a + step * 32; }, memory.out, S::kHeadPitch, kOutSlot, parity, tag);
  if (owner.owns) own_row<S>(p, memory, at, owner, 2 * layer, tag);
}

template <class S>
__device__ __forceinline__ void feed_forward_half(const Params& p, Memory<S>& memory, const Place<S>& at,
                                                  Owner<S>& owner, int layer, uint32_t tag) {
  const auto* of = p.parameters[layer];
  const uint32_t parity = layer & 1;
  const Quad<S, S::kUp> quad(at.thread);
  const int rows = rows_of<S>(p);
  owner.prepare(of[kDownBias], of[kNormBWeight], of[kNormBBias]);
  float value[4] = {};
  if (quad.active()) load_quad(of[kUpBias] + S::up_row(at.block, 4 * quad.quad), value);
  receive_rows<S>(p, memory, at, tag - 1);
  sync_consumers();
  multiply_rows<S, S::kUp / 8>(memory, at, memory.up, kUpSlot, parity);
  if (at.thread == 0) memory.gathered.arrive_expect_tx(S::kCluster * rows * S::kUp * 2);
  if (quad.active()) {
    add_parts<S>(memory, quad.row, quad.quad, value);
#pragma unroll
    for (float& u : value)
      u = p.tanh ? activated_as<Activation::gelu_tanh, bf16_t>(u).value
                 : activated_as<Activation::gelu, bf16_t>(u).value;
    send<S>(memory, at, S::activation_place(quad.row, at.rank * (S::kUp / kChunk) + quad.quad / 2), value,
            quad.row < rows);
  }
  memory.gathered.wait(1);
  // No thread stores the next rows before all have read the parts, because what they send follows from the parts.
  // racecheck does not follow st.async to the mbarrier.
  if (kSanitized) sync_consumers();
  const MatrixRow row = matrix_row_a(at.lane);
  const uint32_t gather = shared_address(memory.gather);
  const auto a = [&](int step) {
    return gather + S::activation_place(at.row_tile * 16 + row.row, 2 * step + row.chunk);
  };
  multiply_part<S, S::kDown / 16>(p, memory, at, a, memory.down, S::kDownPitch, kDownSlot, parity, tag);
  if (owner.owns) own_row<S>(p, memory, at, owner, 2 * layer + 1, tag);
}

// ---- kernel ---------------------------------------------------------------------------------------------------------

template <class S>
__device__ __forceinline__ void prepare(const Params& p, Memory<S>& memory) {
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    for (int slot = 0; slot < kSlots; ++slot) {
      memory.full[slot].init(1);
      memory.empty[slot].init(kLayersWarps * kWarpArrivals);
    }
    memory.gathered.init(1);
    memory.attended.init(1);
    fence_mbarrier_init();
    memory.epoch = *p.epoch;
  }
  if constexpr (S::kDecodes) {
    if (thread < S::kRows)
      memory.begin[thread] = thread < p.tokens ? max(0, min(p.cache.lengths[thread], p.cache.capacity - 1)) : 0;
  } else if (thread < S::kRows) {
    int begin = 0, end = 0;  // no key, for tokens after the last sequence
    for (int i = 0; i < p.sequences; ++i) {
      const Span span = packed_span(p.cu_seqlens, i, p.tokens, p.tokens);
      if (span.first <= thread && thread < span.first + span.length) {
        begin = span.first;
        end = span.first + span.length;
      }
    }
    memory.begin[thread] = begin;
    memory.end[thread] = end;
  }
}

template <class S>
__device__ __forceinline__ void compute(const Params& p, Memory<S>& memory, const Place<S>& at) {
  Owner<S> owner(p, at);
  uint32_t tag = memory.epoch;
  for (int layer = 0; layer < p.layers; ++layer) {
    attention_half<S>(p, memory, at, owner, layer, ++tag);
    feed_forward_half<S>(p, memory, at, owner, layer, ++tag);
  }
  // The owner of row 0 has received sums from all blocks, which have read the epoch before.
  if (at.block == S::owner_of(0) && at.thread == 0) *p.epoch = tag;
}

template <class S>
__global__ void __launch_bounds__(kLayersThreads, 1) layers_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char dynamic_memory[];
  auto& memory = *reinterpret_cast<Memory<S>*>(dynamic_memory);
  const Place<S> at;
  prepare<S>(p, memory);
  __syncthreads();
  cluster_sync();
  if (at.warp < kLayersWarps)
    compute<S>(p, memory, at);
  else
    load_weights<S>(p, memory, at);
  __syncwarp();
  cluster_sync();  // no block ends while others store into its memory
}

// ---- launch ---------------------------------------------------------------------------------------------------------

Status check(const FewRowsLayers& call) {
  if (layers_workspace(call.width, call.intermediate, call.heads) == 0)
    return bad_size("few_rows_layers: takes BERT-base's or MiniLM's width, intermediate size and heads");
  if (call.tokens < 1 || call.tokens > kMostLayersRows || call.layers < 1 || call.layers > kMostLayers)
    return bad_size("few_rows_layers: takes 1 to 32 tokens and 1 to 24 layers");
  const bool decodes = call.cache.keys != nullptr;
  if (decodes) {
    if (call.width != Decode16::kWidth || call.tokens > kMostDecodedRows)
      return bad_size("few_rows_layers: decodes up to 16 sequences in layers of GPT-2's sizes");
    if (call.cache.sequences < call.tokens || call.cache.capacity < 1 || call.cache.capacity > 0x7fffffff)
      return bad_size("few_rows_layers: takes a cache with a slot for each token");
    for (const void* tensor : {static_cast<const void*>(call.cache.keys), static_cast<const void*>(call.cache.values),
                               call.cache.norm_weight, call.cache.norm_bias})
      if (tensor == nullptr || reinterpret_cast<uintptr_t>(tensor) % 16 != 0) return misaligned_rows();
  } else if (call.sequences < 1 || call.sequences > 0x7fffffff) {
    return bad_size("few_rows_layers: takes a sequence");
  }
  if (call.polls < 1) return {StatusCode::bad_value, "few_rows_layers: polls is at least 1"};
  if (call.activation != Activation::gelu && call.activation != Activation::gelu_tanh)
    return {StatusCode::bad_value, "few_rows_layers: takes GELU"};
  for (const void* tensor : {call.x, static_cast<const void*>(call.y), static_cast<const void*>(call.workspace)})
    if (reinterpret_cast<uintptr_t>(tensor) % 16 != 0) return misaligned_rows();
  if (call.entries < kLayerParameters) return bad_size("few_rows_layers: takes all parameters of a layer");
  for (int64_t layer = 0; layer < call.layers; ++layer)
    for (int64_t i = layer * call.entries; i < layer * call.entries + kLayerParameters; ++i)
      if (call.parameters[i] == 0 || call.parameters[i] % 16 != 0)
        return {StatusCode::bad_alignment, "few_rows_layers: takes all parameters, aligned to 16 bytes"};
  return {};
}

template <class S>
Cache cache_of(const FewRowsCache& of) {
  const int64_t head = of.capacity * S::kHeadDim, sequence = S::kHeads * head;
  Cache cache{};
  cache.keys = static_cast<bf16_t*>(of.keys);
  cache.values = static_cast<bf16_t*>(of.values);
  cache.lengths = of.lengths;
  cache.capacity = static_cast<int>(of.capacity);
  cache.layer_stride = of.sequences * sequence;
  cache.sequence_stride = sequence;
  cache.head_stride = head;
  cache.norm_weight = static_cast<const bf16_t*>(of.norm_weight);
  cache.norm_bias = static_cast<const bf16_t*>(of.norm_bias);
  return cache;
}

template <class S>
Status launch_layers(const FewRowsLayers& call) {
  static_assert(sizeof(Memory<S>) <= 227 * 1024, "more shared memory than a block can have");
  auto* workspace = static_cast<char*>(call.workspace);
  auto* packets = reinterpret_cast<uint4*>(workspace + kEpochBytes);
  Params params{};
  params.x = static_cast<const bf16_t*>(call.x);
  params.y = static_cast<bf16_t*>(call.y);
  params.cu_seqlens = call.cu_seqlens;
  params.epoch = reinterpret_cast<uint32_t*>(workspace);
  params.limit = {params.epoch + 1, call.polls};
  params.rows = packets;
  params.sums = packets + S::kRows * S::kPackets;
  params.tokens = static_cast<int>(call.tokens);
  params.sequences = static_cast<int>(call.sequences);
  params.layers = static_cast<int>(call.layers);
  params.tanh = call.activation == Activation::gelu_tanh;
  params.eps_a = call.eps_a;
  params.eps_b = call.eps_b;
  params.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(S::kHeadDim)));
  if (S::kDecodes) params.cache = cache_of<S>(call.cache);
  for (int64_t layer = 0; layer < call.layers; ++layer)
    for (int i = 0; i < kLayerParameters; ++i)
      params.parameters[layer][i] = reinterpret_cast<const bf16_t*>(call.parameters[layer * call.entries + i]);
  return launch_clusters_together(layers_kernel<S>, S::kBlocks, S::kCluster, kLayersThreads, sizeof(Memory<S>),
                                  call.stream, params);
}

}  // namespace

Status few_rows_layers(const FewRowsLayers& call) {
  const Status status = check(call);
  if (status.code != StatusCode::ok) return status;
  const DeviceGuard guard(call.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  if (call.cache.keys != nullptr) return launch_layers<Decode16>(call);
  if (call.width == Small32::kWidth) return launch_layers<Small32>(call);
  return call.tokens <= Base16::kRows ? launch_layers<Base16>(call) : launch_layers<Base32>(call);
}

}  // namespace cuda
}  // namespace fasttfm
