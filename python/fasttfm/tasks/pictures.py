"""A picture of a classifier's confusion matrix."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fasttfm import _extras
from fasttfm._atomic_files import atomic_write
from fasttfm._fonts import fonts_for

CONFUSION = "confusion.png"
_MAX_LABELS = 40


def confusion_counts(gold: Sequence[str], predicted: Sequence[str], labels: Sequence[str]) -> list[list[int]]:
    """How often each label (rows) was predicted as each label (columns)."""
    numbers = {label: number for number, label in enumerate(labels)}
    counts = [[0] * len(labels) for _ in labels]
    for right, prediction in zip(gold, predicted, strict=True):
        if right in numbers and prediction in numbers:
            counts[numbers[right]][numbers[prediction]] += 1
    return counts


def write_confusion(path: Path, counts: Sequence[Sequence[int]], labels: Sequence[str], title: str) -> None:
    """Draws the matrix: fractions of each row as colors, counts as numbers. Draws nothing for more than 40 labels."""
    if not 1 < len(labels) <= _MAX_LABELS:
        return
    try:
        import matplotlib
    except ImportError:
        raise _extras.missing("the picture of the confusions", "matplotlib", "train") from None
    matplotlib.use("Agg")
    with fonts_for((*labels, title)):
        _draw_confusion(path, counts, labels, title)


def _draw_confusion(path: Path, counts: Sequence[Sequence[int]], labels: Sequence[str], title: str) -> None:
    from matplotlib import pyplot

    fractions = [[count / max(1, sum(row)) for count in row] for row in counts]
    side = 2.6 + 0.55 * len(labels)
    figure, axes = pyplot.subplots(figsize=(side + 1.2, side))
    image = axes.imshow(fractions, cmap="Blues", vmin=0, vmax=1)
    for row, values in enumerate(counts):
        for column, count in enumerate(values):
            color = "white" if fractions[row][column] > 0.5 else "black"
            axes.text(column, row, f"{count:,}", ha="center", va="center", color=color, fontsize=9)
    names: list[Any] = [label if len(label) <= 20 else f"{label[:19]}…" for label in labels]
    axes.set_xticks(range(len(labels)), names, rotation=45, ha="right")
    axes.set_yticks(range(len(labels)), names)
    axes.set_xlabel("predicted")
    axes.set_ylabel("label")
    axes.set_title(title)
    figure.colorbar(image, label="fraction of the label", fraction=0.046, pad=0.04)
    figure.tight_layout()
    with atomic_write(path) as partial:
        figure.savefig(partial, dpi=110, format="png")
    pyplot.close(figure)
