// The sizes of the kernel for all layers (cuda_layers.cu): what each block of the grid computes, its shared memory, and
// where blocks exchange data. The index arithmetic also compiles for the host, where tests cover it.
//
// A cluster has one head. Block `rank` of the cluster of head h computes, in every layer,
//   8 columns each of q, k and v of head h                             K = width
//   kOut columns of the output projection, over the head's part of K   K = head dim
//   kUp columns of the first GEMM of the feed-forward block            K = width
//   kOut columns of the second one, over the cluster's part of K       K = kDown
// The sums of the second and the fourth over all clusters are added by the blocks that own rows.
#pragma once

#include <algorithm>
#include <cstdint>

#include "few_rows/tiles.h"

namespace fasttfm {
namespace few_rows {

constexpr int kLayersWarps = 8;  // that compute; one more loads weights
constexpr int kLayersThreads = 32 * kLayersWarps + 32;
constexpr int kMostLayers = 24;  // whose parameters' addresses are an argument of the kernel

// Packets of 16 bytes have three words of data, fp32 sums or pairs of bf16 elements, and a tag.
constexpr int kPacketBytes = 16, kPacketSums = 3, kPacketElements = 6;
constexpr int kEpochBytes = 128;  // at the beginning of the workspace

// DECODES: for one new token of each sequence, which attends to cached keys, in pre-LN layers.
template <int WIDTH, int INNER, int HEADS, int HEAD_DIM, int ROWS, bool DECODES = false>
struct LayersShape {
  static constexpr bool kDecodes = DECODES;
  static constexpr int kWidth = WIDTH, kInner = INNER, kHeads = HEADS, kHeadDim = HEAD_DIM, kRows = ROWS;
  static constexpr int kCluster = HEAD_DIM / 8, kBlocks = HEADS * kCluster;
  static constexpr int kQkv = 24, kUp = INNER / kBlocks, kOut = WIDTH / kCluster, kDown = INNER / HEADS;
  static constexpr int kRowTiles = ROWS / 16;                                            // of mma.sync
  static constexpr int kInnerGroups = kLayersWarps / kRowTiles;                          // warps that share K of a tile
  static constexpr int kWarpColumns = 24;                                                // of a second GEMM
  static constexpr int kSums = WIDTH / kPacketSums, kPackets = WIDTH / kPacketElements;  // packets of a row
  static constexpr int kSpread = kBlocks / ROWS;                                         // between owners of rows

  // Rows of matrices in shared memory are 16 bytes longer than their data: the same 16 bytes of eight rows are in
  // different banks.
  static constexpr int kWidthPitch = 2 * WIDTH + 16, kHeadPitch = 2 * HEAD_DIM + 16, kDownPitch = 2 * kDown + 16;
  // Parts of the sums of a half's first GEMM take the place of the rows.
  static constexpr int kPartPitch = 160;  // bytes of a row of up to 32 sums
  // Later the results of attention to the blocks' parts of the keys do: a head's values, top and total, with padding.
  static constexpr int kTopAt = 4 * HEAD_DIM, kResultBytes = kTopAt + 16;
  static constexpr int kRowsBytes =
      std::max({ROWS * kWidthPitch, kInnerGroups * ROWS * kPartPitch, DECODES ? kCluster * ROWS * kResultBytes : 0});
  static constexpr int kStagingBytes = 16 * kWarpColumns * 4;  // of a warp
  // What the blocks of a cluster exchange: q, k and v, followed by the result of attention, or the activation.
  static constexpr int kAttentionAt = 2 * ROWS * 3 * HEAD_DIM;
  static constexpr int kGatherBytes = std::max(kAttentionAt + ROWS * kHeadPitch, 2 * ROWS * kDown);
  // The workspace: the epoch, packets of rows [kRows, kPackets], and packets of sums [kHeads, kRows, kSums].
  static constexpr int64_t kWorkspaceBytes =
      kEpochBytes + static_cast<int64_t>(kPacketBytes) * ROWS * (kPackets + HEADS * kSums);

