// Copies tokens between a padded batch [B, S] and a packed batch [T]; see reference.py. A token has token_bytes bytes.
#pragma once

#include <cstdint>

#include "common/status.h"

namespace fasttfm {

struct PackCopy {
  const void* source;         // pack: [B, S] tokens; unpack: [T]
  void* target;               // pack: [T] tokens; unpack: [B, S]
  const int32_t* cu_seqlens;  // [B + 1], from 0 to at most T in steps of at most S; validated by the caller on the CPU
  int64_t sequences;          // B
  int64_t max_seqlen;         // S
  int64_t total;              // T
  int64_t token_bytes;
  int threads;   // CPU
  int device;    // CUDA
  void* stream;  // CUDA
};

// Finds the tokens of a padded batch from its mask.
struct MaskLayout {
  const void* mask;       // [B, S] integers of element_bytes bytes, contiguous; not 0 for tokens
  int32_t* cu_seqlens;    // [B + 1]
  int32_t* summary;       // [2], host memory that the GPU can write to: the number of tokens, and whether in every row
                          // they precede the padding
  int64_t sequences;      // B
  int64_t max_seqlen;     // S
  int64_t element_bytes;  // 1, 4 or 8
  int device;
  void* stream;
};

// Each packed token's index in its own sequence; with invalid boundaries any number.
struct PackedPositions {
  const int32_t* cu_seqlens;  // [sequences + 1]
  int64_t* positions;         // [T]
  int64_t sequences;          // from 1 on
  int64_t total;              // T
  int device;
  void* stream;
};

namespace cpu {
Status pack(const PackCopy&);
Status unpack(const PackCopy&);
}  // namespace cpu

namespace cuda {
Status pack(const PackCopy&);
Status unpack(const PackCopy&);
Status mask_layout(const MaskLayout&);
Status packed_positions(const PackedPositions&);
}  // namespace cuda

}  // namespace fasttfm
