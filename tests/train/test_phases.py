"""Two phases: short sequences in the first steps, as BERT was trained, then long ones, in one run."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
from train_runs import results, run_of, settings_of

from fasttfm.train.pretrain import pretrain
from fasttfm.train.run_directory import RunError
from fasttfm.train.settings import StepSettings

PHASES: dict[str, Any] = {"first_length": 16, "first_steps": 5}  # of 8 steps of 256 tokens, later in sequences of 64


@pytest.fixture
def whole(corpus: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with a checkpoint after every step."""
    monkeypatch.setattr("fasttfm.train.pretrain.write_curves", lambda *_: None)
    output = tmp_path / "whole"
    pretrain(settings_of(corpus, **PHASES), run_of(output, checkpoint_every=1, keep=8))
    return output


def test_both_phases_are_one_run_that_resumes_with_the_same_bits(
    whole: Path, corpus: dict[str, Path], tmp_path: Path
) -> None:
    expected = results(whole)
    rows = expected[2]
    tokens = [0, *(int(row["tokens"]) for row in rows)]
    steps = [after - before for before, after in itertools.pairwise(tokens)]
    # As many sequences per step: a quarter of the tokens in those of a quarter of the length.
    assert max(steps[:5]) <= 64 < min(steps[5:]) <= max(steps[5:]) <= 256
    rates = [float(row["learning_rate"]) for row in rows]
    assert rates[1] == max(rates)
    assert rates[1:] == sorted(rates[1:], reverse=True)  # one schedule, which does not begin again
    for step in (3, 5, 6):  # in the first phase, between the phases, in the second
        output = tmp_path / f"resumed-{step}"
        shutil.copytree(whole, output, symlinks=True)
        for later in range(step + 1, 9):
            shutil.rmtree(output / f"checkpoint-{later:06d}")
        pretrain(settings_of(corpus, **PHASES), run_of(output, checkpoint_every=1, keep=8, resume=True))
        assert results(output)[0] == expected[0]
        assert results(output)[2] == rows


def test_more_steps_do_not_move_the_change(whole: Path, corpus: dict[str, Path]) -> None:
    options: dict[str, Any] = {"resume": True, "more_steps": True}
    summary = pretrain(settings_of(corpus, steps=10, **PHASES), run_of(whole, **options))
    assert summary is not None
    assert summary.steps == 10
    rows = results(whole)[2]
    assert int(rows[9]["tokens"]) - int(rows[8]["tokens"]) > 64
    # A finished run has no steps left.
    assert pretrain(settings_of(corpus, steps=10, **PHASES), run_of(whole, resume=True)) is not None
    with pytest.raises(RunError, match="first steps was 5, is 6"):
        pretrain(settings_of(corpus, steps=10, first_length=16, first_steps=6), run_of(whole, resume=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"first_length": 16}, "first_length: expected together with first_steps"),
        ({"first_length": 64, "first_steps": 5}, "below max_length, got 64 with a max_length of 64"),
        ({"first_length": 16, "first_steps": 8}, "above 0 and below all steps, got 8 of 8"),
        ({**PHASES, "step": StepSettings(cuda_graph=True)}, "first_length: expected without cuda_graph"),
    ],
)
def test_bad_phases(changes: dict[str, Any], message: str, corpus: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match=message):
        settings_of(corpus, **changes)
