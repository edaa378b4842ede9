// Removes and restores padding on the CPU. A sequence is contiguous in both layouts.
#include "pack/op.h"

#include <cstring>

#include "common/cpu/isa.h"
#include "common/cpu/parallel.h"
#include "common/packed.h"

namespace fasttfm {
namespace FASTTFM_ISA {
namespace {

constexpr int64_t kItemBytes = 1 << 16;  // approximate bytes per item of work

char* token(void* base, int64_t index, int64_t token_bytes) { return static_cast<char*>(base) + index * token_bytes; }
const char* token(const void* base, int64_t index, int64_t token_bytes) {
  return static_cast<const char*>(base) + index * token_bytes;
}

// Divides the padded batch into ranges that are within one sequence and calls body(padded, packed, present, step) for
// each, in parallel. The range has `step` tokens from index `padded` on in the padded batch; the first `present` of
// them are at index `packed` and after in the packed batch.
template <class Body>
void for_stretches(const PackCopy& p, Body body) {
  const int64_t tokens = p.sequences * p.max_seqlen;
  const int64_t fitting = kItemBytes / (p.token_bytes + 1) + 1;
  parallel_items((tokens + fitting - 1) / fitting, p.threads, [&](int64_t item) {
    const int64_t end = (item + 1) * fitting < tokens ? (item + 1) * fitting : tokens;
    for (int64_t padded = item * fitting; padded < end;) {
      const int64_t sequence = padded / p.max_seqlen, s = padded % p.max_seqlen;
      const int64_t next = padded - s + p.max_seqlen < end ? padded - s + p.max_seqlen : end;
      const Span span = packed_span(p.cu_seqlens, sequence, packed_size(p.total), packed_size(p.max_seqlen));
      const int64_t left = span.length - s, step = next - padded;
      body(padded, span.first + s, left < 0 ? 0 : left < step ? left : step, step);
      padded = next;
    }
  });
}

}  // namespace

Status pack(const PackCopy& p) {
  const auto size = [&](int64_t tokens) { return static_cast<size_t>(tokens * p.token_bytes); };
  for_stretches(p, [&](int64_t padded, int64_t packed, int64_t present, int64_t) {
    if (present > 0)
      std::memcpy(token(p.target, packed, p.token_bytes), token(p.source, padded, p.token_bytes), size(present));
  });
  const int64_t end = packed_first(p.cu_seqlens, p.sequences, packed_size(p.total));
  if (end < p.total) std::memset(token(p.target, end, p.token_bytes), 0, size(p.total - end));
  return Status{};
}

Status unpack(const PackCopy& p) {
  const auto size = [&](int64_t tokens) { return static_cast<size_t>(tokens * p.token_bytes); };
  for_stretches(p, [&](int64_t padded, int64_t packed, int64_t present, int64_t step) {
    if (present > 0)
      std::memcpy(token(p.target, padded, p.token_bytes), token(p.source, packed, p.token_bytes), size(present));
    if (present < step) std::memset(token(p.target, padded + present, p.token_bytes), 0, size(step - present));
  });
  return Status{};
}

}  // namespace FASTTFM_ISA
}  // namespace fasttfm

FASTTFM_CPU_LAUNCHER(pack, PackCopy)
FASTTFM_CPU_LAUNCHER(unpack, PackCopy)
