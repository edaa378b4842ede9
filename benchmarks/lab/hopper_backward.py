"""Checks and times the Hopper backward of attention by itself, through a shared library of its sources alone.

    python benchmarks/lab/hopper_backward.py [--only checks|stress|times|races] [--output DIRECTORY]

Checks hold it against reference.py (same dropout) and repeat it for the same bits; stress repeats large cases more
often; times stand next to cuDNN's and those of other sources (before/NAME.cu beside this script), by turns: the chip's
clock follows what ran before. races: under compute-sanitizer. Each runs in a process of its own with a time limit, for
kernels that hang.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import re
import select
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WORK = Path(os.environ.get("HOPPER_LAB", "/tmp/hopper_lab"))

WRAPPER = """
#include "attention/cuda_backward.cu"
namespace fasttfm::cuda {  // head dim 128 is another script's
Status attention_backward_wide(const AttentionBackward&) { return {}; }
int64_t attention_backward_wide_workspace(int64_t, int64_t, int64_t, int64_t) { return 0; }
}
extern "C" int backward(const fasttfm::AttentionBackward* call, const char** detail) {
  const fasttfm::Status status = fasttfm::cuda::attention_backward(*call);
  *detail = status.detail;
  return static_cast<int>(status.code);
}
extern "C" int64_t workspace(int64_t sequences, int64_t heads, int64_t tokens, int64_t max_seqlen) {
  return fasttfm::cuda::attention_backward_workspace(sequences, heads, 64, tokens, max_seqlen);
}
extern "C" int64_t column_parts(int64_t sequences, int64_t heads, int64_t max_seqlen) {
  return fasttfm::cuda::attention_column_parts(sequences, heads, 64, max_seqlen);
}
"""

# Changes of the source whose times are compared: text to replace, and what stands there instead. Some leave work out,
# and compute nonsense: they show what the work costs.
VARIANTS: dict[str, list[tuple[str, str]]] = {
    "without_sums": [
        ("const bool last = key_tile == unit.last_key_tile(tile), load", "const bool last = false, load"),
        ("          sums.put(dq);", "          if (dq[0] == 1e30f) sums.put(dq);"),
        ("      add_sums<CAUSAL>(p, memory);", ""),
        ("          sums.store(dq, tile);", "          if (dq[0] == 1e30f) sums.store(dq, tile);"),
        ("load = (last || ON_CHIP) && key_tile > 0", "load = last && key_tile > 0"),
    ],
    "without_exp": [('  float result;\n  asm("ex2', '  float result;\n  return x;\n  asm("ex2')],
    "two_staged": [("kBuffers = 4;", "kBuffers = 2;")],
    "told_late": [
        ("      if (untold_) {\n        wait_stores<1>", "      if (++told_late_ % 4 == 0) {\n        wait_stores<1>"),
        ("  bool untold_ = false;", "  int told_late_ = 0;\n    bool untold_ = false;"),
    ],
    "scores_first": [("kScoresFirst = !ON_CHIP;", "kScoresFirst = true;")],
    "scores_last": [("kScoresFirst = !ON_CHIP;", "kScoresFirst = false;")],
    "loose_dscores": [("stay_behind(dweights);", "stay_behind(dweights[31]);")],
}
# Where a step's time goes: one thread of each warpgroup of the first block writes the clock at these places.
MARK = "    note(memory, %d);\n"
MARKED = [
    ("    wait_products<kScoresFirst ? 2 : 1>();\n    hold_registers(scores);\n", "scores"),
    ("    stay_behind(scores[31]);\n", "weights"),
    ("    wait_products<1>();  // dK's operand gives its registers to dV's\n    hold_registers(operand);\n", "dk"),
    ("    commit_products();\n    wait_products<1>();\n    hold_registers(dweights);\n", "dv started, dp"),
    ("    stay_behind(dweights);\n", "dscores"),
    ("    wait_products<0>();  // dV's operand gives its registers to dK's\n    hold_registers(operand);\n", "dv"),
    ("      const uint32_t keys = uniform(k);\n", "rounded"),
    ("    memory.dscores_empty[step.slot].wait(step.parity ^ 1);\n", "scores started, room"),
    ("    arrive_warp(memory.dscores_full[step.slot]);\n", "put"),
    ("      tile = last ? unit.begin(key_tile) : tile + 1;\n", "dk, dp started"),
    ("        memory.dscores_full[step.slot].wait(step.parity);\n", "3: dscores"),
    ("        arrive_warp(memory.dscores_empty[step.slot]);\n", "3: dq"),
    ("          sums.put(dq);\n        }\n", "3: handed on"),
]
CLOCKS = [(old, old + MARK % index) for index, (old, _) in enumerate(MARKED)]
CLOCKS += [
    ("  Barrier q_full[kStages],", "  uint32_t marked[3];\n  Barrier q_full[kStages],"),
    (
        "    v_full.initialize(kWarpArrivals);\n",
        "    v_full.initialize(kWarpArrivals);\n    marked[0] = marked[1] = marked[2] = 0;\n",
    ),
    (
        "template <bool CAUSAL, bool ON_CHIP>\n__device__ __forceinline__ void set_unit",
        """__device__ uint32_t marks[3][1024];
