"""Checkpoints are complete or absent: full disks, damaged and foreign files; the last good one is kept."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import train_runs
from train_runs import run_of, settings_of

from fasttfm.models import CheckpointError
from fasttfm.train import checkpoints as files
from fasttfm.train.checkpoints import Checkpoints
from fasttfm.train.pretrain import RunError, pretrain
from fasttfm.train.stopping import Stop


def write(directory: Path) -> None:
    (directory / "inner").mkdir()
    (directory / "inner" / "weights").write_bytes(bytes(range(200)))
    torch.save({"step": 1}, directory / "training_state.pt")


def test_the_last_ones_are_kept_and_linked(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path / "run", keep=2)
    assert kept.newest() is None
    for step in (1, 2, 3, 1_234_567):
        assert kept.save(step, write) == kept.path(step)
        assert (tmp_path / "run" / "latest").resolve() == kept.path(step).resolve()
    assert kept.steps() == [3, 1_234_567]
    assert kept.newest() == kept.path(1_234_567)
    kept.save(3, write)  # again
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "checkpoint-000003",
        "checkpoint-1234567",
        "latest",
    ]


def test_files_are_synced_before_they_are_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    kept = Checkpoints(tmp_path)

    def sync(descriptor: int) -> None:
        assert kept.steps() == [] or synced[-1] == str(tmp_path)
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    def rename(old: Any, new: Any) -> None:
        folder = f"{kept.path(5)}.partial"
        expected = {f"{folder}/{name}" for name in ("inner/weights", "training_state.pt", "manifest.json", "inner")}
        assert expected | {folder} == set(synced)
        synced.append(str(tmp_path))
        os.replace(old, new)

    monkeypatch.setattr(files.os, "fsync", sync)
    monkeypatch.setattr(files.os, "rename", rename)
    kept.save(5, write)
    assert synced[-1] == str(tmp_path)
    assert kept.newest() == kept.path(5)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("write failed")])
def test_a_failed_write_keeps_the_last_good_checkpoint(tmp_path: Path, error: Exception) -> None:
    kept = Checkpoints(tmp_path, keep=1)
    kept.save(10, write)

    def fail(directory: Path) -> None:
        write(directory)
        raise error

    with pytest.raises(CheckpointError) as raised:
        kept.save(20, fail)
    assert "checkpoint-000020: this checkpoint could not be written" in str(raised.value)
    assert str(error) in str(raised.value)
    assert f"the last whole one is {kept.path(10)}" in str(raised.value)
    assert kept.newest() == kept.path(10)
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_kill_while_a_step_is_saved_again_loses_nothing(
    renames: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rename moves the earlier checkpoint aside, the second gives the new one its name."""
    kept = Checkpoints(tmp_path)
    kept.save(1, lambda directory: files.write_state(directory, {"version": 1}))
    before = os.rename
    calls = []

    def rename(*paths: Any) -> None:
        calls.append(paths)
        if len(calls) > renames:
            raise KeyboardInterrupt  # leaves the directory as a kill does: nothing handles it
        before(*paths)

    monkeypatch.setattr(os, "rename", rename)
    with contextlib.suppress(KeyboardInterrupt):
        kept.save(1, lambda directory: files.write_state(directory, {"version": 2}))
    monkeypatch.undo()
    kept.clean()
    newest = kept.newest()
    assert newest == kept.path(1)
    assert files.read_state(newest) == {"version": 2 if renames == 2 else 1}
    assert {path.name for path in tmp_path.iterdir()} == {newest.name, "latest"}


