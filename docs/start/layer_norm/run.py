"""Runs every step, compares it with torch in fp64 and, on a GPU, prints its time and bandwidth.

python docs/start/layer_norm/run.py --rows 32768 --columns 1024      # without a GPU, choose few rows
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
EPS = 1e-5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: kernels run in Python, slowly
sys.path.insert(0, str(HERE))

import step1_formula  # noqa: E402  (in this folder)
import step2_triton_forward  # noqa: E402
import step3_triton_backward  # noqa: E402


def compile_cuda(source: Path, folder: Path) -> Callable[..., Tensor]:
    """Compiles a .cu file for this GPU, and returns its forward."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    library = folder / f"{source.stem}.so"
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    command = [nvcc, "-O3", "-std=c++17", f"-arch={arch}", "-Xcompiler=-fPIC", "--shared", "-o", str(library)]
    subprocess.run([*command, str(source)], check=True)
    function = ctypes.CDLL(str(library)).layer_norm_fwd
    function.argtypes = [*[ctypes.c_void_p] * 4, ctypes.c_int, ctypes.c_int, ctypes.c_float, ctypes.c_void_p]

    def forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        y = torch.empty_like(x)
        stream = torch.cuda.current_stream().cuda_stream
        addresses = (tensor.data_ptr() for tensor in (x, weight, bias, y))
        status = function(*addresses, *x.shape, eps, stream)
        if status != 0:
            raise RuntimeError(f"{source.name}: expected status 0 of the launch, got cudaError {status}")
        return y

    return forward


def check(name: str, tensors: tuple[Tensor, ...], exact: tuple[Tensor, ...], naive: tuple[Tensor, ...]) -> None:
    """The rule of docs/numerics.md: at most three times the error of the formula in plain torch, and a rounding."""
    for index, (tensor, expected, plain) in enumerate(zip(tensors, exact, naive, strict=True)):
        error = (tensor.double() - expected).abs().max().item()
        floor = torch.finfo(tensor.dtype).eps * expected.abs().max().item()
        bound = 3 * (plain.double() - expected).abs().max().item() + floor
        if not error <= bound:
            raise SystemExit(f"{name}: result {index}: expected an error of at most {bound:.2e}, got {error:.2e}")


def report(name: str, call: Callable[[], object], transferred: int) -> None:
    """Prints the median time of a call on a GPU, and the bandwidth."""
    if DEVICE == "cpu":
        print(f"{name:24} correct")
        return
    for _ in range(3):
        call()
    times = []
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    milliseconds = sorted(times)[len(times) // 2]
    print(f"{name:24} correct  {milliseconds:8.3f} ms  {transferred / milliseconds * 1e-6:7.0f} GB/s")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Runs the steps of layer_norm, from the formula to CUDA.")
    parser.add_argument("--rows", type=int, default=32768 if DEVICE == "cuda" else 64)
    parser.add_argument("--columns", type=int, default=1024)
    sizes = parser.parse_args(arguments)
    torch.manual_seed(0)
    x, dy = torch.randn(2, sizes.rows, sizes.columns, device=DEVICE).unbind()
    weight, bias = torch.randn(2, sizes.columns, device=DEVICE).unbind()
    exact = step1_formula.forward(x.double(), weight.double(), bias.double(), EPS)
    naive = step1_formula.forward(x, weight, bias, EPS)
    exact_grads = step1_formula.backward(dy.double(), x.double(), weight.double(), exact[1], exact[2])
    naive_grads = step1_formula.backward(dy, x, weight, naive[1], naive[2])
    transferred = 2 * x.numel() * x.element_size()

    y = torch.nn.functional.layer_norm(x.double(), (sizes.columns,), weight.double(), bias.double(), EPS)
    check("step 1, formula", (naive[0],), (y,), (naive[0],))
    report("step 1, formula", lambda: step1_formula.forward(x, weight, bias, EPS), transferred)
    check("step 2, Triton forward", step2_triton_forward.forward(x, weight, bias, EPS), exact, naive)
    report("step 2, Triton forward", lambda: step2_triton_forward.forward(x, weight, bias, EPS), transferred)
    statistics = (naive[1], naive[2])
    gradients = step3_triton_backward.backward(dy, x, weight, *statistics)
    check("step 3, Triton backward", gradients, exact_grads, naive_grads)
    report(
        "step 3, Triton backward",
        lambda: step3_triton_backward.backward(dy, x, weight, *statistics),
        3 * x.numel() * x.element_size(),
    )
    if DEVICE == "cpu":
        print("steps 4 and 5 need a GPU and nvcc")
        return
    with tempfile.TemporaryDirectory() as folder:
        for name, file in (("step 4, naive CUDA", "step4_cuda_naive.cu"), ("step 5, CUDA", "step5_cuda_warp.cu")):
            forward = compile_cuda(HERE / file, Path(folder))
            check(name, (forward(x, weight, bias, EPS),), exact[:1], naive[:1])
            report(name, lambda forward=forward: forward(x, weight, bias, EPS), transferred)


if __name__ == "__main__":
    main()
