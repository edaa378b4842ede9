"""A fine-tuning run in a directory: a log, an evaluation after each epoch, the best epoch, early stopping, and
checkpoints from which an interrupted run continues with the same bits."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fasttfm.tasks.finetuning import FineTuning
from fasttfm.tasks.inputs import checksum, truncation
from fasttfm.tasks.running import FeatureRunner
from fasttfm.tasks.task import Predictions
from fasttfm.train import checkpoints as files
from fasttfm.train.checkpoints import Checkpoints
from fasttfm.train.logs import RunLog
from fasttfm.train.progress import Progress
from fasttfm.train.run_directory import RunError
from fasttfm.train.settings import at_least, one_of
from fasttfm.train.stopping import Stop

KEEP = ("best", "last")
_MIN_SECONDS = 60.0  # between checkpoints, unless a number of steps is given, because writing them takes time
_SPARE = 4  # copies of the parameters that must fit into a GPU's free memory for one to be kept there


@dataclass(frozen=True)
class RunOptions:
    """The options of a run. Only ``keep`` and ``patience`` change the resulting model."""

    output: Path
    keep: str = "best"  # the epoch whose model is kept: the one with the best main score on the dev set, or the last
    patience: int | None = None  # stops after this many epochs without a better score; by default never
    checkpoint_every: int | None = None  # steps; by default at the end of epochs, at most one per minute
    resume: bool = False
    progress: bool = True
    reports: Sequence[Any] = ()  # other receivers of the log's numbers, as in RunLog

    def __post_init__(self) -> None:
        one_of("keep", self.keep, KEEP)
        for name in ("patience", "checkpoint_every"):
            if (value := getattr(self, name)) is not None:
                at_least(name, value, 1)


@dataclass
class Epoch:
    """An epoch's scores on the dev set."""

    number: int
    step: int
    scores: dict[str, float]
    threshold: float | None = None  # tuned on the dev set, if the task has one


@dataclass
class Kept:
    """The parameters of an epoch, and its predictions unless the epoch was read from a checkpoint."""

    epoch: Epoch
    parameters: dict[str, Tensor]
    predictions: Predictions | None = field(default=None, repr=False)


