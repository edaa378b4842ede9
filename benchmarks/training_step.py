"""Times whole training steps: forward, backward and AdamW in fused passes, with dropout, in bf16 autocast on a GPU.

    python benchmarks/training_step.py --model bert-large --batch 64x512 --out rows.csv
    python benchmarks/training_step.py --model bert-mini --vocabulary 8000 --batch 8x128 --padded --device cpu
    python benchmarks/training_step.py --chart rows.csv

Contenders run one after the other, because a model with its optimizer fills much of the GPU's memory. Each gets the
same ids, lengths and labels; with --padded, lengths are spread evenly from S/8 to S, and a contender gets the batch
either packed or with a mask. Steps follow each other as in a training run, and the script synchronizes with the GPU
only after the last one. "fasttfm-graph" captures its whole step in a CUDA graph, as ``fasttfm pretrain --cuda-graph``
does; "fasttfm-fast" keeps activations (``keep_activation``), "fasttfm-recompute" keeps the least, "fasttfm-fp8" has the
layers' GEMMs in FP8 (``nn.Fp8Training``); "hf-patched" is transformers' model after ``fasttfm.patch``. On a GPU the
fasttfm contenders use ``fasttfm.optim.AdamW``, as ``fasttfm pretrain`` does; the others use torch's fused AdamW, as
their users do. With --inference the model is called without labels and without gradients.
"""

from __future__ import annotations

import argparse
import csv
import gc
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from training_contenders import CONTENDERS, MEASURED, Batch, Case, build, layout, make_batch, necessary_flops

import fasttfm
from fasttfm.bench.steps import captured

WARMUP = {"cuda": 5, "cpu": 2}


def training_step(name: str, case: Case, batch: Batch, device: torch.device) -> Callable[[], Tensor]:
    """One step of a contender, which returns its loss."""
    model, loss_of = build(name, case, batch, device)
    graph = name.endswith("graph")
    optimizer: torch.optim.Optimizer
    if name.startswith("fasttfm") and device.type == "cuda":
        options = {"weight_copies": True, "direct_gradients": True}
        optimizer = fasttfm.optim.AdamW(model.parameters(), lr=1e-4, **options, capturable=graph)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=graph)

    scaling = fasttfm.nn.Fp8Training(model) if "fp8" in name else None

    def step() -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            loss = loss_of()
        loss.backward()
        optimizer.step()
        if scaling is not None:
            scaling.update()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    if not graph:
        return step
    replay = captured(step, WARMUP["cuda"])
    return lambda: replay().clone()


def inference_step(name: str, case: Case, batch: Batch, device: torch.device) -> Callable[[], Tensor]:
    """A forward of a contender's encoder."""
    model, _ = build(name, case, batch, device)
    ours = name.startswith("fasttfm")
    encoder: Any = model.eval().encoder if ours else model.eval().base_model
    ids, options = batch.ids, {"attention_mask": None if batch.mask is None else batch.mask.long()}
    if ours:
        ids, options = ids if batch.mask is None else ids[batch.mask], layout(batch)

    @torch.no_grad()
    def step() -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            states: Tensor = encoder(ids, **options).last_hidden_state
        return states.flatten()[0]

    return step


def measure(step: Callable[[], Tensor], device: torch.device, steps: int, *, captured: bool) -> dict[str, Any]:
    """Times, peak memory and losses. The peak memory of a captured step includes that of its capture."""
    losses = [step() for _ in range(WARMUP[device.type])]
    if device.type == "cuda":
        torch.cuda.synchronize()
        if not captured:
            torch.cuda.reset_peak_memory_stats()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        marks[0].record()
        for mark in marks[1:]:
            losses.append(step())
            mark.record()
        torch.cuda.synchronize()
        times = [before.elapsed_time(after) for before, after in itertools.pairwise(marks)]
        peak: float | str = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    else:
        times, peak = [], ""
        for _ in range(steps):
            start = time.perf_counter()
            losses.append(step())
            times.append(1e3 * (time.perf_counter() - start))
    p20, p50, p80 = (round(float(milliseconds), 3) for milliseconds in numpy.percentile(times, [20, 50, 80]))
    values = {"ms_p20": p20, "ms_p50": p50, "ms_p80": p80, "peak_gib": peak}
    return {**values, "first_loss": round(float(losses[0]), 4), "last_loss": round(float(losses[-1]), 4)}


