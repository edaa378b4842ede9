// The kernel for all layers over few tokens (kernels/few_rows/layers_shape.h) on the host: blocks load every row of a
// weight as often as they should, exchange data in places of their own, and all packets are inside the workspace.
#include "few_rows/layers_shape.h"

#include <cstdio>
#include <cstdlib>
#include <set>
#include <utility>
#include <vector>

using namespace fasttfm::few_rows;

namespace {

void require(bool holds, const char* what) {
  if (holds) return;
  std::printf("%s\n", what);
  std::exit(1);
}

template <class S>
void check_weights() {
  std::vector<int> qkv(3 * S::kWidth), up(S::kInner);
  std::set<std::pair<int, int>> out;  // rows, with the head whose part of K the block has
  for (int block = 0; block < S::kBlocks; ++block) {
    for (int i = 0; i < S::kQkv; ++i) ++qkv.at(S::qkv_row(block, i));
    for (int i = 0; i < S::kUp; ++i) ++up.at(S::up_row(block, i));
    for (int i = 0; i < S::kOut; ++i)
      require(out.insert({S::out_row(block, i), block / S::kCluster}).second, "a row of out is loaded twice");
    // The activation's columns of a block are part of the K that its cluster has of the next weight.
    require(S::up_row(block, 0) / S::kDown == block / S::kCluster, "another cluster has the activation's columns");
  }
  for (const int count : qkv) require(count == 1, "a row of q, k or v is not loaded once");
  for (const int count : up) require(count == 1, "a row of the first feed-forward weight is not loaded once");
  require(static_cast<int>(out.size()) == S::kWidth * S::kHeads, "a row of out is not loaded");
}

// Chunks of 16 bytes that blocks of a cluster send, and where they are read.
template <class S>
void check_exchange() {
  std::set<int> places;
  for (int part = 0; part < 3; ++part)
    for (int row = 0; row < S::kRows; ++row)
      for (int rank = 0; rank < S::kCluster; ++rank) {
        const int place = S::qkv_place(part, row, rank);
        require(place >= 0 && place + 16 <= S::kAttentionAt && places.insert(place).second, "a place of q, k or v");
      }
  places.clear();
  for (int row = 0; row < S::kRows; ++row)
    for (int chunk = 0; chunk < S::kDown / kChunk; ++chunk) {
      const int place = S::activation_place(row, chunk);
      require(place >= 0 && place + 16 <= S::kGatherBytes && places.insert(place).second, "a place of the activation");
    }
}

template <class S>
void check_packets() {
  std::set<int> owners, rows, sums;
  for (int row = 0; row < S::kRows; ++row) {
    require(owners.insert(S::owner_of(row)).second && S::row_of(S::owner_of(row)) == row, "a row's owner");
    for (int i = 0; i < S::kPackets; ++i) require(rows.insert(S::row_packet(row, i)).second, "a packet of a row");
  }
  int owning = 0;
  for (int block = 0; block < S::kBlocks; ++block) owning += S::row_of(block) < S::kRows;
  require(owning == S::kRows, "a block that owns no row");
  // As publish() writes them: a warp has eight packets of each of 16 rows.
  for (int block = 0; block < S::kBlocks; ++block)
    for (int group = 0; group < S::kOut / S::kWarpColumns; ++group)
      for (int row = 0; row < S::kRows; ++row)
        for (int i = 0; i < S::kWarpColumns / kPacketSums; ++i) {
          const int packet = S::sums_packet(block / S::kCluster, row, S::first_sums(block, group) + i);
          require(sums.insert(packet).second, "a packet of sums is written twice");
        }
  require(S::kOut / S::kWarpColumns <= S::kInnerGroups, "more columns than warps");
  require(*rows.rbegin() + 1 == static_cast<int>(rows.size()), "packets of rows have gaps");
  require(*sums.rbegin() + 1 == S::kHeads * S::kRows * S::kSums && *sums.begin() == 0, "packets of sums");
  require(static_cast<int>(sums.size()) == S::kHeads * S::kRows * S::kSums, "packets of sums have gaps");
  const int64_t bytes = kEpochBytes + static_cast<int64_t>(kPacketBytes * (rows.size() + sums.size()));
  require(bytes == S::kWorkspaceBytes, "the workspace");
}

template <class S>
void check_shape() {
  check_weights<S>();
  check_exchange<S>();
  check_packets<S>();
  require(layers_workspace(S::kWidth, S::kInner, S::kHeads) >= S::kWorkspaceBytes, "a workspace that is too small");
  require(layers_workspace(S::kWidth, S::kInner, S::kHeads / 2) == 0, "another number of heads");
}

}  // namespace

int main() {
  check_shape<Base32>();
  check_shape<Base16>();
  check_shape<Small32>();
  require(layers_workspace(1024, 4096, 16) == 0, "other sizes");
  std::printf("ok\n");
}
