"""What the sums of the gradients' columns cost inside the Hopper backward of attention, against a pass over dqkv.

    python benchmarks/lab/column_sums.py [--only checks|times] [--output DIRECTORY]

Builds a library of the backward's and column_sum's sources alone. Checks hold the sums against those of the same call's
gradients in fp64, and for the same bits; times are of the backward alone, with column_sum behind it, and with the
sums inside, one after another in turns. Both run in processes of their own with a time limit.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from hopper_backward import ONLY_ALL_KEYS, WORK, Backward, Report, compile_source, compile_variant, lay_package
from hopper_backward_cases import make

COLUMN_SUM = """
#include "column_sum/cuda.cu"
extern "C" int column_sum(const fasttfm::ColumnSum* call) {
  return static_cast<int>(fasttfm::cuda::column_sum(*call).code);
}
"""

# Libraries: changes of the source.
LIBRARIES: dict[str, list[tuple[str, str]]] = {
    "sums": [],
    "without_dk": [("add_columns(dk,", "if (dk[0] == 1e30f) add_columns(dk,")],
}

FUSED = {"heads": 16, "fused": True}
CHECKS: dict[str, dict[str, Any]] = {
    "512_p": {"dense": (3, 512), "p": 0.1, **FUSED},
    "packed_p": {"packed": (5, 0, 37, 130, 512, 64, 1, 300), "p": 0.1, **FUSED},
    "lengths": {"dense": (6, 330), "lengths": (5, 0, 37, 330, 128, 192), **FUSED},
    "1024": {"dense": (2, 1024), **FUSED},
    "2000_p": {"dense": (2, 2000), "p": 0.1, **FUSED},
    "long_packed": {"packed": (700, 64, 0, 1500, 3), "p": 0.1, **FUSED},
}
TIMES: dict[str, dict[str, Any]] = {
    "64x512_p": {"dense": (64, 512), "p": 0.1, **FUSED},
    "packed_p": {"packed": tuple(64 + 448 * i // 63 for i in range(64)), "p": 0.1, **FUSED},
    "128x256_p": {"dense": (128, 256), "p": 0.1, **FUSED},
    "32x1024_p": {"dense": (32, 1024), "p": 0.1, **FUSED},
    "16x2048": {"dense": (16, 2048), **FUSED},
}


class ColumnSum(ctypes.Structure):
    """ColumnSum of column_sum/op.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "sum", "workspace")),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "x_stride")),
        *((name, ctypes.c_int32) for name in ("dtype", "sum_dtype", "threads", "parts", "device")),
        ("stream", ctypes.c_void_p),
    ]


def build() -> str:
    lay_package()
    source = WORK / "column_sum.cu"
    source.write_text(COLUMN_SUM)
    begin, lines = time.time(), []
    started = {"column_sum": compile_source("column_sum", source)}
    for name, changes in LIBRARIES.items():
        started[name] = compile_variant(name, [*changes, *ONLY_ALL_KEYS])
    for name, process in started.items():
        log, _ = process.communicate()
        if process.returncode:
            print(log)
        stacks = " ".join(re.findall(r"(\d+) bytes stack frame", log))
        lines.append(f"{name}: {time.time() - begin:.1f} s, bytes of the kernels' stacks: {stacks}")
    return "\n".join(lines)


