"""Times FP8 training against bf16 in the same run: whole steps as CUDA graphs, and single kernels.

    python benchmarks/fp8_step.py --out benchmarks/results/nvidia-h200-fp8_step.csv
    python benchmarks/fp8_step.py --cases bert-large:64x512 --peers handmade-compile,hf-compile --seconds 150
    python benchmarks/fp8_step.py --chart benchmarks/results/nvidia-h200-fp8_step.csv

Rows of steps are those of training_step.py. Rows of kernels have the time of a call (p50, with a cold L2) and its rate:
casts, activations and LayerNorm's backward in TB/s of the bytes that they must move, next to a copy of the same tensor;
GEMMs in TFLOP/s, next to those of bf16 operands and those with a scale for each row.

The operands of GEMMs with a scale for each row need other scales in their rows than in their columns, and scales of
columns are known only when the whole tensor was read: at least two passes cast a tensor ("cast rows, then columns").
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from training_contenders import Case, make_batch, necessary_flops
from training_step import append_row, measure, training_step, versions, write_chart

from fasttfm.kernels.common import philox
from fasttfm.ops import fp8
from fasttfm.ops.dropout_add_layer_norm import backward_op, forward_op
from fasttfm.ops.fp8 import native as fp8_native
from fasttfm.ops.fp8.norm import NormArguments, add_norm_backward_cast, add_norm_cast

CASES = (
    "bert-large:64x512",
    "bert-large:64x512:padded",
    "bert-base:256x128",
    "gpt2-small:32x1024",
    "gpt2-medium:16x1024",
)
CONTENDERS = "fasttfm-fast-graph,fasttfm-fp8-graph"
TOKENS, WIDTHS = 32768, ((1024, 3072), (1024, 1024), (1024, 4096), (4096, 1024))
_FLUSH = 256 << 20  # bytes, more than L2 has


def step_rows(
    name: str, contenders: list[str], device: torch.device, steps: int, deadline: float
) -> Iterator[dict[str, Any]]:
    model, shape, *padded = name.split(":")
    size, sequence = (int(number) for number in shape.split("x"))
    case = Case(model, size, sequence, bool(padded))
    config = case.config()
    batch = make_batch(case, config.vocab_size, device)
    flops = necessary_flops(case, config, batch.lengths, len(batch.positions))
    for contender in contenders:
        if time.perf_counter() > deadline:
            print(f"{name}: no time left for {contender}", file=sys.stderr)
            continue
        torch.cuda.reset_peak_memory_stats()
        step = training_step(contender, case, batch, device)
        measured = measure(step, device, steps, captured=contender.endswith("graph"))
        row = {"device": torch.cuda.get_device_name(device), "model": model, "batch": shape, "padded": case.padded}
        row |= {"mode": "training", "contender": contender, **measured}
        yield row | {"tflop_per_s": round(flops / measured["ms_p50"] * 1e-9, 2), **versions(), "note": ""}
        del step
        gc.collect()
        torch._dynamo.reset()
        torch.cuda.empty_cache()


def median_ms(call: Callable[[], Any], count: int = 20) -> float:
    flush = torch.empty(_FLUSH, dtype=torch.int8, device="cuda")
    for _ in range(3):
        call()
    marks = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(count)]
    for before, after in marks:
        flush.zero_()
        before.record()
        call()
        after.record()
    torch.cuda.synchronize()
    return float(numpy.median([before.elapsed_time(after) for before, after in marks]))


def kernel_rows(device: torch.device) -> Iterator[dict[str, Any]]:
    for name, rate, unit, ms in (*_casts(device), *_products(device)):
        row = {"device": torch.cuda.get_device_name(device), "kernel": name, "ms_p50": round(ms, 4)}
        yield row | {"rate": round(rate, 3), "rate_unit": unit, **versions()}


def _casts(device: torch.device) -> Iterator[tuple[str, float, str, float]]:
    """The name, the rate, its unit and the time of each pass."""
    for width in (768, 1024, 3072, 4096):
        passes = _passes(width, device) | (_norms(width, device) if width <= 1024 else {})
        for name, (bytes_each, call) in passes.items():
            ms = median_ms(call)
            yield f"{name} {TOKENS}x{width}", bytes_each * TOKENS * width / ms * 1e-9, "TB/s", ms


def _passes(width: int, device: torch.device) -> dict[str, tuple[int, Callable[[], Any]]]:
    """Passes over [TOKENS, width] bf16 elements, and the bytes that they move for each."""
    slot, other = fp8.Scales([fp8.E4M3, fp8.E5M2], 4, device).slots
    slot.scales.set_magnitudes(0.0)
    x = torch.randn(TOKENS, width, device=device, dtype=torch.bfloat16)
    target, bias = torch.empty_like(x), torch.randn(width, device=device)
    rows, columns = fp8.empty_layouts(x, slot.dtype)

    def cast_twice() -> None:
        for outputs in ((rows, rows.new_empty(0)), (columns.new_empty(0), columns)):
            fp8_native.run("cast", x, slot.scale, slot.amax, *outputs)

    passes: dict[str, tuple[int, Callable[[], Any]]] = {
        "copy": (4, lambda: target.copy_(x)),
        "cast": (4, lambda: fp8.cast(x, slot)),
        "cast rows, then columns": (6, cast_twice),
    }
    if width == 4096:
        passes["gelu forward"] = (3, lambda: fp8.gelu(x, bias, "gelu", slot))
        passes["gelu backward"] = (7, lambda: fp8.gelu_backward(x, x, bias, "gelu", slot, other, True))
    return passes


def _norms(width: int, device: torch.device) -> dict[str, tuple[int, Callable[[], Any]]]:
    """dropout_add_layer_norm with casts, and its backward with and without the cast of the branch's gradient."""
    slot, other = fp8.Scales([fp8.E5M2, fp8.E4M3], 4, device).slots
    slot.scales.set_magnitudes(0.0)
    x, residual, dy = (torch.randn(TOKENS, width, device=device, dtype=torch.bfloat16) for _ in range(3))
    weight, bias, linear_bias = (torch.randn(width, device=device) for _ in range(3))
    ends = torch.arange(0, TOKENS + 1, 512, dtype=torch.int32, device=device)
    norm = NormArguments(weight, bias, linear_bias, ends, philox.draw_seed(device), 0.1, 1e-5)
    _, z, statistics = forward_op(x, residual, *norm, True, None)
    needs, dropout = [True] * 3, (ends, norm.seed, norm.p)
    return {
        "norm forward with cast": (10, lambda: add_norm_cast(x, residual, norm, other, None)),
        "norm backward": (8, lambda: backward_op(dy, None, z, statistics, *norm[:-1], needs, None)),
        "dropout and cast": (4, lambda: fp8.cast_dropped(dy, slot, dropout)),
        "norm backward with cast": (
            8,
            lambda: add_norm_backward_cast((dy, None), z, statistics, norm, needs, slot, None),
        ),
    }


