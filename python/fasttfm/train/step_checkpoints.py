"""``StepCheckpoints``: checkpoints of a training in one process whose batches follow from their number."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fasttfm.train import checkpoints as files
from fasttfm.train.checkpoints import Checkpoints
from fasttfm.train.loop import StepResult, Trainer
from fasttfm.train.run_directory import RunError
from fasttfm.train.stopping import Stop


class StepCheckpoints:
    """Saves a training at intervals and when a signal stops it, and continues it with the same bits on a CPU.

    Args:
        directory: The run's directory.
        facts: The settings that a resumed run must have, too.
        write: Writes model and tokenizer into a checkpoint's directory, so that it is a model's.
        resume: Whether to continue from the newest checkpoint; otherwise checkpoints of an earlier run are removed.
        every: Steps between checkpoints; by default a fifth of the run, at most 1,000.
    """

    def __init__(
        self,
        directory: Path,
        facts: Mapping[str, Any],
        write: Callable[[Path], Any],
        *,
        resume: bool = False,
        every: int | None = None,
    ) -> None:
        if every is not None and every < 1:
            raise ValueError(f"checkpoint_every: expected a number from 1 on, got {every}")
        self.checkpoints = Checkpoints(directory, keep=1)
        self.facts = {name: str(value) for name, value in facts.items()}
        self._write, self._every = write, every
        self.start = 0  # the step to continue from
        self._state: dict[str, Any] | None = None
        self.checkpoints.clean()
        if resume:
            self._read()
        else:
            self.checkpoints.remove()

    def _read(self) -> None:
        newest = self.checkpoints.newest()
        if newest is None:
            raise RunError(f"{self.checkpoints.directory}: expected a checkpoint to resume from, got none")
        self._state = files.read_state(newest)
        if changed := files.differences(self._state.get("settings", {}), self.facts):
            raise RunError(f"{newest} is of a run with other settings: {'; '.join(changed)}")
        self.start = int(self._state["trainer"]["completed"])

    def train(
        self,
        trainer: Trainer,
        groups: Iterator[Sequence[Any]],
        steps: int,
        on_results: Callable[[list[StepResult]], Any],
    ) -> None:
        """Trains up to ``steps`` with the groups of batches, which start with that of the first step. Raises RunError
        after a signal, when a checkpoint is written."""
        for _ in range(self.start):
            next(groups)
        if self._state is not None:
            self._load(trainer, self._state)
        every = self._every or min(1000, max(1, math.ceil(steps / 5)))
        with Stop(launched=False) as stop:
            while trainer.completed < steps:
                on_results(trainer.step(next(groups)))
                ended = trainer.completed == steps
                if not ended and (stop.asked or trainer.completed % every == 0):
                    on_results(trainer.flush())
                    path = self._save(trainer)
                if stop.asked and not ended:
                    raise RunError(
                        f"stopped by a signal after step {trainer.completed}; {path} was written; --resume continues "
                        "from there"
                    )

    def remove(self) -> None:
        """Removes the checkpoints of a run that has ended."""
        self.checkpoints.remove()

    def _save(self, trainer: Trainer) -> Path:
        state = {
            "settings": self.facts,
            "trainer": trainer.state_dict(),
            "optimizer": files.optimizer_state(trainer.optimizer),
            "module": trainer.module.state_dict(),
            "random": files.random_state(trainer.world.device),
        }

        def write(directory: Path) -> None:
            self._write(directory)
            files.write_state(directory, state)

        return self.checkpoints.save(trainer.completed, write)

    def _load(self, trainer: Trainer, state: dict[str, Any]) -> None:
        try:
            trainer.module.load_state_dict(state["module"])
            files.load_optimizer_state(trainer.optimizer, state["optimizer"])
            trainer.load_state_dict(state["trainer"])
            files.set_random_state(state["random"], trainer.world.device)
        except (KeyError, TypeError, RuntimeError) as error:
            where = self.checkpoints.path(self.start) / files.STATE
            raise RunError(f"{where}: not the state of this training: {error}") from error
