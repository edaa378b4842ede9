"""A run's curve does not depend on its number of ranks, also if it changes on the way."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import train_runs
from train_runs import back_to, close, run_of, settings_of, trained

from fasttfm.train.pretrain import RunError, pretrain
from fasttfm.train.settings import PretrainSettings

STEPS = 9


def settings(corpus: dict[str, Path], family: str = "bert") -> PretrainSettings:
    """With dropout, masked tokens, and four batches per step."""
    return settings_of(corpus, family, steps=STEPS, batches_per_step=4, tokens_per_step=512)


@pytest.mark.parametrize(("ranks", "parallel"), [(2, "ddp"), (4, "ddp"), (2, "fsdp")])
def test_ranks_have_the_curve_of_one(ranks: int, parallel: str, corpus: dict[str, Path], tmp_path: Path) -> None:
    trained(1, settings(corpus), tmp_path / "one")
    trained(ranks, settings(corpus), tmp_path / "several", parallel=parallel)
    close(tmp_path / "several", tmp_path / "one")


def test_sampling_of_a_generator_does_not_depend_on_ranks(corpus: dict[str, Path], tmp_path: Path) -> None:
    trained(1, settings(corpus, "electra"), tmp_path / "one")
    trained(2, settings(corpus, "electra"), tmp_path / "several")
    close(tmp_path / "several", tmp_path / "one")


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_run_goes_on_with_other_numbers_of_ranks(parallel: str, corpus: dict[str, Path], tmp_path: Path) -> None:
    """Two ranks, then one, then four."""
    trained(1, settings(corpus), tmp_path / "one")
    run = tmp_path / "run"
    trained(2, settings(corpus), run, parallel=parallel)
    back_to(run, 3)
    trained(1, settings(corpus), run, resume=True)
    back_to(run, 6)
    trained(4, settings(corpus), run, resume=True, parallel=parallel)
    close(run, tmp_path / "one")
    os.rename(run / "checkpoint-000006", run / "kept")
    back_to(run, 3)
    with pytest.raises(RunError, match="batches per step was 4, is 8"):
        pretrain(settings_of(corpus, steps=STEPS, batches_per_step=8, tokens_per_step=512), run_of(run, resume=True))


def test_ranks_share_out_a_steps_batches(corpus: dict[str, Path], tmp_path: Path) -> None:
    for process in train_runs.start_ranks(3, refused, settings(corpus), tmp_path):
        process.join()
        assert process.exitcode == 0


def refused(given: PretrainSettings, folder: Path) -> None:
    with pytest.raises(RunError, match="batches per step: expected a multiple of the 3 processes, got 4"):
        pretrain(given, run_of(folder / "run"))
