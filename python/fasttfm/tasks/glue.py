"""GLUE (Wang et al., 2018): its nine tasks, their scores and the files of its leaderboard.

The score of a task is the mean of its measures: Matthews' correlation for CoLA; F1 of the label 1 and accuracy for MRPC
and QQP; the correlations of Pearson and Spearman for STS-B; accuracy for the others, for MNLI of both dev sets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fasttfm.data.lines import data_error
from fasttfm.tasks.finetuning import FinetuneSettings, FineTuning, predict, prepare, save
from fasttfm.tasks.metrics import Scores
from fasttfm.tasks.reading import part_files, read_files
from fasttfm.tasks.trials import best


@dataclass(frozen=True)
class GlueTask:
    """One of GLUE's tasks.

    Args:
        name: The name on the leaderboard and of the folder.
        task: One of ``TASKS``.
        measures: The measures whose mean is the score.
        values: Whether the task is a regression.
        parts: The suffixes of its dev and test sets, in file names and on the leaderboard.
    """

    name: str
    task: str
    measures: tuple[str, ...] = ("accuracy",)
    values: bool = False
    parts: tuple[tuple[str, str], ...] = (("", ""),)

    def scores(self, gold: Sequence[str], predicted: Sequence[Any], scored: Scores) -> Scores:
        """The measures of predictions; ``scored`` are the scores that the task has computed."""
        positive = _positive_f1(gold, predicted) if "f1" in self.measures else 0.0
        return {name: positive if name == "f1" else scored[name] for name in self.measures}


GLUE = (
    GlueTask("CoLA", "classify", ("matthews",)),
    GlueTask("SST-2", "classify"),
    GlueTask("MRPC", "pair", ("f1", "accuracy")),
    GlueTask("STS-B", "pair", ("pearson", "spearman"), values=True),
    GlueTask("QQP", "pair", ("f1", "accuracy")),
    GlueTask("MNLI", "pair", parts=(("_matched", "-m"), ("_mismatched", "-mm"))),
    GlueTask("QNLI", "pair"),
    GlueTask("RTE", "pair"),
    GlueTask("WNLI", "pair"),
)
DIAGNOSTIC = "AX"  # a test set for the model of MNLI
_DIAGNOSTIC_FOLDERS = ("ax", "diagnostic", "diagnostics")


@dataclass(frozen=True)
class GlueResult:
    """The scores and the submission of a model for one task."""

    name: str
    examples: int
    dev: dict[str, Scores]  # by the leaderboard's name of the dev set
    submission: dict[str, str] = field(default_factory=dict)  # the leaderboard's files: names and contents
    trials: list[dict[str, float]] = field(default_factory=list)  # learning rate, seed and score of every training

    @property
    def score(self) -> float:
        """The mean of the measures over all dev sets."""
        return mean([value for scores in self.dev.values() for value in scores.values()])


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def find_tasks(folder: Path, names: Sequence[str] = ()) -> dict[str, Path]:
    """The folders of GLUE's tasks below ``folder``, in the order of ``GLUE``.

    Args:
        names: Only these tasks, all of which must exist.
    """
    known = [task.name for task in GLUE]
    for name in names:
        if name not in known:
            raise ValueError(f"tasks: expected some of {', '.join(known)}, got {name!r}")
    if not folder.is_dir():
        raise data_error(folder, "a directory with the folders of GLUE's tasks", "no directory")
    folders = {_plain(path.name): path for path in sorted(folder.iterdir()) if path.is_dir()}
    tasks = {name: folders[_plain(name)] for name in known if _plain(name) in folders and (not names or name in names)}
    if missing := [name for name in names if name not in tasks]:
        raise data_error(
            folder, f"a folder for {', '.join(missing)}", ", ".join(path.name for path in folders.values())
        )
    if not tasks:
        raise data_error(folder, f"folders such as {', '.join(known[:3])}", ", ".join(folders) or "none")
    return tasks


def train_task(
    glue: GlueTask,
    folder: Path,
    model: str | Path,
    settings: Callable[[Any], Sequence[FinetuneSettings]],
    *,
    seed: int = 0,
    device: Any = "cpu",
    max_length: int | None = None,
    output: Path | None = None,
    watch: Callable[[FineTuning], Callable[[Any], Any]] = lambda work: lambda results: None,
) -> GlueResult:
    """Fine-tunes a model on a task and predicts its dev and test sets.

    Args:
        folder: The task's folder, as downloaded.
        model: The model's directory.
        settings: Called with the prepared model; returns the settings of one training or of several, of which the one
            with the best score on the dev set is kept.
        seed: That of the first training, which also initializes the head.
        output: The directory for the fine-tuned model; by default it is not saved.
        watch: Called with each training before it starts; its result is called with the results of steps.
    """
    train = read_files(glue.task, _files(folder, "train", ""))
    dev_sets = {ending: read_files(glue.task, _files(folder, "dev", part)) for part, ending in glue.parts}

    def prepared(seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)  # of the head
        network, task = prepare(glue.task, model, train, values=glue.values, max_length=max_length)
        return network.to(device), task

    first = prepared(seed)
    planned = settings(first[0])
    trials: list[dict[str, float]] = []
    kept: list[_Trained] = []
    for number, trial in enumerate(planned):
        network, task = prepared(trial.seed) if number else first
        work = FineTuning(network, task, train, trial)
        work.run(watch(work))
        trained = _Trained(work, {glue.name + ending: _scores(glue, work, rows) for ending, rows in dev_sets.items()})
        trials.append({"learning_rate": trial.rates.rate, "seed": trial.seed, "score": trained.score})
        kept = [trained] if best([one["score"] for one in trials]) == number else kept
    work = kept[0].work
    submission = {}
    for name, path in _test_sets(glue, folder).items():
        predictions = _predictions(work, read_files(glue.task, [path]))
        submission[f"{name}.tsv"] = submission_text(predictions, values=glue.values)
    if output is not None:
        save(work.model, work.task, output)
    return GlueResult(glue.name, len(train), kept[0].dev, submission, trials)


class _Trained(NamedTuple):
    """A training and its scores by the leaderboard's name of the dev set."""

    work: FineTuning
    dev: dict[str, Scores]

    @property
    def score(self) -> float:
        return mean([value for scores in self.dev.values() for value in scores.values()])