MOMENTS = ("write_state", "_write_manifest", "_sync", "_sync_directory", "sync_file", "os.rename", "os.replace")


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("signals", [1, 2])
def test_sigterm_while_a_checkpoint_is_written(
    moment: str, signals: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first signal the checkpoint is completed. A second one ends the run at once, and the previous
    checkpoint stays usable."""
    kept = Checkpoints(tmp_path, keep=2)

    def write_checkpoint(directory: Path) -> None:
        write(directory)
        files.write_state(directory, {"step": 2})

    kept.save(1, write_checkpoint)
    owner: Any = os if moment.startswith("os.") else files
    original = getattr(owner, moment.removeprefix("os."))

    def interrupted(*arguments: Any, **named: Any) -> Any:
        for _ in range(0 if stop.asked else signals):
            signal.raise_signal(signal.SIGTERM)
        return original(*arguments, **named)

    monkeypatch.setattr(owner, moment.removeprefix("os."), interrupted)
    with Stop(launched=False) as stop:
        if signals == 1:
            kept.save(2, write_checkpoint)
        else:
            with pytest.raises(KeyboardInterrupt):
                kept.save(2, write_checkpoint)
    assert stop.asked
    monkeypatch.undo()
    newest = Checkpoints(tmp_path).newest()  # checks every file against the manifest
    # After the rename the checkpoint is complete: only the sync of the folder and the link follow.
    assert newest == kept.path(2 if signals == 1 or moment == "os.replace" else 1)
    assert files.read_state(newest) == {"step": 2}
    kept.clean()
    assert not list(tmp_path.glob("*.partial"))
    kept.save(3, write_checkpoint)
    assert Checkpoints(tmp_path).newest() == kept.path(3)


def small_files(settings: Any, run: Any) -> None:
    """Trains with a limit of 100,000 bytes per file, as on a disk that fills up."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        pretrain(settings, run)
    except CheckpointError as error:
        (run.output / "said").write_text(str(error))
        raise SystemExit(7) from error


def test_a_run_on_a_full_disk_reports_it_and_can_be_resumed(corpus: dict[str, Path], tmp_path: Path) -> None:
    settings = settings_of(corpus, steps=4)
    process = train_runs.start(small_files, settings, run_of(tmp_path / "new"))
    process.join()
    assert process.exitcode == 7
    assert "could not be written" in (tmp_path / "new" / "said").read_text()
    assert Checkpoints(tmp_path / "new").steps() == []

    pretrain(settings, run_of(tmp_path / "whole", checkpoint_every=2))
    shutil.copytree(tmp_path / "whole", tmp_path / "run", symlinks=True)
    shutil.rmtree(tmp_path / "run" / "checkpoint-000004")
    process = train_runs.start(small_files, settings, run_of(tmp_path / "run", checkpoint_every=2, resume=True))
    process.join()
    assert process.exitcode == 7
    assert "the last whole one is" in (tmp_path / "run" / "said").read_text()
    pretrain(settings, run_of(tmp_path / "run", checkpoint_every=2, resume=True))
    assert train_runs.results(tmp_path / "run")[0] == train_runs.results(tmp_path / "whole")[0]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def change_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("name", "damage", "sentence"),
    [
        ("inner/weights", truncate, "inner/weights: damaged: expected 200 bytes, got 199"),
        ("inner/weights", change_a_bit, "inner/weights: damaged: the checksum differs from the manifest's"),
        ("training_state.pt", Path.unlink, "training_state.pt: cannot be read: No such file"),
        ("manifest.json", Path.unlink, "no checkpoint of a training run: there is no manifest.json"),
        ("manifest.json", truncate, "manifest.json: cannot be read"),
        ("manifest.json", lambda path: path.write_text(json.dumps(["files"])), "manifest.json: cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name(tmp_path: Path, name: str, damage: Any, sentence: str) -> None:
    kept = Checkpoints(tmp_path)
    kept.save(10, write)
    kept.save(20, write)
    if name == "manifest.json" and damage is truncate:
        (kept.path(20) / name).write_text('{"files": ')
    else:
        damage(kept.path(20) / name)
    with pytest.raises(CheckpointError) as raised:
        kept.newest()
    assert sentence in str(raised.value)
    assert f"{kept.path(10)} is complete: remove the damaged one to resume from there" in str(raised.value)
    damaged = kept.path(10) / "inner" / "weights"
    damaged.unlink()
    with pytest.raises(CheckpointError, match="there is no other that is whole"):
        kept.newest()


def test_a_foreign_state_is_refused(corpus: dict[str, Path], tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path)
    settings = settings_of(corpus, steps=2)

    def refused(state: Any) -> str:
        kept.save(1, lambda directory: torch.save(state, directory / "training_state.pt"))
        with pytest.raises((RunError, CheckpointError)) as raised:
            pretrain(settings, run_of(tmp_path, resume=True))
        return str(raised.value)

    assert "training_state.pt: not the state of a pre-training run" in refused({"weights": torch.zeros(2)})
    assert "expected a dictionary, got Tensor" in refused(torch.zeros(2))
    assert "cannot be read" in refused(Path("code/that/must/not/run"))


def test_the_state_of_the_optimizer_is_restored() -> None:
    from fasttfm.train import OptimizerSettings, make_optimizer

    for name in ("adamw", "lamb"):
        model = torch.nn.Linear(3, 2)
        optimizer = make_optimizer(model, OptimizerSettings(name))
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        state = files.optimizer_state(optimizer)
        other = make_optimizer(model, OptimizerSettings(name, learning_rate=0.5))
        files.load_optimizer_state(other, state)
        torch.testing.assert_close(other.state_dict()["state"], optimizer.state_dict()["state"], rtol=0, atol=0)
        assert other.param_groups[0]["lr"] == 0.5
