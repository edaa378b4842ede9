"""Draws the charts of the pages about kernels from committed rows; nothing is measured.

python benchmarks/kernel_charts.py benchmarks/results/nvidia-h200
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PARTIAL = "bare GEMMs"  # a contender that computes only a part of its op
OURS, PEER, OTHER = "#1b6ca8", "#b8b8b8", "#e0a458"
# Variants of nvidia-h200-kernel_variants.csv: run, label, the case's text around the number of tokens, variant.
FEW_TOKENS = (
    ("22", "one kernel for all layers", "BERT-base 12 layers {} tokens", "one kernel"),
    ("32", "five kernels a layer", "BERT-base, {} tokens", "LayerNorms folded, statistics merged before the main loop"),
    ("36", "six kernels a layer", "BERT-base, {} tokens", "first LayerNorm folded, tiles of the plan"),
    ("22", "seven kernels a layer", "BERT-base 12 layers {} tokens", "chain of kernels"),
    ("32", "seven kernels a layer", "BERT-base, {} tokens", "LayerNorms by kernels of their own"),
    ("36", "seven kernels a layer", "BERT-base, {} tokens", "LayerNorms by kernels of their own"),
)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def largest_cases(rows: list[dict[str, str]]) -> dict[str, tuple[str, float, float]]:
    """For each op: the bf16 case with the most work in both directions, and the fraction of the device's limit that
    fasttfm and its fastest peer reach in it."""
    work = {"TB/s": "bytes", "TFLOP/s": "flops"}
    measured = [row for row in rows if row["dtype"] == "bfloat16" and row["direction"] == "forward+backward"]
    measured = [row for row in measured if row["fraction"] and row["contender"] != PARTIAL]
    cases = {}
    for op in sorted({row["op"] for row in measured}):
        ours = [row for row in measured if row["op"] == op and row["contender"] == "fasttfm"]
        if all(row["backend"] == "reference" for row in ours):
            continue
        largest = max(ours, key=lambda row: float(row[work[row["rate_unit"]]]))
        peers = [
            float(row["fraction"])
            for row in measured
            if (row["op"], row["case"]) == (op, largest["case"]) and not row["contender"].startswith("fasttfm")
        ]
        cases[op] = (largest["case"], float(largest["fraction"]), max(peers))
    return cases


def few_tokens(rows: list[dict[str, str]]) -> dict[str, list[tuple[int, float]]]:
    """Tokens and microseconds of twelve layers of BERT-base, by label."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for run, label, case, variant in FEW_TOKENS:
        before, after = case.split("{}")
        lines.setdefault(label, []).extend(
            (int(row["case"].removeprefix(before).removesuffix(after)), float(row["us"]))
            for row in rows
            if (row["run"], row["variant"], row["measure"]) == (run, variant, "graph replay")
            and row["case"].startswith(before)
        )
    return {label: sorted(points) for label, points in lines.items()}


def draw_limits(panel: Any, rows: list[dict[str, str]]) -> None:
    cases = largest_cases(rows)
    centers = range(len(cases))
    for offset, column, color, label in ((-0.2, 1, OURS, "fasttfm"), (0.2, 2, PEER, "fastest peer of the same run")):
        heights = [100 * values[column] for values in cases.values()]
        bars = panel.barh([center + offset for center in centers], heights, height=0.38, color=color, label=label)
        panel.bar_label(bars, fmt="%.0f%%", padding=2, fontsize=9)
    panel.axvline(100, color="#444444", linewidth=1, linestyle="--")
    panel.set_yticks(list(centers), [f"{op}\n{values[0]}" for op, values in cases.items()], fontsize=9)
    panel.set(
        xlabel="% of the device's limit, forward and backward, bf16", xlim=(0, 110), ylim=(len(cases) - 0.4, -0.6)
    )
    panel.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=2)


def draw_few_tokens(panel: Any, rows: list[dict[str, str]]) -> None:
    colors = (OURS, "#8fb98a", OTHER, PEER)
    for (label, points), color in zip(few_tokens(rows).items(), colors, strict=True):
        panel.plot(*zip(*points, strict=True), marker="o", markersize=4, color=color, label=label)
    panel.set_xscale("log", base=2)
    ticks = (1, 4, 16, 32, 64, 128, 256, 512, 1024)
    panel.set_xticks(ticks, [str(tick) for tick in ticks])
    panel.minorticks_off()
    panel.set(xlabel="tokens", ylabel="us, twelve layers of BERT-base", ylim=(0, None))
    panel.grid(axis="y", color="#dddddd", linewidth=0.6)
    panel.legend(frameon=False)


def charts(stem: Path) -> Iterator[Path]:
    """Writes STEM-kernel_limits.png, STEM-few_tokens.png and STEM-attention.png."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from fasttfm.bench import measure, report
    from fasttfm.testing.specs import all_specs

    ops = read(stem.with_name(f"{stem.name}.csv"))
    for name, size, draw, rows in (
        ("kernel_limits", (8, 9.5), draw_limits, ops),
        ("few_tokens", (8, 4.2), draw_few_tokens, read(stem.with_name(f"{stem.name}-kernel_variants.csv"))),
    ):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        panel = figure.subplots()
        draw(panel, rows)
        panel.spines[["top", "right"]].set_visible(False)
        path = stem.with_name(f"{stem.name}-{name}.png")
        figure.savefig(path, dpi=110, metadata={"Software": None})
        yield path
    path = stem.with_name(f"{stem.name}-attention.png")
    numbers = ("ms_p50", "gpu_ms", "flops")
    texts = ("op", "case", "dtype", "direction", "device", "contender")
    attention = [
        measure.Row(
            **{key: row[key] for key in texts}, **{key: float(row[key]) if row[key] else None for key in numbers}
        )
        for row in ops
        if row["op"] == "attention"
    ]
    report.write_curves(path, attention, all_specs()["attention"].curves)
    yield path


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws charts of kernels from STEM.csv and STEM-kernel_variants.csv.")
    parser.add_argument("stem", type=Path, help="for example benchmarks/results/nvidia-h200")
    for path in charts(parser.parse_args().stem):
        print(path)


if __name__ == "__main__":
    main()
