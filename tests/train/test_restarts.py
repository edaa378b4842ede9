"""torchrun --max-restarts: the same command continues a run whose processes have ended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from train_runs import back_to, close

from fasttfm.cli.main import main
from fasttfm.train.checkpoints import Checkpoints
from fasttfm.train.logs import read_rows
from fasttfm.train.run_directory import read_settings

ROOT = Path(__file__).parents[2]


def command(corpus: dict[str, Path], output: Path, *more: Any) -> list[str]:
    options = ["--size", "tiny", "--max-length", 64, "--tokens-per-step", 256, "--steps", 6, "--held-out", 0.1]
    every = ["--checkpoint-every", 2, "--evaluate-every", 3, "--log-every", 1, "--device", "cpu", "--quiet"]
    data = ["--data", corpus["data"], "--tokenizer", corpus["wordpiece"], "--output", output]
    return [str(each) for each in ("pretrain", "bert", *options, *every, *data, *more)]


def test_a_restarted_command_continues_the_run(
    corpus: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert main(command(corpus, run)) == 0  # nothing has begun there: a new run
    (run / "checkpoint-000006").rename(tmp_path / "checkpoint-000006")
    rows = len(read_rows(run / "log.csv"))
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / "log.csv").write_bytes((run / "log.csv").read_bytes())
    back_to(run, 2)
    before = (run / "checkpoint-000002").stat().st_mtime_ns
    assert main(command(corpus, run, "--overwrite")) == 0
    assert (run / "checkpoint-000002").stat().st_mtime_ns == before
    back_to(run, 0)  # killed before the first checkpoint
    assert main(command(corpus, run, "--accumulation", 1)) == 0
    assert len(read_rows(run / "log.csv")) == rows
    close(run, whole)
    assert Checkpoints(run).steps() == [2, 4, 6]
    assert read_settings(run)[0].schedule.steps == 6


def test_what_a_restart_would_repeat_is_refused(
    corpus: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    run = tmp_path / "run"
    (run / "checkpoint-000002").mkdir(parents=True)
    with pytest.raises(SystemExit):
        main(command(corpus, run, "--resume", "--more-steps", 2))
    assert "--more-steps: expected without torchrun's --max-restarts" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(command(corpus, run, "--overwrite"))
    assert (
        "--overwrite: expected with torchrun's --max-restarts a folder without checkpoints" in capsys.readouterr().err
    )


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", ["sharded", "whole"])
def test_ranks_that_are_killed_leave_the_curve_as_it_is(checkpoints: str) -> None:
    script = [sys.executable, ROOT / "benchmarks" / "restart_soak.py", "--kills", "2", "--checkpoints", checkpoints]
    ended = subprocess.run(script, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "2 kills of 2 ranks" in ended.stdout
