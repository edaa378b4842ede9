"""Sharded checkpoints: read by other numbers of ranks, complete or absent, written while the training goes on."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import train_runs
from train_runs import back_to, close, run_of, settings_of, trained

from fasttfm import models
from fasttfm.models import CheckpointError
from fasttfm.train import checkpoints as files
from fasttfm.train import sharded_checkpoints
from fasttfm.train.checkpoints import Checkpoints
from fasttfm.train.distributed import World
from fasttfm.train.pretrain import pretrain
from fasttfm.train.settings import PretrainSettings
from fasttfm.train.sharded_checkpoints import ShardedCheckpoints

STEPS = 9
ALONE = World(torch.device("cpu"))


def settings(corpus: dict[str, Path], family: str = "bert") -> PretrainSettings:
    return settings_of(corpus, family, steps=STEPS, batches_per_step=4, tokens_per_step=512)


@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_run_goes_on_with_other_numbers_of_ranks(parallel: str, corpus: dict[str, Path], tmp_path: Path) -> None:
    """Two ranks, then one, then four; the last checkpoint is whole."""
    trained(1, settings(corpus), tmp_path / "one")
    run = tmp_path / "run"
    trained(2, settings(corpus), run, parallel=parallel, checkpoints="sharded")
    back_to(run, 3)
    parts = {path.name for path in (run / "checkpoint-000003" / "sharded").iterdir()}
    assert parts == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    trained(1, settings(corpus), run, resume=True, checkpoints="sharded")
    back_to(run, 6)
    assert (run / "checkpoint-000006" / "sharded" / ".metadata").is_file()
    trained(4, settings(corpus), run, resume=True, parallel=parallel, checkpoints="sharded")
    close(run, tmp_path / "one")
    assert models.BertForPreTraining.from_pretrained(run).config.num_hidden_layers == 2


def test_kinds_of_checkpoints_can_change(corpus: dict[str, Path], tmp_path: Path) -> None:
    """ELECTRA, which has two models in a checkpoint, from a model that has been trained before."""
    trained(1, settings(corpus, "electra"), tmp_path / "first", checkpoints="sharded")
    begun = settings_of(corpus, "electra", steps=STEPS, init=str(tmp_path / "first"), tokenizer=None, changes={})
    trained(1, begun, tmp_path / "whole")
    trained(1, begun, tmp_path / "run", checkpoints="sharded")
    back_to(tmp_path / "run", 3)
    with pytest.raises(CheckpointError, match=r"expected model.safetensors, got a sharded checkpoint; --resume"):
        models.ElectraForJointPreTraining.from_pretrained(tmp_path / "run" / "checkpoint-000003")
    trained(1, begun, tmp_path / "run", resume=True)
    back_to(tmp_path / "run", 6)
    trained(1, begun, tmp_path / "run", resume=True, checkpoints="sharded")
    close(tmp_path / "run", tmp_path / "whole")


def kill_after(calls: int, owner: Any, name: str) -> None:
    """Kills the process in a call of a function after others."""
    function = getattr(owner, name)
    numbers = itertools.count()

    def counted(*arguments: Any, **named: Any) -> Any:
        if next(numbers) == calls:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **named)

    setattr(owner, name, counted)


def killed(rank: int, moment: str, settings: PretrainSettings, run: Any) -> None:
    """A run with a rank that is killed while the second checkpoint is written."""
    if int(os.environ["RANK"]) == rank:
        writer: Any = sharded_checkpoints.dcp.FileSystemWriter
        kill_after(1, writer if hasattr(writer, moment) else files, moment)
    pretrain(settings, run)


@pytest.mark.parametrize(
    ("rank", "moment"),
    [
        (1, "write_data"),
        *(pytest.param(0, moment, marks=pytest.mark.slow) for moment in ("write_data", "finish", "_write_manifest")),
    ],
)
def test_a_kill_while_a_checkpoint_is_written_keeps_the_last_one(
    rank: int, moment: str, corpus: dict[str, Path], tmp_path: Path
) -> None:
    trained(1, settings(corpus), tmp_path / "one")
    options: dict[str, Any] = {"checkpoint_every": 3, "evaluate_every": 3, "evaluation_batches": 3}
    run = run_of(tmp_path / "run", checkpoints="sharded", **options)
    processes = train_runs.start_ranks(2, killed, rank, moment, settings(corpus), run)
    for process in processes:
        process.join()
    assert processes[rank].exitcode == -signal.SIGKILL
    kept = Checkpoints(run.output)
    assert kept.steps() == [3]
    assert kept.newest() == kept.path(3)
    trained(1, settings(corpus), run.output, resume=True, checkpoints="sharded")
    close(run.output, tmp_path / "one")
    assert not list(run.output.glob("*.partial"))


def flat(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    tensors = sharded_checkpoints.tensors_of(model, optimizer)
    return {**tensors["model"], **tensors["optimizer"]}


def test_tensors_are_those_of_the_moment_when_saving_starts(tmp_path: Path) -> None:
    """Although the training goes on while they are written."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    before = {name: each.clone() for name, each in flat(model, optimizer).items()}
    kept = ShardedCheckpoints(Checkpoints(tmp_path), ALONE)
    goes_on = threading.Event()

    def write(directory: Path) -> None:
        assert goes_on.wait(60)
        files.write_state(directory, {})

    kept.start(1, sharded_checkpoints.tensors_of(model, optimizer), write)
    optimizer.step()  # while the first checkpoint is written
    assert kept.checkpoints.newest() is None
    goes_on.set()
    kept.wait()
    found = kept.checkpoints.newest()
    assert found == tmp_path / "checkpoint-000001"
    assert not torch.equal(before["weight"], model.weight)
    sharded_checkpoints.read(found, model, optimizer, ALONE)
    tensors = flat(model, optimizer)
    moments = {f"{index}.{name}" for index in range(2) for name in ("step", "exp_avg", "exp_avg_sq")}
    assert tensors.keys() == before.keys() == {"weight", "bias", *moments}
    assert all(torch.equal(tensors[name], before[name]) for name in before)


def test_a_failed_write_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = ShardedCheckpoints(Checkpoints(tmp_path), ALONE)
    tensors = {"model": {"weight": torch.ones(3)}}
    kept.start(1, tensors, lambda directory: files.write_state(directory, {}))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    kept.wait()
    monkeypatch.setattr(sharded_checkpoints.dcp.FileSystemWriter, "write_data", full)
    kept.start(2, tensors, lambda directory: files.write_state(directory, {}))
    with pytest.raises(CheckpointError, match=r"checkpoint-000002: this checkpoint could not be written: .*No space"):
        kept.wait()
    assert kept.checkpoints.steps() == [1]
    (tmp_path / "checkpoint-000001" / "sharded" / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"sharded: cannot be read"):
        sharded_checkpoints.read(tmp_path / "checkpoint-000001", torch.nn.Linear(1, 1), adamw(), ALONE)


def adamw() -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.ones(1)])
