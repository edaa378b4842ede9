"""``fasttfm pretrain``: its output, its files, and errors for impossible requests."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fasttfm.cli import pretrain, torch_step
from fasttfm.cli.main import main
from fasttfm.train.logs import read_rows


def arguments(corpus: dict[str, Path], output: Path, *more: str) -> list[str]:
    paths = ["--data", str(corpus["data"]), "--tokenizer", str(corpus["wordpiece"]), "--output", str(output)]
    small = ["--size", "tiny", "--max-length", "64", "--tokens-per-step", "128", "--steps", "2", "--held-out", "0.1"]
    return ["pretrain", "bert", "--device", "cpu", *paths, *small, *more]


def test_a_run_prints_its_results(corpus: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(corpus, tmp_path / "run")) == 0
    said = capsys.readouterr()
    assert re.search(r"bert tiny: 0.5 million parameters, vocabulary of 2\d\d; 36 documents", said.err)
    assert "step 2/2: loss" in said.err
    assert "2 steps, " in said.out
    assert "validation: loss" in said.out
    assert "that of word frequencies (" in said.out
    assert said.out.count("    word frequencies: ") == 4  # sentences with the model's guesses
    assert "plain torch" not in said.out
    for name in ("checkpoint-000002", "log.csv", "curves.png"):
        assert str(tmp_path / "run" / name) in said.out
        assert (tmp_path / "run" / name).exists()


def test_a_quiet_run_prints_its_results_without_a_progress_bar(
    corpus: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(corpus, tmp_path / "run", "--quiet")) == 0
    said = capsys.readouterr()
    assert "step 2/2" not in said.err
    assert "validation: loss" in said.out
    assert str(tmp_path / "run" / "checkpoint-000002") in said.out
    with pytest.raises(SystemExit):
        main(["pretrain", "--resume", "--steps", "1", "--output", str(tmp_path / "run")])
    expected = "--steps: expected with --resume the 2 steps of the run, which --more-steps extends, got 1"
    assert expected in capsys.readouterr().err


def test_a_step_is_timed_against_plain_torch(
    corpus: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it is requested, and if the run trains on the shipped text."""
    monkeypatch.setattr(torch_step, "_ROUNDS", 1)
    monkeypatch.setattr(torch_step, "_SECONDS", 0.0)
    assert main(arguments(corpus, tmp_path / "run", "--compare")) == 0
    assert re.search(r"fasttfm [\d.]+ ms, plain torch [\d.]+ ms", capsys.readouterr().out)
    parser = argparse.ArgumentParser()
    pretrain.add_parser(parser.add_subparsers())
    for options, expected in (
        (["--data", str(corpus["data"])], False),
        (["--quiet"], False),
        ([], True),
        (["gpt2"], True),
        (["--no-compare"], False),
        (["roberta"], False),
    ):
        parsed = parser.parse_args(["pretrain", "--output", "x", *options])
        assert pretrain._compares(parsed, pretrain._settings(parsed)[0]) == expected
    parsed = parser.parse_args(["pretrain", "albert", "--compare"])
    settings, _ = pretrain._settings(parsed)
    with pytest.raises(ValueError, match="--compare: expected with bert or gpt2, got albert"):
        pretrain._compares(parsed, settings)


def test_a_run_without_a_size_is_small() -> None:
    parser = argparse.ArgumentParser()
    pretrain.add_parser(parser.add_subparsers())
    for family in pretrain.trained_on_text():
        settings, _ = pretrain._settings(parser.parse_args(["pretrain", family, "--output", "x"]))
        assert settings.size == "tiny"


