"""Checks and times the Hopper backward of attention by itself, through a shared library of its sources alone.

    python benchmarks/lab/hopper_backward.py [--only checks|stress|times|races] [--output DIRECTORY]

Checks hold it against reference.py (same dropout) and repeat it for the same bits; stress repeats large cases more
often; times stand next to cuDNN's and those of other sources (before/NAME.cu beside this script), by turns: the chip's
clock follows what ran before. races: under compute-sanitizer. Each runs in a process of its own with a time limit, for
kernels that hang.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import select
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from hopper_backward_cases import CHECKS, RACES, STRESS, TIMES, make

ROOT = Path(__file__).resolve().parents[2]
WORK = Path(os.environ.get("HOPPER_LAB", "/tmp/hopper_lab"))

WRAPPER = """
#include "attention/hopper/backward_d64.cu"
namespace fasttfm::cuda {  // head dim 128 is another script's
Status attention_backward_d128(const AttentionBackward&) { return {}; }
int64_t attention_backward_d128_workspace(int64_t, int64_t, int64_t, int64_t) { return 0; }
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
    "without_dq": [("c < 4 * half + 4; ++c)\n          multiply", "c < 0; ++c)\n          multiply")],
    "without_sums": [
        ("const bool last = key_tile == unit.last_key_tile(tile), load", "const bool last = false, load"),
        ("sums.add(dq, sum,", "if (dq[0] == 1e30f) sums.add(dq, sum,"),
        ("sums.store(dq, tile)", "if (dq[0] == 1e30f) sums.store(dq, tile)"),
        ("load = (last || ON_CHIP) && key_tile > 0", "load = last && key_tile > 0"),
    ],
    "without_exp": [
        ("exp2_approx(pair[0] * p.score_scale - own.x)", "(pair[0] * p.score_scale - own.x)"),
        ("exp2_approx(pair[1] * p.score_scale - own.y)", "(pair[1] * p.score_scale - own.y)"),
    ],
    "without_adding": [("        bulk_reduce_add(tile,", "        if (place == 1u << 31) bulk_reduce_add(tile,")],
    "told_each": [("kInterval = 4;", "kInterval = 1;")],
    "without_turns": [
        ("{ named_barrier_sync(kFirstTurn + number, 2 * kWarpgroup); }", "{}"),
        ("{ named_barrier_arrive(kFirstTurn + 1 - number, 2 * kWarpgroup); }", "{}"),
    ],
}
MEASURED: dict[str, tuple[str, ...]] = {
    "32x512_p": ("without_dq", "without_sums", "without_exp", "without_turns"),
    "32x512": ("without_dq", "without_sums", "without_exp", "without_turns"),
    "8x2048": tuple(VARIANTS),
    "4x4096": tuple(VARIANTS),
}
BEFORE = sorted(
    path.stem for path in Path(__file__).with_name("before").glob("*.cu")
)  # whole sources, WRAPPER included

# What only the case of all keys needs is left, to compile less.
ONLY_ALL_KEYS = [
    ("causal ? launch_backward<T, true, true>(call, p, processors)\n                  :", ""),
    ("causal ? launch_backward<T, false, true>(call, p, processors)\n                :", ""),
]
WITHOUT_HALF = (": call.dtype == DType::f16 ? launch_typed<f16_t>(call, p)", "")
WITHOUT_BFLOAT = ("call.dtype == DType::bf16  ? launch_typed<bf16_t>(call, p)\n         : ", "")
# As many blocks share a head as the library is told.
FORCED = [
    (
        "  if (call.max_seqlen <= kOnChipQueries) return 1;",
        "  if (forced_blocks > 0) return forced_blocks;\n  if (call.max_seqlen <= kOnChipQueries) return 1;",
    ),
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


def build(kinds: set[str]) -> str:
    """The libraries that these kinds of cases need."""
    lay_package()
    begin = time.time()
    started = []
    if kinds != {"races"}:
        started += [("backward", compile_variant("backward", FORCED))]
    if "checks" in kinds:
        started += [("half", compile_variant("half", [WITHOUT_BFLOAT]))]
    if "races" in kinds:
        started += [("racecheck", compile_variant("racecheck", FORCED, " -DFASTTFM_SANITIZE_GPU"))]
    if "times" in kinds:
        started += [(name, compile_variant(name, [*changes, *ONLY_ALL_KEYS])) for name, changes in VARIANTS.items()]
        started += [(name, compile_source(name, Path(__file__).with_name("before") / f"{name}.cu")) for name in BEFORE]
    lines = []
    for name, process in started:
        log, _ = process.communicate()
        if process.returncode:
            print(log)
            if name in ("backward", "racecheck"):
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
        r'#include "(attention/hopper/(?:backward|ordered|column)_\w+\.cuh)"\n',
        header,
        (ROOT / "kernels" / name).read_text(),
    )


