"""Checks and times variants of attention's backward for long sequences: benchmarks/lab/backward_long.cu on an H200.

    python benchmarks/lab/backward_long.py check LIBRARY            # gradients of all variants against fp64
    python benchmarks/lab/backward_long.py stress LIBRARY SECONDS   # launches whose bits differ from the first one's
    python benchmarks/lab/backward_long.py time LIBRARY             # TFLOP/s of all variants, in turns
    python benchmarks/lab/backward_long.py package                  # TFLOP/s of the installed package, one JSON object
    python benchmarks/lab/backward_long.py bits SECONDS             # the package's calls with other bits than the first

``stress`` and ``bits`` find a wrong order of additions only if blocks of a head run at different speeds: run several
processes.
"""

from __future__ import annotations

import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

VARIANTS = ("base", "relaxed", "one_thread", "publisher")
TOKENS, HEADS, DIM = 16384, 16, 64
CASES = [(length, causal) for causal in (False, True) for length in (512, 1024, 2048, 4096, 8192, 16384)]
# Of the package: length, causal, head dim and probability of dropout.
PACKAGE_CASES = [
    *((length, causal, DIM, 0.0) for length, causal in CASES),
    *((length, causal, 128, 0.0) for causal in (False, True) for length in (512, 1024, 4096, 16384)),
    *((length, causal, DIM, 0.1) for length, causal in ((1024, False), (4096, False), (2048, True))),
    *((length, causal, 128, 0.1) for length, causal in ((1024, False), (4096, False), (2048, True))),
]


class Call:
    """A backward of [sequences, length, heads, dim]; run() needs a dim of 64."""

    def __init__(self, sequences: int, length: int, heads: int, causal: bool, dim: int = DIM) -> None:
        torch.manual_seed(0)
        self.shape, self.causal = (sequences, length, heads, dim), causal
        self.q, self.k, self.v, self.dout = (
            torch.randn(self.shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)
        )
        forward = torch.ops.aten._scaled_dot_product_flash_attention
        out, lse, *_ = forward(*(x.transpose(1, 2) for x in (self.q, self.k, self.v)), 0.0, causal)
        self.out, self.lse = out.transpose(1, 2).contiguous(), lse.contiguous()
        self.gradients = [torch.empty_like(self.q) for _ in range(3)]
        tiles = sequences * length // 64 + sequences
        self.workspace = torch.empty(heads * tiles * (128 + 4096 + 1) + 4096 + sequences, device="cuda")

    def run(self, library: ctypes.CDLL, variant: int, blocks: int = 0) -> None:
        tensors = (self.q, self.k, self.v, self.out, self.dout, self.lse, *self.gradients, self.workspace)
        sequences, length, heads, _ = self.shape
        sizes = (ctypes.c_int64(sequences), ctypes.c_int64(length), ctypes.c_int64(heads))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        pointers = [ctypes.c_void_p(x.data_ptr()) for x in tensors]
        status = library.lab_backward(variant, *pointers, *sizes, int(self.causal), blocks, stream)
        if status != 0:
            raise RuntimeError(f"status {status}")

    def flops(self) -> float:
        sequences, length, heads, dim = self.shape
        return 10.0 * sequences * heads * length * length * dim * (0.5 if self.causal else 1.0)


def exact(call: Call) -> list[Tensor]:
    leaves = [x.double().requires_grad_() for x in (call.q, call.k, call.v)]
    q, k, v = (x.transpose(1, 2) for x in leaves)
    scores = q @ k.transpose(-1, -2) / 8
    if call.causal:
        length = scores.shape[-1]
        scores = scores.masked_fill(torch.ones(length, length, device="cuda", dtype=torch.bool).triu(1), -torch.inf)
    out = (scores.softmax(-1) @ v).transpose(1, 2)
    return list(torch.autograd.grad(out, leaves, call.dout.double()))


