"""Runs in FP8, which a CPU emulates: they learn, resume with the same bits, and continue after skipped steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from train_runs import results, run_of, settings_of

from fasttfm.train import StepSettings, Trainer
from fasttfm.train.logs import read_rows
from fasttfm.train.pretrain import pretrain


@pytest.fixture(autouse=True)
def no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fasttfm.train.pretrain.write_curves", lambda *_: None)


def test_a_run_learns_and_resumes_with_the_same_bits(corpus: dict[str, Path], tmp_path: Path) -> None:
    settings = settings_of(corpus, steps=8, step=StepSettings(precision="fp8"))
    options: dict[str, Any] = {"checkpoint_every": 4, "evaluate_every": 8}
    pretrain(settings, run_of(tmp_path / "whole", **options))
    parts = tmp_path / "parts"
    parts.mkdir()
    (tmp_path / "whole" / "checkpoint-000004").rename(parts / "checkpoint-000004")
    pretrain(settings, run_of(parts, resume=True, **options))
    rows = read_rows(tmp_path / "whole" / "log.csv")
    assert float(rows[-1]["loss"]) < float(rows[0]["loss"])
    (weights, state, _), (found, other, _) = results(tmp_path / "whole"), results(parts)
    assert found == weights
    for name, expected in state["trainer"]["fp8"].items():
        assert torch.equal(torch.as_tensor(other["trainer"]["fp8"][name]), torch.as_tensor(expected))


def test_a_skipped_step_is_survived(corpus: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terms = Trainer._terms

    def spoilt(self: Trainer, batch: Any) -> Any:
        found = terms(self, batch)
        return [each * float("nan") for each in found] if self.completed == 3 and self.module.training else found

    monkeypatch.setattr(Trainer, "_terms", spoilt)
    settings = settings_of(corpus, steps=8, step=StepSettings(precision="fp8"))
    summary = pretrain(settings, run_of(tmp_path, evaluate_every=8))
    assert summary is not None
    assert summary.skipped == 1
    losses = [float(row["loss"]) for row in read_rows(tmp_path / "log.csv") if row["step"] != "4"]
    assert losses[-1] < losses[0]


def test_compiled_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="precision: fp8 expects compile=False"):
        StepSettings(precision="fp8", compile=True)
