"""Times single calls whose kernels take almost no time: what is left is the work on the host before the kernel.

    OMP_NUM_THREADS=1 python benchmarks/host_time.py --out benchmarks/results
    python benchmarks/host_time.py --device cuda --rounds 50
    python benchmarks/host_time.py --device cuda --rounds 50 --dtype float32

Each op is compared with torch's op or chain of ops for the same result: ``layer_norm`` with torch's, ``attention`` with
``scaled_dot_product_attention``, ``dropout_add_layer_norm`` with dropout, an addition and torch's ``layer_norm``.
Directions are the forward without gradients, the forward that records a graph, and both passes. The two sides take
turns in rounds of a few milliseconds. A time is the median over rounds of the seconds that the calling thread has
computed, so that other processes disturb it little; on a GPU the host runs ahead of the device, and a round ends with
a synchronization that is not timed. The ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import csv
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from fasttfm import __version__, ops
from fasttfm.bench.timing import device_name, file_stem

ROWS, COLUMNS, HEADS = 8, 128, 2
CALLS = 100  # of a round; the launches stay below the limit of a GPU's queue
FIELDS = (
    "op",
    "direction",
    "dropout",
    "dtype",
    "torch_us",
    "fasttfm_us",
    "ratio",
    "device",
    "torch_version",
    "fasttfm_version",
)
Call = Callable[[], Tensor]


def pairs(device: str, dtype: torch.dtype, grad: bool) -> dict[tuple[str, float], tuple[Call, Call]]:
    """torch's call and ours for each op and probability of dropout."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype, requires_grad=grad)

    x, residual, weight, bias = draw(ROWS, COLUMNS), draw(ROWS, COLUMNS), draw(COLUMNS), draw(COLUMNS)
    q, k, v = (draw(1, ROWS, HEADS, COLUMNS // HEADS) for _ in range(3))
    heads_first = [tensor.detach().transpose(1, 2).requires_grad_(grad) for tensor in (q, k, v)]

    def chain(p: float) -> Call:
        return lambda: F.layer_norm(F.dropout(x, p) + residual, (COLUMNS,), weight, bias)

    def fused(p: float) -> Call:
        return lambda: ops.dropout_add_layer_norm(x, residual, weight, bias, p=p)  # type: ignore[return-value]

    return {
        ("layer_norm", 0.0): (
            lambda: F.layer_norm(x, (COLUMNS,), weight, bias),
            lambda: ops.layer_norm(x, weight, bias),
        ),
        ("attention", 0.0): (
            lambda: F.scaled_dot_product_attention(*heads_first),
            lambda: ops.attention(q, k, v),  # type: ignore[return-value,dict-item]
        ),
        **{("dropout_add_layer_norm", p): (chain(p), fused(p)) for p in (0.0, 0.1)},
    }


def with_backward(call: Call) -> Call:
    incoming = torch.randn_like(call())

    def run() -> Tensor:
        y = call()
        y.backward(incoming)
        return y

    return run


def seconds(call: Call, device: str) -> float:
    """The time of a round of calls."""
    start = time.thread_time()
    for _ in range(CALLS):
        call()
    elapsed = time.thread_time() - start
    if device != "cpu":
        torch.cuda.synchronize()
    return elapsed


def measure(theirs: Call, ours: Call, device: str, rounds: int) -> tuple[float, float, float]:
    """Microseconds of both calls, and the ratio of ours to theirs."""
    for call in (theirs, ours):
        seconds(call, device)
    gc.collect()
    pairs = [(seconds(theirs, device), seconds(ours, device)) for _ in range(rounds)]
    peer, ours_us = (statistics.median(times) / CALLS * 1e6 for times in zip(*pairs, strict=True))
    return peer, ours_us, statistics.median(mine / other for other, mine in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--out", type=Path, help="a folder for the CSV file")
    arguments = parser.parse_args()
    device, lines = torch.device(arguments.device), []
    dtype_name = arguments.dtype or ("float32" if device.type == "cpu" else "bfloat16")
    for direction in ("forward", "forward with graph", "forward+backward"):
        grad = direction != "forward"
        for (op, p), calls in pairs(arguments.device, getattr(torch, dtype_name), grad).items():
            theirs, ours = map(with_backward, calls) if direction == "forward+backward" else calls
            with torch.set_grad_enabled(grad):
                peer, ours_us, ratio = measure(theirs, ours, arguments.device, arguments.rounds)
            print(f"{op:<24} {direction:<20} p={p:<4} torch {peer:7.2f} us  fasttfm {ours_us:7.2f} us  {ratio:5.2f}x")
            names = (device_name(device), torch.__version__, __version__)
            values = (op, direction, p, dtype_name, f"{peer:.2f}", f"{ours_us:.2f}", f"{ratio:.2f}", *names)
            lines.append(dict(zip(FIELDS, values, strict=True)))
    if arguments.out is not None:
        path = arguments.out / f"{file_stem(device)}-host_time.csv"
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(lines)


if __name__ == "__main__":
    main()
