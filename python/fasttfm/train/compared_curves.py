"""``compare_curves``: the curves of several runs in one picture."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fasttfm import _extras
from fasttfm._atomic_files import atomic_write
from fasttfm._fonts import fonts_for
from fasttfm.train.logs import CSV, read_rows

Curves = dict[str, tuple[list[int], list[float]]]  # of a run: steps and values by column

_COUNTERS = ("step", "tokens")  # columns that are no curves
_MARKED = 20  # a curve of up to this many points has a marker at each


def compare_curves(runs: Sequence[Path], columns: Sequence[str], path: Path) -> None:
    """Draws columns of the logs of several runs over their steps, a panel for each column.

    Args:
        runs: Output directories; their names label the curves.
        columns: Columns of ``log.csv``. A run that does not have a column has no curve in its panel.
        path: The PNG file to write.
    """
    curves = {run: _curves_of(run, columns) for run in runs}
    for column in columns:
        if not any(column in points for points in curves.values()):
            known = ", ".join(name for name in read_rows(runs[0] / CSV)[0] if name not in _COUNTERS)
            raise ValueError(f"columns: expected some of {known}, got {column}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise _extras.missing("drawing curves", "matplotlib", "train") from None
    named = {_name(run): points for run, points in curves.items()}
    with fonts_for((*named, *columns)), atomic_write(path) as partial:
        draw(named, columns).savefig(partial, dpi=100, format="png")


def draw(curves: Mapping[str, Curves], columns: Sequence[str]) -> Any:
    """A matplotlib figure with a panel for each column; curves are labelled with the names of their runs."""
    from matplotlib.figure import Figure

    count = len(columns)
    figure = Figure(figsize=(4.2 * count + 0.6, 3.2), layout="constrained")
    panels = figure.subplots(1, count, squeeze=False)
    for panel, column in zip(panels[0], columns, strict=True):
        for number, (name, points) in enumerate(curves.items()):
            if column in points:
                marker = "o" if len(points[column][0]) <= _MARKED else ""
                panel.plot(*points[column], marker=marker, markersize=4, color=f"C{number}", label=name)
        panel.set_title(column.replace("_", " "))
        panel.set_xlabel("step")
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25)
        panel.legend(frameon=False)
    return figure


def _curves_of(run: Path, columns: Sequence[str]) -> Curves:
    """Steps and values of each column that the run has."""
    rows = read_rows(run / CSV)
    if not rows:
        raise ValueError(f"runs: expected a folder with the {CSV} of a run, got {run}")
    curves = {}
    for column in columns:
        points = [(int(row["step"]), float(row[column])) for row in rows if row.get(column, "") != ""]
        if points:
            steps, values = zip(*points, strict=True)
            curves[column] = (list(steps), list(values))
    return curves


def _name(run: Path) -> str:
    return os.path.basename(os.path.abspath(run))
