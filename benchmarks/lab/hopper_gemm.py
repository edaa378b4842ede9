"""Which shapes Hopper's product with an activation is fastest with: ``python benchmarks/lab/hopper_gemm.py``.

Compiles kernels/gelu_product/cuda_product.cuh for every variant of VARIANTS (in parallel), checks each against fp64 in
a process of its own with a time limit, then times those that are right, with either tensor kept for the backward,
against the vendor's product with bias_gelu's pass behind it, in the same run: replays of CUDA graphs under lasting
load, in turns. Needs nvcc and torch. The table goes to standard output and to $OUT/hopper_gemm.txt.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import ctypes
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WORK = Path(tempfile.gettempdir()) / "hopper_gemm"
HEADER = ROOT / "kernels" / "gelu_product" / "cuda_product.cuh"
DEVICE = "cuda"

Edits = tuple[tuple[str, str], ...]  # of the header: what stands there, and what in its place

# What is left out to see what it costs; results are wrong then.
NO_STORES: Edits = (("setp.ne.b32 p, %0, 0; @p st.global", "setp.gt.s32 p, %0, 1; @p st.global"),)
NO_LOADS: Edits = (("setp.ne.b32 p, %4, 0; mov.b32", "setp.gt.s32 p, %4, 1; mov.b32"),)
NO_ACTIVATION: Edits = (("activated<A, false>", "activated<Activation::relu, false>"),)
NO_EPILOGUE: Edits = (("part < parts; ++part", "part < p.columns / (1 << 30); ++part"),)
# Tiles at the ends of rows as wide as all others; those of the last round not shared.
NOT_NARROWER: Edits = (
    ("first < p.whole ? S::kParts : S::kParts / p.split;", "S::kParts;"),
    ("return min(width, (p.columns - column + kTileColumns - 1) / kTileColumns);", "return width;"),
    ("(tiles - p.whole) * split <= clusters", "false"),
)
FIXED: Edits = (("own + 1 == clusters ? 0 : own + 1", "own"),)  # places of clusters within a round


@dataclass(frozen=True)
class Variant:
    columns: int
    stages: int
    cluster: int
    epilogues: int
    edits: Edits = ()
    note: str = ""

    @property
    def right(self) -> bool:
        """Whether its results are to be."""
        return not self.note.startswith("without")

    def __str__(self) -> str:
        name = f"128x{self.columns} {self.stages} stages cluster {self.cluster} epilogue {self.epilogues} {self.note}"
        return name.strip()

    @property
    def folder(self) -> Path:
        return WORK / str(self).replace(" ", "_").replace(",", "")  # nvcc splits paths at commas

    @property
    def library(self) -> Path:
        return self.folder / "product.so"


WAYS = ((NOT_NARROWER, "wide"), (FIXED, "fixed"), ((*NOT_NARROWER, *FIXED), "wide, fixed"))
LIGHT = [  # for the backward of the derivative alone
    *(Variant(*shape) for shape in ((192, 4, 2, 3), (128, 5, 2, 3))),
    *(Variant(*shape, *WAYS[2]) for shape in ((128, 5, 2, 7), (256, 3, 2, 3))),
]
VARIANTS = [
    *(Variant(*shape) for shape in ((192, 4, 2, 7), (128, 5, 2, 7), (256, 3, 2, 3))),
    *(Variant(192, 4, 2, 7, *ways) for ways in WAYS),
    *LIGHT,
]
WITHOUT = [  # --without: what each part of the epilogue costs
    Variant(256, 3, 2, 3, edits, f"without {name}")
    for name, edits in (
        ("stores", NO_STORES),
        ("activation", NO_ACTIVATION),
        ("loads, activation and stores", (*NO_ACTIVATION, *NO_STORES, *NO_LOADS)),
        ("epilogue", NO_EPILOGUE),
    )
]


BRIEF = {
    *(
        f"{Variant(192, 4, 2, 7, *ways)}: {form}"
        for ways in ((), *WAYS)
        for form in ("a and h", "a and derivative", "of the derivative")
    ),
    *(f"{Variant(128, 5, 2, 7, *ways)}: of h, a again" for ways in ((), WAYS[2])),
}


# ---- building and calling --------------------------------------------------------------------------------------------


def compile_variant(variant: Variant) -> str:
    """What the compiler complains about."""
    copy = variant.folder / "gelu_product" / HEADER.name
    copy.parent.mkdir(parents=True, exist_ok=True)
    text = HEADER.read_text()
    for old, new in variant.edits:
        if old not in text:
            return f"nothing to edit: {old}"
        text = text.replace(old, new)
    copy.write_text(text)
    definitions = [
        f"-DLAB_COLUMNS={variant.columns}",
        f"-DLAB_STAGES={variant.stages}",
        f"-DLAB_CLUSTER={variant.cluster}",
        f"-DLAB_EPILOGUES={variant.epilogues}",
    ]
    command = ["nvcc", "-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a", "-Xptxas=-v", "-shared"]
    command += ["-Xcompiler=-fPIC", "-I", str(variant.folder), "-I", str(ROOT / "kernels"), *definitions]
    command += ["-o", str(variant.library), str(ROOT / "benchmarks/lab/hopper_gemm.cu")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    output = result.stdout + result.stderr
    if result.returncode:
        return output[-2000:]
    lines = output.splitlines()
    spills = [line.strip() for line in lines if "spill" in line and "0 bytes spill stores" not in line]
    return "; ".join(spills + [line for line in lines if "C75" in line or "serialized" in line])


class Operands(ctypes.Structure):
    """ProductOperands of cuda_product.cuh."""

    _fields_ = [
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("a_stride", ctypes.c_int64),
        ("inner", ctypes.c_int64),
        ("dtype", ctypes.c_int),
        ("device", ctypes.c_int),
        ("stream", ctypes.c_void_p),
    ]


class Params(ctypes.Structure):
    """ProductParams of cuda_product.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("bias", "kept", "product", "activation", "sums")),
        *(
            (name, ctypes.c_int)
            for name in ("rows", "columns", "steps", "column_tiles", "turns", "whole", "split", "bias_dtype")
        ),
    ]


