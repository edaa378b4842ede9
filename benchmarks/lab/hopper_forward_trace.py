"""Where the cycles of a step go: ``python benchmarks/lab/hopper_forward_trace.py``, after hopper_forward.py.

Compiles copies of the kernel that note the clock at seven places of a step (one thread of each warpgroup of one block)
and prints the mean cycles between them: wait for k, wait for the turn and issue, wait for the scores, softmax, wait for
the product with v, operand (and results).
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import hopper_forward as lab

MARKS = [
    (
        "    memory.k_full[at.slot].wait(at.parity);\n    turns.take();\n    hold_registers(o);\n",
        "    mark(0);\n",
        True,
    ),
    (
        "    issue_scores<T, S>(s, q_tile, shared_address(memory.k[at.slot]));\n    const uint32_t",
        "    mark(1);\n",
        True,
    ),
    ("    turns.pass();\n    wait_products<1>();\n", "    mark(2);\n", True),
    ("    wait_products<1>();\n    take_scores(s);\n", "    mark(3);\n", False),
    ("    finish_values(o, weights, v_used);\n", "    mark(4);\n", True),
    ("    finish_values(o, weights, v_used);\n", "    mark(5);\n", False),
    ("          softmax.correct(o);\n          make_operand(s, weights, kept);\n", "          mark(6);\n", False),
]
MARK = """
  __device__ __forceinline__ void mark(int place) {
    uint32_t clock;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(clock)::"memory");
    if (blockIdx.x == 5 && threadIdx.x % kWarpgroup == 0) clocks[group][marked % 64][place] = clock;
    if (place == 6) ++marked;
  }
  uint32_t marked = 0;
"""


def patched() -> Path:
    folder = lab.WORK / "trace" / "attention"
    folder.mkdir(parents=True, exist_ok=True)
    text = (lab.ROOT / "kernels/attention/cuda_forward.cuh").read_text()
    for place, mark, before in MARKS:
        assert text.count(place) == 1, place
        text = text.replace(place, mark + place if before else place + mark)
    text = text.replace(" private:\n  // Asked for anew", MARK + " private:\n  // Asked for anew")
    text = text.replace(
        "// A warpgroup of the block: 64 queries of each tile.\n", "__device__ uint32_t clocks[3][64][8];\n"
    )
    assert "++marked" in text
    assert "uint32_t clocks" in text
    (folder / "cuda_forward.cuh").write_text(text)
    return folder.parent


SHAPES = [
    lab.Shape(64, 2, 128, 3, turns=False),
    lab.Shape(64, 3, 128, 3, turns=False),
]


def main() -> None:
    lab.WORK.mkdir(exist_ok=True)
    libraries = {shape: shape.library.with_suffix(".trace.so") for shape in SHAPES}
    if sys.argv[1:] == ["--compile"]:
        include = patched()
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda shape: lab.compile_traced(shape, include), SHAPES))
        return
    lab._import_fasttfm()
    import torch

    for shape, library in libraries.items():
        kernel = lab.Kernel(shape, library)
        read = ctypes.CDLL(str(library)).hopper_trace
        for S, p in ((512, 0.0), (512, 0.1), (4096, 0.0)):
            case = lab.Case(16384 // S, S, 1024 // shape.D, shape.D, p=p)
            q, k, v, problem = lab.make(case)
            tensors = (q, k, v, *lab.outputs(q, problem))
            for _ in range(3):
                kernel(tensors, problem, lab.Mode(False, 0 if S <= 512 else 1))
            torch.cuda.synchronize()
            buffer = (ctypes.c_uint32 * (3 * 64 * 8))()
            read(buffer)
            clocks = torch.tensor(list(buffer), dtype=torch.int64).view(3, 64, 8)
            for group in range(shape.groups):
                used = clocks[group][clocks[group, :, 0] > 0]
                order = used[used[:, 0].argsort()]
                parts = (order[:, 1:7] - order[:, :6]).double().mean(0)
                rounds = float((order[1:, 0] - order[:-1, 0]).double().median())
                mean = float((order[-1, 0] - order[0, 0]) / max(len(order) - 1, 1))
                print(
                    f"{shape} S{S} p{p} group {group}: step {mean:.0f} (median {rounds:.0f}); "
                    f"k, issue, scores, softmax, v, operand: {[round(float(x)) for x in parts]}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