def profile(step: Callable[[], Tensor], device: torch.device) -> str:
    """The kernels of one step, by their time."""
    for _ in range(3):
        step()
    on_gpu = device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if on_gpu else [])]
    with torch.profiler.profile(activities=activities) as profiler:
        step()
        if on_gpu:
            torch.cuda.synchronize()
    order = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
    return profiler.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=90)


def versions() -> dict[str, str]:
    from importlib.metadata import version

    return {"torch": torch.__version__, "transformers": version("transformers")}


def append_row(path: Path, row: dict[str, Any]) -> None:
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, row, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


def write_chart(path: Path) -> Path:
    """A bar chart of step times: a panel for each case that several contenders have run. A row with a note was not
    measured in the same run as the others, and is not drawn."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if not row["note"]]
    cases: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        shape = row["batch"] + (", padded" if row["padded"] == "True" else "")
        cases.setdefault(f"{row['model']} {shape}, {row['mode']}", []).append(row)
    cases = {title: case_rows for title, case_rows in cases.items() if len(case_rows) > 1}
    columns = min(4, len(cases))
    lines = -(-len(cases) // columns)
    figure = Figure(figsize=(4.4 * columns, 0.6 + 2.3 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{rows[0]['device']}: milliseconds a step")
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for panel in panels[len(cases) :]:
        panel.set_visible(False)
    for panel, (title, case_rows) in zip(panels, cases.items(), strict=False):
        names = [row["contender"] for row in case_rows]
        colors = ["#1b6ca8" if name.startswith("fasttfm") else "#b5b5b5" for name in names]
        bars = panel.barh(names, [float(row["ms_p50"]) for row in case_rows], color=colors)
        panel.bar_label(bars, [f"{float(row['ms_p50']):.4g}" for row in case_rows], padding=3, fontsize=9)
        panel.invert_yaxis()
        panel.margins(x=0.16)
        panel.set_title(title, loc="left", fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
    chart = path.with_suffix(".png")
    figure.savefig(chart, dpi=110, metadata={"Software": None})
    return chart


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bert-base", help=f"family and size: {', '.join(MEASURED)}, for example")
    parser.add_argument("--batch", default="64x512", help="sequences x tokens")
    parser.add_argument("--vocabulary", type=int, help="tokens of the vocabulary; the model's own by default")
    parser.add_argument("--padded", action="store_true", help="sequences of different lengths")
    parser.add_argument("--inference", action="store_true", help="time the encoder's forward")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--profile", action="store_true", help="print the kernels of one step of the first contender")
    parser.add_argument("--out", type=Path, help="a CSV file to add rows to")
    parser.add_argument("--chart", type=Path, help="draw the rows of a CSV file, and measure nothing")
    arguments = parser.parse_args()
    if arguments.chart is not None:
        print(write_chart(arguments.chart))
        return
    device = torch.device(arguments.device)
    size, sequence = (int(number) for number in arguments.batch.split("x"))
    case = Case(arguments.model, size, sequence, arguments.padded, arguments.vocabulary)
    config = case.config()
    batch = make_batch(case, config.vocab_size, device)
    flops = necessary_flops(case, config, batch.lengths, len(batch.positions))
    make = inference_step if arguments.inference else training_step
    mode = "inference" if arguments.inference else "training"
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    for name in arguments.contenders.split(","):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        step = make(name, case, batch, device)
        if arguments.profile:
            print(profile(step, device))
            return
        row = {"device": machine, "model": case.name, "batch": arguments.batch, "padded": case.padded, "mode": mode}
        row |= {"contender": name, **measure(step, device, arguments.steps, captured=name.endswith("graph"))}
        row |= {
            "tflop_per_s": "" if arguments.inference else round(flops / row["ms_p50"] * 1e-9, 2),
            **versions(),
            "note": "",
        }
        print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)
        if arguments.out is not None:
            append_row(arguments.out, row)
        del step
        gc.collect()
        torch._dynamo.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