class Kernel:
    def __init__(self, variant: Variant) -> None:
        import torch

        self.library = ctypes.CDLL(str(variant.library))
        self.function = self.library.hopper_gemm
        self.function.restype = ctypes.c_char_p
        self.function.argtypes = [ctypes.POINTER(Operands), ctypes.POINTER(Params), ctypes.c_int, ctypes.c_int]
        self.multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count

    def _call(self, a: Any, b: Any, params: Params, form: int) -> None:
        import torch

        stream = torch.cuda.current_stream().cuda_stream
        operands = Operands(a.data_ptr(), b.data_ptr(), a.stride(0), a.shape[1], _code(a), 0, stream)
        error = self.function(ctypes.byref(operands), ctypes.byref(params), form, self.multiprocessors)
        if error is not None:
            raise RuntimeError(error.decode())

    def forward(self, x: Any, w: Any, bias: Any, kept: Any, a: Any, derivative: bool = False) -> None:
        """Writes a and, as what is kept, h or the activation's derivative."""
        params = Params(_address(bias), None, _address(kept), a.data_ptr(), None, x.shape[0], w.shape[0])
        params.bias_dtype = _code(bias)
        self._call(x, w, params, int(derivative))

    def backward(self, dy: Any, w: Any, bias: Any, kept: Any, dh: Any, a: Any, sums: Any) -> None:
        """Out of h."""
        params = Params(*(_address(t) for t in (bias, kept, dh, a, sums)), dy.shape[0], w.shape[1])
        params.bias_dtype = _code(bias)
        self._call(dy, w, params, 2)

    def backward_kept(self, dy: Any, w: Any, derivative: Any, dh: Any, sums: Any) -> None:
        params = Params(*(_address(t) for t in (None, derivative, dh, None, sums)), dy.shape[0], w.shape[1])
        self._call(dy, w, params, 3)


