"""A picture of a run's curves."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path

from fasttfm import _extras
from fasttfm._atomic_files import atomic_write
from fasttfm._fonts import fonts_for
from fasttfm.train.logs import PERPLEXITY, VALIDATION, WEIGHT, read_rows, weighted_sum

CURVES = "curves.png"


def write_curves(log: Path, path: Path, title: str) -> None:
    """Plots the rows of a log: a panel for the loss, whose title names its terms and their weights, one for each term,
    training and validation, and one for learning rate and gradient norm."""
    try:
        import matplotlib
    except ImportError:
        raise _extras.missing("plotting the curves", "matplotlib", "train") from None
    matplotlib.use("Agg")
    rows = read_rows(log)
    with fonts_for((title, *rows[0])):
        _draw(rows, path, title)


def _draw(rows: list[dict[str, str]], path: Path, title: str) -> None:
    from matplotlib import pyplot

    evaluated = [name for name in rows[0] if name.startswith(VALIDATION) and name != PERPLEXITY]
    names = [name.removeprefix(VALIDATION) for name in evaluated]
    terms = [name for name in names if name in rows[0]]
    if len(terms) == 2:  # one term is the loss
        names.remove(terms[1])
    rows_of_panels = math.ceil((len(names) + 1) / 2)
    figure, grid = pyplot.subplots(rows_of_panels, 2, figsize=(11, 3.8 * rows_of_panels), squeeze=False)
    panels = list(grid.flat)[: len(names) + 1]
    for panel, name in zip(panels, names, strict=False):
        for column, label, marker in ((name, "training", ""), (VALIDATION + name, "validation", "o")):
            points = [(int(row["step"]), float(row[column])) for row in rows if row.get(column, "") != ""]
            panel.plot(*zip(*points, strict=True), marker=marker, markersize=4, label=label) if points else None
        panel.set_title(_title(name, rows[-1]))
        panel.legend(frameon=False)
    rates = panels[-1]
    steps = [int(row["step"]) for row in rows]
    rates.plot(steps, [float(row["gradient_norm"]) for row in rows], color="tab:gray", label="gradient norm")
    rates.set_title("gradient norm and learning rate")
    rates.set_ylim(bottom=0)
    other = rates.twinx()
    other.plot(steps, [float(row["learning_rate"]) for row in rows], color="tab:green", label="learning rate")
    other.set_ylim(bottom=0)
    other.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    lines = [*rates.get_lines(), *other.get_lines()]
    rates.legend(lines, [str(line.get_label()) for line in lines], frameon=False)
    for panel in panels:
        panel.set_xlabel("step")
        panel.spines[["top"]].set_visible(False)
        panel.grid(alpha=0.25)
    for panel in list(grid.flat)[len(panels) :]:
        panel.set_visible(False)
    figure.suptitle(title)
    figure.tight_layout()
    with atomic_write(path) as partial:
        figure.savefig(partial, dpi=110, format="png")
    pyplot.close(figure)


def _title(name: str, row: dict[str, str]) -> str:
    """The name of a column; that of the loss is followed by its terms and their weights."""
    weights = {column.removeprefix(WEIGHT): value for column, value in row.items() if column.startswith(WEIGHT)}
    if name != "loss" or not weights:
        return name.replace("_", " ")
    terms = [term.replace("_", " ") for term in weights]
    return "\n".join(textwrap.wrap(f"loss = {weighted_sum(terms, [float(value) for value in weights.values()])}", 80))
