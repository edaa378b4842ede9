"""Runs on a stream of shards: one curve for any ranks, exact resumption, and errors of settings."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from train_runs import results, run_of, settings_of

from fasttfm import data
from fasttfm.cli.main import main
from fasttfm.train.pretrain import pretrain
from fasttfm.train.settings import PretrainSettings

from .test_ranks import STEPS, back_to, close, trained

pytest.importorskip("fsspec")


@pytest.fixture(scope="module")
def files(corpus: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus in three files."""
    folder = tmp_path_factory.mktemp("files")
    documents = list(data.read_documents(corpus["data"]))
    for number in range(3):
        lines = [json.dumps({"text": text}) for text in documents[number::3]]
        (folder / f"part-{number}.jsonl").write_text("\n".join(lines))
    return folder


def settings(corpus: dict[str, Path], files: Path, **changes: Any) -> PretrainSettings:
    options = {"steps": STEPS, "batches_per_step": 4, "tokens_per_step": 512, "window_tokens": 500, **changes}
    return settings_of(corpus, stream=True, **{"data": (f"file://{files}/*.jsonl",), **options})


@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_ranks_have_the_curve_of_one_and_resume(
    parallel: str, corpus: dict[str, Path], files: Path, tmp_path: Path
) -> None:
    """One rank continues a run of two, by the curve of one rank from the start on."""
    trained(1, settings(corpus, files), tmp_path / "one")
    run = tmp_path / "run"
    trained(2, settings(corpus, files), run, parallel=parallel)
    close(run, tmp_path / "one")
    back_to(run, 6)
    trained(1, settings(corpus, files), run, resume=True)
    close(run, tmp_path / "one")


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(
    corpus: dict[str, Path], files: Path, tmp_path: Path
) -> None:
    given = settings(corpus, files, first_length=32, first_steps=5)
    once = run_of(tmp_path / "once", checkpoint_every=3)
    pretrain(given, once)
    for step in (3, 6):
        run = run_of(tmp_path / f"from-{step}", checkpoint_every=3, workers=1)
        pretrain(given, run)
        back_to(run.output, step)
        pretrain(given, run_of(run.output, checkpoint_every=3, resume=True))
        assert results(run.output)[0] == results(once.output)[0]
        assert results(run.output)[2] == results(once.output)[2]


def test_the_command(corpus: dict[str, Path], files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--size", "tiny", "--max-length", "64", "--tokens-per-step", "128", "--held-out", "0.1", "--device", "cpu"]
    tokenizer, output = ["--tokenizer", str(corpus["wordpiece"])], ["--output", str(tmp_path / "run")]
    stream = ["pretrain", "bert", "--stream", "--data", f"file://{files}/*.jsonl", "--window-tokens", "1000", *small]
    assert main([*stream, *tokenizer, *output, "--steps", "2"]) == 0
    said = capsys.readouterr()
    assert "; 3 files, 0.0 MB, read while training; cpu" in said.err
    assert "million tokens of text" in said.out
    assert "2 steps, " in said.out
    assert main(["pretrain", "--resume", "--more-steps", "1", *output]) == 0
    assert "3 steps, " in capsys.readouterr().out
    for argv, status, expected in (
        ([*stream, "--steps", "1"], 2, "stream: expected tokenizer or init: no tokenizer is trained on a stream"),
        (["pretrain", "--stream", *tokenizer], 2, "stream: expected data, the addresses of files, got none"),
        ([*stream, *tokenizer, "--text-column", "body"], 1, "expected an object with the field 'body', got 'text'"),
        (["pretrain", "--data", "s3://texts/*"], 1, "nothing there; fasttfm pretrain --stream reads addresses"),
    ):
        with pytest.raises(SystemExit) as exit:
            main([*argv, "--output", str(tmp_path / "refused")])
        assert exit.value.code == status
        assert expected in capsys.readouterr().err


def test_workers_end_with_their_run(corpus: dict[str, Path], files: Path, tmp_path: Path) -> None:
    import multiprocessing

    before = set(multiprocessing.active_children())  # of other tests
    pretrain(settings(corpus, files, steps=2), run_of(tmp_path / "run", workers=2))
    deadline = time.monotonic() + 10
    # The pool's own thread waits for the processes, so that joining them here may return before they have ended.
    while (started := set(multiprocessing.active_children()) - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not started
