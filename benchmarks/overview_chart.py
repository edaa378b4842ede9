"""Draws the README's chart from committed rows: one large training step and one fine-tuning step, with their peers.

python benchmarks/overview_chart.py benchmarks/results/nvidia-h200
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

# A panel: its title, the file that has the rows, the columns that select them, and the contenders with their labels.
PANELS = (
    (
        "Pre-training BERT-large, 64 x 512 tokens",
        "training_step",
        {"model": "bert-large", "batch": "64x512", "padded": "False", "mode": "training"},
        {
            "fasttfm-fast": "fasttfm, keep_activation",
            "handmade-compile": "hand-written torch, compiled",
            "hf-compile": "transformers, torch.compile",
        },
    ),
    (
        "Fine-tuning BERT-base, 32 x 128 tokens, 56% full",
        "small_batches",
        {"part": "training"},
        {
            "fasttfm lengths": "fasttfm",
            "hf patched": "transformers, fasttfm.patch",
            "hf reduce-overhead": "transformers, reduce-overhead",
            "hf eager": "transformers",
        },
    ),
)
OURS, PEER = "#1c6ca8", "#b4b4b4"


def rows_of(path: Path, columns: dict[str, str], contenders: dict[str, str]) -> list[tuple[str, float]]:
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if all(row[key] == value for key, value in columns.items())]
    times = {row["contender"]: float(row["ms_p50"]) for row in rows}
    missing = [name for name in contenders if name not in times]
    if missing:
        raise SystemExit(f"overview_chart: {path}: expected rows of {', '.join(missing)} where {columns}, got none")
    return [(label, times[name]) for name, label in contenders.items()]


def panel_rows(stem: Path) -> list[list[tuple[str, float]]]:
    """The labels and times of each panel."""
    return [
        rows_of(stem.with_name(f"{stem.name}-{file}.csv"), columns, contenders)
        for _, file, columns, contenders in PANELS
    ]


def description(panels: list[list[tuple[str, float]]]) -> str:
    """A description of the chart for the metadata of its file."""
    return "; ".join(f"{label}: {time:.1f} ms" for rows in panels for label, time in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws STEM-overview.png from STEM-*.csv.")
    parser.add_argument("stem", type=Path, help="for example benchmarks/results/nvidia-h200")
    stem: Path = parser.parse_args().stem
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 2.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = panel_rows(stem)
    for panel, (title, *_), rows in zip(figure.subplots(1, len(PANELS)), PANELS, panels, strict=True):
        labels, times = zip(*rows, strict=True)
        colors = [OURS if "fasttfm" in label else PEER for label in labels]
        bars = panel.barh(labels, times, color=colors)
        panel.bar_label(bars, fmt="%.1f ms", padding=3)
        panel.set_title(title, fontsize=9, loc="left")
        panel.set(xlim=(0, 1.2 * max(times)), xticks=[])
        panel.invert_yaxis()
        panel.spines[["top", "right", "bottom"]].set_visible(False)
    path = stem.with_name(f"{stem.name}-overview.png")
    figure.savefig(path, dpi=150, metadata={"Description": description(panels)})
    print(path)


if __name__ == "__main__":
    main()