def compile_variant(name: str, changes: list[tuple[str, str]], options: str = "") -> subprocess.Popen[str]:
    source = WORK / f"{name}.cu"
    text = WRAPPER
    kernel = inlined("attention/hopper/backward_d64.cu", set())
    for old, new in changes if WITHOUT_BFLOAT in changes else [*changes, WITHOUT_HALF]:
        if old not in kernel:
            print(f"{name}: the source has no {old!r}")
        kernel = kernel.replace(old, new, 1 if old.startswith("#include") else -1)
    text = text.replace('#include "attention/hopper/backward_d64.cu"', kernel)
    source.write_text(text)
    return compile_source(name, source, options)


def compile_source(name: str, source: Path, options: str = "") -> subprocess.Popen[str]:
    command = f"nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a{options} -I{ROOT}/kernels -Xptxas=-v -shared"
    command += f" -Xcompiler -fPIC {source} -o {WORK / name}.so"
    return subprocess.Popen(command.split(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


# ---- one problem ----------------------------------------------------------------------------------------------------


class Backward:
    blocks: int | None = None  # that share a head, where the library can be told; 0: its own choice
    columns: Any = None  # fp32 [3, heads, 64]: gets the gradients' sums over all tokens

    def __init__(self, variant: str = "backward", blocks: int = 0, columns: Any = None) -> None:
        if variant in ("backward", "racecheck"):
            self.blocks = blocks
        self.columns = columns
        self.open(WORK / f"{variant}.so")

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
    variant = "half" if CHECKS[name].get("half") else "backward"
    backward = Backward(variant, CHECKS[name].get("blocks", 0), columns)
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


def milliseconds(functions: dict[str, Any], eager: tuple[str, ...] = ()) -> dict[str, float]:
    """Medians of several rounds in which each has its turn; as graphs, but for those of ``eager``."""
    import torch

    replays = {}
    print("~", end=" ", flush=True)
    for name, function in functions.items():
        print(name, end=" ", flush=True)  # for who waits for it in vain
        for _ in range(3):
            function()
        torch.cuda.synchronize()
        if name not in eager:
            replays[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(replays[name]):
                for _ in range(5):
                    function()
    print(flush=True)
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
    functions = {who: run for who, run in functions.items() if who not in os.environ.get("HANGS", "").split()}
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


# ---- processes ------------------------------------------------------------------------------------------------------


def in_process(
    names: list[str],
    limit: float,
    deadline: float,
    lines: Report,
    tool: list[str] | None = None,
    script: str = __file__,
) -> None:
    """Lines of the cases, kind:name; one that takes longer than ``limit`` seconds is left out, the rest go on anew."""
    attempts = 0
    environment = dict(os.environ, PYTHONPATH=f"{WORK / 'lib'}:{os.environ.get('PYTHONPATH', '')}")
    while names and attempts < 4 and time.time() < deadline:
        attempts += 1
        command = [*(tool or ()), sys.executable, script, "--child", *names]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        assert process.stdout is not None
        done, rest, begin = 0, b"", time.time()
        while time.time() < min(begin + (limit if done else limit + 10), deadline):  # torch starts
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
                elif not text.startswith("~ "):
                    lines.append("    | " + text)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # a tool's children too
        process.wait()
        if done < len(names):
            lines.append(f"LOST {names[done]} ({'exit ' + str(process.returncode)}) {rest.decode(errors='replace')}")
            if rest.startswith(b"~ "):
                environment["HANGS"] = environment.get("HANGS", "") + " " + rest.decode().split()[-1]
        names = names[done + 1 :] if done < len(names) else []


def racecheck() -> list[str]:
    return [shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer", "--tool", "racecheck"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="checks,times,stress,races", help="comma-separated kinds")
    parser.add_argument("--cases", default="", help="comma-separated names; all by default")
    parser.add_argument("--output", default=os.environ.get("OUT", str(WORK)))
    parser.add_argument("--seconds", type=float, default=60.0, help="room for all but races, which get 20 more")
    parser.add_argument("--child", nargs="+")
    arguments = parser.parse_args()
    if arguments.child:
        functions = {"checks": check, "stress": stressed, "times": timed, "races": once}
        for case in arguments.child:
            kind, name = case.split(":")
            print("RESULT " + json.dumps(functions[kind](name)), flush=True)
        return
    begin = time.time()
    lines = Report(Path(arguments.output) / "hopper_backward.txt")
    kinds = {"checks": CHECKS, "times": TIMES, "stress": STRESS, "races": RACES}
    asked = arguments.only.split(",")
    lines.append(build(set(asked)))
    chosen = [name for name in arguments.cases.split(",") if name]
    cases = [
        f"{kind}:{name}"
        for kind, names in kinds.items()
        for name in names
        if kind in asked and (not chosen or name in chosen)
    ]
    in_process([case for case in cases if not case.startswith("races")], 10.0, begin + arguments.seconds, lines)
    races = [case for case in cases if case.startswith("races")]
    in_process(races, 15.0, max(time.time(), begin + arguments.seconds) + 20, lines, racecheck())
    if any(line.startswith(("BAD", "LOST")) for line in lines):
        lines.append("FAILED")
    lines.append(f"{time.time() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
