// The named barriers of the Hopper attention kernels. Barrier 0 is used by __syncthreads(). An entry marked "+ i" is
// the first of several barriers, one per warpgroup.
#pragma once

namespace fasttfm {
namespace cuda {

enum ForwardBarrier : int {
  kForwardWarpScheduler = 1,  // + i: warpgroup i may issue wgmma (WarpSchedulerBarrier)
  kForwardZeroed = 8,         // + i: warpgroup i has zeroed rows of v
};

enum BackwardBarrier : int {
  kBackwardSums = 1,           // warpgroup 3 has written its partial sums to shared memory (OrderedSums)
  kBackwardWarpScheduler = 2,  // + i: warpgroup 1 + i may compute weights
};

enum BackwardD128Barrier : int {
  kBackwardD128Unit = 1,           // + i: warpgroup 1 + i has written its unit to shared memory
  kBackwardD128WarpScheduler = 3,  // + i: warpgroup 1 + i may issue wgmma
};

}  // namespace cuda
}  // namespace fasttfm
