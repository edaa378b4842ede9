"""A run's directory: its lock, and the settings with which it is resumed."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fasttfm._atomic_files import write_json
from fasttfm.train.settings import OptimizerSettings, PretrainSettings, RunSettings, ScheduleSettings, StepSettings

SETTINGS = "settings.json"
_LOCK = ".lock"
# What a resumed run states itself: where it runs, and what it does with what is there.
_NOT_KEPT = ("output", "device", "parallel", "shard_optimizer", "resume", "overwrite", "progress", "more_steps")


class RunError(RuntimeError):
    """A run that cannot start or continue; the message is for the user."""


def write_settings(settings: PretrainSettings, run: RunSettings) -> None:
    """Writes a run's settings into its directory."""
    kept = {name: value for name, value in dataclasses.asdict(run).items() if name not in _NOT_KEPT}
    if run.prepared is not None:
        kept["prepared"] = os.path.abspath(run.prepared)
    write_json(run.output / SETTINGS, {"settings": dataclasses.asdict(settings), "run": kept})


def read_settings(directory: Path) -> tuple[PretrainSettings, dict[str, Any]]:
    """The settings of the run in a directory, and the fields of its ``RunSettings``."""
    path = directory / SETTINGS
    if not path.is_file():
        raise not_a_run(directory)
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        values, run = saved["settings"], dict(saved["run"])
        nested = {
            "schedule": ScheduleSettings(**values["schedule"]),
            "optimizer": OptimizerSettings(
                **{**values["optimizer"], "betas": tuple(values["optimizer"]["betas"])},
            ),
            "step": StepSettings(**values["step"]),
            "data": tuple(values["data"]),
        }
        run["prepared"] = None if run["prepared"] is None else Path(run["prepared"])
        return PretrainSettings(**{**values, **nested}), run
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise RunError(f"{path}: expected the settings of a run, got {error}") from None


def restarted(directory: Path) -> bool:
    """Whether torchrun has restarted the processes of a run (``--max-restarts``), which has begun in the directory."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0 and (directory / SETTINGS).is_file()


def check_restarts(directory: Path, *, more_steps: bool, overwrite: bool) -> None:
    """Raises ValueError if torchrun may restart a run that could not be told from what it replaces or extends."""
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) == 0:
        return
    if more_steps:
        raise ValueError("--more-steps: expected without torchrun's --max-restarts: a restart would add them again")
    if overwrite and any(directory.glob("checkpoint-*")):
        got = f"checkpoints in {directory}: a restart could resume from them; remove them first"
        raise ValueError(
            f"--overwrite: expected with torchrun's --max-restarts a folder without checkpoints, got {got}"
        )


def not_a_run(directory: Path) -> RunError:
    got = "a directory without one" if directory.is_dir() else "nothing there"
    return RunError(f"{directory}: expected a run to resume, got {got}: --output is the folder of a run that began")


@contextlib.contextmanager
def run_lock(directory: Path) -> Iterator[None]:
    """Creates a run's directory and locks it. The kernel releases the lock when the process ends, even if it is
    killed."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / _LOCK).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise RunError(
                f"{directory}: another run writes to this directory, process {holder}: wait until it has ended, or "
                "choose another --output"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield
