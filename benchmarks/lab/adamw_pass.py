"""AdamW's step over all of BERT-large's parameters beside torch's: ``python benchmarks/lab/adamw_pass.py``.

Compiles kernels/adamw/cuda.cu for every variant of VARIANTS (in parallel), checks each against fp64 in a process with a
time limit, and times it by replays of a CUDA graph: the step alone, with 16-bit copies, with clipping, with both, and
the norm alone. torch's fused AdamW, ``clip_grad_norm_`` and the casts of all matrices to bf16 are timed in the same
way. Needs nvcc and torch. The table goes to standard output and to $OUT/adamw_pass.txt.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import ctypes
import functools
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WORK = Path(tempfile.gettempdir()) / "adamw_pass"
RATE, BETAS, EPSILON, DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.01

# What is changed in the sources.
VARIANTS: dict[str, tuple[tuple[str, str], ...]] = {
    "main": (),
    "chunks of 65536": (("kAdamWChunk = 16384", "kAdamWChunk = 65536"),),
    "1 place, 4 blocks": (("kDeep = 2;", "kDeep = 1;"), ("(kThreads, 3) update_kernel", "(kThreads, 4) update_kernel")),
    "4 places, 2 blocks": (
        ("kDeep = 2;", "kDeep = 4;"),
        ("(kThreads, 3) update_kernel", "(kThreads, 2) update_kernel"),
    ),
    "streaming hints": (
        ("*reinterpret_cast<const float4*>(from)", "__ldcs(reinterpret_cast<const float4*>(from))"),
        ("*reinterpret_cast<const uint2*>(from)", "__ldcs(reinterpret_cast<const uint2*>(from))"),
        (
            "*reinterpret_cast<float4*>(to) = make_float4(from[0], from[1], from[2], from[3])",
            "__stcs(reinterpret_cast<float4*>(to), make_float4(from[0], from[1], from[2], from[3]))",
        ),
    ),
    "IEEE root and quotient": (("__fdividef(m, ", "__fdiv_rn(m, "), ("square_root(v)", "sqrtf(v)")),
}


def folder(variant: str) -> Path:
    return WORK / variant.replace(" ", "_").replace(",", "")


def compile_variant(variant: str) -> str:
    """What the compiler has to complain about, and the update's registers."""
    own = folder(variant) / "adamw"
    own.mkdir(parents=True, exist_ok=True)
    texts = {name: (ROOT / "kernels/adamw" / name).read_text() for name in ("op.h", "cuda.cu")}
    for old, new in VARIANTS[variant]:
        if not any(old in text for text in texts.values()):
            return f"nothing to edit: {old}"
        texts = {name: text.replace(old, new) for name, text in texts.items()}
    for name, text in texts.items():
        (own / name).write_text(text)
    command = ["nvcc", "-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a", "-Xptxas=-v", "-shared"]
    command += ["-Xcompiler=-fPIC", "-I", str(folder(variant)), "-I", str(ROOT / "kernels")]
    command += ["-o", str(folder(variant) / "adamw.so"), str(ROOT / "benchmarks/lab/adamw_pass.cu")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    lines = (result.stdout + result.stderr).splitlines()
    if result.returncode:
        return "\n".join(lines)[-1500:]
    spills = [line.strip() for line in lines if "spill" in line and "0 bytes spill stores" not in line]
    place = next(i for i, line in enumerate(lines) if "Function properties" in line and "update_kernel" in line)
    return "; ".join([lines[place + 2].partition(":")[2].strip(), *spills])


# ---- calling ---------------------------------------------------------------------------------------------------------


class Tensor(ctypes.Structure):
    """AdamWTensor of op.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("parameter", "exp_avg", "exp_avg_sq", "step", "gradient", "copy")),
        ("size", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("group", "gradient_dtype", "copy_dtype", "unused")),
    ]


class Group(ctypes.Structure):
    """AdamWGroup of op.h."""

    _fields_ = [
        ("learning_rate", ctypes.c_double),
        ("learning_rate_on_device", ctypes.c_void_p),
        *((name, ctypes.c_double) for name in ("beta1", "beta2", "epsilon", "weight_decay")),
    ]


class Params(ctypes.Structure):
    """AdamW of op.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("table", "workspace", "partial_norms", "norm")),
        ("max_norm", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("grad_scale", "found_inf")),
        *((name, ctypes.c_int64) for name in ("tensors", "groups", "chunks")),
        ("device", ctypes.c_int),
        ("stream", ctypes.c_void_p),
    ]


