"""Reads the hardware counters of the Hopper kernels and of their peers: ``python benchmarks/lab/counters.py`` on a GPU.

Runs itself under Nsight Compute, which needs permission to read counters, and prints a line for each kernel: its time,
and the fraction of it for which the tensor cores, the warp schedulers, shared memory, L2 and DRAM were busy. Under the
profiler kernels are serialized and replayed for groups of counters: times are longer than in a benchmark, but the
ratios are meaningful.
"""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from collections.abc import Callable, Iterator

COUNTERS = {
    "gpu__time_duration.sum": "us",
    "sm__cycles_elapsed.avg.per_second": "GHz",
    "smsp__issue_active.avg.pct_of_peak_sustained_elapsed": "issue %",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed": "lsu shared %",
    "lts__t_sectors.avg.pct_of_peak_sustained_elapsed": "L2 %",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram %",
}
UNITS = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "hz": 1e-9, "Ghz": 1.0, "GHz": 1.0, "Mhz": 1e-3, "MHz": 1e-3, "%": 1.0}


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """The measured calls: a name, and one call whose kernels are listed under it."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from fasttfm import ops

    def attention(name: str, head_dim: int, seqlen: int, causal: bool, p: float) -> Iterator[tuple[str, Callable]]:
        heads, batch = 1024 // head_dim, 16384 // seqlen
        q, k, v = (
            torch.randn(batch, seqlen, heads, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        )
        dout = torch.randn_like(q)

        def cudnn() -> torch.Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                out = torch.nn.functional.scaled_dot_product_attention(
                    *(x.transpose(1, 2) for x in (q, k, v)), dropout_p=p, is_causal=causal
                )
            return out.transpose(1, 2)

        for contender, forward in (
            ("fasttfm", lambda: ops.attention(q, k, v, causal=causal, dropout_p=p)),
            ("cuDNN", cudnn),
        ):
            yield f"{name} {contender}", forward
            out = forward()
            yield f"{name} {contender} backward", lambda out=out: torch.autograd.grad(out, (q, k, v), dout, True)

    yield from attention("D=64 S=512 p=0.1", 64, 512, False, 0.1)
    yield from attention("D=64 S=2048", 64, 2048, False, 0.0)
    yield from attention("D=64 S=16384", 64, 16384, False, 0.0)
    yield from attention("D=128 S=2048", 128, 2048, False, 0.0)

    x, w1, w2 = (
        (torch.randn(shape, device="cuda", dtype=torch.bfloat16) * shape[-1] ** -0.5).requires_grad_()
        for shape in ((32768, 1024), (4096, 1024), (1024, 4096))
    )
    b1, b2 = (torch.zeros(size, device="cuda", dtype=torch.bfloat16, requires_grad=True) for size in (4096, 1024))
    yield "mlp 32768 x 1024", lambda: ops.mlp(x, w1, b1, w2, b2)
    y, dy = ops.mlp(x, w1, b1, w2, b2), torch.randn(32768, 1024, device="cuda", dtype=torch.bfloat16)
    yield "mlp 32768 x 1024 backward", lambda: torch.autograd.grad(y, (x, w1, b1, w2, b2), dy, True)


def run() -> None:
    """Runs each call once before it is measured; a kernel that writes one number marks where the next call begins."""
    import torch

    mark = torch.zeros(1, device="cuda")
    for name, call in calls():
        call()
        torch.cuda.synchronize()
        print(f"CALL {name}", flush=True)
        torch.cuda.profiler.start()
        mark.fill_(1.0)
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def tensor_counters() -> list[str]:
    """The names of this GPU's counters for the busy cycles of the tensor cores."""
    listed = subprocess.run(["ncu", "--query-metrics", "--chip", "gh100"], capture_output=True, text=True).stdout
    names = re.findall(r"^(sm__pipe_tensor\w*cycles_active)\b", listed, re.MULTILINE)
    return [f"{name}.avg.pct_of_peak_sustained_elapsed" for name in dict.fromkeys(names)]


def main() -> None:
    if sys.argv[1:] == ["run"]:
        run()
        return
    tensor = tensor_counters()
    command = ["ncu", "--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw"]
    command += ["--metrics", ",".join([*COUNTERS, *tensor])]
    completed = subprocess.run([*command, sys.executable, __file__, "run"], capture_output=True, text=True)
    lines = completed.stdout.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        sys.exit(f"ncu gave no table: {completed.stdout[-2000:]}{completed.stderr[-2000:]}")
    names = iter(line.removeprefix("CALL ") for line in lines if line.startswith("CALL "))
    units, *kernels = csv.DictReader(lines[start:])
    for kernel in kernels:
        if "FillFunctor" in kernel["Kernel Name"]:
            print(next(names), flush=True)
            continue
        values = {
            name: float(kernel[name].replace(",", "")) * UNITS.get(units[name], 1.0)
            for name in [*COUNTERS, *tensor]
            if kernel.get(name)
        }
        busy = max((values[name] for name in tensor if name in values), default=float("nan"))
        shares = "  ".join(f"{COUNTERS[name]} {values[name]:.4g}" for name in COUNTERS if name in values)
        print(f"  {kernel['Kernel Name'][:70]:70s}  tensor % {busy:.1f}  {shares}", flush=True)


if __name__ == "__main__":
    main()
