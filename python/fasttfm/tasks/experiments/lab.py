"""``Lab`` and ``Experiment``: the small models, data, tables and plots that the experiments share."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from fasttfm import _extras, data
from fasttfm._atomic_files import atomic_write, write_text
from fasttfm.models.objectives import Pretraining
from fasttfm.models.pretrained import PretrainedModel
from fasttfm.tasks.finetuning import FinetuneSettings, FineTuning, predict, prepare, trainer_of
from fasttfm.tasks.rates import Rates
from fasttfm.tasks.reading import read_examples
from fasttfm.train import Objective, OptimizerSettings

Row = dict[str, Any]


@dataclass(frozen=True)
class Experiment:
    """An ablation of a paper, on small data.

    Args:
        name: The name on the command line.
        title: A short description of the comparison.
        paper: The source of the ablation.
        expect: A paragraph about the paper's results and what to expect of models this small.
        run: Yields the rows of the table, one at a time.
        label: The column that names a row; the points of curves show it, unless it distinguishes the curves
            or is ``x``.
        plotted: The columns with numbers that are plotted, one panel each.
        x: The column of the x axis, if rows are points of curves; by default they are bars.
        lines: The column that distinguishes the curves.
    """

    name: str
    title: str
    paper: str
    expect: str
    run: Callable[[Lab], Iterator[Row]]
    label: str
    plotted: tuple[str, ...]
    x: str | None = None
    lines: str | None = None

    def write(self, rows: Sequence[Row], directory: Path) -> list[Path]:
        """Writes the table, the plot and the paragraph; returns their paths."""
        paths = [directory / f"{self.name}.{suffix}" for suffix in ("csv", "md", "png")]
        write_text(paths[0], csv_text(rows))
        text = f"# {self.title}\n\n{self.paper}\n\n{' '.join(self.expect.split())}\n\n{table(rows)}\n"
        write_text(paths[1], text)
        draw(self, rows, paths[2])
        return paths


class Lab:
    """Small data and short trainings, the same for every row of a table.

    Args:
        folder: The directory for tokenizers, shards and models.
        quick: Whether to run only a few steps of the smallest models, as a test.
        seed: Random seed of every training.
    """

    def __init__(self, folder: Path, *, quick: bool = False, seed: int = 0) -> None:
        self.folder, self.quick, self.seed = folder, quick, seed
        self.length = 64
        self.tokens_per_batch = 512 if quick else 1024

    def steps(self, count: int) -> int:
        return min(count, 2) if self.quick else count

    @property
    def sizes(self) -> Row:
        """Fields of a BERT's configuration."""
        width = 32 if self.quick else 128
        return {
            "vocab_size": self.wordpiece.vocab_size,
            "hidden_size": width,
            "num_hidden_layers": 2 if self.quick else 4,
            "num_attention_heads": 2 if self.quick else 4,
            "intermediate_size": 4 * width,
            "max_position_embeddings": 128,
        }

    @cached_property
    def documents(self) -> list[str]:
        texts = data.read_documents(data.shipped_corpus() / "state-of-the-union.txt.gz")
        return list(islice(texts, 6 if self.quick else None))

    @cached_property
    def wordpiece(self) -> data.Tokenizer:
        return data.train_tokenizer("wordpiece", self.documents, 600 if self.quick else 4000)

    @cached_property
    def bpe(self) -> data.Tokenizer:
        return data.train_tokenizer("bpe", self.documents, 600 if self.quick else 4000)

    def batches(
        self,
        tokenizer: data.Tokenizer,
        sequences: Any,
        tokens: int | None = None,
        masking: data.Masking | None = None,
    ) -> tuple[data.BatchStream, list[data.Batch]]:
        """The batches of the training set and of the validation set, of ``tokens`` tokens (by default, and if this is
        quick, ``tokens_per_batch``). ``masking`` is that of the training set; the validation set has the default."""
        if tokens is None or self.quick:
            tokens = self.tokens_per_batch
        folder = self.folder / f"shards-{tokenizer.fingerprint[:8]}"
        shards = data.prepare(iter(self.documents), tokenizer, folder, progress=False, workers=1)
        streams = [
            data.BatchStream(
                part,
                data.SequenceFormat(sequences, self.length),
                part_masking,
                tokens_per_batch=tokens,
                seed=self.seed,
            )
            for part, part_masking in zip(shards.split(0.4 if self.quick else 0.1), (masking, None), strict=True)
        ]
        return streams[0], list(islice(streams[1], self.steps(16384 // tokens)))

    def pretrain(
        self,
        module: Pretraining,
        sequences: str,
        *,
        steps: int,
        tokenizer: data.Tokenizer | None = None,
        tokens: int | None = None,
        masking: data.Masking | None = None,
    ) -> dict[str, float]:
        """Trains for ``steps`` steps and returns the mean of each loss term over the validation set. ``tokens`` and
        ``masking`` are those of ``batches``."""
        stream, held_out = self.batches(tokenizer or self.wordpiece, sequences, tokens, masking)
        settings = FinetuneSettings(
            rates=Rates(1e-3), optimizer=OptimizerSettings(learning_rate=1e-3), warmup=0.1, seed=self.seed
        )
        objective = Objective.of(module)
        torch.manual_seed(self.seed)
        trainer = trainer_of(module, objective, module, settings, self.steps(steps))
        for batch in islice(stream, self.steps(steps)):
            trainer.step([batch])
        trainer.finish()
        return trainer.evaluate(held_out)

    def score(self, model: PretrainedModel, task: str, *, epochs: int = 8, **options: Any) -> float:
        """The main score of the model after fine-tuning on the task's shipped sample."""
        directory = self.folder / f"{task}-model"
        tokenizer = self.bpe if model.config.model_type in ("gpt2", "roberta") else self.wordpiece
        model.save_pretrained(directory)
        tokenizer.save(directory)
        return self.score_of(directory, task, epochs=epochs, **options)[0]

    def score_of(
        self, directory: Path, task: str, *, epochs: int = 8, rate: float = 1e-3
    ) -> tuple[float, PretrainedModel, Any]:
        """The main score of the checkpoint after fine-tuning, the model and its task."""
        examples = read_examples(task)
        train, dev = (part[:16] if self.quick else part for part in (examples.train, examples.dev))
        model, kind = prepare(task, directory, train, max_length=128)
        settings = FinetuneSettings(
            rates=Rates(rate), epochs=self.steps(epochs), tokens_per_batch=self.tokens_per_batch, seed=self.seed
        )
        FineTuning(model, kind, train, settings).run(lambda results: None)
        return kind.scores(dev, predict(model, kind, dev))[kind.main_score], model, kind


def parameters(model: torch.nn.Module) -> int:
    """The number of parameters; shared ones count once."""
    return sum(parameter.numel() for parameter in dict.fromkeys(model.parameters()))


# ---- tables and plots ------------------------------------------------------------------------------------------------


def csv_text(rows: Sequence[Row]) -> str:
    """Rows as a CSV file."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def table(rows: Sequence[Row]) -> str:
    """Rows as a Markdown table."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def draw(experiment: Experiment, rows: Sequence[Row], path: Path) -> None:
    """A panel for each plotted column: bars or points with their numbers, or curves over ``x``."""
    try:
        import matplotlib
    except ImportError:
        raise _extras.missing("the plot of an experiment", "matplotlib", "train") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    count = len(experiment.plotted)
    figure, panels = pyplot.subplots(1, count, figsize=(4 * count + 1.5, 4), squeeze=False, sharey=experiment.x is None)
    for panel, column in zip(panels[0], experiment.plotted, strict=True):
        panel.set_title(column.replace("_", " "))
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y" if experiment.x else "x", alpha=0.25)
        if experiment.x is None:
            _draw_values(panel, [str(row[experiment.label]) for row in rows], [row[column] for row in rows])
        else:
            _draw_curves(panel, experiment, rows, column)
    if experiment.x is None:
        panels[0][0].invert_yaxis()
    figure.suptitle(experiment.title)
    figure.tight_layout()
    with atomic_write(path) as partial:
        figure.savefig(partial, dpi=110, format="png")
    pyplot.close(figure)


def _draw_values(panel: Any, names: Sequence[str], values: Sequence[float]) -> None:
    """Bars from 0, or points where the values are so near to each other that bars would look alike."""
    known = [value for value in values if math.isfinite(value)] or [0.0]
    smallest, largest = min(known), max(known)
    spread = largest - smallest
    if smallest > 2 * spread > 0:
        panel.plot(values, names, "o", color="tab:blue")
        panel.set_xlim(smallest - spread / 2, largest + spread)
    else:
        panel.barh(names, [value if math.isfinite(value) else 0 for value in values], color="tab:blue")
        panel.set_xlim(0, 1.3 * largest or 1)
    for name, value in zip(names, values, strict=True):
        text = "none" if not math.isfinite(value) else _short(value)
        place = value if math.isfinite(value) else panel.get_xlim()[0]
        panel.annotate(text, (place, name), xytext=(6, 0), textcoords="offset points", va="center", fontsize=9)
    panel.set_ylim(-0.6, len(names) - 0.4)
    panel.locator_params(axis="x", nbins=4)
    panel.xaxis.set_major_formatter(lambda value, _: _short(value))


def _short(value: float) -> str:
    """A number in few characters: 1.2M, 48.8k, 0.583."""
    for unit, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.3g}{letter}"
    return f"{value:.4g}"


def _draw_curves(panel: Any, experiment: Experiment, rows: Sequence[Row], column: str) -> None:
    assert experiment.x is not None
    groups = dict.fromkeys(row[experiment.lines] if experiment.lines else "" for row in rows)
    for group in groups:
        some = [row for row in rows if experiment.lines is None or row[experiment.lines] == group]
        panel.plot([row[experiment.x] for row in some], [row[column] for row in some], marker="o", label=str(group))
    name = experiment.x.replace("_", " ")
    if experiment.label not in (experiment.lines, experiment.x):
        name += f" (at the points: {experiment.label.replace('_', ' ')})"
        for row in rows:
            place = (row[experiment.x], row[column])
            panel.annotate(str(row[experiment.label]), place, xytext=(6, 4), textcoords="offset points", fontsize=9)
        panel.margins(x=0.12)  # room for the last annotation
    panel.set_xlabel(name)
    if experiment.lines:
        panel.legend(frameon=False, title=experiment.lines)
    values = [row[experiment.x] for row in rows]
    if min(values) > 0 and max(values) / min(values) > 30:
        panel.set_xscale("log")
    panel.xaxis.set_major_formatter(lambda value, _: _short(value))