class State:
    """Parameters, gradients and moments."""

    def __init__(self, parameters: list[Any], gradients: list[Any]) -> None:
        import torch

        self.parameters, self.gradients = parameters, gradients
        self.exp_avg = [torch.zeros_like(each) for each in parameters]
        self.exp_avg_sq = [torch.zeros_like(each) for each in parameters]
        self.steps = [torch.zeros((), device="cuda") for _ in parameters]
        self.copies: list[Any] = [None] * len(parameters)


class Kernel:
    def __init__(self, variant: str) -> None:
        self.library = ctypes.CDLL(str(folder(variant) / "adamw.so"))
        for name in ("adamw_step", "adamw_norm"):
            function = getattr(self.library, name)
            function.restype, function.argtypes = ctypes.c_char_p, [ctypes.POINTER(Params)]
        self.library.adamw_workspace.restype = ctypes.c_int64
        self.library.adamw_workspace.argtypes = [ctypes.c_int64, ctypes.c_int64]
        edits = dict(VARIANTS[variant])
        self.chunk = int(edits.get("kAdamWChunk = 16384", "= 16384").partition("= ")[2])

    def call(self, state: State, *, clip: float | None = None, skip: Any = None, norm_alone: bool = False) -> Any:
        import torch

        count = len(state.parameters)
        chunks = 0
        starts = (ctypes.c_int32 * (count + count % 2))()
        rows = (Tensor * count)()
        codes = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
        for i in range(count):
            p, g, c = state.parameters[i], state.gradients[i], state.copies[i]
            starts[i] = chunks
            chunks += -(-p.numel() // self.chunk)
            rows[i] = Tensor(
                p.data_ptr(), state.exp_avg[i].data_ptr(), state.exp_avg_sq[i].data_ptr(), state.steps[i].data_ptr(),
                g.data_ptr(), 0 if c is None else c.data_ptr(), p.numel(), 0, codes[g.dtype],
                0 if c is None else codes[c.dtype],
            )  # fmt: skip
        groups = (Group * 1)(Group(RATE, None, *BETAS, EPSILON, DECAY))
        table = ctypes.create_string_buffer(bytes(starts) + bytes(rows) + bytes(groups))
        workspace = torch.empty(self.library.adamw_workspace(count, 1), dtype=torch.int64, device="cuda")
        norm = torch.zeros(1, device="cuda") if clip is not None or norm_alone else None
        partial = torch.empty(max(chunks, 1), device="cuda")
        params = Params(ctypes.addressof(table), workspace.data_ptr(), partial.data_ptr())
        params.norm = None if norm is None else norm.data_ptr()
        params.max_norm = clip or 0.0
        params.found_inf = None if skip is None else skip.data_ptr()
        params.tensors, params.groups, params.chunks = count, 1, chunks
        params.stream = torch.cuda.current_stream().cuda_stream
        function = self.library.adamw_norm if norm_alone else self.library.adamw_step
        error = function(ctypes.byref(params))
        if error is not None:
            raise RuntimeError(error.decode())
        return norm


# ---- checks ----------------------------------------------------------------------------------------------------------


def small_state(seed: int) -> State:
    """Odd sizes, empty tensors, views that begin anywhere, gradients of every type, copies of some."""
    import torch

    torch.manual_seed(seed)
    sizes = [1, 3, 4, 5, 0, 1023, 16384, 16385, 65536 * 3 + 7, 40000, 2, 0, *range(1000, 1400), 300000]
    parameters, gradients, copies = [], [], []
    types = (torch.float32, torch.bfloat16, torch.float16)
    for i, size in enumerate(sizes):
        shift = i % 3 if i % 5 == 0 else 0
        parameters.append(torch.randn(size + 3, device="cuda")[shift : size + shift])
        moved = i % 4 if i % 7 == 0 else 0
        gradients.append((1e-2 * torch.randn(size + 3, device="cuda")).to(types[i % 3])[moved : size + moved])
        copies.append(None if i % 4 == 0 else torch.zeros(size, dtype=types[1 + i % 2], device="cuda"))
    state = State(parameters, gradients)
    state.copies = copies
    return state


def wrong(state: State, before: list[Any], steps: int, factor: float) -> list[str]:
    """Complaints where numbers differ from fp64's by more than a few roundings; all tensors one after the other."""
    import torch

    found = []
    start = torch.cat(before).double()
    p, m, v = start, torch.zeros_like(start), torch.zeros_like(start)
    g = factor * torch.cat([each.double() for each in state.gradients])
    for t in range(1, steps + 1):
        m = BETAS[0] * m + (1 - BETAS[0]) * g
        v = BETAS[1] * v + (1 - BETAS[1]) * g * g
        p = p - RATE * (DECAY * p + (m / (1 - BETAS[0] ** t)) / ((v / (1 - BETAS[1] ** t)).sqrt() + EPSILON))
    for name, got, exact, size in (
        ("parameter", state.parameters, p, start.abs() + steps * RATE),
        ("exp_avg", state.exp_avg, m, g.abs()),
        ("exp_avg_sq", state.exp_avg_sq, v, v),
    ):
        error = ((torch.cat(got).double() - exact).abs() / (size * 2.0**-24 + 1e-37)).nan_to_num(nan=1e30)
        if float(error.max()) > 4 * steps + 4:
            found.append(f"{name}: {float(error.max()):.1f} roundings at {int(error.argmax())} of {error.numel()}")
    if bool((torch.stack(state.steps) != steps).any()):
        found.append("step counts")
    pairs = [(c, p.to(c.dtype)) for c, p in zip(state.copies, state.parameters, strict=True) if c is not None]
    if not torch.equal(*(torch.cat([each.float() for each in side]) for side in zip(*pairs, strict=True))):
        found.append("copies")
    return found


def bits(state: State) -> list[Any]:
    import torch

    return [torch.cat(each) for each in (state.parameters, state.exp_avg, state.exp_avg_sq)]


def check(kernel: Kernel, clips: tuple[float | None, ...]) -> list[str]:
    import torch

    found = []
    for clip in clips:
        runs = []
        for _ in range(2):
            state = small_state(0)
            before = [each.clone() for each in state.parameters]
            norm = None
            for _ in range(3):
                norm = kernel.call(state, clip=clip)
            runs.append((state, before, norm))
        state, before, norm = runs[0]
        exact = torch.stack([each.double().square().sum() for each in state.gradients]).sum().sqrt()
        factor = 1.0 if clip is None else min(1.0, clip / (float(exact) + 1e-6))
        found += [f"clip {clip}: {each}" for each in wrong(state, before, 3, factor)[:4]]
        if norm is not None and abs(float(norm) / float(exact) - 1) > 1e-6:
            found.append(f"norm {float(norm)} {float(exact)}")
        if not all(torch.equal(a, b) for a, b in zip(bits(state), bits(runs[1][0]), strict=True)):
            found.append(f"clip {clip}: other bits in a second run")
    state = small_state(1)
    kernel.call(state)
    before = bits(state)
    kernel.call(state, skip=torch.ones(1, device="cuda"))
    if not all(torch.equal(a, b) for a, b in zip(bits(state), before, strict=True)) or float(state.steps[0]) != 1:
        found.append("a skipped step changed something")
    eager, graphed = small_state(2), small_state(2)
    for _ in range(3):
        kernel.call(eager, clip=0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.call(graphed, clip=0.5)
    for _ in range(3):
        graph.replay()
    if not all(torch.equal(a, b) for a, b in zip(bits(eager), bits(graphed), strict=True)):
        found.append("a graph gives other bits")
    return found


# ---- times -----------------------------------------------------------------------------------------------------------


def bert_large() -> list[tuple[int, ...]]:
    norm = [(1024,), (1024,)]
    layer = [(3072, 1024), (3072,), (1024, 1024), (1024,), *norm, (4096, 1024), (4096,), (1024, 4096), (1024,), *norm]
    head = [(1024, 1024), (1024,), *norm, (30522,)]
    return [(30522, 1024), (512, 1024), (2, 1024), *norm, *layer * 24, *head]


def milliseconds(work: Callable[[], Any], repeats: int = 10) -> float:
    from step_turns import times

    for _ in range(2):
        work()
    return sorted(times(work, repeats))[repeats // 2]


def graphed(work: Callable[[], Any]) -> Callable[[], Any]:
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def large() -> tuple[list[Any], list[Any]]:
    import torch

    torch.manual_seed(0)
    shapes = bert_large()
    return [torch.randn(s, device="cuda") for s in shapes], [1e-3 * torch.randn(s, device="cuda") for s in shapes]


def row(name: str, ms: float, bytes_each: float, count: int) -> str:
    return f"  {name:34} {ms:7.3f} ms  {bytes_each * count / ms * 1e-9:5.2f} TB/s"


def time_torch() -> list[str]:
    import torch

    parameters, gradients = large()
    for p, g in zip(parameters, gradients, strict=True):
        p.requires_grad_().grad = g
    count = sum(each.numel() for each in parameters)
    optimizer = torch.optim.AdamW(parameters, lr=RATE, fused=True, capturable=True)
    matrices = [each.detach() for each in parameters if each.dim() == 2][3:]
    own = sum(each.numel() for each in matrices)
    found = [f"torch {torch.__version__}, {len(parameters)} tensors, {count / 1e6:.1f} M parameters"]
    found.append(row("AdamW(fused=True)", milliseconds(graphed(optimizer.step)), 28, count))
    clip = milliseconds(graphed(lambda: torch.nn.utils.clip_grad_norm_(parameters, 1e-3)))
    found.append(row("clip_grad_norm_", clip, 12, count))
    norm = milliseconds(graphed(lambda: torch.stack(torch._foreach_norm(gradients)).norm()))
    found.append(row("_foreach_norm", norm, 4, count))

    held = []  # as a forward holds its casts for the backward

    def cast() -> None:
        for i in range(0, len(matrices), 4):
            few = matrices[i : i + 4]
            held.append([torch.empty_like(each, dtype=torch.bfloat16) for each in few])
            torch._foreach_copy_(held[-1], few)

    found.append(row("_foreach_copy_ of the matrices", milliseconds(graphed(cast)), 6, own))
    return found


def time_kernel(variant: str) -> list[str]:
    import torch

    kernel = Kernel(variant)
    state = State(*large())
    count = sum(each.numel() for each in state.parameters)
    copies = [each.to(torch.bfloat16) if each.dim() == 2 else None for each in state.parameters]
    none = [None] * len(copies)

    found = []
    for name, own, clip, size in (
        ("step", none, None, 28),
        ("step, copies", copies, None, 30),
        ("step, clipping", none, 1.0, 32),
        ("step, copies, clipping", copies, 1.0, 34),
    ):
        if variant != "main" and own is none:
            continue
        state.copies = own
        ms = milliseconds(graphed(functools.partial(kernel.call, state, clip=clip)))
        found.append(row(name, ms, size, count))
    ms = milliseconds(graphed(functools.partial(kernel.call, state, norm_alone=True)))
    found.append(row("norm", ms, 4, count))
    return found


# ---- the run ---------------------------------------------------------------------------------------------------------


def child(variants: list[str]) -> None:
    import torch

    begin = time.perf_counter()
    torch.zeros(1, device="cuda")
    for what in variants:
        print(f"after {time.perf_counter() - begin:.1f} s: {what}", flush=True)
        if what == "torch":
            print("\n".join(time_torch()), flush=True)
            continue
        complaints = check(Kernel(what), (None, 0.5, 1e6) if what == "main" else (0.5,))
        print(f"{what}: {'right' if not complaints else 'WRONG: ' + '; '.join(complaints[:6])}", flush=True)
        print("\n".join(time_kernel(what)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="a variant, or torch; nothing is compiled")
    parser.add_argument("--build", action="store_true", help="compile, and run nothing")
    arguments = parser.parse_args()
    if arguments.only is not None:
        child(arguments.only)
        return
    said = []
    with concurrent.futures.ThreadPoolExecutor(max_workers=min(9, os.cpu_count() or 1)) as pool:
        for variant, line in zip(VARIANTS, pool.map(compile_variant, VARIANTS), strict=True):
            said.append(f"compiled {variant}: {line}")
            print(said[-1], flush=True)
    if not arguments.build:
        for few in (["main", "torch"], list(VARIANTS)[1:]):
            said += run(few)
    if "OUT" in os.environ:
        (Path(os.environ["OUT"]) / "adamw_pass.txt").write_text("\n".join(said) + "\n")


def run(few: list[str], seconds: float = 25.0) -> list[str]:
    """Lines of a process of its own, which are printed as they come."""
    command = [sys.executable, __file__, *(word for each in few for word in ("--only", each))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    lines = []
    for line in process.stdout or ():
        lines.append(line.rstrip())
        print(lines[-1], flush=True)
    timer.cancel()
    if process.wait():
        lines.append(f"{few}: FAILED or lost after {seconds:.0f} s ({process.returncode})")
        print(lines[-1], flush=True)
    return lines


if __name__ == "__main__":
    main()
