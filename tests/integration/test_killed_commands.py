"""SIGTERM at any moment of a command: nothing is lost or doubled when it runs again. ``FASTTFM_KILLS=50`` tries 50
moments of each command instead of a few."""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import train_runs
from model_fixtures import bert_directory, wordpiece
from small_models import addresses
from train_runs import run_command

from fasttfm.data.task_files import TextExample
from fasttfm.tasks.finetuning import prepare, save
from fasttfm.train.logs import read_rows

__all__ = ["bert_directory", "wordpiece"]
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*randomly initialized, to be trained")]
KILLS = int(os.environ.get("FASTTFM_KILLS", "4"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "texts.txt"
    lines = (line.strip() for document in addresses(4) for line in document.splitlines())
    path.write_text("\n".join([line for line in lines if line][:300]) + "\n")
    return path


@pytest.fixture(scope="module")
def classifier(bert_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classifier")
    examples = [TextExample("peace", None, "a"), TextExample("war", None, "b")]
    torch.manual_seed(0)
    save(*prepare("classify", bert_directory, examples, max_length=48), folder)
    return folder


def report(name: str, found: Counter[str]) -> None:
    print(f"{name}: {found.total()} processes: {dict(found)}")


@pytest.mark.parametrize("output", ["vectors.npy", "vectors.jsonl", "labels.csv", "labels.jsonl"])
def test_an_output_file_is_complete_or_absent(
    output: str, bert_directory: Path, classifier: Path, texts: Path, tmp_path: Path
) -> None:
    model = ["embed", "--model", bert_directory] if "vectors" in output else ["predict", "--model", classifier]
    call: list[Any] = [*model, "--data", texts, "--device", "cpu", "--quiet", "--overwrite"]
    log = tmp_path / "printed.txt"
    for _ in range(2):  # the first process may wait for the server to start
        status, seconds = run_command([*call, "--output", tmp_path / "whole" / output], log)
    assert status == 0, log.read_text()
    expected = (tmp_path / "whole" / output).read_bytes()
    draw, found = random.Random(output), Counter[str]()
    for index in range(-(-KILLS // 2)):  # two formats for each command
        folder = tmp_path / str(index)
        path = folder / output
        if index % 2:  # a file that is replaced
            folder.mkdir()
            path.write_text("old")
        status, _ = run_command([*call, "--output", path], log, delay=draw.uniform(0, seconds))
        names = sorted(each.name for each in folder.iterdir()) if folder.exists() else []
        content = path.read_bytes() if path.exists() else None
        state = {None: "absent", b"old": "unchanged", expected: "complete"}.get(content, "damaged")
        found[state] += 1
        assert state != "damaged"
        assert state == "complete" or status != 0
        assert names in ([], [output]), log.read_text()  # no temporary file
        assert state != "absent" or index % 2 == 0
        if state != "complete":
            assert run_command([*call, "--output", path], log)[0] == 0, log.read_text()
        assert path.read_bytes() == expected
    report(output, found)


def losses(run: Path, every: int = 2) -> dict[int, float]:
    """The sum of the losses of all steps up to each that is a multiple of ``every``. A row is a mean over the steps
    since the row before, and a stop between two checkpoints ends one."""
    sums, total, before = {}, 0.0, 0
    for row in read_rows(run / "log.csv"):
        step = int(row["step"])
        total += float(row["loss"]) * (step - before)
        before = step
        if step % every == 0:
            sums[step] = total
    return sums


def test_a_pretraining_run_resumes_to_the_same_curve(tmp_path: Path) -> None:
    corpus = train_runs.write_corpus(tmp_path)
    paths = ["--data", corpus["data"], "--tokenizer", corpus["wordpiece"]]
    sizes = ["--size", "tiny", "--max-length", "64", "--tokens-per-step", "128", "--steps", "12", "--held-out", "0.1"]
    often = ["--checkpoint-every", "2", "--evaluate-every", "6", "--workers", "0", "--quiet", "--no-compare"]
    call: list[Any] = ["pretrain", "bert", "--device", "cpu", *paths, *sizes, *often]
    log = tmp_path / "printed.txt"
    for more in ([], ["--overwrite"]):  # the first process may wait for the server to start
        status, seconds = run_command([*call, "--output", tmp_path / "whole", *more], log)
    assert status == 0, log.read_text()
    expected, weights = losses(tmp_path / "whole"), train_runs.results(tmp_path / "whole")[0]
    draw, found, kills, runs = random.Random(0), Counter[str](), 0, 0
    while kills < KILLS:
        run = tmp_path / f"run-{runs}"
        runs += 1
        for attempt in range(8):
            killed = kills < KILLS and attempt < 7
            kills += killed
            resumed = ["--resume"] if any(run.glob("checkpoint-??????")) else ["--overwrite"]
            delay = draw.uniform(0, seconds) if killed else None
            status, _ = run_command([*call, "--output", run, *resumed], log, delay)
            found[f"{'resumed' if '--resume' in resumed else 'new'}, status {status}"] += 1
            if status == 0:
                break
            assert killed, log.read_text()
        assert status == 0, log.read_text()
        assert losses(run) == pytest.approx(expected, rel=1e-12, abs=0)  # of fp64 sums in another order
        assert train_runs.results(run)[0] == weights
        assert not list(run.glob("*.partial")), sorted(run.iterdir())
    report("pretrain", found)
