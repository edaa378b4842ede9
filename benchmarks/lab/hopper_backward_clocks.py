"""Where a step of the Hopper backward of attention spends its cycles: a library with clocks at places of its source.

    python benchmarks/lab/hopper_backward_clocks.py [CASE ...]

Cases are those of hopper_backward.py's times. A mark costs some 50 cycles.
"""

from __future__ import annotations

import ctypes
import itertools
import statistics
import sys

from hopper_backward import ONLY_ALL_KEYS, TIMES, WORK, Backward, compile_variant, lay_package, make

# One thread of each warpgroup of the first block writes the clock at these places.
MARK = "    note(memory, %d);\n"
MARKED = [
    ("    wgmma_wait<ON_CHIP ? 1 : 2>();\n    fence_operand(scores);\n", "scores"),
    ("    give_turn();\n    float2 delta[8];", "weights"),
    ("    wgmma_commit();\n    wgmma_wait<1>();\n    fence_operand(dweights);\n", "dv started, dp"),
    ("    prevent_hoist(dweights[31]);\n", "dscores"),
    ("    wgmma_wait<0>();  // dK's operand reuses the registers of dV's\n    fence_operand(operand);\n", "dv"),
    ("      const uint32_t keys = warp_uniform(k);\n", "rounded"),
    ("    memory.dscores_empty[step.slot][number].wait(step.parity ^ 1);\n", "room"),
    ("    arrive_warp(memory.dscores_full[step.slot][number]);\n", "put"),
    ("      tile = last ? unit().begin(key_tile) : tile + 1;\n", "dk, scores, dp started"),
    ("        memory.dscores_full[step.slot][half].wait(step.parity);\n", "3: dscores"),
    ("      arrive_warp(memory.dscores_empty[step.slot][1]);\n", "3: dq"),
    ("rank == 0 ? unit.query_tiles : 0, key_tile == 0);\n      }\n", "3: handed on"),
]
CLOCKS = [
    (old, MARK % index + old if old.endswith(";") else old + MARK % index) for index, (old, _) in enumerate(MARKED)
]
CLOCKS += [
    ("  Barrier stage_full[kStages],", "  uint32_t marked[3];\n  Barrier stage_full[kStages],"),
    (
        "    for (Mbarrier& landed : raw)",
        "    marked[0] = marked[1] = marked[2] = 0;\n    for (Mbarrier& landed : raw)",
    ),
    (
        "// ---- warpgroup 0: tiles",
        """__device__ uint32_t marks[3][1024];
template <bool ON_CHIP>
__device__ __forceinline__ void note(Memory<ON_CHIP>& memory, int place) {
  if (blockIdx.x != 0 || reload_tid() % 128 != 0) return;
  const int group = reload_tid() / 128 - 1;
  uint32_t now;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(now));
  const uint32_t index = memory.marked[group]++;
  if (index < 1024) marks[group][index] = now << 4 | place;
}
// ---- warpgroup 0: tiles""",
    ),
    (
        "Status attention_backward(const AttentionBackward& call) {\n",
        """extern "C" void read_marks(void* to) {
  cudaDeviceSynchronize();
  cudaMemcpyFromSymbol(to, marks, sizeof(marks));
}
Status attention_backward(const AttentionBackward& call) {\n""",
    ),
]


def traced(name: str) -> str:
    """Cycles from one place of a step to the next, medians over steps, for each warpgroup."""
    import torch

    problem, q, k, v, dout, *gradients = make(TIMES[name], dirty=False)
    lse = torch.full((*q.shape[:-3], q.shape[-2], q.shape[-3]), 12.0, device="cuda")
    backward = Backward("clocks")
    backward.prepare(dout, q, k, v, dout, lse, problem, *gradients)()
    marks = (ctypes.c_uint32 * 3072)()
    backward.library.read_marks(marks)
    lines = []
    for group in range(3):
        own = [x for x in marks[1024 * group + 200 : 1024 * (group + 1)] if x]
        found: dict[int, list[int]] = {}
        for a, b in itertools.pairwise(own):
            found.setdefault(b & 15, []).append(((b >> 4) - (a >> 4)) & 0xFFFFFFF)
        parts = [f"{MARKED[place][1]} {statistics.median(times):.0f}" for place, times in sorted(found.items())]
        steps = max(map(len, found.values()), default=1)
        total = sum(map(sum, found.values())) / steps
        lines.append(f"\n    warpgroup {group + 1}: {total:.0f} a step: {', '.join(parts)}")
    return f"{name}{''.join(lines)}"


def main() -> None:
    lay_package()
    log, _ = (process := compile_variant("clocks", [*CLOCKS, *ONLY_ALL_KEYS])).communicate()
    if process.returncode:
        sys.exit(log)
    sys.path.insert(0, str(WORK / "lib"))
    for name in sys.argv[1:] or ("32x512", "32x512_p", "8x2048"):
        print(traced(name), flush=True)


if __name__ == "__main__":
    main()
