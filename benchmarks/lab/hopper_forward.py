"""Which shapes Hopper's attention forward is fastest with: ``python benchmarks/lab/hopper_forward.py [--only TEXT]``.

With ``--short`` for heads of 64, bf16 and sequences of few tokens alone, with fewer checks.

Compiles the kernel for every shape of SHAPES (in parallel), checks each against the reference backend in fp64 in a
process of its own with a time limit, then times those that are right against cuDNN in the same run: replays of a CUDA
graph of several launches. Needs no build of the library: nvcc and torch are enough. Tables go to standard output, all
numbers to $OUT/hopper_forward.json.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import ctypes
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WORK = Path(tempfile.gettempdir()) / "hopper_forward"


def _import_fasttfm() -> None:
    """The package straight from the sources: its Python files are all that is needed."""
    package = WORK / "path" / "fasttfm"
    package.mkdir(parents=True, exist_ok=True)
    for source in [*(ROOT / "python" / "fasttfm").iterdir(), ROOT / "kernels"]:
        if not source.name.startswith("_C.") and not (package / source.name).exists():
            (package / source.name).symlink_to(source)
    sys.path.insert(0, str(package.parent))


@dataclass(frozen=True)
class Shape:
    D: int
    groups: int
    keys: int
    stages: int
    turns: bool = True
    dropout: bool = True  # whether registers suffice

    def __str__(self) -> str:
        return f"D{self.D} {64 * self.groups}x{self.keys} {self.stages} stages{' turns' if self.turns else ''}"

    @property
    def library(self) -> Path:
        return WORK / f"{str(self).replace(' ', '_')}.so"

    def takes(self, case: Case) -> bool:
        return self.D == case.D and (self.dropout or not case.p)


SHAPES = [
    Shape(64, 2, 128, 3),
    Shape(64, 3, 128, 3, dropout=False),
    Shape(64, 4, 64, 6, turns=False),
    Shape(64, 4, 64, 8, turns=False),
    Shape(128, 2, 128, 2),
    Shape(128, 3, 64, 3, turns=False),
]


HALF = (Shape(64, 4, 64, 8, turns=False), Shape(128, 2, 128, 2))  # which are compiled for fp16 too


# ---- building and calling --------------------------------------------------------------------------------------------


def compile_shape(shape: Shape, half: bool) -> str:
    definitions = [
        f"-DLAB_HEAD_DIM={shape.D}",
        f"-DLAB_GROUPS={shape.groups}",
        f"-DLAB_KEYS={shape.keys}",
        f"-DLAB_STAGES={shape.stages}",
        f"-DLAB_TURNS={str(shape.turns).lower()}",
        f"-DLAB_DROPOUT={str(shape.dropout).lower()}",
    ]
    if half:
        definitions.append("-DLAB_HALF")
    command = ["nvcc", "-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a", "-Xptxas=-v", "-shared"]
    command += ["-Xcompiler=-fPIC", *definitions, "-I", str(ROOT / "kernels"), "-o", str(shape.library)]
    result = subprocess.run(
        [*command, str(ROOT / "benchmarks/lab/hopper_forward.cu")], capture_output=True, text=True, timeout=100
    )
    output = result.stdout + result.stderr
    if result.returncode:
        return output[-2000:]
    spills = [line for line in output.splitlines() if "spill" in line and "0 bytes spill stores" not in line]
    return "; ".join(spills + [line for line in output.splitlines() if "C75" in line or "serialized" in line])


@dataclass(frozen=True)
class Mode:
    """How tiles are handed out: by a counter or dealt; heads that go together (0: a block has whole heads)."""

    dynamic: bool
    batched: int

    def __str__(self) -> str:
        return f"{'dynamic ' if self.dynamic else ''}b{self.batched}"


class Call(ctypes.Structure):
    """AttentionForward of kernels/attention/op.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v")),
        *((f"{name}_{axis}", ctypes.c_int64) for name in "qkv" for axis in ("sequence", "token", "head")),
        *((name, ctypes.c_void_p) for name in ("cu_seqlens", "cu_seqlens_k", "lengths", "lengths_k", "seed")),
        *((name, ctypes.c_int64) for name in ("sequences", "heads", "kv_heads", "head_dim", "queries", "keys")),
        *((name, ctypes.c_int64) for name in ("max_seqlen", "max_seqlen_k", "window_left", "window_right")),
        ("scale", ctypes.c_float),
        ("threshold", ctypes.c_int),
        ("dropout_scale", ctypes.c_float),
        ("dtype", ctypes.c_int),
        ("workspace", ctypes.c_void_p),
        ("threads", ctypes.c_int),
        ("device", ctypes.c_int),
        ("stream", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("lse", ctypes.c_void_p),
    ]