def _address(tensor: Any) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _code(tensor: Any) -> int:
    return 0 if tensor is None else {"torch.float32": 0, "torch.bfloat16": 1, "torch.float16": 2}[str(tensor.dtype)]


# ---- checks ----------------------------------------------------------------------------------------------------------

GUARD = 64  # rows behind a result, which must stay as they are
SENTINEL = 12345.0


def guarded(rows: int, columns: int, dtype: Any) -> Any:
    import torch

    return torch.full((rows + GUARD, columns), SENTINEL, dtype=dtype, device=DEVICE)


def inner_gradient(u: Any) -> tuple[Any, Any]:
    """gelu(u) and its derivative."""
    import torch

    u = u.detach().requires_grad_()
    y = torch.nn.functional.gelu(u)
    return y.detach(), torch.autograd.grad(y.sum(), u)[0]


def wrong(name: str, got: Any, expected: Any, dtype: Any, slack: float = 1.0) -> str:
    """A complaint if an element is off by more than a few roundings."""
    import torch

    unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    scale = float(expected.double().square().mean().sqrt()) + 1e-30
    error = (got.double() - expected.double()).abs() / (expected.double().abs() + 0.25 * scale)
    worst = float(error.nan_to_num(nan=1e30).max())
    if worst <= 3 * unit * slack:
        return ""
    bad = (~(error <= 3 * unit * slack)).nonzero()
    return f"{name}: {worst:.1e} at {bad[0].tolist()} .. {bad[-1].tolist()}, {len(bad)} of {error.numel()}"


