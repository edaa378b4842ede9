"""Measures the benefit of sharing torch's threads: a torch operation and ours alternate, with three kinds of threads.

    python benchmarks/lab/threads.py

``openmp``: torch's own pool, which the core uses. ``threads``: threads started for each call, which the core uses if it
finds no OpenMP runtime. ``second pool``: another copy of the same OpenMP runtime, as in a library that links its own
OpenMP. Each is timed in new processes, in turn; the table shows the best of the rounds.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from fasttfm import _C, _native
from fasttfm.ops import layer_norm

RUNTIMES = ("openmp", "threads", "second pool")
SHAPES = ((2048, 768), (128, 256))
ROUNDS = 5
SECONDS = 1.5  # per shape and process


def use(runtime: str) -> None:
    path, reason = _native.shared_openmp()
    if not path:
        raise SystemExit(f"torch's OpenMP runtime was not found: {reason}")
    if runtime == "threads":
        _C.use_plain_threads()
    elif runtime == "second pool":
        copy = Path(tempfile.mkdtemp()) / "libsecond_openmp.so"
        shutil.copy(path, copy)
        ctypes.CDLL(str(copy))  # another file, so that the loader creates a second runtime
        loaded, reason = _C.share_openmp(str(copy))
        assert loaded == str(copy), reason
        shutil.rmtree(copy.parent)


def milliseconds_per_turn(rows: int, columns: int) -> float:
    """The 10% quantile of the time of one forward of torch's layer_norm followed by one of ours.

    A low quantile, because other processes disturb single turns, while a second pool disturbs every turn."""
    x = torch.randn(rows, columns)
    turns = []
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        start = time.perf_counter()
        torch.nn.functional.layer_norm(x, (columns,))
        layer_norm(x, backend="cpu")
        turns.append((time.perf_counter() - start) * 1e3)
    return statistics.quantiles(turns, n=10)[0]


def measure(runtime: str) -> None:
    use(runtime)
    print(json.dumps([milliseconds_per_turn(*shape) for shape in SHAPES]))


def compare() -> None:
    runs: dict[str, list[list[float]]] = {runtime: [] for runtime in RUNTIMES}
    for _ in range(ROUNDS):
        for runtime in RUNTIMES:
            output = subprocess.run([sys.executable, __file__, runtime], check=True, capture_output=True, text=True)
            runs[runtime].append(json.loads(output.stdout))
    print(f"{torch.get_num_threads()} threads; torch's layer_norm and ours in turn, forward, fp32: ms per turn")
    for index, (rows, columns) in enumerate(SHAPES):
        shared = min(times[index] for times in runs["openmp"])
        for runtime in RUNTIMES:
            best = min(times[index] for times in runs[runtime])
            print(f"{rows} x {columns:<5} {runtime:12} {best:8.3f}   {best / shared:5.2f} x")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(sys.argv[1])
    else:
        compare()