class Kernel:
    def __init__(self, shape: Shape) -> None:
        self.function = ctypes.CDLL(str(shape.library)).hopper_forward
        self.function.restype = ctypes.c_char_p
        self.function.argtypes = [ctypes.POINTER(Call), ctypes.c_int, ctypes.c_int, ctypes.c_int]

    def __call__(self, tensors: tuple[Any, ...], problem: Any, mode: Mode) -> None:
        import torch

        q, k, v, out, lse, counter = tensors
        address = lambda x: None if x is None else x.data_ptr()  # noqa: E731
        strides = [(0, *x.stride()[:2]) if x.dim() == 3 else x.stride()[:3] for x in (q, k, v)]
        call = Call(
            *(x.data_ptr() for x in (q, k, v)),
            *(stride for three in strides for stride in three),
            *(address(x) for x in (problem.cu_seqlens, problem.cu_seqlens_k, problem.lengths, problem.lengths_k)),
            address(problem.seed),
            problem.sequences,
            q.shape[-2],
            k.shape[-2],
            q.shape[-1],
            q.shape[-3],
            k.shape[-3],
            problem.max_seqlen,
            problem.max_seqlen_k,
            problem.window_left,
            problem.window_right,
            problem.scale,
            problem.threshold,
            problem.dropout_scale,
            {torch.bfloat16: 1, torch.float16: 2}[q.dtype],
            counter.data_ptr(),
            0,
            0,
            torch.cuda.current_stream().cuda_stream,
            out.data_ptr(),
            lse.data_ptr(),
        )
        multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
        error = self.function(ctypes.byref(call), multiprocessors, mode.dynamic, mode.batched)
        if error is not None:
            raise RuntimeError(error.decode())


