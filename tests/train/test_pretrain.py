"""Whole runs: every family learns, transformers loads the result, and interrupted runs end with the same bits."""

from __future__ import annotations

import dataclasses
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import train_runs
from train_runs import results, run_of, settings_of

from fasttfm import data
from fasttfm.models.families import trained_on_text
from fasttfm.models.family import Head
from fasttfm.testing.tolerance import OUTPUT_FACTOR, compare
from fasttfm.train.logs import read_rows
from fasttfm.train.loop import Trainer
from fasttfm.train.pretrain import RunError, pretrain
from fasttfm.train.run_directory import SETTINGS, run_lock


@pytest.mark.parametrize("family", trained_on_text())
def test_a_family_learns_and_resumes_with_the_same_bits(
    family: str, corpus: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if family != "bert":  # one picture shows enough
        monkeypatch.setattr("fasttfm.train.pretrain.write_curves", lambda *_: None)
    settings = settings_of(corpus, family, steps=16)
    options = {"checkpoint_every": 6, "evaluate_every": 4}
    summary = pretrain(settings, run_of(tmp_path / "whole", **options))
    assert summary is not None
    rows = read_rows(tmp_path / "whole" / "log.csv")
    held_out = [float(row["validation_loss"]) for row in rows if row["validation_loss"]]
    assert float(rows[-1]["loss"]) < float(rows[0]["loss"])
    assert held_out[-1] < held_out[0]
    assert family != "bert" or (tmp_path / "whole" / "curves.png").stat().st_size > 10_000

    class Interrupted(Exception):
        pass

    step = Trainer.step

    def interrupted(self: Trainer, batches: Any) -> Any:
        if self.completed == 15:
            raise Interrupted
        return step(self, batches)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", interrupted)
        with pytest.raises(Interrupted):
            pretrain(settings, run_of(tmp_path / "parts", **options))
    pretrain(settings, run_of(tmp_path / "parts", resume=True, **options))
    same(results(tmp_path / "parts"), results(tmp_path / "whole"))


def same(found: Any, expected: Any) -> None:
    """Bit by bit."""
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            same(found[name], value)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    else:
        assert found == expected


HEADS = {
    "bert": ("AutoModelForPreTraining", "prediction_logits"),
    "roberta": ("AutoModelForMaskedLM", "logits"),
    "xlm-roberta": ("AutoModelForMaskedLM", "logits"),
    "camembert": ("AutoModelForMaskedLM", "logits"),
    "albert": ("AutoModelForPreTraining", "prediction_logits"),
    "electra": ("AutoModelForPreTraining", "logits"),
    "gpt": ("AutoModelForCausalLM", "logits"),
    "gpt2": ("AutoModelForCausalLM", "logits"),
    "distilbert": ("AutoModelForMaskedLM", "logits"),
    "eurobert": ("AutoModelForMaskedLM", "logits"),
    "nomic_bert": ("AutoModelForMaskedLM", "logits"),
}


@pytest.mark.parametrize("family", HEADS)
def test_transformers_opens_a_checkpoint_with_equal_outputs(
    family: str, corpus: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr("fasttfm.train.pretrain.write_curves", lambda *_: None)
    pretrain(settings_of(corpus, family, steps=3), run_of(tmp_path))
    latest = tmp_path / "latest"
    folder = latest / "discriminator" if family == "electra" else latest
    head, name = HEADS[family]
    theirs = getattr(transformers, head).from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(latest)
    text = corpus["data"].read_text().split("\n")[0]
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    assert tokenizer.decode(ids[0]).replace(" ", "").lower() == text.replace(" ", "").lower()
    ours: Any = trained_on_text()[family].models[Head.PRETRAINING].from_pretrained(latest)
    ours = ours.discriminator if family == "electra" else ours
    with torch.no_grad():
        found = getattr(ours(ids), name)
        naive = getattr(theirs(ids), name)
        exact = getattr(theirs.double()(ids), name)
    comparison = compare(family, found, naive, exact, OUTPUT_FACTOR)
    assert comparison.ok, comparison


def test_killed_at_twenty_random_times(corpus: dict[str, Path], tmp_path: Path) -> None:
    """Whether a run was tokenizing, computing or writing a checkpoint, the next one resumes."""
    settings = settings_of(corpus, steps=60)
    options: dict[str, Any] = {"checkpoint_every": 2, "evaluate_every": 20, "keep": 2}
    started = time.perf_counter()
    process = train_runs.start(train_runs.train, settings, run_of(tmp_path / "whole", **options))
    process.join()
    longest = (time.perf_counter() - started) / 6
    assert process.exitcode == 0
    expected = results(tmp_path / "whole")

    draw = random.Random(1)
    kills = runs = 0
    while kills < 20:
        runs += 1
        output = tmp_path / f"killed-{runs}"
        while True:
            begun = (output / SETTINGS).exists()
            process = train_runs.start(train_runs.train, settings, run_of(output, resume=begun, **options))
            process.join(draw.uniform(0, longest) if kills < 20 else None)
            if process.exitcode is not None:
                break
            process.kill()
            process.join()
            kills += 1
        assert process.exitcode == 0
        same(results(output), expected)
    assert not list(output.glob("*.partial"))


def test_a_signal_ends_a_run_with_a_checkpoint(corpus: dict[str, Path], tmp_path: Path) -> None:
    settings = settings_of(corpus, steps=4000)
    process = train_runs.start(train_runs.train, settings, run_of(tmp_path, checkpoint_every=4000))
    while not read_rows(tmp_path / "log.csv"):
        assert process.is_alive()
        time.sleep(0.05)
    process.terminate()
    process.join()
    assert process.exitcode == 1
    steps = train_runs.Checkpoints(tmp_path).steps()
    assert len(steps) == 1
    assert 0 < steps[0] < 4000


def test_resuming_with_other_settings_names_them(corpus: dict[str, Path], tmp_path: Path) -> None:
    settings = settings_of(corpus, steps=2)
    pretrain(settings, run_of(tmp_path))
    with pytest.raises(RunError, match="--resume continues that run, --overwrite starts a new one"):
        pretrain(settings, run_of(tmp_path))
    other = settings_of(corpus, steps=4, tokens_per_step=512, batches_per_step=2)
    other = dataclasses.replace(other, optimizer=dataclasses.replace(other.optimizer, learning_rate=0.5))
    with pytest.raises(RunError) as raised:
        pretrain(other, run_of(tmp_path, resume=True))
    for sentence in (
        "tokens per step was 256, is 512",
        "batches per step was 1, is 2",
        "optimizer learning rate was 0.003, is 0.5",
        "steps was 2, is 4",
    ):
        assert sentence in str(raised.value)
    assert "seed" not in str(raised.value)
    more = train_runs.write_texts(tmp_path / "more.txt", documents=50)
    with pytest.raises(RunError, match="corpus was"):
        pretrain(dataclasses.replace(settings, data=(str(more),)), run_of(tmp_path, resume=True))
    assert pretrain(settings, run_of(tmp_path, overwrite=True)) is not None


def test_non_finite_steps_end_a_run(corpus: dict[str, Path], tmp_path: Path) -> None:
    from fasttfm.train import NonFiniteError, OptimizerSettings

    settings = settings_of(corpus, steps=40, optimizer=OptimizerSettings(learning_rate=1e30))
    with pytest.raises(NonFiniteError, match="was not finite in 5 steps in a row"):
        pretrain(settings, run_of(tmp_path))


def test_lamb_and_other_options(corpus: dict[str, Path], tmp_path: Path) -> None:
    from fasttfm.train import OptimizerSettings, ScheduleSettings

    settings = settings_of(
        corpus,
        optimizer=OptimizerSettings("lamb", 0.02),
        schedule=ScheduleSettings(20, 4, "cosine", 0.1),
        batches_per_step=2,
        whole_word=True,
        ngram=3,
        dropout=0.0,
    )
    summary = pretrain(settings, run_of(tmp_path))
    assert summary is not None
    rows = read_rows(tmp_path / "log.csv")
    assert float(rows[-1]["loss"]) < float(rows[0]["loss"])
    assert summary.tokens == int(rows[-1]["tokens"])
    assert summary.skipped == 0


# ---- existing output directories -------------------------------------------------------------------------------------


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "changes",
    [
        {"changes": {"hidden_size": "abc"}},
        {"changes": {"hidden_size": 33}},
        {"changes": {"vocab_size": 20}},
        {"tokens_per_step": 32},
        {"tokens_per_step": 10**8},
        {"held_out": 0.01},
        {"data": ("/nowhere",)},
    ],
    ids=str,
)
def test_overwriting_replaces_a_run_only_when_the_new_one_can_start(
    changes: dict[str, Any], corpus: dict[str, Path], tmp_path: Path
) -> None:
    run = run_of(tmp_path / "run", overwrite=True)
    kept = {"checkpoint-000003/model.safetensors": b"weights", "tokenizer/tokenizer.json": b"words", "log.csv": b"rows"}
    for name, content in kept.items():
        (run.output / name).parent.mkdir(parents=True, exist_ok=True)
        (run.output / name).write_bytes(content)
    settings = settings_of(corpus, steps=2)
    if "changes" in changes:
        changes = {"changes": {**settings.changes, **changes["changes"]}}
    with pytest.raises((ValueError, RunError)):
        pretrain(dataclasses.replace(settings, **{"tokenizer": None, "vocabulary": 300, **changes}), run)
    assert kept.items() <= contents(run.output).items()


def test_an_overwritten_run_is_removed(corpus: dict[str, Path], tmp_path: Path) -> None:
    settings = dataclasses.replace(settings_of(corpus, steps=2), tokenizer=None, vocabulary=300)
    pretrain(settings, run_of(tmp_path, checkpoint_every=1))
    other = dataclasses.replace(settings, vocabulary=200, schedule=dataclasses.replace(settings.schedule, steps=3))
    summary = pretrain(other, run_of(tmp_path, overwrite=True, checkpoint_every=3))
    assert summary is not None
    assert train_runs.Checkpoints(tmp_path).steps() == [3]
    assert data.load_tokenizer(tmp_path / "tokenizer").vocab_size == 200
    assert not (tmp_path / "tokenizer.new").exists()
    assert pretrain(other, run_of(tmp_path, resume=True)) is not None


def test_a_directory_with_other_files_is_refused(corpus: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    settings = settings_of(corpus, steps=2)
    with pytest.raises(
        RunError, match=r"expected a new or empty directory, got one with thesis\.txt: --overwrite starts"
    ):
        pretrain(settings, run_of(tmp_path))
    assert pretrain(settings, run_of(tmp_path, overwrite=True)) is not None
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_a_validation_set_that_is_too_small_is_reported_at_the_start(corpus: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"1 documents here: .*two documents or more for next sentences"):
        pretrain(settings_of(corpus, steps=10**6, held_out=0.001), run_of(tmp_path))
    assert not (tmp_path / "log.csv").exists()


def test_two_runs_do_not_share_a_directory(corpus: dict[str, Path], tmp_path: Path) -> None:
    settings = settings_of(corpus, steps=2)
    with run_lock(tmp_path):
        with pytest.raises(
            RunError, match=rf"{tmp_path}: another run writes to this directory, process {os.getpid()}:"
        ):
            pretrain(settings, run_of(tmp_path, overwrite=True))
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    assert pretrain(settings, run_of(tmp_path)) is not None


def hold(directory: Path) -> None:
    with run_lock(directory):
        (directory / "held").touch()
        time.sleep(600)


def test_the_lock_of_a_killed_process_is_released(tmp_path: Path) -> None:
    process = train_runs.start(hold, tmp_path)
    while not (tmp_path / "held").exists():
        assert process.is_alive()
        time.sleep(0.01)
    with pytest.raises(RunError, match=f"process {process.pid}:"), run_lock(tmp_path):
        pass
    process.kill()
    process.join()
    with run_lock(tmp_path):
        pass
