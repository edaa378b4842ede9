"""Where a step of the Hopper backward of attention at head dim 128 spends its cycles; how long products take alone."""

from __future__ import annotations

import ctypes
import itertools
import statistics
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

# One thread of each warpgroup of the first block writes the clock before (-) or after (+) these texts of the kernel.
MARKED = [
    ("+", "    wgmma_wait<LAST ? 0 : 1>();\n    fence_operand(dweights);\n", "dp, dv"),
    ("+", "    compute_dscores(dweights, weights, left, dscores);\n", "ds"),
    ("+", "    store_dscores(dscores);\n", "ds put"),
    ("+", "      wgmma_wait<0>();\n      fence_operand(scores);\n", "next s"),
    ("+", "      compute_weights(scores, weights, left, key, unit.after(tile), step + 1);\n", "weights"),
    ("+", "    take_turn();\n    begin_dk", "turn"),
    ("-", "    if constexpr (LAST) {\n      begin_dq(dweights, step);\n", "dk, dq started"),
    ("+", "      begin_dv(weights, left, step + 1, true);\n", "dp, dv started"),
    ("-", "    fence_operand(dk);\n    fence_operand(scores);\n    arrive_warp(memory.q_empty", "dk, dq"),
    ("-", "    const int use = memory.staging_use;\n", "room for dq"),
    ("-", "      return;\n    }\n    if (use == kLast) {\n", "dq left"),
    ("-", "      give_turn();\n    }\n    ++step;\n", "s started"),
]
NOTE = """
__device__ uint32_t marks[2][2048];
template <bool CAUSAL>
__device__ __forceinline__ void note(MemoryD128<CAUSAL>& memory, uint32_t place) {
  uint32_t thread, now;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  if (blockIdx.x != 0 || thread % 128 != 0) return;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(now));
  const uint32_t index = memory.marked[thread / 128 - 1]++;
  if (index < 2048) marks[thread / 128 - 1][index] = now << 4 | place;
}
"""


def changes() -> list[tuple[str, str]]:
    """Of the source."""
    found = []
    for index, (where, text, _) in reversed([*enumerate(MARKED)]):
        mark = f"note(memory, {index});\n"
        if text.endswith("begin_dk"):  # in the middle
            found.append((text, text.replace("    begin_dk", mark + "    begin_dk")))
        else:
            found.append((text, text + mark if where == "+" else mark + text))
    found += [
        ("  int staging_use;\n", "  int staging_use;\n  uint32_t marked[2];\n"),
        (
            "      memory.staging_free[i].init(1);\n",
            "      memory.staging_free[i].init(1);\n    memory.marked[i] = 0;\n",
        ),
        (
            "template <class T, bool DROPOUT, bool CAUSAL>\nstruct WideKeyWarpgroup {",
            NOTE + "template <class T, bool DROPOUT, bool CAUSAL>\nstruct WideKeyWarpgroup {",
        ),
        (
            "Status attention_backward_d128(const AttentionBackward& call) {\n",
            """extern "C" void read_marks(void* to) {
  cudaDeviceSynchronize();
  cudaMemcpyFromSymbol(to, marks, sizeof(marks));
}
Status attention_backward_d128(const AttentionBackward& call) {\n""",
        ),
    ]
    return found


def report(library: Any) -> str:
    """Cycles from one place of a step to the next, medians (means), of each warpgroup, and how far these are apart."""
    marks = (ctypes.c_uint32 * 4096)()
    library.read_marks(marks)
    lines, steps = [], []
    for group in range(2):
        own = [x for x in marks[2048 * group + 100 : 2048 * (group + 1)] if x]
        found: dict[int, list[int]] = {}
        for a, b in itertools.pairwise(own):
            found.setdefault(b & 15, []).append(((b >> 4) - (a >> 4)) & 0xFFFFFFF)
        parts = [
            f"{MARKED[place][2]} {statistics.median(times):.0f} ({statistics.mean(times):.0f})"
            for place, times in sorted(found.items())
        ]
        total = sum(map(sum, found.values())) / max(map(len, found.values()), default=1)
        lines.append(f"\n    warpgroup {group + 1}: {total:.0f} a step: {', '.join(parts)}")
        steps.append([x >> 4 for x in own if x & 15 == 2])
    apart = [(b - a + (1 << 27)) % (1 << 28) - (1 << 27) for a, b in zip(*steps, strict=False)]
    return "".join(lines) + f"\n    the second puts dS {statistics.median(apart or [0]):.0f} cycles after the first"