def check_case(kernel: Kernel, T: int, C: int, I: int) -> list[str]:
    import torch

    dtype = torch.bfloat16

    def randn(*shape: int, gain: float = 1.0) -> Any:
        return (gain * torch.randn(*shape, device=DEVICE)).to(dtype)

    x, w = randn(T, C), randn(I, C, gain=C**-0.5)
    bias = randn(I).float()
    h, a = guarded(T, I, dtype), guarded(T, I, dtype)
    kernel.forward(x, w, bias, h, a)
    torch.cuda.synchronize()
    shift = bias.double()
    found = [
        wrong("h", h[:T], x.double() @ w.double().t(), dtype),
        wrong("a", a[:T], inner_gradient(h[:T].double() + shift)[0], dtype),
    ]
    dy, w2 = randn(T, C), randn(C, I, gain=C**-0.5)
    dh, again = guarded(T, I, dtype), guarded(T, I, dtype)
    tiles = -(-T // 128)
    sums = torch.full((tiles + 1, I), SENTINEL, device=DEVICE)
    kernel.backward(dy, w2, bias, h, dh, again, sums)
    torch.cuda.synchronize()
    y, slope = inner_gradient(h[:T].double() + shift)
    exact = (dy.double() @ w2.double()) * slope
    total = sums[:tiles].double().sum(0)
    found += [
        wrong("dh", dh[:T], exact, dtype),
        wrong("a again", again[:T], y, dtype),
        wrong("dbias", total, exact.sum(0), dtype, slack=5.0),
    ]
    slope_kept, same, scaled = guarded(T, I, dtype), guarded(T, I, dtype), guarded(T, I, dtype)
    kernel.forward(x, w, bias, slope_kept, same, True)
    other_sums = torch.full((tiles + 1, I), SENTINEL, device=DEVICE)
    kernel.backward_kept(dy, w2, slope_kept, scaled, other_sums)
    torch.cuda.synchronize()
    exact = (dy.double() @ w2.double()) * slope_kept[:T].double()
    found += [
        wrong("derivative", slope_kept[:T], slope, dtype),
        wrong("dh of the derivative", scaled[:T], exact, dtype),
        wrong("dbias of the derivative", other_sums[:tiles].double().sum(0), exact.sum(0), dtype, slack=5.0),
    ]
    if not torch.equal(same, a):
        found.append("another a beside the derivative")
    written = {"h": h, "a": a, "dh": dh, "a again": again, "derivative": slope_kept, "dh of the derivative": scaled}
    for name, tensor in written.items():
        if not bool((tensor[T:] == tensor.new_tensor(SENTINEL)).all()):
            found.append(f"{name}: written behind its end")
    if not bool((sums[tiles:] == SENTINEL).all()) or not bool((other_sums[tiles:] == SENTINEL).all()):
        found.append("sums: written behind their end")
    only = guarded(T, I, dtype)
    kernel.forward(x, w, bias, None, only)
    other = guarded(T, I, dtype)
    kernel.backward(dy, w2, bias, h, other, None, None)
    if not torch.equal(only, a) or not torch.equal(other, dh):
        found.append("other results when less is wanted")
    label = f"T{T} C{C} I{I}"
    return [f"{label}: {complaint}" for complaint in found if complaint]


def check(variant: Variant) -> list[str]:
    """Complaints about a variant; runs in its own process."""
    import torch

    torch.manual_seed(0)
    kernel = Kernel(variant)
    complaints = []
    cases = [(256, 64, 256), (128, 1024, 512), (1, 72, 8), (300, 200, 392), (777, 768, 3072), (4200, 1024, 4096)]
    for T, C, I in cases:
        complaints += check_case(kernel, T, C, I)
    T, C, I = 18400, 768, 3072
    x, w, bias = (torch.randn(s, device=DEVICE).bfloat16() for s in ((T, C), (I, C), (I,)))
    dy, w2 = torch.randn(T, C, device=DEVICE).bfloat16(), torch.randn(C, I, device=DEVICE).bfloat16()
    first = None
    for _ in range(15):
        results = [torch.empty(T, I, dtype=x.dtype, device=DEVICE) for _ in range(7)]
        sums = [torch.empty(-(-T // 128), I, device=DEVICE) for _ in range(2)]
        kernel.forward(x, w, bias, *results[:2])
        kernel.backward(dy, w2, bias, results[0], *results[2:4], sums[0])
        kernel.forward(x, w, bias, *results[4:6], True)
        kernel.backward_kept(dy, w2, results[4], results[6], sums[1])
        bits = [*(r.view(torch.int16) for r in results), *(s.view(torch.int32) for s in sums)]
        if first is not None and not all(torch.equal(a, b) for a, b in zip(bits, first, strict=True)):
            complaints.append("not the same bits every time")
            break
        first = bits
    return complaints


def check_apart(variant: Variant, seconds: float) -> str:
    """``ok``, or what is wrong, of a process that may hang or die."""
    command = [sys.executable, __file__, "--check", str(variant)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"hangs (no answer in {seconds:.0f} s)"
    return result.stdout.strip() if result.returncode == 0 else f"died: {result.stderr[-600:]}"


# ---- times -----------------------------------------------------------------------------------------------------------

LAUNCHES = 10  # in a graph
SHAPES = [(32768, 1024, 4096), (18350, 1024, 4096), (32768, 768, 3072)]


class ForwardPass(ctypes.Structure):
    """BiasGeluForward of kernels/bias_gelu/op.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "bias", "y")),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "x_stride")),
        *((name, ctypes.c_int) for name in ("activation", "dtype", "bias_dtype", "threads", "device")),
        ("stream", ctypes.c_void_p),
    ]


class BackwardPass(ctypes.Structure):
    """BiasGeluBackward of kernels/bias_gelu/op.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("dy", "x", "bias", "dx", "y", "dbias", "workspace")),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "x_stride")),
        *((name, ctypes.c_int) for name in ("activation", "dtype", "bias_dtype", "threads", "parts", "device")),
        ("stream", ctypes.c_void_p),
    ]


PASS = WORK / "pass.so"


def compile_pass() -> str:
    command = ["nvcc", "-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a", "-shared", "-Xcompiler=-fPIC"]
    command += ["-DLAB_PASS", "-I", str(ROOT / "kernels"), "-o", str(PASS), str(ROOT / "benchmarks/lab/hopper_gemm.cu")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    return (result.stdout + result.stderr)[-2000:] if result.returncode else ""


class Pass:
    """bias_gelu's own CUDA kernels."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(str(PASS))

    def forward(self, h: Any, bias: Any, a: Any) -> None:
        import torch

        call = ForwardPass(h.data_ptr(), bias.data_ptr(), a.data_ptr(), *h.shape, h.stride(0), 0, _code(h), _code(bias))
        call.stream = torch.cuda.current_stream().cuda_stream
        self.library.bias_gelu_forward_pass(ctypes.byref(call))

    def backward(self, da: Any, h: Any, bias: Any, dh: Any, a: Any, dbias: Any, workspace: Any) -> None:
        import torch

        tensors = (da, h, bias, dh, a, dbias, workspace)
        call = BackwardPass(*(t.data_ptr() for t in tensors), *h.shape, h.stride(0), 0, _code(h), _code(bias))
        call.parts, call.stream = workspace.shape[0], torch.cuda.current_stream().cuda_stream
        self.library.bias_gelu_backward_pass(ctypes.byref(call))


def graph_of(function: Callable[[], Any], launches: int) -> Any:
    import torch

    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            function()
    graph.replay()
    return graph


def lasting_us(calls: dict[str, Callable[[], Any]], rounds: int = 3) -> dict[str, list[float]]:
    """Under lasting load, where the chip's power sets its clock; the calls take turns, sorted."""
    import torch

    graphs = {name: graph_of(function, LAUNCHES) for name, function in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        for name, graph in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            for _ in range(8):  # until the clock is this call's
                graph.replay()
            start.record()
            for _ in range(12):
                graph.replay()
            end.record()
            if number == 0 and name == next(iter(graphs)):
                print(f"{name}: {chip()}", flush=True)
            end.synchronize()
            times[name].append(1e3 * start.elapsed_time(end) / (12 * LAUNCHES))
    return {name: sorted(found) for name, found in times.items()}


def calls_of(T: int, C: int, I: int, kernels: dict[str, Kernel], own: Pass) -> dict[str, dict[str, Callable[[], Any]]]:
    """What is timed in each direction."""
    import torch

    x, dy = (torch.randn(T, C, device=DEVICE).bfloat16() for _ in range(2))
    w = (torch.randn(I, C, device=DEVICE) * C**-0.5).bfloat16()
    bias, dbias, w2 = torch.randn(I, device=DEVICE), torch.empty(I, device=DEVICE), w.t().contiguous()
    h, derivative, a, dh, da = (torch.empty(T, I, dtype=x.dtype, device=DEVICE) for _ in range(5))
    sums = torch.empty(-(-T // 128), I, device=DEVICE)
    workspace = torch.empty(4 * 132 // (I // 256), I, device=DEVICE)
    torch.mm(x, w.t(), out=h)
    derivative.copy_(inner_gradient(h.float() + bias)[1])

    forward: dict[str, Callable[[], Any]] = {
        "vendor's product": partial(torch.mm, x, w.t(), out=h),
        "product, pass": lambda: (torch.mm(x, w.t(), out=h), own.forward(h, bias, a)),
    }
    backward: dict[str, Callable[[], Any]] = {
        "vendor's product": partial(torch.mm, dy, w2, out=da),
        "product, pass": lambda: (
            torch.mm(dy, w2, out=da),
            own.backward(da, h, bias, dh, a, dbias, workspace),
        ),
    }
    for name, kernel in kernels.items():
        backward[f"{name}: of the derivative"] = partial(kernel.backward_kept, dy, w2, derivative, dh, sums)
        forward[f"{name}: a and h"] = partial(kernel.forward, x, w, bias, h, a)
        forward[f"{name}: a and derivative"] = partial(kernel.forward, x, w, bias, derivative, a, True)
        backward[f"{name}: of h, a again"] = partial(kernel.backward, dy, w2, bias, h, dh, a, sums)
        backward[f"{name}: of h"] = partial(kernel.backward, dy, w2, bias, h, dh, None, sums)
    return {"backward": backward, "forward": forward}


def is_timed(name: str, brief: bool) -> bool:
    variant, _, form = name.partition(": ")
    if not form:
        return True
    if brief:
        return name in BRIEF
    return form == "of the derivative" or variant not in map(str, LIGHT)


def chip() -> str:
    """Clock, power, its limit and what slows the chip down, now."""
    fields = "clocks.sm,power.draw,power.limit,temperature.gpu,clocks_throttle_reasons.active"
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True).stdout.strip()


def time_all(names: list[str], shapes: int, brief: bool) -> None:
    import torch

    torch.manual_seed(0)
    kernels = {name: Kernel(variant) for variant in (*VARIANTS, *WITHOUT) if (name := str(variant)) in names}
    own = Pass()
    for T, C, I in SHAPES[:shapes]:
        for direction, calls in calls_of(T, C, I, kernels, own).items():
            timed = {name: call for name, call in calls.items() if is_timed(name, brief)}
            for name, found in lasting_us(timed).items():
                median = found[len(found) // 2]
                rate = 2e-6 * T * C * I / median
                spread = f"{found[0]:.1f} to {found[-1]:.1f}"
                print(f"T{T} C{C} {direction}: {name}: {median:.1f} us ({spread}), {rate:.0f} TFLOP/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", default="", help="a variant's name: check it and say ok")
    parser.add_argument("--time", nargs="*", help="variants' names: time these")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="how many of SHAPES are timed")
    parser.add_argument("--brief", action="store_true", help="time what a choice is to be made of, without checks")
    parser.add_argument("--build", action="store_true", help="compile only")
    parser.add_argument("--without", action="store_true", help="also time kernels that leave work out")
    parser.add_argument("--jobs", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=65.0, help="when the last timing is broken off")
    arguments = parser.parse_args()
    if arguments.check:
        variant = next(variant for variant in VARIANTS if str(variant) == arguments.check)
        print("\n    ".join(check(variant)) or "ok")
        return
    if arguments.time is not None:
        time_all(arguments.time, arguments.shapes, arguments.brief)
        return
    start = time.time()
    WORK.mkdir(exist_ok=True)
    results = Path(os.environ.get("OUT", str(WORK))) / "hopper_gemm.txt"

    def say(text: str) -> None:
        print(text, flush=True)
        with results.open("a") as file:
            file.write(text + "\n")

    variants = [*VARIANTS, *(WITHOUT if arguments.without else [])]
    brief = ["--brief"] if arguments.brief else []
    if brief:
        variants = [variant for variant in VARIANTS if any(name.startswith(f"{variant}: ") for name in BRIEF)]
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        own = pool.submit(compile_pass)
        for variant, complaint in zip(variants, pool.map(compile_variant, variants), strict=True):
            if complaint:
                say(f"compile {variant}: {complaint}")
    if own.result():
        say(f"compile the pass: {own.result()}")
    say(f"compiled after {time.time() - start:.0f} s")
    if arguments.build:
        return
    built = [variant for variant in variants if variant.library.exists()]
    checked = [variant for variant in built if variant.right and not brief]
    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        verdicts = list(pool.map(lambda variant: check_apart(variant, 20.0), checked))
    for variant, verdict in zip(checked, verdicts, strict=True):
        say(f"check {variant}: {verdict[:1200]}")
    say(f"checked after {time.time() - start:.0f} s")
    right = [str(variant) for variant, verdict in zip(checked, verdicts, strict=True) if verdict == "ok"]
    right += [str(variant) for variant in built if variant not in checked]
    timing = subprocess.Popen(
        [sys.executable, __file__, f"--shapes={arguments.shapes}", *brief, "--time", *right],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert timing.stdout is not None
    limit = concurrent.futures.ThreadPoolExecutor(1)
    limit.submit(lambda: timing.wait(max(5.0, arguments.seconds - (time.time() - start)))).add_done_callback(
        lambda _: timing.kill()
    )
    for line in timing.stdout:
        say(line.rstrip())
    say(f"timed after {time.time() - start:.0f} s")
    limit.shutdown()


if __name__ == "__main__":
    main()
