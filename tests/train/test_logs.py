"""The logs of a run: rows, TensorBoard events, a plot, lines on a terminal."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest

from fasttfm.train.curves import write_curves
from fasttfm.train.logs import RunLog, Stopwatch, perplexity, read_rows
from fasttfm.train.loop import StepResult
from fasttfm.train.progress import Progress


def result(step: int, *, skipped: bool = False) -> StepResult:
    loss = float("nan") if skipped else 10.0 - step
    return StepResult(step, loss, {"words": loss}, 1.0, 0.1 * step, 100, 1e9, skipped)


def test_rows_are_means_and_survive_an_interruption(tmp_path: Path) -> None:
    log = RunLog(tmp_path, ["words"], steps=8, every=2)
    log.add([result(1), result(2), result(3, skipped=True)])
    log.add([result(4), result(5)])
    with log.paused():
        log.write({"loss": 4.5, "words": 4.25})
    log.add([result(6)])
    log.close()
    rows = read_rows(tmp_path / "log.csv")
    assert [row["step"] for row in rows] == ["2", "4", "5", "6"]
    assert [float(row["loss"]) for row in rows] == [8.5, 6.0, 5.0, 4.0]  # means do not include the skipped step
    assert [row["skipped"] for row in rows] == ["0", "1", "1", "1"]
    assert [row["tokens"] for row in rows] == ["200", "400", "500", "600"]
    assert [row["validation_words"] for row in rows] == ["", "", "4.25", ""]
    seconds = [float(row["seconds"]) for row in rows]
    assert seconds == sorted(seconds)

    with (tmp_path / "log.csv").open("a") as file:
        file.write("7,700,3.0")  # a process died while it wrote this
    assert read_rows(tmp_path / "log.csv") == rows
    again = RunLog(tmp_path, ["words"], steps=8, every=2, start=5)
    again.add([result(6), result(7), result(8)])
    assert again.tokens == 800
    again.close()
    assert [row["step"] for row in read_rows(tmp_path / "log.csv")] == ["2", "4", "5", "6", "8"]
    assert read_rows(tmp_path / "log.csv")[-1]["skipped"] == "1"
    write_curves(tmp_path / "log.csv", tmp_path / "curves.png", "a run")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_former_names_of_columns_are_read(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(
        "step,tokens,loss,masked_words,skipped,held_out_loss,held_out_masked_words,seconds\n2,200,8.5,8.0,0,8.25,7.5,1.0\n"
    )
    (row,) = read_rows(tmp_path / "log.csv")
    assert (row["masked_lm"], row["validation_loss"], row["validation_masked_lm"]) == ("8.0", "8.25", "7.5")
    log = RunLog(tmp_path, ["masked_lm"], steps=4, start=2)
    log.close()
    (again,) = read_rows(tmp_path / "log.csv")
    assert {name: value for name, value in again.items() if value != ""} == row


def test_utilization_and_perplexity(tmp_path: Path) -> None:
    log = RunLog(tmp_path, ["words"], steps=2, every=1, peak=1e12, perplexity="words")
    log.add([result(1), result(2)])
    log.write({"loss": 9.0, "words": 2.0})
    log.close()
    first, last = read_rows(tmp_path / "log.csv")
    assert first["validation_perplexity"] == ""
    assert float(last["validation_perplexity"]) == pytest.approx(7.389, abs=1e-3)
    assert float(first["mfu"]) > 0
    assert perplexity(1e4) == float("inf")


def test_tensorboard_has_the_same_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = RunLog(tmp_path, ["words"], steps=4, every=1)
    log.add([result(1), result(2)])
    log.write({"loss": 3.0, "words": 3.0})
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(each.step, each.value) for each in events.Scalars("loss")] == [(1, 9.0), (2, 8.0)]
    assert [each.value for each in events.Scalars("validation/loss")] == [3.0]


def test_paused_time_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    watch = Stopwatch(5.0)
    clock[0] += 2.0
    with watch.paused():
        clock[0] += 10.0
        assert watch.seconds() == 7.0
    clock[0] += 1.0
    assert watch.seconds() == 8.0


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_progress_bar() -> None:
    pytest.importorskip("tqdm")
    terminal = Terminal()
    progress = Progress(10, start=2, peak=1e12, stream=terminal)
    progress.note("a small BERT")
    progress.say(6.25, 12345.6, 4.1e11)
    progress.advance(10)
    progress.close()
    text = terminal.getvalue()
    assert "a small BERT\n" in text
    assert "loss 6.250, 12,346 tokens/s, 41% of peak" in text
    assert "10/10" in text
    assert " left]" in text


def test_other_outputs_get_lines() -> None:
    stream = io.StringIO()
    progress = Progress(10, stream=stream)
    progress.advance(5)
    progress.say(6.25, 1000.0, 0.0)  # too soon for a line
    progress.advance(10)
    progress.say(5.5, 1000.0, 0.0)
    progress.close()
    assert stream.getvalue() == "step 10/10: loss 5.500, 1,000 tokens/s, 0 s left\n"
