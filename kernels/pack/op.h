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

namespace cpu {
Status pack(const PackCopy&);
Status unpack(const PackCopy&);
}  // namespace cpu

namespace cuda {
Status pack(const PackCopy&);
Status unpack(const PackCopy&);
}  // namespace cuda

}  // namespace fasttfm