# ---- products --------------------------------------------------------------------------------------------------------

RATES = """
#include "common/cuda/hopper.cuh"
using namespace fasttfm;
using namespace fasttfm::cuda;

// Cycles of 64 times 8 products of each of `groups` warpgroups.
template <int KIND>
__global__ void __launch_bounds__(256, 1) rate(uint32_t* cycles) {
  extern __shared__ __align__(1024) char memory[];
  const int group = warp_uniform(threadIdx.x / 128);
  const uint32_t a = shared_address(memory) + group * 32768, b = shared_address(memory) + 65536;
  constexpr int kCount = KIND == 2 || KIND == 3 ? 64 : 32;
  float d[kCount];
  uint32_t operand[16];
  for (int i = 0; i < kCount; ++i) d[i] = 0;
  for (int i = 0; i < 16; ++i) operand[i] = threadIdx.x;
  for (int i = threadIdx.x; i < 131072 / 4; i += blockDim.x) reinterpret_cast<int*>(memory)[i] = 0;
  fence_proxy_async();
  __syncthreads();
  const uint32_t begin = clock();
  for (int round = 0; round < 64; ++round) {
    fence_operand(d);
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const uint32_t k = c % 4 * kKMajorStep, half = c / 4 * 16384, mn = c * kMnMajorStep;
      if (KIND == 0 || KIND == 3) wgmma<bf16_t>(d, advance(k_major(a + half), k), advance(k_major(b + half), k));
      if (KIND == 1)
        wgmma<bf16_t, Major::mn, Major::mn>(d, advance(mn_major(a, 0), mn), advance(mn_major(b, 0), mn));
      if (KIND == 2) wgmma<bf16_t, Major::mn>(d, operand + c % 4 * 4, advance(mn_major(b, 16384), mn));
      if (KIND == 4) wgmma<bf16_t>(d, operand + c % 4 * 4, advance(k_major(b + half), k));
    }
    wgmma_commit();
    wgmma_wait<0>();
  }
  fence_operand(d);
  if (threadIdx.x % 128 == 0) cycles[group] = clock() - begin;
  if (d[0] + d[kCount - 1] == 1.5f) cycles[2] = 0;
}

template <int KIND>
void measure(int groups, uint32_t* to, uint32_t* device) {
  cudaFuncSetAttribute(rate<KIND>, cudaFuncAttributeMaxDynamicSharedMemorySize, 196608);
  for (int i = 0; i < 2; ++i) rate<KIND><<<1, 128 * groups, 196608>>>(device);
  cudaMemcpy(to, device, 8, cudaMemcpyDeviceToHost);
}
extern "C" void rates(uint32_t* to) {
  uint32_t* device;
  cudaMalloc(&device, 64);
  for (int groups = 1; groups <= 2; ++groups, to += 10) {
    measure<0>(groups, to, device);
    measure<1>(groups, to + 2, device);
    measure<2>(groups, to + 4, device);
    measure<3>(groups, to + 6, device);
    measure<4>(groups, to + 8, device);
  }
}
"""
PRODUCTS: tuple[str, ...] = (
    "S, dP (both operands in shared memory, 64 wide)",
    "dQ (the same, transposed)",
    "dV, dK (128 wide)",
)
PRODUCTS += ("S, 128 wide", "dP with v in registers, 64 wide")


def compile_rates(work: Path) -> subprocess.Popen[str]:
    (work / "rates.cu").write_text(RATES)
    command = f"nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -I{ROOT}/kernels -Xptxas=-v -shared"
    command += f" -Xcompiler -fPIC {work}/rates.cu -o {work}/rates.so"
    return subprocess.Popen(command.split(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def rates(work: Path) -> str:
    found = (ctypes.c_uint32 * 20)()
    ctypes.CDLL(str(work / "rates.so")).rates(found)
    lines = ["cycles of 8 products and the wait for them, of one warpgroup and of two at a time (matrix units' own):"]
    for index, name in enumerate(PRODUCTS):
        one, two = (found[10 * groups + 2 * index] / 64 for groups in range(2))
        own = 512 if "128" in name else 256
        lines.append(f"    {name}: {one:.0f} ({own}), {two:.0f} ({2 * own})")
    return "\n".join(lines)