template <bool ON_CHIP>
__device__ __forceinline__ void note(Memory<ON_CHIP>& memory, int place) {
  if (blockIdx.x != 0 || thread_here() % 128 != 0) return;
  const int group = thread_here() / 128 - 1;
  uint32_t now;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(now));
  const uint32_t index = memory.marked[group]++;
  if (index < 1024) marks[group][index] = now << 4 | place;
}
template <bool CAUSAL, bool ON_CHIP>\n__device__ __forceinline__ void set_unit""",
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
MEASURED: dict[str, tuple[str, ...]] = {"32x512": ("scores_first", "loose_dscores", "without_sums", "without_exp")}
MEASURED["32x512_p"] = MEASURED["32x512"]
MEASURED["4x4096"] = ("two_staged", "told_late", "scores_last", "loose_dscores", "without_sums", "without_exp")
MEASURED["8x2048"] = MEASURED["1x16384"] = ("two_staged", "told_late", "scores_last")
BEFORE = sorted(
    path.stem for path in Path(__file__).with_name("before").glob("*.cu")
)  # whole sources, WRAPPER included

# What only the case of all keys needs is left, to compile less.
ONLY_ALL_KEYS = [
    ("causal ? launch_backward<T, true, true>(call, p, processors)\n                  :", ""),
    ("causal ? launch_backward<T, false, true>(call, p, processors)\n                :", ""),
]
WITHOUT_HALF = (": call.dtype == DType::f16 ? launch_typed<f16_t>(call, p)", "")
# As many blocks share a head as the library is told.
FORCED = [
    ("  if (call.max_seqlen <= kOnChipQueries) return 1;", "  if (forced_blocks > 0) return forced_blocks;"),
    ("  if (call.max_seqlen <= kOnChipQueries)\n", "  if (forced_blocks == 0 && call.max_seqlen <= kOnChipQueries)\n"),
    ("(longest > kOnChipQueries ? kSumFloats : 0)", "(forced_blocks + longest > 0 ? kSumFloats : 0)"),
    ("max_seqlen > kOnChipQueries ? std::max", "forced_blocks + max_seqlen > 0 ? std::max"),
    ("#include <algorithm>\n", '#include <algorithm>\nextern "C" {\nint forced_blocks = 0;\n}\n'),
]

P, I64, I32, F32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


def _strides(*names: str) -> list[tuple[str, Any]]:
    return [(f"{name}_{axis}_stride", I64) for name in names for axis in ("sequence", "token", "head")]


class Call(ctypes.Structure):
    """AttentionBackward of op.h."""

    _fields_ = [
        *((name, P) for name in ("q", "k", "v")),
        *_strides("q", "k", "v"),
        *((name, P) for name in ("cu_seqlens", "cu_seqlens_k", "lengths", "lengths_k", "seed")),
        *(
            (name, I64)
            for name in ("sequences", "heads", "kv_heads", "head_dim", "queries", "keys", "max_seqlen", "max_seqlen_k")
        ),
        *((name, I64) for name in ("window_left", "window_right")),
        ("scale", F32),
        ("threshold", I32),
        ("dropout_scale", F32),
        ("dtype", I32),
        ("workspace", P),
        ("threads", I32),
        ("device", I32),
        ("stream", P),
        *((name, P) for name in ("dout", "out", "lse", "dq", "dk", "dv")),
        *_strides("dq", "dk", "dv"),
        ("column_sums", P),
        ("column_sums_dtype", I32),
        ("column_parts", P),
    ]


def lay_package() -> None:
    """The package as it is installed, without its C++ core."""
    overlay = WORK / "lib" / "fasttfm"
    if overlay.exists():
        return
    overlay.mkdir(parents=True)
    for entry in (ROOT / "python" / "fasttfm").iterdir():
        if not entry.name.startswith("_C."):
            (overlay / entry.name).symlink_to(entry)
    (overlay / "kernels").symlink_to(ROOT / "kernels")


def build() -> str:
    lay_package()
    begin = time.time()
    started = [("backward", compile_variant("backward", [])), ("forced", compile_variant("forced", FORCED))]
    started += [("racecheck", compile_variant("racecheck", FORCED, " -DFASTTFM_EVERY_LANE_ARRIVES"))]
    started += [(name, compile_variant(name, [*changes, *ONLY_ALL_KEYS])) for name, changes in VARIANTS.items()]
    started += [("clocks", compile_variant("clocks", [*CLOCKS, *ONLY_ALL_KEYS]))]
    started += [(name, compile_source(name, Path(__file__).with_name("before") / f"{name}.cu")) for name in BEFORE]
    lines = []
    for name, process in started:
        log, _ = process.communicate()
        if process.returncode:
            print(log)
            if name == "backward":
                sys.exit("nvcc failed")
        spills = sum("spill stores" in line and " 0 bytes spill stores" not in line for line in log.splitlines())
        lines.append(f"{name}: {time.time() - begin:.1f} s, spills {spills}, serialized {log.count('serialized')}")
    return "\n".join(lines)


def inlined(name: str, seen: set[str]) -> str:
    """A source file with the kernel's own headers in the place of their first includes."""

    def header(match: re.Match[str]) -> str:
        if match[1] in seen:
            return ""
        seen.add(match[1])
        return inlined(match[1], seen).replace("#pragma once\n", "")

    return re.sub(
        r'#include "(attention/cuda_(?:backward_|ordered_|column_)\w+\.cuh)"\n',
        header,
        (ROOT / "kernels" / name).read_text(),
    )