class Columns:
    """Calls on one problem; the sums come in fp32."""

    def __init__(self, problem: Any, tensors: list[Any], lse: Any, out: Any) -> None:
        import torch

        self.problem, self.tensors, self.lse, self.out = problem, tensors, lse, out
        q, *_, dq, _, _ = tensors
        self.columns = 3 * q.shape[-2] * q.shape[-1]
        self.sums = torch.full((self.columns,), torch.nan, device="cuda")
        self.dqkv = dq._base  # dq, dk and dv are its slices

    def backward(self, library: str, *, sums: bool) -> Any:
        q, k, v, dout, *gradients = self.tensors
        own = Backward(library, columns=self.sums if sums else None)
        return own.prepare(dout, q, k, v, self.out, self.lse, self.problem, *gradients)

    def column_sum(self) -> Any:
        import torch

        library = ctypes.CDLL(str(WORK / "column_sum.so"))
        rows = self.tensors[0].shape[:-2].numel()
        strips = -(-self.columns // 256)
        multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
        parts = max(1, min(4 * multiprocessors // strips, rows // 64))
        workspace = torch.empty(parts * self.columns, device="cuda")
        call = ColumnSum(rows=rows, columns=self.columns, x_stride=self.columns, dtype=1, parts=parts)
        call.x, call.sum, call.workspace = (x.data_ptr() for x in (self.dqkv, self.sums, workspace))

        def run() -> Any:
            call.stream = torch.cuda.current_stream().cuda_stream
            if library.column_sum(ctypes.byref(call)):
                raise RuntimeError("column_sum")
            return workspace

        return run


def problem_of(case: dict[str, Any], *, dirty: bool) -> Columns:
    import torch

    problem, *tensors = make(case, dirty=dirty)
    q, dout = tensors[0], tensors[3]
    # The statistics are not those of a forward, which sums of columns do not need; weights are about 1 / keys.
    longest = problem.max_seqlen
    lse = torch.full((*q.shape[:-3], q.shape[-2], q.shape[-3]), 0.5 + torch.log(torch.tensor(longest)), device="cuda")
    return Columns(problem, tensors, lse, torch.randn(dout.shape, device="cuda", dtype=q.dtype))


def checked(name: str) -> str:
    """The sums' distance to those of the rounded gradients over what their roundings may add up to."""
    import torch

    torch.manual_seed(1)
    columns = problem_of(CHECKS[name], dirty=True)
    run = columns.backward("sums", sums=True)
    run()
    first = columns.sums.clone()
    same = True
    for _ in range(20):
        columns.sums.fill_(torch.nan)
        run()
        same = same and torch.equal(columns.sums, first)
    gradient = columns.dqkv[:-3] if columns.problem.packed else columns.dqkv
    gradient = gradient.reshape(-1, columns.columns).double()
    # A rounding is off by up to 2^-8 of its number, and all are independent: by Hoeffding's inequality their sum passes
    # 8 times the root of the sum of squares once in 10^13 cases.
    bound = 8 * (gradient * 2.0**-8).square().sum(0).sqrt() + gradient.abs().sum(0) * 2.0**-17
    error = (first.double() - gradient.sum(0)).abs()
    worst = [(error / bound.clamp(min=1e-30)).view(3, -1).amax(1)[i].item() for i in range(3)]
    good = same and all(ratio < 1 for ratio in worst)
    text = " ".join(f"{ratio:.2f}" for ratio in worst)
    return f"{'ok  ' if good else 'BAD '} {name:12} error of its bound, dq dk dv: {text}; same bits {same}"


def timed(name: str) -> str:
    import torch

    torch.manual_seed(1)
    columns = problem_of(TIMES[name], dirty=False)
    alone, behind = columns.backward("sums", sums=False), columns.column_sum()
    runs = {"alone": alone, "column_sum behind": lambda: (alone(), behind())}
    runs |= {library: columns.backward(library, sums=True) for library in LIBRARIES}
    graphs = {}
    for who, run in runs.items():
        run()
        torch.cuda.synchronize()
        graphs[who] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[who]):
            for _ in range(10):
                run()
    found: dict[str, list[float]] = {who: [] for who in runs}
    for _ in range(12):
        for who, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            found[who].append(begin.elapsed_time(end) / 10)
    return f"{name:10} ms: " + "  ".join(f"{who} {statistics.median(ms):.4f}" for who, ms in found.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", default=os.environ.get("OUT", str(WORK)))
    parser.add_argument("--only", choices=("checks", "times"))
    parser.add_argument("--child", choices=("checks", "times"))
    arguments = parser.parse_args()
    if arguments.child:
        function, cases = (checked, CHECKS) if arguments.child == "checks" else (timed, TIMES)
        for name in cases:
            print(function(name), flush=True)
        return
    begin = time.time()
    lines = Report(Path(arguments.output) / "column_sums.txt")
    lines.append(build())
    environment = dict(os.environ, PYTHONPATH=f"{WORK / 'lib'}:{os.environ.get('PYTHONPATH', '')}")
    for kind in ("checks", "times") if arguments.only is None else (arguments.only,):
        command = [sys.executable, __file__, "--child", kind]
        child = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
        )
        limit = threading.Timer(15, child.kill)
        limit.start()
        assert child.stdout is not None
        for line in child.stdout:
            lines.append(line.rstrip())
        limit.cancel()
        if child.wait():
            lines.append(f"LOST {kind}: exit {child.returncode}")
    lines.append(f"{time.time() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