def _predictions(work: FineTuning, examples: Sequence[Any]) -> Any:
    return predict(work.model, work.task, examples, precision=work.settings.step.precision)


def _scores(glue: GlueTask, work: FineTuning, examples: Sequence[Any]) -> Scores:
    predictions = _predictions(work, examples)
    return glue.scores([example.label for example in examples], predictions, work.task.scores(examples, predictions))


def submission_text(predictions: Sequence[Any], *, values: bool) -> str:
    """A file for the leaderboard: index and prediction. Numbers are clamped to STS-B's range, 0 to 5."""
    lines = [f"{min(5.0, max(0.0, prediction)):.3f}" if values else str(prediction) for prediction in predictions]
    return "index\tprediction\n" + "".join(f"{index}\t{line}\n" for index, line in enumerate(lines))


def _test_sets(glue: GlueTask, folder: Path) -> dict[str, Path]:
    """The files of the test sets by their names on the leaderboard; MNLI's model also predicts the diagnostic set."""
    test_files = {}
    for part, ending in glue.parts:
        if files := _part_named(folder, "test", part):
            test_files[glue.name + ending] = files[0]
    if glue.name == "MNLI":
        for path in sorted(folder.parent.iterdir()):
            if path.is_dir() and _plain(path.name) in _DIAGNOSTIC_FOLDERS:
                test_files.update((DIAGNOSTIC, file) for file in sorted(path.glob("*.tsv"))[:1])
    return test_files


def _files(folder: Path, part: str, ending: str) -> list[Path]:
    files = _part_named(folder, part, ending)
    if not files:
        raise data_error(
            folder, f"a file {part}{ending}.tsv", ", ".join(sorted(file.name for file in folder.iterdir()))
        )
    return files


def _part_named(folder: Path, part: str, ending: str) -> list[Path]:
    if not ending:
        return part_files(folder, part)
    names = (part, "validation") if part == "dev" else (part,)
    pattern = re.compile(rf"(?:{'|'.join(names)}){ending}(?:-\d+-of-\d+)?\.\w+")
    return [path for path in sorted(folder.iterdir()) if pattern.fullmatch(path.name)]


def _plain(name: str) -> str:
    """A task's name in lower case without punctuation: sst2 for SST-2."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _positive_f1(gold: Sequence[str], predicted: Sequence[Any]) -> float:
    """F1 of the label 1."""
    both = sum(a == b == "1" for a, b in zip(gold, predicted, strict=True))
    total = sum(label == "1" for label in (*gold, *predicted))
    return 2 * both / total if total else 0.0