def _products(device: torch.device) -> Iterator[tuple[str, float, str, float]]:
    for inputs, outputs in WIDTHS:
        for name, call in _gemms(inputs, outputs, device).items():
            try:
                ms = median_ms(call)
            except RuntimeError as error:  # torch does not support every format with a scale for each row
                print(f"{name}: {error}", file=sys.stderr)
                continue
            yield f"{name} {TOKENS}x{inputs}x{outputs}", 2 * TOKENS * inputs * outputs / ms * 1e-9, "TFLOP/s", ms


def _gemms(inputs: int, outputs: int, device: torch.device) -> dict[str, Callable[[], Tensor]]:
    x, dy = (torch.randn(TOKENS, width, device=device).bfloat16() for width in (inputs, outputs))
    weight = torch.randn(outputs, inputs, device=device)
    slots: Any = fp8.Scales([fp8.E4M3, fp8.E4M3, fp8.E5M2], 4, device).slots
    layer = fp8.Fp8Linear(weight, tuple(slots))
    layer.refresh_changed()
    x8, g8, w16 = fp8.cast(x, layer.input), fp8.cast(dy, layer.gradient), weight.bfloat16()
    by_row = {
        "fp8 row-wise forward": _row_wise(x8.rows, layer.rows, fast=True),
        "fp8 row-wise input gradient": _row_wise(g8.rows, layer.columns, fast=False),
        "fp8 row-wise weight gradient": _row_wise(g8.columns, x8.columns, fast=False),
    }
    return {
        "fp8 forward": lambda: layer.forward(x8, torch.bfloat16),
        "fp8 input gradient": lambda: layer.input_gradient(g8, torch.bfloat16),
        "fp8 weight gradient": lambda: layer.weight_gradient(g8, (x8.columns, x8.inverse), torch.float32),
        "bf16 forward": lambda: x @ w16.t(),
        "bf16 input gradient": lambda: dy @ w16,
        "bf16 weight gradient": lambda: torch.mm(dy.t(), x, out_dtype=torch.float32),
        **by_row,
    }


def _row_wise(a: Tensor, b: Tensor, *, fast: bool) -> Callable[[], Tensor]:
    """``a b^T`` of a [M, K] and b [N, K] with a scale for each of their rows; torch supports only bf16 results."""
    left, right = (torch.ones(len(factor), 1, device=a.device) for factor in (a, b))
    return lambda: torch._scaled_mm(a, b.t(), left, right.t(), out_dtype=torch.bfloat16, use_fast_accum=fast)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), help="model:batch, with :padded for 56%% real tokens")
    parser.add_argument("--contenders", default=CONTENDERS)
    parser.add_argument("--peers", default="", help="contenders of training_step.py to run after those of all cases")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no more steps after this time")
    parser.add_argument("--no-kernels", action="store_true", help="only whole steps")
    parser.add_argument("--out", type=Path, help="a CSV file to add rows to; those of kernels go to <name>-kernels.csv")
    parser.add_argument("--chart", type=Path, help="draw the rows of a CSV file, and measure nothing")
    arguments = parser.parse_args()
    if arguments.chart is not None:
        print(write_chart(arguments.chart))
        return
    device = torch.device("cuda", torch.cuda.current_device())
    cases, ours, peers = (
        [name for name in names.split(",") if name]
        for names in (arguments.cases, arguments.contenders, arguments.peers)
    )
    deadline = time.perf_counter() + arguments.seconds
    out: Path | None = arguments.out

    def report(row: dict[str, Any], path: Path | None) -> None:
        print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)
        if path is not None:
            append_row(path, row)

    for contenders, name in itertools.product((ours, peers), cases):
        for row in step_rows(name, contenders, device, arguments.steps, deadline):
            report(row, out)
    if not arguments.no_kernels:
        for row in kernel_rows(device):
            report(row, None if out is None else out.with_name(f"{out.stem}-kernels.csv"))


if __name__ == "__main__":
    main()