def check(library: ctypes.CDLL) -> None:
    for sequences, length, heads, causal in (
        (1, 1024, 2, False),
        (2, 1000, 3, False),
        (1, 2048, 2, True),
        (2, 1280, 2, True),
    ):
        call = Call(sequences, length, heads, causal)
        expected = exact(call)
        for blocks in (1, 2, 4):
            for variant, name in enumerate(VARIANTS):
                for gradient in call.gradients:
                    gradient.fill_(torch.nan)
                call.run(library, variant, blocks)
                pairs = zip(call.gradients, expected, strict=True)
                errors = [((a.double() - b).norm() / b.norm()).item() for a, b in pairs]
                verdict = "right" if max(errors) < 0.006 else "WRONG"
                if verdict == "WRONG" or blocks == 4:
                    print(
                        f"{name} {length} causal={causal} /{blocks}: {verdict} {[f'{e:.1e}' for e in errors]}",
                        flush=True,
                    )


def stress(library: ctypes.CDLL, seconds: float) -> None:
    for length, causal in ((1024, False), (2048, False), (4096, True)):
        call = Call(TOKENS // length, length, HEADS, causal)
        call.run(library, 0)
        first = [x.view(torch.int16).clone() for x in call.gradients]
        for variant in (1, 0, 2, 3):
            launches, wrong, end = 0, torch.zeros(3, dtype=torch.int64, device="cuda"), time.monotonic() + seconds
            while time.monotonic() < end:
                for _ in range(50):
                    call.run(library, variant)
                    pairs = zip(call.gradients, first, strict=True)
                    wrong += torch.stack([(a.view(torch.int16) != b).any() for a, b in pairs])
                    launches += 1
                torch.cuda.synchronize()
            differing = dict(zip(("dq", "dk", "dv"), wrong.tolist(), strict=True))
            print(
                f"stress {length} causal={causal} {VARIANTS[variant]}: {launches} launches, other bits: {differing}",
                flush=True,
            )


def milliseconds(run: Callable[[], object], repeats: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def time_variants(library: ctypes.CDLL) -> None:
    print("length causal | " + " | ".join(VARIANTS))
    for length, causal in CASES:
        if length <= 512:
            continue
        call = Call(TOKENS // length, length, HEADS, causal)
        runs = [partial(call.run, library, variant) for variant in range(len(VARIANTS))]
        for run in runs:
            milliseconds(run, 5)
        times = [[milliseconds(run, 20) for run in runs] for _ in range(9)]
        medians = [statistics.median(column) for column in zip(*times, strict=True)]
        print(f"{length} {int(causal)} | " + " | ".join(f"{call.flops() / ms / 1e9:.0f}" for ms in medians), flush=True)


def package_calls() -> Iterator[tuple[str, Call, Callable[[], tuple[Tensor, ...]]]]:
    """The name of each case, its call, and the package's backward."""
    from fasttfm.ops import attention

    for length, causal, dim, p in PACKAGE_CASES:
        call = Call(TOKENS // length, length, HEADS * DIM // dim, causal, dim)
        leaves = [x.clone().requires_grad_() for x in (call.q, call.k, call.v)]
        out = attention(*leaves, causal=causal, dropout_p=p, backend="cuda")
        name = f"{length} {int(causal)}" + (f" D={dim}" if dim != DIM else "") + (f" p={p}" if p else "")
        yield name, call, partial(torch.autograd.grad, out, leaves, call.dout, retain_graph=True)


def package() -> None:
    rates = {}
    for name, call, run in package_calls():
        milliseconds(run, 5)
        ms = statistics.median(milliseconds(run, 20) for _ in range(5))
        rates[name] = call.flops() / ms / 1e9
    print(json.dumps(rates))


def bits(seconds: float) -> None:
    for name, call, run in package_calls():
        if call.shape[1] not in (1024, 4096):
            continue
        first, calls, end = run(), 0, time.monotonic() + seconds
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        while time.monotonic() < end:
            for _ in range(50):
                pairs = zip(run(), first, strict=True)
                wrong += torch.stack([(a.view(torch.int16) != b.view(torch.int16)).any() for a, b in pairs]).sum()
                calls += 1
            torch.cuda.synchronize()
        print(f"bits {name}: {calls} calls, {wrong.item()} gradients with other bits", flush=True)


def main() -> None:
    command, *rest = sys.argv[1:]
    if command == "package":
        package()
        return
    if command == "bits":
        bits(float(rest[0]))
        return
    library = ctypes.CDLL(rest[0])
    if command == "check":
        check(library)
    elif command == "stress":
        stress(library, float(rest[1]))
    elif command == "time":
        time_variants(library)
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