  static_assert(kUp == 32 && kOut == 96, "the tiles of the warps");
  static_assert(kSums <= 32 * kLayersWarps && kSums % 32 == 0 && kPackets % 32 == 0, "whole warps add the sums");
  static_assert(WIDTH / 16 % (2 * kInnerGroups) == 0, "two steps of 16 at a time");
  static_assert(kBlocks >= ROWS, "an owner for each row");

  // The row of each weight [outputs, inputs] that is row `i` of the block's part of it.
  static FASTTFM_HOST_DEVICE constexpr int qkv_row(int block, int i) {
    return i / 8 * kWidth + block / kCluster * kHeadDim + block % kCluster * 8 + i % 8;
  }
  static FASTTFM_HOST_DEVICE constexpr int up_row(int block, int i) { return block * kUp + i; }
  static FASTTFM_HOST_DEVICE constexpr int out_row(int block, int i) { return block % kCluster * kOut + i; }

  // Places of 16 bytes in the memory that a cluster exchanges: chunk `chunk` of a row of q, k or v (`part`), and of the
  // activation, whose chunks are those of the cluster's part of K.
  static FASTTFM_HOST_DEVICE constexpr int qkv_place(int part, int row, int chunk) {
    return part * 2 * kRows * kHeadDim + chunk_offset(row, chunk, kHeadDim / kChunk);
  }
  static FASTTFM_HOST_DEVICE constexpr int activation_place(int row, int chunk) {
    constexpr int kBlockChunks = kUp / kChunk;
    return chunk / kBlockChunks * kRows * 2 * kUp + chunk_offset(row, chunk % kBlockChunks, kBlockChunks);
  }

  // The block that owns a row, and the row that a block owns; kRows if it owns none.
  static FASTTFM_HOST_DEVICE constexpr int owner_of(int row) { return kSpread * row; }
  static FASTTFM_HOST_DEVICE constexpr int row_of(int block) {
    return block % kSpread == 0 && block / kSpread < kRows ? block / kSpread : kRows;
  }

  // Indices of packets: of a row, and of the sums of a head's cluster.
  static FASTTFM_HOST_DEVICE constexpr int row_packet(int row, int i) { return row * kPackets + i; }
  static FASTTFM_HOST_DEVICE constexpr int sums_packet(int head, int row, int i) {
    return (head * kRows + row) * kSums + i;
  }
  // The packet in a row, the first of eight, that has the columns of group `group` of the block's warps.
  static FASTTFM_HOST_DEVICE constexpr int first_sums(int block, int group) {
    return out_row(block, group * kWarpColumns) / kPacketSums;
  }
};

// BERT-base's layers, with tiles of 32 and of 16 rows, and those of MiniLM.
using Base32 = LayersShape<768, 3072, 12, 64, 32>;
using Base16 = LayersShape<768, 3072, 12, 64, 16>;
using Small32 = LayersShape<384, 1536, 12, 32, 32>;
// GPT-2's layers.
using Decode16 = LayersShape<768, 3072, 12, 64, 16, true>;
constexpr int kMostLayersRows = 32, kMostDecodedRows = Decode16::kRows;

template <class S>
constexpr bool has_sizes(int64_t width, int64_t intermediate, int64_t heads) {
  return width == S::kWidth && intermediate == S::kInner && heads == S::kHeads;
}

// The bytes of the workspace for layers of these sizes; 0 if the kernel does not support them.
constexpr int64_t layers_workspace(int64_t width, int64_t intermediate, int64_t heads) {
  if (has_sizes<Base32>(width, intermediate, heads)) return Base32::kWorkspaceBytes;
  return has_sizes<Small32>(width, intermediate, heads) ? Small32::kWorkspaceBytes : 0;
}

}  // namespace few_rows
}  // namespace fasttfm
