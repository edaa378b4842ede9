// Removes and restores padding on NVIDIA GPUs, for small batches, which are bound by launch latency. A thread copies
// one unit of 1 to 16 bytes. Boundaries are not validated here: whatever they are, every token of the target is
// written, and no memory outside of the tensors is read.
#include <cstdint>

#include "common/cuda/launch.cuh"
#include "common/packed.h"
#include "pack/op.h"

namespace fasttfm {
namespace cuda {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ Span span_of(const PackCopy& p, int64_t sequence) {
  return packed_span(p.cu_seqlens, sequence, packed_size(p.total), packed_size(p.max_seqlen));
}

// The index of the source's token for a token of the target, or -1 if there is none.
__device__ __forceinline__ int64_t padded_of(const PackCopy& p, int64_t packed) {
  const int64_t sequence = RowPositions{p.cu_seqlens, p.sequences, p.max_seqlen}(packed).sequence;
  const Span span = span_of(p, sequence);
  const int64_t token = packed - span.first;
  return token >= 0 && token < span.length ? sequence * p.max_seqlen + token : -1;
}
__device__ __forceinline__ int64_t packed_of(const PackCopy& p, int64_t padded) {
  const int64_t sequence = padded / p.max_seqlen, token = padded % p.max_seqlen;
  const Span span = span_of(p, sequence);
  return token < span.length ? span.first + token : -1;
}

template <class Unit, bool TO_PACKED>
__global__ void __launch_bounds__(kThreads) copy_kernel(PackCopy p, int64_t tokens, int64_t units) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= tokens * units) return;
  const int64_t token = index / units, unit = index % units;
  const int64_t from = TO_PACKED ? padded_of(p, token) : packed_of(p, token);
  Unit value{};
  if (from >= 0) value = static_cast<const Unit*>(p.source)[from * units + unit];
  static_cast<Unit*>(p.target)[index] = value;
}

template <class Unit, bool TO_PACKED>
Status launch_units(const PackCopy& p, int64_t tokens) {
  const int64_t units = p.token_bytes / static_cast<int64_t>(sizeof(Unit));
  const int64_t blocks = (tokens * units + kThreads - 1) / kThreads;
  if (blocks > INT32_MAX) return bad_size("pack: too many bytes for one launch");
  return launch(copy_kernel<Unit, TO_PACKED>, static_cast<unsigned>(blocks), kThreads, 0, p.stream, p, tokens, units);
}

template <bool TO_PACKED>
Status copy(const PackCopy& p) {
  const int64_t tokens = TO_PACKED ? p.total : p.sequences * p.max_seqlen;
  if (tokens == 0 || p.token_bytes == 0) return {};
  const DeviceGuard guard(p.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  if (p.sequences == 0 || p.max_seqlen == 0 || p.source == nullptr)
    return status_of(
        cudaMemsetAsync(p.target, 0, static_cast<size_t>(tokens * p.token_bytes), static_cast<cudaStream_t>(p.stream)));
  const auto places = reinterpret_cast<uintptr_t>(p.source) | reinterpret_cast<uintptr_t>(p.target) |
                      static_cast<uintptr_t>(p.token_bytes);
  if (places % 16 == 0) return launch_units<uint4, TO_PACKED>(p, tokens);
  if (places % 8 == 0) return launch_units<uint2, TO_PACKED>(p, tokens);
  if (places % 4 == 0) return launch_units<uint32_t, TO_PACKED>(p, tokens);
  if (places % 2 == 0) return launch_units<uint16_t, TO_PACKED>(p, tokens);
  return launch_units<uint8_t, TO_PACKED>(p, tokens);
}

__global__ void __launch_bounds__(kThreads) positions_kernel(PackedPositions p) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= p.total) return;
  p.positions[row] = static_cast<int32_t>(RowPositions{p.cu_seqlens, p.sequences, 0}(row).token);
}

}  // namespace

Status pack(const PackCopy& p) { return copy<true>(p); }
Status unpack(const PackCopy& p) { return copy<false>(p); }

Status packed_positions(const PackedPositions& p) {
  if (p.sequences < 1 || p.total > INT32_MAX)
    return bad_size("packed_positions: expected sequences, and 32-bit indices");
  if (p.total == 0) return {};
  const DeviceGuard guard(p.device);
  if (guard.status().code != StatusCode::ok) return guard.status();
  const auto blocks = static_cast<unsigned>((p.total + kThreads - 1) / kThreads);
  return launch(positions_kernel, blocks, kThreads, 0, p.stream, p);
}

}  // namespace cuda
}  // namespace fasttfm
