"""Two processes on the CPU: the losses of one process, for DDP and FSDP, and the death of a process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import train_runs
from train_runs import results, run_of, settings_of

import fasttfm
from fasttfm import data, models
from fasttfm.models.objectives import NextSentence
from fasttfm.testing.tolerance import OUTPUT_FACTOR, compare
from fasttfm.train import (
    Objective,
    OptimizerSettings,
    Schedule,
    ScheduleSettings,
    StepSettings,
    Trainer,
    make_optimizer,
)
from fasttfm.train.checkpoints import Checkpoints
from fasttfm.train.distributed import World, join, share_out
from fasttfm.train.logs import read_rows
from fasttfm.train.stopping import Stop

STEPS = 5


def streams(shards: Path, ranks: range) -> list[data.BatchStream]:
    """Streams of different sizes: the second rank has a third of the tokens and predictions of the first."""
    opened = data.TokenShards.open(shards)
    objective = data.SequenceFormat("nsp", 64)
    return [data.BatchStream(opened, objective, tokens_per_batch=(384, 128)[rank], seed=rank) for rank in ranks]


def curve(shards: Path, world: World, ranks: range, optimizer_name: str, dtype: torch.dtype = torch.float32) -> Any:
    """The losses of some steps over the batches of ``ranks``."""
    torch.manual_seed(0)
    size = {**train_runs.SIZES["bert"], "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = models.BertForPreTraining(models.BertConfig(vocab_size=300, **size)).to(dtype)
    module = NextSentence(model)
    shared = share_out(module, world)
    optimizer = make_optimizer(shared, OptimizerSettings(optimizer_name, 1e-3, epsilon=1e-4))
    schedule = Schedule(optimizer, ScheduleSettings(STEPS, 2))
    trainer = Trainer(shared, Objective.of(module), optimizer, schedule, StepSettings(clip=0.5), world=world)
    batches = [iter(stream) for stream in streams(shards, ranks)]
    found = [trainer.step([next(each) for each in batches])[0] for _ in range(STEPS)]
    evaluation = trainer.evaluate([next(each) for each in batches])
    return [value for each in found for value in (each.loss, each.gradient_norm)] + [evaluation["loss"]]


def ranked_curve(shards: Path, output: Path, parallel: str, optimizer: str) -> None:
    world = join("cpu", parallel)
    losses = curve(shards, world, range(world.rank, world.rank + 1), optimizer)
    torch.save(losses, output / f"{world.rank}.pt")
    world.leave()


@pytest.mark.parametrize(("parallel", "optimizer"), [("ddp", "adamw"), ("fsdp", "adamw"), ("fsdp", "lamb")])
def test_two_ranks_have_the_losses_of_one(
    parallel: str, optimizer: str, corpus: dict[str, Path], tmp_path: Path
) -> None:
    shards = tmp_path / "shards"
    data.prepare(corpus["data"], data.load_tokenizer(corpus["wordpiece"]), shards, progress=False, workers=1)
    processes = train_runs.start_ranks(2, ranked_curve, shards, tmp_path, parallel, optimizer)
    alone = World(torch.device("cpu"))
    naive = curve(shards, alone, range(2), optimizer)
    with fasttfm.use_backend("reference"):
        exact = curve(shards, alone, range(2), optimizer, torch.float64)
    for process in processes:
        process.join()
        assert process.exitcode == 0
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert found[0] == found[1]
    values = [torch.tensor(each, dtype=torch.float64) for each in (found[0], naive, exact)]
    comparison = compare("curve", values[0].float(), values[1].float(), values[2], OUTPUT_FACTOR)
    assert comparison.ok, comparison
    # The mean of the ranks' means is different.
    first = [curve(shards, alone, range(rank, rank + 1), optimizer)[0] for rank in range(2)]
    assert abs(sum(first) / 2 - naive[0]) > 100 * comparison.bound


def test_ranks_resume_with_the_same_bits(corpus: dict[str, Path], tmp_path: Path) -> None:
    """FSDP, with dropout: every rank has its own part of the optimizer's state."""
    settings = settings_of(corpus, steps=6, batches_per_step=4)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options: dict[str, Any] = {"parallel": "fsdp", "checkpoint_every": 3}
    for process in train_runs.start_ranks(2, train_runs.train, settings, run_of(whole, **options)):
        process.join()
        assert process.exitcode == 0
    parts.mkdir()
    os.rename(whole / "checkpoint-000003", parts / "checkpoint-000003")
    for process in train_runs.start_ranks(2, train_runs.train, settings, run_of(parts, resume=True, **options)):
        process.join()
        assert process.exitcode == 0
    assert results(parts)[0] == results(whole)[0]


def test_the_death_of_a_rank_ends_the_run_with_a_message(corpus: dict[str, Path], tmp_path: Path) -> None:
    """Started by torchrun, with one of its processes killed."""
    output = tmp_path / "run"
    command: list[Any] = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "fasttfm", "pretrain", "--device", "cpu", "--size", "tiny", "--max-length", "64"]
    command += ["--tokens-per-step", "256", "--steps", "5000", "--checkpoint-every", "2", "--log-every", "1"]
    command += ["--data", corpus["data"], "--tokenizer", corpus["wordpiece"], "--output", output, "--held-out", "0.1"]
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, env={**os.environ, "OMP_NUM_THREADS": "1"})
        deadline = time.monotonic() + 600
        while len(read_rows(output / "log.csv")) < 5:
            assert process.poll() is None, (tmp_path / "said").read_text()
            assert time.monotonic() < deadline, (tmp_path / "said").read_text()
            time.sleep(0.1)
        os.kill(rank_process(process.pid, 1), signal.SIGKILL)
        assert process.wait() != 0
    text = (tmp_path / "said").read_text()
    # Either comes first: the collective that fails, or the SIGTERM that torchrun sends to the remaining ranks.
    collective_failed = r"rank 0 of 2 cannot continue, most likely because another rank has ended: .*"
    stopped_by_launcher = r"stopped by a signal after step \d+; \S+ was written"
    assert re.search(f"{collective_failed}|{stopped_by_launcher}", text), text
    assert "--resume continues from there" in text
    newest = Checkpoints(output).newest()
    assert newest is not None
    assert models.BertForPreTraining.from_pretrained(newest).config.num_hidden_layers == 2


def rank_process(launcher: int, rank: int) -> int:
    """The process id of a rank under torchrun."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int(re.search(r"PPid:\s+(\d+)", (path / "status").read_text())[1])  # type: ignore[index]
            if parent == launcher and f"RANK={rank}" in (path / "environ").read_text().split("\0"):
                return int(path.name)
        except OSError:
            continue
    raise AssertionError(f"there is no rank {rank}")


@pytest.mark.parametrize("launched", [True, False])
def test_a_rank_with_an_error_ignores_sigterm_of_the_launcher(launched: bool) -> None:
    """It still has to print a message. A process without torchrun ends, as it would without a run."""
    ended: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    on_interrupt = signal.getsignal(signal.SIGINT)  # ignored in a shell's background
    try:
        with pytest.raises(RuntimeError, match="connection closed"), Stop(launched=launched):
            raise RuntimeError("connection closed")
        signal.raise_signal(signal.SIGTERM)
        assert ended == ([] if launched else [signal.SIGTERM])
        with Stop(launched=launched):
            pass
        assert signal.getsignal(signal.SIGINT) is on_interrupt
    finally:
        signal.signal(signal.SIGTERM, before)