def test_a_changed_size_is_named_so(corpus: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    call = arguments(corpus, tmp_path / "unused", "--quiet")
    index = call.index("--output")
    titles: list[str] = []
    monkeypatch.setattr("fasttfm.train.pretrain.write_curves", lambda log, path, title: titles.append(title))
    assert main([*call[:index], *call[index + 2 :], "--set", "hidden_act=relu"]) == 0
    assert [path.name for path in (tmp_path / "fasttfm-runs").iterdir()] == ["bert-tiny-changed-1"]
    assert "hidden_act=relu" in titles[0]


def test_a_new_folder_for_every_run(corpus: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    call = arguments(corpus, tmp_path / "unused", "--quiet")
    index = call.index("--output")
    for _ in range(2):
        assert main([*call[:index], *call[index + 2 :]]) == 0
    assert sorted(path.name for path in (tmp_path / "fasttfm-runs").iterdir()) == ["bert-tiny-1", "bert-tiny-2"]


@pytest.mark.parametrize(
    ("more", "status", "sentence"),
    [
        (["--size", "huge"], 2, "size of bert: expected one of tiny, mini, small, medium, base, large, got 'huge'"),
        (["--set", "layers=3"], 2, "layers: expected a field of BertConfig"),
        (["--set", "layers"], 2, "argument --set: expected FIELD=VALUE, got 'layers'"),
        (["--device", "tpu"], 2, "device: expected cpu, cuda or cuda:<number>, got 'tpu'"),
        (["--device", "cuda:7"], 2, "device: cuda:7 does not exist: torch sees"),
        (["--parallel", "ddp"], 2, "parallel: ddp needs several processes: torchrun --nproc-per-node N -m fasttfm ..."),
        (["--optimizer", "sgd"], 2, "optimizer: expected one of adamw, lamb, muon, got 'sgd'"),
        (["--steps", "0"], 2, "steps: expected a number from 1 on, got 0"),
        (["--warmup", "9"], 2, "warmup: expected a number of steps from 0 to all 2, got 9"),
        (["--cuda-graph"], 2, "cuda_graph: expected one process with a GPU"),
        (["--data", "/nowhere/texts.txt"], 1, "/nowhere/texts.txt"),
        (["--tokenizer", "/nowhere/vocab.txt"], 1, "/nowhere/vocab.txt"),
        (["--tokens-per-step", "9999999"], 1, "the data are too small"),
        (["--tokens-per-step", "32"], 1, "32 in 1 batches (over all processes) are 32 each, fewer than one"),
        (["--held-out", "0.01"], 1, "the data are too small, 1 documents here"),
    ],
)
def test_impossible_requests_are_reported(
    more: list[str],
    status: int,
    sentence: str,
    corpus: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if more == ["--device", "cuda:7"] and torch.cuda.device_count() > 7:
        pytest.skip("there is such a device")
    try:
        code: Any = main(arguments(corpus, tmp_path / "run", *more))
    except SystemExit as stopped:
        code = stopped.code
    assert code == status
    assert sentence in capsys.readouterr().err


def test_resume_needs_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["pretrain", "--resume"])
    assert "--resume: expected --output, the folder of the run to resume" in capsys.readouterr().err


@pytest.mark.slow
def test_the_default_run(tmp_path: Path) -> None:
    """A shorter run of `fasttfm pretrain` reaches about the loss of the README, and transformers loads the result."""
    transformers = pytest.importorskip("transformers")
    begun = time.perf_counter()
    # An eighth of the default number of steps, so that the test is shorter than the default run.
    command = [sys.executable, "-m", "fasttfm", "pretrain", "--steps", "50", "--output", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr
    rows = read_rows(tmp_path / "run" / "log.csv")
    first, last = float(rows[0]["masked_lm"]), float(rows[-1]["masked_lm"])
    assert 8.0 < first < 8.6  # ln 4000 = 8.29
    assert last < 7.3, f"{last} after {time.perf_counter() - begun:.0f} s"
    assert float(rows[-1]["validation_masked_lm"]) < 7.3
    model = transformers.BertForPreTraining.from_pretrained(tmp_path / "run" / "latest")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "run" / "latest").vocab_size == model.config.vocab_size


def test_the_language_selects_the_shipped_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--size", "tiny", "--max-length", "64", "--tokens-per-step", "128", "--steps", "1", "--vocabulary", "3000"]
    options = ["pretrain", "bert", "--device", "cpu", "--no-compare", "--output", str(tmp_path), *small]
    assert main([*options, "--language", "korean", "--evaluation-batches", "1"]) == 0
    said = capsys.readouterr()
    assert re.search(r"1,3\d\d documents", said.err)
    assert re.search(r"\[[가-힣]{2,}\]", said.out)  # a guessed word
    for more, message in (
        (["--language", "latin"], "language: expected one of english, korean, got 'latin'"),
        (["--language", "korean", "--data", "x"], "--language: expected without --data"),
    ):
        with pytest.raises(SystemExit):
            main([*options[:-2], "--overwrite", *more])
        assert message in capsys.readouterr().err