def compile_variant(name: str, changes: list[tuple[str, str]], options: str = "") -> subprocess.Popen[str]:
    source = WORK / f"{name}.cu"
    text = WRAPPER
    if changes:
        kernel = inlined("attention/cuda_backward.cu", set())
        for old, new in [*changes, WITHOUT_HALF]:
            if old not in kernel:
                print(f"{name}: the source has no {old!r}")
            kernel = kernel.replace(old, new, 1 if old.startswith("#include") else -1)
        text = text.replace('#include "attention/cuda_backward.cu"', kernel)
    source.write_text(text)
    return compile_source(name, source, options)


def compile_source(name: str, source: Path, options: str = "") -> subprocess.Popen[str]:
    command = f"nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a{options} -I{ROOT}/kernels -Xptxas=-v -shared"
    command += f" -Xcompiler -fPIC --split-compile=4 {source} -o {WORK / name}.so"
    return subprocess.Popen(command.split(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


# ---- one problem ----------------------------------------------------------------------------------------------------

# Of a case: dense (B, S) or packed (lengths); heads; causal; p; lengths; fused: slices of one qkv; half: fp16.
CHECKS: dict[str, dict[str, Any]] = {
    "64": {"dense": (2, 64), "heads": 2},
    "128": {"dense": (2, 128), "heads": 3},
    "64_p": {"dense": (2, 64), "heads": 2, "p": 0.1},
    "512": {"dense": (3, 512), "heads": 2},
    "512_p": {"dense": (3, 512), "heads": 2, "p": 0.1, "fused": True},
    "200": {"dense": (2, 200), "heads": 2},
    "lengths": {"dense": (6, 330), "lengths": (5, 0, 37, 330, 128, 192), "heads": 2, "p": 0.1},
    "packed": {"packed": (5, 0, 37, 130, 512, 64, 1, 300), "heads": 3, "p": 0.1, "fused": True},
    "many": {"dense": (40, 192), "heads": 16, "p": 0.1},
    "causal": {"dense": (2, 512), "heads": 2, "causal": True},
    "causal_p": {"packed": (5, 0, 37, 130, 500, 64, 1, 300), "heads": 3, "p": 0.1, "causal": True},
    "cross": {"packed": (5, 0, 37, 130, 500, 64), "packed_k": (50, 7, 30, 0, 256, 130), "heads": 2, "causal": True},
    "cross_p": {"packed": (5, 0, 37, 130, 500, 64), "packed_k": (50, 7, 30, 0, 256, 130), "heads": 2, "p": 0.5},
    "half": {"dense": (2, 256), "heads": 2, "p": 0.1, "half": True},
    "all_dropped": {"dense": (2, 128), "heads": 2, "p": 1.0},
    "1024": {"dense": (2, 1024), "heads": 2},
    "2000_p": {"dense": (1, 2000), "heads": 2, "p": 0.1},
    "long_packed": {"packed": (700, 64, 1500, 3), "heads": 2, "p": 0.1, "fused": True},
    "long_causal": {"dense": (1, 2000), "heads": 2, "causal": True},
    "long_cross": {"packed": (700, 64), "packed_k": (300, 1000), "heads": 2, "causal": True},
    "4096": {"dense": (1, 4096), "heads": 2},
    "5000_causal": {"dense": (1, 5000), "heads": 1, "causal": True},
    "mixed": {"packed": (6000, 5, 64, 0, 1000, 130), "heads": 1, "p": 0.1, "fused": True},
    "4096_causal_p": {"dense": (1, 4096), "heads": 2, "causal": True, "p": 0.1},
}
# With so many blocks for a head.
SHARED = {
    f"{name}/{blocks}": {**CHECKS[name], "blocks": blocks}
    for blocks, names in {
        1: ("long_packed", "long_causal", "4096"),
        2: ("64", "512_p", "lengths", "packed", "causal_p", "cross", "cross_p", "long_cross"),
        4: ("512", "packed", "causal", "cross", "2000_p", "long_packed", "long_causal"),
        8: ("200", "1024", "lengths", "causal_p", "long_cross", "long_causal"),
    }.items()
    for name in names
}
CHECKS |= SHARED
CLOCKED = ("32x512", "32x512_p", "8x2048")
RACES = ("lengths", "64_p", "causal", "causal_p/2", "512/2", "long_cross/4")  # a call of each kernel, or nearly


def make(case: dict[str, Any], dirty: bool = True, head_dim: int = 64) -> tuple[Any, ...]:
    import torch

    from fasttfm.kernels.attention.problem import AttentionProblem
    from fasttfm.kernels.common import philox

    dtype = torch.float16 if case.get("half") else torch.bfloat16
    heads, p = case["heads"], case.get("p", 0.0)
    threshold = philox.threshold(p)
    limits = {"scale": head_dim**-0.5, "window_right": 0 if case.get("causal") else -1, "threshold": threshold}
    limits |= {"dropout_scale": philox.scale(threshold)}
    if p:
        limits["seed"] = torch.tensor([0x1234_5678_9ABC_DEF], device="cuda")

    def ints(values: Any) -> Any:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    spare = 3 if dirty else 0  # rows that are no sequence's
    shape: tuple[int, ...]
    shape_k: tuple[int, ...]
    if "dense" in case:
        batch, size = case["dense"]
        shape = shape_k = (batch, size, heads, head_dim)
        lengths = ints(case["lengths"]) if "lengths" in case else None
        problem = AttentionProblem(batch, size, size, lengths=lengths, lengths_k=lengths, **limits)
    else:
        own, own_k = case["packed"], case.get("packed_k", case["packed"])
        cu, cu_k = (ints([0, *itertools.accumulate(x)]) for x in (own, own_k))
        shape, shape_k = (sum(own) + spare, heads, head_dim), (sum(own_k) + spare, heads, head_dim)
        problem = AttentionProblem(len(own), max(own), max(own_k), cu_seqlens=cu, cu_seqlens_k=cu_k, **limits)
    if case.get("fused"):
        fused = (*shape[:-2], 3, heads, head_dim)
        q, k, v = torch.randn(fused, device="cuda", dtype=dtype).unbind(-3)
        dq, dk, dv = torch.full(fused, torch.nan, device="cuda", dtype=dtype).unbind(-3)
    else:
        q, k, v = (torch.randn(s, device="cuda", dtype=dtype) for s in (shape, shape_k, shape_k))
        dq, dk, dv = (torch.full_like(x, torch.nan) for x in (q, k, v))
    dout = torch.randn(shape, device="cuda", dtype=dtype)
    if dirty and problem.packed:
        for x in (q, k, v, dout):
            x[-spare:] = torch.nan
    if dirty and problem.lengths is not None:
        absent = torch.arange(size, device="cuda") >= problem.lengths[:, None]
        for x in (q, k, v, dout):
            x[absent] = torch.nan
    return problem, q, k, v, dout, dq, dk, dv


class Backward:
    blocks: int | None = None  # that share a head, where the library is told
    columns: Any = None  # fp32 [3, heads, 64]: gets the gradients' sums over all tokens

    def __init__(self, variant: str = "backward", blocks: int = 0, columns: Any = None) -> None:
        if blocks or variant == "racecheck":
            self.blocks = blocks
        self.columns = columns
        self.open(WORK / f"{variant if not blocks or variant == 'racecheck' else 'forced'}.so")

    def open(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        self.library.workspace.restype = ctypes.c_int64
        self.library.workspace.argtypes = [ctypes.c_int64] * 4
        if hasattr(self.library, "column_parts"):
            self.library.column_parts.restype = ctypes.c_int64

    def prepare(self, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, problem: Any, *gradients: Any) -> Any:
        import torch

        heads = q.shape[-2]
        longest = max(problem.max_seqlen, problem.max_seqlen_k)
        size = self.library.workspace(problem.sequences, heads, q.shape[:-2].numel(), longest)
        workspace = torch.full((size,), torch.nan, device="cuda")
        call = Call(sequences=problem.sequences, heads=heads, kv_heads=k.shape[-2], head_dim=q.shape[-1])
        call.queries, call.keys, call.dtype = q.shape[-3], k.shape[-3], 1 if q.dtype == torch.bfloat16 else 2
        for name in ("max_seqlen", "max_seqlen_k", "window_left", "window_right", "scale", "threshold"):
            setattr(call, name, getattr(problem, name))
        call.dropout_scale, call.workspace = problem.dropout_scale, workspace.data_ptr()
        call.dout, call.out, call.lse = (x.data_ptr() for x in (dout, out, lse))
        for name in ("cu_seqlens", "cu_seqlens_k", "lengths", "lengths_k", "seed"):
            tensor = getattr(problem, name)
            setattr(call, name, None if tensor is None else tensor.data_ptr())
        for name, x in zip(("q", "k", "v", "dq", "dk", "dv"), (q, k, v, *gradients), strict=True):
            setattr(call, name, x.data_ptr())
            strides = x.stride()[:3] if x.dim() == 4 else (0, *x.stride()[:2])
            for axis, stride in zip(("sequence", "token", "head"), strides, strict=True):
                setattr(call, f"{name}_{axis}_stride", stride)
        keep = [workspace, dout, q, k, v, out, lse, problem, gradients]
        if self.columns is not None:
            size = self.library.column_parts(*map(I64, (problem.sequences, heads, problem.max_seqlen)))
            keep += [self.columns, torch.full((size,), torch.nan, device="cuda")]
            call.column_sums, call.column_parts = keep[-2].data_ptr(), keep[-1].data_ptr()

        def run() -> Any:
            call.stream = torch.cuda.current_stream().cuda_stream
            if self.blocks is not None:
                ctypes.c_int.in_dll(self.library, "forced_blocks").value = self.blocks
            detail = ctypes.c_char_p()
            code = self.library.backward(ctypes.byref(call), ctypes.byref(detail))
            if code:
                raise RuntimeError(f"backward: {detail.value!r}")
            return keep

        return run


def relative(found: Any, expected: Any) -> float:
    """The norm of the difference over that of the expected; where that is 0, the norm of what was found."""
    found, expected = found.double(), expected.double()
    norm = expected.norm().item()
    return (found - expected).norm().item() / (norm or 1.0)


def check(name: str) -> str:
    import torch

    from fasttfm.kernels.attention import reference

    torch.manual_seed(len(name) * 1000 + sum(map(ord, name)))
    problem, q, k, v, dout, *gradients = make(CHECKS[name])
    out, lse = reference.attention_forward(q, k, v, problem)
    columns = torch.full((3, q.shape[-2], 64), torch.nan, device="cuda")
    backward = Backward(blocks=CHECKS[name].get("blocks", 0), columns=columns)
    run = backward.prepare(dout, q, k, v, out, lse, problem, *gradients)
    run()
    torch.cuda.synchronize()
    expected = [torch.empty_like(x) for x in gradients]
    reference.attention_backward(dout, q, k, v, out, lse, problem, *expected)
    rows = slice(None) if problem.cu_seqlens is None else slice(0, -3)
    errors = [relative(a[rows], b[rows]) for a, b in zip(gradients, expected, strict=True)]
    sums = [b[rows].double().flatten(0, -3).sum(0) for b in gradients]
    sizes = [b[rows].double().flatten(0, -3).abs().sum(0).norm().item() for b in gradients]
    errors += [(a.double() - b).norm().item() / (size or 1.0) for a, b, size in zip(columns, sums, sizes, strict=True)]
    untouched = ""
    if problem.packed and any(not x[-3:].isnan().all() for x in gradients):
        untouched = " WROTE PAST THE END"
    differences = repeat(run, [*gradients, columns], [rows] * 3 + [slice(None)], 10)
    good = all(error < 0.006 for error in errors) and not differences and not untouched
    text = f"{'ok  ' if good else 'BAD '} {name:14} dq dk dv, columns " + " ".join(f"{error:.1e}" for error in errors)
    return f"{text} same bits {not differences}{differences}{untouched}"


def once(name: str) -> str:
    import torch

    problem, q, k, v, dout, *gradients = make(CHECKS[name])
    lse = torch.full((*q.shape[:-3], q.shape[-2], q.shape[-3]), 12.0, device="cuda")
    Backward("racecheck", CHECKS[name].get("blocks", 0)).prepare(dout, q, k, v, dout, lse, problem, *gradients)()
    torch.cuda.synchronize()
    return name


def repeat(run: Any, results: Any, rows: Any, times: int) -> str:
    """Empty if every run gives the bits of the first, else what differs of these rows of the results."""
    import torch

    run()
    first = [x.clone() for x in results]
    found: dict[str, list[str]] = {}
    for index in range(times):
        run()
        for name, own, a, b in zip(("dq", "dk", "dv", "columns")[: len(rows)], rows, first, results, strict=True):
            if torch.equal(a[own], b[own]):
                continue
            x, y = (t[own] for t in (a, b))  # ([sequence], token, head, feature)
            where = (x != y).nonzero()
            low, high = where.amin(0).tolist(), where.amax(0).tolist()
            size = (x.float() - y.float()).abs().max().item()
            found.setdefault(name, []).append(f"run {index}: {len(where)} from {low} to {high}, up to {size:.2g}")
    return "".join(f"\n      {name} differs in {len(runs)} runs: {'; '.join(runs[:3])}" for name, runs in found.items())


# ---- stress ---------------------------------------------------------------------------------------------------------

STRESS: dict[str, dict[str, Any]] = {
    "64x512_p": {"dense": (64, 512), "heads": 16, "p": 0.1, "fused": True},
    "128x128_p": {"dense": (128, 128), "heads": 16, "p": 0.1},
    "40x192_p": {"dense": (40, 192), "heads": 16, "p": 0.1},
    "32x512_causal": {"dense": (32, 512), "heads": 16, "causal": True},
    "packed_p": {"packed": tuple(1 + 511 * i // 99 for i in range(100)), "heads": 16, "p": 0.1},
    "16x1024_p": {"dense": (16, 1024), "heads": 16, "p": 0.1},
    "16x1024_p/1": {"dense": (16, 1024), "heads": 16, "p": 0.1, "blocks": 1},
    "16x1024/8": {"dense": (16, 1024), "heads": 16, "blocks": 8},
    "8x2000_causal_p": {"dense": (8, 2000), "heads": 16, "p": 0.1, "causal": True},
    "8x2000_causal/2": {"dense": (8, 2000), "heads": 16, "causal": True, "blocks": 2},
    "2x8192": {"dense": (2, 8192), "heads": 16},
    "long_cross": {"packed": (700, 64) * 8, "packed_k": (300, 1000) * 8, "heads": 16, "causal": True},
    "long_cross/4": {"packed": (700, 64) * 8, "packed_k": (300, 1000) * 8, "heads": 16, "causal": True, "blocks": 4},
    "short_cross/8": {"packed": (64,) * 16, "packed_k": (1000,) * 16, "heads": 16, "causal": True, "blocks": 8},
}


def stressed(name: str) -> str:
    """Repeats one case; the statistics it is given are not those of a forward, which the bits do not need."""
    import torch

    case = STRESS[name]
    problem, q, k, v, dout, *gradients = make(case)
    lse = torch.full((*q.shape[:-3], q.shape[-2], q.shape[-3]), 12.0, device="cuda")
    out = torch.randn(dout.shape, device="cuda", dtype=q.dtype)
    backward = Backward(blocks=case.get("blocks", 0))
    run = backward.prepare(dout, q, k, v, out, lse, problem, *gradients)
    rows = slice(None) if problem.cu_seqlens is None else slice(0, -3)
    differences = repeat(run, gradients, [rows] * 3, 25)
    finite = all(bool(x[rows].isfinite().all()) for x in gradients)
    return f"{'BAD ' if differences or not finite else 'ok  '} stress {name:30} finite {finite}{differences}"


# ---- times ----------------------------------------------------------------------------------------------------------

TIMES: dict[str, dict[str, Any]] = {
    f"{batch}x{size}{'_causal' if causal else ''}{'_p' if p else ''}": {
        "dense": (batch, size),
        "heads": 16,
        "p": p,
        "causal": causal,
        "fused": True,
    }
    for batch, size, causal, p in (
        (32, 512, False, 0.0),
        (32, 512, False, 0.1),
        (8, 2048, False, 0.0),
        (4, 4096, False, 0.0),
        (16, 1024, False, 0.0),
        (1, 16384, False, 0.0),
        (16, 1024, True, 0.0),
        (8, 2048, True, 0.0),
        (4, 4096, True, 0.0),
        (1, 16384, True, 0.0),
        (16, 1024, False, 0.1),
        (8, 2048, False, 0.1),
        (4, 4096, False, 0.1),
        (32, 512, True, 0.0),
        (64, 256, False, 0.1),
        (128, 128, False, 0.0),
        (128, 128, False, 0.1),
        (2, 8192, False, 0.0),
        (2, 8192, True, 0.0),
        (2, 8192, False, 0.1),
        (8, 512, False, 0.1),
    )
}
TIMES["packed_p"] = {"packed": tuple(64 + 448 * i // 63 for i in range(64)), "heads": 16, "p": 0.1, "fused": True}


def milliseconds(functions: dict[str, Any], eager: tuple[str, ...] = ()) -> dict[str, float]:
    """Medians of several rounds in which each has its turn; as graphs, but for those of ``eager``."""
    import torch

    replays = {}
    for name, function in functions.items():
        for _ in range(3):
            function()
        torch.cuda.synchronize()
        if name not in eager:
            replays[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(replays[name]):
                for _ in range(5):
                    function()
    found: dict[str, list[float]] = {name: [] for name in functions}
    for name in [*functions] * 7:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        if name in eager:
            for _ in range(5):
                functions[name]()
        else:
            replays[name].replay()
        end.record()
        torch.cuda.synchronize()
        found[name].append(begin.elapsed_time(end) / 5)
    return {name: statistics.median(times) for name, times in found.items()}


def timed(name: str) -> str:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from fasttfm.kernels.attention import triton

    case = TIMES[name]
    problem, q, k, v, dout, *gradients = make(case, dirty=False)
    size = 0
    if "packed" in case:
        out, lse = triton.attention_fwd_triton(q, k, v, problem)
        pairs = sum(length**2 for length in case["packed"])
    else:
        batch, size = case["dense"]
        pairs = batch * size**2 // (2 if case["causal"] else 1)
        heads_first = [x.transpose(1, 2) for x in (q, k, v)]
        forward = torch.ops.aten._scaled_dot_product_flash_attention
        out, lse = forward(*heads_first, 0.0, case["causal"])[:2]
        out = out.transpose(1, 2).contiguous()
    flops = 10 * pairs * 16 * 64
    arguments = (dout, q, k, v, out, lse, problem, *gradients)
    functions = {"hopper": Backward().prepare(*arguments)}
    if name in ("32x512_p", "8x2048"):
        columns = torch.empty(3, 16, 64, device="cuda")
        functions["columns"] = Backward(columns=columns).prepare(*arguments)
    if size:
        inputs = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            query, key, value = inputs
            options = {"dropout_p": case["p"], "is_causal": case["causal"]}
            result = torch.nn.functional.scaled_dot_product_attention(query, key, value, **options)
        gradient = dout.transpose(1, 2)
        functions["cudnn"] = lambda: torch.autograd.grad(result, inputs, gradient, retain_graph=True)
    functions |= {other: Backward(other).prepare(*arguments) for other in BEFORE if other != "main" or size <= 4096}
    if size >= 512 and not case["p"]:
        for blocks in (1, 2, 4) if size < 4096 else (2, 3, 4) if size < 8192 else (4, 8):
            functions[f"/{blocks}"] = Backward(blocks=blocks).prepare(*arguments)
    functions |= {variant: Backward(variant).prepare(*arguments) for variant in MEASURED.get(name, ())}
    results = milliseconds(functions, eager=("cudnn",))
    text = "  ".join(f"{who} {ms:.3f}" for who, ms in results.items())
    ratio = f"  x{results['cudnn'] / results['hopper']:.2f}" if "cudnn" in results else ""
    return f"{name:16} {flops / results['hopper'] / 1e9:4.0f} TFLOP/s  {text}{ratio}"


class Report(list[str]):
    """Lines that are printed and written as they come."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")

    def append(self, line: str) -> None:
        super().append(line)
        print(line, flush=True)
        with self.path.open("a") as file:
            file.write(line + "\n")


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


# ---- processes ------------------------------------------------------------------------------------------------------


def in_process(names: list[str], limit: float, deadline: float, lines: Report, tool: list[str] | None = None) -> None:
    """Lines of the cases (kind:name); one that takes longer than ``limit`` seconds is left out and the rest goes on anew."""
    attempts = 0
    environment = dict(os.environ, PYTHONPATH=f"{WORK / 'lib'}:{os.environ.get('PYTHONPATH', '')}")
    while names and attempts < 4 and time.time() < deadline:
        attempts += 1
        command = [*(tool or ()), sys.executable, __file__, "--child", *names]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
        assert process.stdout is not None
        done, rest, begin = 0, b"", time.time()
        while time.time() < min(begin + (limit if done else limit + 6), deadline):  # torch starts
            if not select.select([process.stdout], [], [], 0.2)[0]:
                continue
            new = os.read(process.stdout.fileno(), 1 << 16)
            if not new:
                break
            *whole, rest = (rest + new).split(b"\n")
            for line in whole:
                text = line.decode(errors="replace")
                if text.startswith("RESULT "):
                    lines.append(json.loads(text[7:]))
                    done, begin = done + 1, time.time()
                else:
                    lines.append("    | " + text)
        process.kill()
        process.wait()
        if done < len(names):
            lines.append(f"LOST {names[done]} ({'exit ' + str(process.returncode)})")
        names = names[done + 1 :] if done < len(names) else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("checks", "clocks", "stress", "times", "races"))
    parser.add_argument("--cases", default="", help="comma-separated names; all by default")
    parser.add_argument("--output", default=os.environ.get("OUT", str(WORK)))
    parser.add_argument("--child", nargs="+")
    arguments = parser.parse_args()
    if arguments.child:
        functions = {"checks": check, "stress": stressed, "times": timed, "races": once, "clocks": traced}
        for case in arguments.child:
            kind, name = case.split(":")
            print("RESULT " + json.dumps(functions[kind](name)), flush=True)
        return
    begin = time.time()
    lines = Report(Path(arguments.output) / "hopper_backward.txt")
    lines.append(build())
    chosen = [name for name in arguments.cases.split(",") if name]
    kinds = {"checks": CHECKS, "times": TIMES, "clocks": CLOCKED, "stress": STRESS, "races": RACES}
    cases = [
        f"{kind}:{name}"
        for kind, names in kinds.items()
        for name in names
        if arguments.only in (None, kind) and (not chosen or name in chosen)
    ]
    in_process([case for case in cases if not case.startswith("races")], 5.0, begin + 54, lines)
    sanitizer = [shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer", "--tool", "racecheck"]
    in_process([case for case in cases if case.startswith("races")], 10.0, begin + 72, lines, sanitizer)
    if any(line.startswith(("BAD", "LOST")) for line in lines):
        lines.append("FAILED")
    lines.append(f"{time.time() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
