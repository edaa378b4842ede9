"""Explains a KagNet's answer by the paths with the largest attention weights, as text and as a picture."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fasttfm._atomic_files import atomic_write
from fasttfm._fonts import fonts_for
from fasttfm.data.graphs import ConceptGraph
from fasttfm.tasks.commonsense import ChosenAnswer, CommonsenseTask, WeightedPath, path_text

_COLOURS = {"question": "#cfe3f7", "answer": "#d7efcf", "": "#eeeeee"}


def explanation(task: CommonsenseTask, example: Any, answer: ChosenAnswer, *, paths: int = 5) -> str:
    """The question, its choices with their probabilities, and the paths with the largest weights for the chosen one."""
    probabilities = _softmax(answer.scores)
    lines = [example.context]
    for number, ending in enumerate(example.endings):
        mark = "*" if number == answer.choice else " "
        right = "  (right)" if number == example.label else ""
        lines.append(f"  {mark} {example.key(number)}  {probabilities[number]:6.1%}  {ending}{right}")
    best = answer.paths[answer.choice][:paths]
    lines += [f"      {weight:.3f}  {path_text(task.graph, path)}" for weight, path in best]
    return "\n".join(lines if best else [*lines, "      no path connects the question with this answer"])


def _softmax(scores: Sequence[float]) -> list[float]:
    powers = [math.exp(score - max(scores)) for score in scores]
    return [power / sum(powers) for power in powers]


def draw_explanation(graph: ConceptGraph, example: Any, answer: ChosenAnswer, path: Path, *, paths: int = 8) -> None:
    """Draws the paths with the largest weights for the chosen answer, from the question's concepts on the left to the
    answer's on the right. The width of an edge shows the sum of its paths' weights."""
    try:
        import matplotlib
    except ImportError:
        raise ImportError("the picture of a schema graph needs matplotlib: pip install fasttfm[train]") from None
    matplotlib.use("Agg")
    best = answer.paths[answer.choice][:paths]
    concepts = [graph.concepts[concept] for _, drawn in best for concept in drawn.concepts]
    with fonts_for((example.context, example.endings[answer.choice], *concepts, *graph.relations)):
        _draw(graph, example, answer, path, paths)


def _draw(graph: ConceptGraph, example: Any, answer: ChosenAnswer, path: Path, paths: int) -> None:
    from matplotlib import pyplot

    best = answer.paths[answer.choice][:paths]
    positions = _positions(best)
    rows = max(
        [sum(1 for x, _ in positions.values() if x == column) for column in {x for x, _ in positions.values()}] or [1]
    )
    figure, panel = pyplot.subplots(figsize=(10, 1.6 + 0.9 * rows))
    panel.set_title(f"{example.context}\n{example.endings[answer.choice]}", fontsize=11)
    panel.axis("off")
    panel.set_xlim(-0.15, 1.15)
    panel.set_ylim(-0.08, 1.08)
    if not best:
        panel.text(0.5, 0.5, "no path connects the question with this answer", ha="center")
    ends = {drawn.concepts[0]: "question" for _, drawn in best} | {drawn.concepts[-1]: "answer" for _, drawn in best}
    boxes = {}
    for concept, (x, y) in positions.items():
        colour = _COLOURS[ends.get(concept, "")]
        box = {"boxstyle": "round,pad=0.4", "facecolor": colour, "edgecolor": "#666666"}
        name = graph.concepts[concept].replace("_", " ")
        boxes[concept] = panel.text(x, y, name, ha="center", va="center", bbox=box, zorder=1).get_bbox_patch()
    for (head, relation, tail), weight in _edges(graph, best).items():
        _draw_edge(
            panel, (positions[head], boxes[head]), (positions[tail], boxes[tail]), f"{relation} {weight:.2f}", weight
        )
    with atomic_write(path) as partial:
        figure.savefig(partial, dpi=110, format="png", bbox_inches="tight")
    pyplot.close(figure)


def _draw_edge(panel: Any, head: tuple[Any, Any], tail: tuple[Any, Any], name: str, weight: float) -> None:
    """Draws a relation of the graph as an arrow between the boxes of two concepts, each given by its position and its
    box, with a label above. Boxes are drawn first (``zorder``): only then their edges are known, where arrows end."""
    style = {"arrowstyle": "-|>", "color": "#30506f", "linewidth": 0.8 + 4 * weight, "alpha": 0.35 + 0.6 * weight}
    (begin, first), (end, last) = head, tail
    arrow = {**style, "patchA": first, "patchB": last, "shrinkA": 2, "shrinkB": 2, "mutation_scale": 10 + 12 * weight}
    panel.annotate("", xy=end, xytext=begin, arrowprops=arrow, zorder=2)
    middle = ((begin[0] + end[0]) / 2, (begin[1] + end[1]) / 2)
    text = {"ha": "center", "va": "bottom", "fontsize": 8, "color": "#30506f", "zorder": 3}
    background = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85}
    panel.annotate(name, middle, xytext=(0, 4), textcoords="offset points", bbox=background, **text)


def _edges(graph: ConceptGraph, paths: Sequence[WeightedPath]) -> dict[tuple[int, str, int], float]:
    """The edges of paths, in the graph's direction, with the sum of their paths' weights."""
    count = len(graph.relations)
    weights: dict[tuple[int, str, int], float] = defaultdict(float)
    for weight, path in paths:
        for step, relation in enumerate(path.relations):
            head, tail = path.concepts[step : step + 2]
            if relation >= count:
                head, tail = tail, head
            weights[head, graph.relations[relation % count], tail] += weight
    return weights


def _positions(paths: Sequence[WeightedPath]) -> dict[int, tuple[float, float]]:
    """The position of each concept in the picture; x is its position along the path with the largest weight."""
    along: dict[int, float] = {}
    for _, path in paths:
        for step, concept in enumerate(path.concepts):
            along.setdefault(concept, step / len(path.relations))
    columns: dict[float, list[int]] = defaultdict(list)
    for concept, x in along.items():
        columns[x].append(concept)
    return {
        concept: (x, 1 - (row + 0.5) / len(concepts))
        for x, concepts in columns.items()
        for row, concept in enumerate(concepts)
    }