# ---- inputs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    B: int
    S: int
    H: int
    D: int
    causal: bool = False
    p: float = 0.0
    layout: str = "dense"  # fused (slices of qkv), heads_first, lengths, packed
    Sk: int = 0
    Hk: int = 0
    dtype: str = "bfloat16"
    gain: float = 1.0

    def __str__(self) -> str:
        marks = [f"B{self.B} S{self.S}", f"Sk{self.Sk}" if self.Sk else "", f"H{self.H}"]
        marks += [f"Hk{self.Hk}" if self.Hk else "", f"D{self.D}", self.layout, "causal" if self.causal else ""]
        return " ".join(filter(None, [*marks, f"p{self.p}" if self.p else "", self.dtype[:4]]))

    def lengths(self) -> list[int]:
        if self.layout == "packed":
            least = self.S // 8
            return [least + (self.S - least) * (i * 37 % self.B) // max(self.B - 1, 1) for i in range(self.B)]
        return [self.S] * self.B

    @property
    def flops(self) -> float:
        return sum(4.0 * self.H * self.D * n * n for n in self.lengths()) * (0.5 if self.causal else 1)


def make(case: Case, poison: bool = False) -> tuple[Any, Any, Any, Any]:
    """q, k, v and the problem; with poison, NaN wherever nothing may be read."""
    import torch

    from fasttfm.kernels.attention.problem import UNLIMITED, AttentionProblem
    from fasttfm.kernels.common import philox

    B, S, H, D, Sk, Hk = case.B, case.S, case.H, case.D, case.Sk or case.S, case.Hk or case.H
    dtype = getattr(torch, case.dtype)

    def randn(*shape: int) -> Any:
        return (case.gain * torch.randn(*shape, device="cuda")).to(dtype)

    bounds = lengths = None
    if case.layout == "packed":
        sizes = case.lengths()
        if poison:
            sizes = [S // 3, 0, 1, S, 129, 64][: max(B, 2)]
        total = sum(sizes) + (37 if poison else 0)  # rows after the last sequence are nobody's
        bounds = torch.tensor([0, *torch.tensor(sizes).cumsum(0)], dtype=torch.int32, device="cuda")
        qkv = randn(total, 3, H, D)
        q, k, v = qkv.unbind(1)
        if Hk != H:
            k, v = randn(total, Hk, D), randn(total, Hk, D)
        B = len(sizes)
        if poison:
            k[sum(sizes[:4]) :], v[sum(sizes[:4]) :] = float("nan"), float("nan")  # the last sequences, and the rest
    elif case.layout == "fused":
        q, k, v = randn(B, S, 3, H, D).unbind(2)
    elif case.layout == "heads_first":
        q, k, v = (randn(B, heads, rows, D).transpose(1, 2) for heads, rows in ((H, S), (Hk, Sk), (Hk, Sk)))
    else:
        q, k, v = randn(B, S, H, D), randn(B, Sk, Hk, D), randn(B, Sk, Hk, D)
    if case.layout == "lengths":
        lengths = torch.tensor([(S * (2 * i + 1) // 3) % (S + 1) for i in range(B)], dtype=torch.int32, device="cuda")
        if poison:
            for x in (q, k, v):
                for i, length in enumerate(lengths.tolist()):
                    x[i, length:] = float("nan")
    threshold = philox.threshold(case.p)
    return (
        q,
        k,
        v,
        AttentionProblem(
            sequences=B,
            max_seqlen=S,
            max_seqlen_k=Sk,
            scale=D**-0.5,
            window_left=UNLIMITED,
            window_right=0 if case.causal else UNLIMITED,
            cu_seqlens=bounds,
            cu_seqlens_k=bounds,
            lengths=lengths,
            lengths_k=lengths,
            seed=torch.tensor([0x1234567887654321], device="cuda") if case.p else None,
            threshold=threshold,
            dropout_scale=philox.scale(threshold),
        ),
    )


def outputs(q: Any, problem: Any) -> tuple[Any, Any, Any]:
    import torch

    *leading, rows, heads, _ = q.shape
    out = torch.full(q.shape, float("nan"), dtype=q.dtype, device="cuda")
    lse = torch.full((*leading, heads, rows), float("nan"), device="cuda")
    return out, lse, torch.full((1,), 12345, dtype=torch.int32, device="cuda")


# ---- checks ----------------------------------------------------------------------------------------------------------


def check_cases(D: int, short: bool) -> list[Case]:
    cases = []
    for causal in (False, True):
        for p in (0.0, 0.1):
            cases += [
                Case(2, 256, 3, D, causal, p),
                Case(2, 200, 2, D, causal, p, "fused"),
                Case(5, 300, 2, D, causal, p, "lengths"),
                Case(6, 256, 2, D, causal, p, "packed"),
                Case(6, 512, 2, D, causal, p, "packed"),
            ]
        cases += [
            Case(2, 1, 2, D, causal),
            Case(40, 64, 16, D, causal, 0.0, "fused"),
            Case(2, 70, 2, D, causal, 0.0, Sk=333),
            Case(2, 333, 2, D, causal, 0.7, Sk=70),
            Case(9, 1000, 16, D, causal, 0.0, Sk=250),
            Case(40, 30, 16, D, causal, 0.0, Sk=256),
            Case(40, 128, 16, D, causal, 0.0, "lengths"),
            Case(2, 192, 8, D, causal, 0.0, "heads_first", Hk=2),
            Case(6, 512, 4, D, causal, 0.1, "packed", Hk=2),
            Case(6, 256, 4, D, causal, 0.0, "packed", Hk=2),
            Case(4, 1024, 16, D, causal, gain=4.0),
            Case(16, 256, 16, D, causal, gain=4.0),
            Case(6, 300, 2, D, causal, 0.1, "packed", dtype="float16"),
            Case(6, 256, 2, D, causal, 0.0, "packed", dtype="float16"),
            Case(40, 128, 16, D, causal, 0.1),
            Case(48, 256, 12, D, causal),
            Case(20, 320, 12, D, causal, 0.5),
        ]
    if short:
        cases = [case for case in cases if case.dtype == "bfloat16" and case.S < 1000]
    return cases


def load_cases(shape: Shape) -> list[Case]:
    """Enough work for all multiprocessors, again and again."""
    p = 0.1 if shape.dropout else 0.0
    sizes = (
        (40, 512, True, "packed"),
        (24, 500, False, "dense"),
        (160, 256, True, "packed"),
        (200, 128, False, "fused"),
    )
    return [Case(B, S, 16, shape.D, causal, p, layout) for B, S, causal, layout in sizes]


def check(shape: Shape, short: bool) -> list[str]:
    """Complaints about a shape; runs in its own process."""
    _import_fasttfm()
    import torch

    from fasttfm.kernels.attention import reference

    torch.manual_seed(0)
    kernel, complaints = Kernel(shape), []
    for case in check_cases(shape.D, short):
        if not shape.takes(case) or (case.dtype == "float16" and shape not in HALF):
            continue
        q, k, v, problem = make(case, poison=True)
        expected, expected_lse = reference.attention_forward(q.double(), k.double(), v.double(), problem)
        static = [Mode(False, 1)] if case.layout == "packed" else [Mode(False, 0), Mode(False, 3)]
        for mode in (*static, Mode(True, 2)):
            out, lse, counter = outputs(q, problem)
            kernel((q, k, v, out, lse, counter), problem, mode)
            torch.cuda.synchronize()
            rows = slice(None)
            if case.layout == "packed":  # the sequences whose keys are numbers; and the rows after the last one
                first, end = int(problem.cu_seqlens[4]), int(problem.cu_seqlens[-1])
                rows = torch.cat([torch.arange(first), torch.arange(end, len(q))]).cuda()
            got, wanted = out[rows].double(), expected[rows]
            error = float((got - wanted).norm() / wanted.norm().clamp(min=1e-30))
            got_lse, wanted_lse = (x[:, rows] if case.layout == "packed" else x for x in (lse.double(), expected_lse))
            same = (got_lse == wanted_lse) | ((got_lse - wanted_lse).abs() < 2e-3 * wanted_lse.abs().clamp(min=1.0))
            if not error < (6e-3 if q.dtype == torch.bfloat16 else 1e-3) or not bool(same.all()):
                bad = (~((got - wanted).abs() < 0.05 + 0.05 * wanted.abs())).nonzero()
                complaints.append(f"{case} {mode}: error {error:.2e}, lse {bool(same.all())}, {bad[:2].tolist()}")
    for case in load_cases(shape):
        q, k, v, problem = make(case)
        expected, _ = reference.attention_forward(q.double(), k.double(), v.double(), problem)
        first = None
        for i in range(40):
            out, lse, counter = outputs(q, problem)
            kernel((q, k, v, out, lse, counter), problem, Mode(case.layout == "packed" or i % 2 == 0, 1 + i % 3))
            bits = (out.view(torch.int16), lse.view(torch.int32))
            if first is None:
                error = float((out.double() - expected).norm() / expected.norm())
                if not error < 6e-3:
                    complaints.append(f"{case}: error {error:.2e}")
            elif not all(torch.equal(a, b) for a, b in zip(bits, first, strict=True)):
                complaints.append(f"{case}: not the same bits every time")
                break
            first = bits
    return complaints


def check_apart(shape: Shape, short: bool, seconds: float) -> str:
    """``ok``, or what is wrong, of a process that may hang or die."""
    command = [sys.executable, __file__, "--check", json.dumps(shape.__dict__), *(["--short"] if short else [])]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"hangs (no answer in {seconds:.0f} s)"
    return result.stdout.strip() if result.returncode == 0 else f"died: {result.stderr[-600:]}"


# ---- times -----------------------------------------------------------------------------------------------------------


def time_us(function: Any, replays: int = 5) -> float:
    import torch

    function()
    torch.cuda.synchronize()
    started = time.perf_counter()
    function()
    torch.cuda.synchronize()
    launches = 8 if time.perf_counter() - started < 8e-4 else 2
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            function()
    times = []
    graph.replay()
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / launches)
    return sorted(times)[len(times) // 2]


def cudnn_us(q: Any, k: Any, v: Any, case: Case, _: Any) -> float:
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if case.layout == "packed":
        return math.nan
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return time_us(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=case.causal, dropout_p=case.p))


def triton_us(q: Any, k: Any, v: Any, _: Case, problem: Any) -> float:
    from fasttfm.kernels.attention.triton import attention_fwd_triton

    return time_us(lambda: attention_fwd_triton(q, k, v, problem))


KINDS = ((False, 0.0), (False, 0.1), (True, 0.0))  # causal, p


def timing_cases(short: bool) -> list[Case]:
    cases = []
    for D in (64, 128):
        H = 1024 // D
        if short:
            cases += [Case(16384 // S, S, H, D) for S in (64, 192, 384)]
            cases += [Case(B, S, H, D) for S in (128, 256, 512) for B in (4, 8)]  # few heads
            cases += [Case(16384 // S, S, H, D, causal, p) for S in (128, 256, 512, 1024, 2048) for causal, p in KINDS]
            cases += [Case(B, S, H, D, causal, p, "packed") for B, S in ((114, 256), (64, 512)) for causal, p in KINDS]
            return [*cases, Case(64, 512, H, D, p=0.1), Case(4, 4096, H, D)]
        for causal, p in KINDS:
            cases += [Case(16384 // S, S, H, D, causal, p) for S in (128, 256, 512, 1024, 2048, 16384)]
            cases.append(Case(64, 512, H, D, causal, p, layout="packed"))
    return cases


def modes(case: Case) -> list[Mode]:
    cached = max((16 << 20) // (4 * case.D * case.S), 1)
    if case.layout == "packed":
        return [Mode(True, 1), Mode(False, 1)]
    if case.causal:
        return [Mode(True, cached), *([Mode(False, cached)] if case.S <= 1024 else [])]
    return [Mode(False, 4)]


def time_all(cases: list[Case], shapes: list[Shape], peers: dict[str, Any], deadline: float) -> list[dict[str, Any]]:
    import torch

    rows = []
    kernels = {shape: Kernel(shape) for shape in shapes}
    for case in cases:
        if time.time() > deadline:
            print("out of time before", case)
            break
        q, k, v, problem = make(case)
        tensors = (q, k, v, *outputs(q, problem))
        row: dict[str, Any] = {"case": str(case), "flops": case.flops}
        for name, peer in peers.items():
            try:
                row[name] = peer(q, k, v, case, problem)
            except Exception as error:  # a peer that is not there
                row[name] = math.nan
                print(f"{name}, {case}: {repr(error)[:200]}")
        for shape, kernel in kernels.items():
            if not shape.takes(case):
                continue
            for mode in modes(case):
                row[f"{shape} {mode}"] = time_us(lambda: kernel(tensors, problem, mode))  # noqa: B023
        rows.append(row)
        print_row(row)
        torch.cuda.empty_cache()
    return rows


def print_row(row: dict[str, Any]) -> None:
    names = sorted((name for name in row if name not in ("case", "flops")), key=lambda name: row[name])
    fastest = next((name for name in names if name.startswith("D")), None)
    rate = f"{row['flops'] / row[fastest] * 1e-6:.0f} TFLOP/s" if fastest else ""
    times = "; ".join(f"{name[name.startswith('D') * 4 :]} {row[name]:.1f}" for name in names)
    print(f"{row['case']}: {rate} | us: {times}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("--check", default="", help="a shape as JSON: check it and say ok")
    parser.add_argument("--short", action="store_true", help="heads of 64 and few tokens alone, in half a minute")
    parser.add_argument("--triton", action="store_true", help="time the Triton kernels too: compiling them takes long")
    parser.add_argument("--seconds", type=float, default=115.0, help="stop timing after this")
    arguments = parser.parse_args()
    start = time.time()
    WORK.mkdir(exist_ok=True)
    if arguments.check:
        print("; ".join(check(Shape(**json.loads(arguments.check)), arguments.short)) or "ok")
        return
    _import_fasttfm()
    shapes = [shape for shape in SHAPES if arguments.only in str(shape)]
    if arguments.short:
        shapes = [shape for shape in shapes if shape.D == 64]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        for shape, complaint in zip(
            shapes,
            pool.map(lambda shape: compile_shape(shape, shape in HALF and not arguments.short), shapes),
            strict=True,
        ):
            if complaint:
                print(f"compile {shape}: {complaint}")
    print(f"compiled after {time.time() - start:.0f} s", flush=True)
    built = [shape for shape in shapes if shape.library.exists()]
    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        verdicts = list(pool.map(lambda shape: check_apart(shape, arguments.short, 28.0), built))
    for shape, verdict in zip(built, verdicts, strict=True):
        print(f"check {shape}: {verdict[:1500]}")
    print(f"checked after {time.time() - start:.0f} s", flush=True)
    right = [shape for shape, verdict in zip(built, verdicts, strict=True) if verdict == "ok"]
    peers = {"cudnn": cudnn_us} | ({"triton": triton_us} if arguments.triton else {})
    rows = time_all(timing_cases(arguments.short), right, peers, start + arguments.seconds)
    results = Path(os.environ.get("OUT", ".")) / "hopper_forward.json"
    results.write_text(
        json.dumps({"rows": rows, "verdicts": {str(s): v for s, v in zip(built, verdicts, strict=True)}})
    )
    print(f"timed after {time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
