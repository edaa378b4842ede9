"""``RunLog``: the log of a run: rows of a CSV file and, if it is installed, TensorBoard's events."""

from __future__ import annotations

import contextlib
import csv
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fasttfm._atomic_files import atomic_write
from fasttfm.train.loop import StepResult
from fasttfm.train.progress import Progress

CSV = "log.csv"
EVENTS = "tensorboard"
VALIDATION = "validation_"
PERPLEXITY = "validation_perplexity"
WEIGHT = "weight_"  # columns with the weights of losses
MEASURED = ("tokens_per_second", "mfu", "seconds")  # columns with times, which are not reproducible


class RunLog:
    """Collects the results of steps in order and writes a row for every few of them, with means over the steps that
    were not skipped.

    Args:
        directory: The run's directory.
        terms: The objective's terms. The rows have their means and, if there are several, their weights.
        steps: The number of steps of the run.
        every: Steps per row; evaluations and checkpoints end a row too.
        weights: The weights of the terms in the loss; by default 1 for each.
        start: The number of completed steps; later rows, of an interrupted run, are removed.
        progress: A progress bar that shows the numbers of each row.
        peak: The peak FLOP/s of all devices, if known; the model FLOPs utilization (MFU) is relative to it.
        perplexity: The term whose validation loss is a mean over tokens; its exponential is in the rows.
        scores: Names of scores of the validation set, in addition to its losses.
        reports: Other receivers of the numbers: objects with ``add_scalar`` and ``close``, like TensorBoard's.
    """

    def __init__(
        self,
        directory: Path,
        terms: Sequence[str],
        *,
        steps: int,
        every: int = 10,
        weights: Sequence[float] | None = None,
        start: int = 0,
        progress: Progress | None = None,
        peak: float | None = None,
        perplexity: str | None = None,
        scores: Sequence[str] = (),
        reports: Sequence[Any] = (),
    ) -> None:
        names = ["loss", *terms]
        self.path = directory / CSV
        self._validation_columns = [VALIDATION + name for name in [*names, *scores]]
        counters = ("gradient_norm", "learning_rate", "skipped")
        self._peak, self._perplexity = peak, perplexity
        evaluated = [*self._validation_columns, *([PERPLEXITY] if perplexity else [])]
        self.weights = dict(zip(terms, weights or [1.0] * len(terms), strict=True))
        constants = {WEIGHT + name: weight for name, weight in self.weights.items()} if len(terms) > 1 else {}
        self.columns = ["step", "tokens", *names, *constants, *counters, *evaluated, *MEASURED]
        earlier = [row for row in read_rows(self.path) if int(row["step"]) <= start] if start else []
        self._file = self._begin(earlier)
        self._writer = csv.DictWriter(self._file, self.columns, lineterminator="\n")
        events = _events(directory / EVENTS, start)
        self._reports = [*([] if events is None else [events]), *reports]
        self._progress = progress
        self._every = every
        self._window: list[StepResult] = []
        self._row: dict[str, Any] = dict(earlier[-1]) if earlier else dict.fromkeys(self.columns, 0)
        self._row |= constants
        self._arrived = float(self._row["seconds"])  # when the last result arrived, on this clock
        self._clock = Stopwatch(self._arrived)
        self._warm_step = start + min(10, (steps - start) // 3)
        self._warm: tuple[float, int] | None = None  # seconds and tokens after the first steps
        self.held_out: dict[str, float] = {}  # of the last evaluation

    def _begin(self, rows: Sequence[Mapping[str, str]]) -> Any:
        """The file with only these rows, opened for appending."""
        with atomic_write(self.path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        return self.path.open("a", newline="", encoding="utf-8")

    def add(self, results: Sequence[StepResult]) -> None:
        """Takes results that have arrived."""
        for result in results:
            if self._window and self._window[-1].step % self._every == 0:
                self.write()  # only now, because an evaluation after that step belongs to its row
            self._window.append(result)
            self._arrived = self._clock.seconds()
            if result.step == self._warm_step:
                self._warm = self._arrived, self.tokens
            if self._progress is not None:
                self._progress.advance(result.step)

    def write(self, held_out: Mapping[str, float] | None = None) -> None:
        """Ends a row; ``held_out`` are the validation losses after its last step."""
        if not self._window and held_out is None:
            return
        if self._window:
            self._row |= self._means() | self._counters()
            self._window.clear()
        self.held_out = dict(held_out or self.held_out)
        evaluated = held_out or {}
        self._row |= {name: evaluated.get(name.removeprefix(VALIDATION), "") for name in self._validation_columns}
        if self._perplexity:
            self._row[PERPLEXITY] = round(perplexity(evaluated[self._perplexity]), 3) if evaluated else ""
        self._writer.writerow(self._row)
        self._file.flush()
        for report in self._reports:
            for name, value in self._row.items():
                if name != "step" and value != "" and not name.startswith(WEIGHT):
                    report.add_scalar(name.replace(VALIDATION, "validation/"), float(value), int(self._row["step"]))

    def _means(self) -> dict[str, float]:
        """Means of losses and norms; those of the previous row if every step was skipped."""
        good = [result for result in self._window if not result.skipped]
        if not good:
            return {}
        losses = {name: sum(result.terms[name] for result in good) for name in good[0].terms}
        sums = {"loss": sum(result.loss for result in good), **losses}
        sums["gradient_norm"] = sum(result.gradient_norm for result in good)
        return {name: value / len(good) for name, value in sums.items()}

    def _counters(self) -> dict[str, Any]:
        last = self._window[-1]
        passed = max(self._arrived - float(self._row["seconds"]), 1e-9)
        tokens = self.tokens
        rate = (tokens - int(self._row["tokens"])) / passed
        flops = sum(result.flops for result in self._window) / passed
        if self._progress is not None:
            self._progress.say(float(self._means().get("loss", last.loss)), rate, flops)
        return {
            "step": last.step,
            "tokens": tokens,
            "learning_rate": last.learning_rate,
            "skipped": int(self._row["skipped"]) + sum(result.skipped for result in self._window),
            "tokens_per_second": round(rate, 1),
            "mfu": round(flops / self._peak, 4) if self._peak and flops else "",
            "seconds": round(self._arrived, 3),
        }

    @property
    def tokens(self) -> int:
        """The number of tokens of all steps so far."""
        return int(self._row["tokens"]) + sum(result.tokens for result in self._window)

    @property
    def loss(self) -> float:
        """The loss of the last row."""
        return float(self._row["loss"])

    @property
    def loss_sum(self) -> str:
        """The loss of the last row as the sum of its terms."""
        if len(self.weights) == 1:
            return f"{self.loss:.3f}"
        terms = [f"{name.replace('_', ' ')} {float(self._row[name]):.3f}" for name in self.weights]
        return f"{self.loss:.3f} = {weighted_sum(terms, list(self.weights.values()))}"

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """A context whose time does not count as training."""
        return self._clock.paused()

    def rate(self) -> float | None:
        """Tokens per second, without the first steps of this process, which warm up."""
        if self._warm is None or self.tokens == self._warm[1]:
            return None
        return (self.tokens - self._warm[1]) / (self._arrived - self._warm[0])

    def close(self) -> None:
        self.write()
        self.abandon()

    def abandon(self) -> None:
        """Closes the files without writing, after an error."""
        self._file.close()
        for report in self._reports:
            report.close()


def perplexity(loss: float) -> float:
    """The exponential of a mean loss over tokens; infinite if it overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


class Stopwatch:
    """A stopwatch that starts at ``before``, the seconds of earlier processes of the same run."""

    def __init__(self, before: float = 0.0) -> None:
        self._before = before
        self._since: float | None = time.perf_counter()  # None: it is stopped

    def seconds(self) -> float:
        return self._before + (0.0 if self._since is None else time.perf_counter() - self._since)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self._before, self._since = self.seconds(), None
        try:
            yield
        finally:
            self._since = time.perf_counter()


def weighted_sum(terms: Sequence[str], weights: Sequence[float]) -> str:
    """A loss as the sum of its terms: ``masked lm + 50 x replaced tokens``."""
    pairs = zip(terms, weights, strict=True)
    return " + ".join(term if weight == 1 else f"{weight:g} x {term}" for term, weight in pairs)


def read_rows(path: Path) -> list[dict[str, str]]:
    """The complete rows of a log; the last one is incomplete if a process died while it wrote it."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except FileNotFoundError:
        return []
    complete = [row for row in rows if None not in row and None not in row.values() and row["seconds"] != ""]
    return [{_current_name(name): value for name, value in row.items()} for row in complete]


# Other names of columns, which older logs have.
_FORMER_TERMS = {"masked_words": "masked_lm", "next_words": "causal_lm", "replaced_words": "replaced_tokens"}
_FORMER_VALIDATION = "held_out_"


def _current_name(column: str) -> str:
    prefix = VALIDATION if column.startswith(_FORMER_VALIDATION) else ""
    term = column.removeprefix(_FORMER_VALIDATION)
    return prefix + _FORMER_TERMS.get(term, term)


def _events(directory: Path, start: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(directory), purge_step=start or None)