class FinetuneRun:
    """Runs a ``FineTuning`` in a directory.

    Args:
        work: The training.
        dev: The examples that the epochs are scored on.
        options: The options of the run.
        facts: What must be the same when the run is resumed, in addition to the settings and the data.
    """

    def __init__(
        self, work: FineTuning, dev: Sequence[Any], options: RunOptions, facts: Mapping[str, Any] | None = None
    ) -> None:
        self.work, self.dev, self.options = work, dev, options
        self.model, self.task, self.world = work.model, work.task, work.world
        self.dev_features = self.task.features(dev)
        self.epochs: list[Epoch] = []
        self.kept: Kept | None = None
        self.loss_sum = ""  # the training loss of the last row of the log, with its terms
        self.checkpoints = Checkpoints(options.output, keep=1)
        self._facts = {**dict(facts or {}), **self._settings()}
        self._saved = time.monotonic()
        self._runner: FeatureRunner | None = None
        self._thread = ThreadPoolExecutor(1)  # writes checkpoints
        self._writing: Future[Path] | None = None
        if options.resume:
            self._resume()

    @property
    def truncation(self) -> str | None:
        """A message about truncated examples of the dev set; None if there are none."""
        return truncation(self.dev_features, self.task.language.format.max_length)

    # ---- training ----------------------------------------------------------------------------------------------------

    def train(self, score_names: Sequence[str] = ()) -> None:
        """Trains; afterwards the model has the parameters of the epoch that is kept.

        Args:
            score_names: The names of the scores, which are columns of the log.
        """
        if self.work.steps == 0:
            return
        start = self.work.trainer.completed
        main = self.world.main
        progress = Progress(self.work.steps, start=start) if main and self.options.progress else None
        log = None
        if main:
            if start == 0:
                self.checkpoints.remove()  # of an earlier run that is overwritten
            log = RunLog(
                self.options.output,
                self.task.terms,
                weights=self.task.weights,
                steps=self.work.steps,
                start=start,
                progress=progress,
                scores=score_names,
                reports=self.options.reports,
            )
        try:
            with Stop(launched=self.world.size > 1) as stop:
                self.work.run(
                    lambda results: None if log is None else log.add(results),
                    lambda number: self._end_of_epoch(number, log, progress, stop),
                    lambda: self._after_step(log, stop),
                )
                self._wait_for_checkpoint()
        finally:
            self._thread.shutdown()
            if log is not None:
                self.loss_sum = log.loss_sum
                log.close()
            if progress is not None:
                progress.close()
        self._restore()

    def _end_of_epoch(self, number: int, log: RunLog | None, progress: Progress | None, stop: Stop) -> bool:
        """Scores the dev set, in the main process; True if the training is over."""
        epoch = None
        if log is not None:
            with log.paused():
                predictions = self.predict(self.dev, self.dev_features, tune=True)
                threshold = getattr(self.task, "threshold", None)
                scores = self.task.scores(self.dev, predictions)
                epoch = Epoch(number, self.work.trainer.completed, scores, threshold)
            log.write(scores)
            if progress is not None:
                text = ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in scores.items())
                progress.note(f"epoch {number}/{self.work.settings.epochs}: {text}")
            self.epochs.append(epoch)
            if self._is_better(epoch):
                changes = self.options.keep == "best" and number < self.work.settings.epochs
                self.kept = None  # frees its parameters
                self.kept = Kept(epoch, self._parameters(self._kept_device()) if changes else {}, predictions)
        over = self.world.agree(self._is_over())
        ended = over or number == self.work.settings.epochs
        if not ended and (self._is_due(end_of_epoch=True) or (stop.asked and self.world.size == 1)):
            self._checkpoint(log)
        if stop.asked and not ended:
            self._stopped()
        return over

    def _after_step(self, log: RunLog | None, stop: Stop) -> None:
        if self._writing is not None and self._writing.done():
            self._wait_for_checkpoint()  # raises what the thread has raised
        if self._is_due() or (stop.asked and self.world.size == 1):
            self._checkpoint(log)
        if stop.asked:
            self._stopped()

    def _is_due(self, *, end_of_epoch: bool = False) -> bool:
        """Whether to write a checkpoint now. All processes get the same answer."""
        if self.options.checkpoint_every is not None:
            return self.work.trainer.completed % self.options.checkpoint_every == 0
        return end_of_epoch and self.world.agree(time.monotonic() - self._saved >= _MIN_SECONDS)

    def _is_better(self, epoch: Epoch) -> bool:
        if self.kept is None or self.options.keep == "last":
            return True
        return self._score(epoch) > self._score(self.kept.epoch)

    def _score(self, epoch: Epoch) -> float:
        """The main score; -inf if it is not finite."""
        value = epoch.scores.get(self.task.main_score, next(iter(epoch.scores.values())))
        return value if math.isfinite(value) else -math.inf

    def _is_over(self) -> bool:
        """Whether none of the last ``patience`` epochs is better than the best epoch before them."""
        patience = self.options.patience
        if patience is None or len(self.epochs) <= patience:
            return False
        scores = [self._score(epoch) for epoch in self.epochs]
        return max(scores[-patience:]) <= max(scores[:-patience])

    def _trained(self) -> dict[str, Tensor]:
        return {
            name: parameter.detach() for name, parameter in self.model.named_parameters() if parameter.requires_grad
        }

    def _parameters(self, device: torch.device) -> dict[str, Tensor]:
        """Copies of the trained parameters."""
        return {name: parameter.to(device, copy=True) for name, parameter in self._trained().items()}

    def _kept_device(self) -> torch.device:
        """Where the parameters of an epoch are kept: the model's device if its memory has room, because a copy to the
        host takes as long as many steps; otherwise the CPU."""
        return self.world.device if self._has_room() else torch.device("cpu")

    def _has_room(self) -> bool:
        """Whether the device has memory for a copy of the parameters during the rest of the training."""
        if self.world.device.type != "cuda":
            return True
        free, _ = torch.cuda.mem_get_info(self.world.device)
        return free >= _SPARE * sum(parameter.nbytes for parameter in self.model.parameters())

    @torch.no_grad()
    def _restore(self) -> None:
        """Copies the parameters of the kept epoch to the model."""
        if self.kept is None:
            return
        if hasattr(self.task, "threshold"):
            self.task.threshold = self.kept.epoch.threshold
        if self.kept.epoch is not self.epochs[-1]:
            for name, value in self.kept.parameters.items():
                self.model.get_parameter(name).copy_(value)

    # ---- predictions -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def predict(self, examples: Sequence[Any], features: Any = None, *, tune: bool = False) -> Predictions:
        """The model's predictions; ``tune`` sets the threshold of a task that has one."""
        features = self.task.features(examples) if features is None else features
        predictions = self.task.predictions(examples, features, self._feature_runner().read(features))
        if tune and hasattr(self.task, "tune"):
            self.task.tune(examples, predictions)
        return predictions

    def _feature_runner(self) -> FeatureRunner:
        """The runner of the model as it is now. It is kept for the next evaluation if the device has room."""
        if self._runner is not None:
            self._runner.refresh()
            return self._runner
        runner = FeatureRunner(self.model, self.task, precision=self.work.settings.step.precision)
        self._runner = runner if self._has_room() else None
        return runner

    def dev_predictions(self) -> Predictions:
        """The predictions of the kept model for the dev set."""
        if self.kept is not None and self.kept.predictions is not None:
            return self.kept.predictions
        return self.predict(self.dev, self.dev_features, tune=True)

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def _settings(self) -> dict[str, Any]:
        """The settings that must be the same in a resumed run, and a checksum of the data."""
        nested = dataclasses.asdict(self.work.settings)
        flat = {name: value for name, value in nested.items() if not isinstance(value, dict)}
        for part in ("rates", "optimizer", "step"):
            flat |= {f"{part} {name}": value for name, value in nested[part].items()}
        for name, features in (("training", self.work.features), ("dev", self.dev_features)):
            flat[f"{name} examples"] = f"{len(features)} features with checksum {checksum(features)}"
        flat |= {"task": self.task.name, "labels": list(self.task.labels), "keep": self.options.keep}
        flat |= {
            "class weights": self.work.class_weights,
            "patience": self.options.patience,
            "processes": self.world.size,
        }
        return {name: list(value) if isinstance(value, tuple) else value for name, value in flat.items()}

    def _checkpoint(self, log: RunLog | None) -> None:
        """Copies the state of the training, which a thread writes as a checkpoint. All processes call this."""
        self._wait_for_checkpoint()
        results = self.work.trainer.flush()
        random_state = files.random_state(self.world.device)
        random = self.world.gather(random_state)
        if log is None:
            return
        log.add(results)
        with log.paused():
            log.write()
            state = {
                "settings": self._facts,
                "trainer": self.work.trainer.state_dict(),
                "optimizer": files.optimizer_state(self.work.trainer.optimizer),
                "random": random,
                "parameters": self._parameters(torch.device("cpu")),
                "epochs": [dataclasses.asdict(epoch) for epoch in self.epochs],
                "kept": None,
            }
            if self.kept is not None:
                kept = {name: parameter.cpu() for name, parameter in self.kept.parameters.items()}
                state["kept"] = {"number": self.kept.epoch.number, "parameters": kept}
            step = self.work.trainer.completed
        self._writing = self._thread.submit(
            self.checkpoints.save, step, lambda directory: files.write_state(directory, state)
        )
        self._saved = time.monotonic()

    def _wait_for_checkpoint(self) -> None:
        """Waits until the last checkpoint is written; raises if it could not be written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _stopped(self) -> None:
        self._wait_for_checkpoint()
        steps = self.checkpoints.steps()
        where = f"{self.checkpoints.path(steps[-1])} was written" if steps else "there is no checkpoint yet"
        done = self.work.trainer.completed
        raise RunError(f"stopped by a signal after step {done} of {self.work.steps}; {where}; --resume continues")

    @torch.no_grad()
    def _resume(self) -> None:
        checkpoint = self.checkpoints.newest()
        if checkpoint is None:
            raise RunError(f"{self.options.output}: expected a checkpoint to resume from, got none")
        state = files.read_state(checkpoint)
        try:
            if changed := files.differences(state["settings"], self._facts):
                raise RunError(f"{checkpoint} is of a run with other settings: {'; '.join(changed)}")
            for name, value in state["parameters"].items():
                self.model.get_parameter(name).copy_(value)
            self.epochs = [Epoch(**epoch) for epoch in state["epochs"]]
            if (kept := state["kept"]) is not None:
                self.kept = Kept(self.epochs[kept["number"] - 1], kept["parameters"])
            trainer = self.work.trainer
            files.load_optimizer_state(trainer.optimizer, state["optimizer"])
            trainer.load_state_dict(state["trainer"])
            files.set_random_state(state["random"][self.world.rank], self.world.device)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise RunError(f"{checkpoint / files.STATE}: not the state of a fine-tuning run: {error!r}") from error
