"""Objectives are a choice for each family, and logs have their losses with the weights of the papers."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from small_models import save_bert
from train_runs import run_of, settings_of

from fasttfm.cli.main import main
from fasttfm.data import load_tokenizer
from fasttfm.train.curves import _title
from fasttfm.train.logs import WEIGHT, read_rows
from fasttfm.train.pretrain import pretrain


def check_loss(row: dict[str, str], weights: dict[str, float]) -> None:
    """The columns of the terms and their weights, whose weighted sum is the loss."""
    assert {name.removeprefix(WEIGHT): float(row[name]) for name in row if name.startswith(WEIGHT)} == weights
    total = sum(weight * float(row[name]) for name, weight in weights.items())
    assert float(row["loss"]) == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("family", ["bert", "albert"])
@pytest.mark.parametrize(
    ("objective", "term"), [("mlm", None), ("mlm+nsp", "next_sentence"), ("mlm+sop", "sentence_order")]
)
def test_both_families_have_all_second_objectives(
    family: str, objective: str, term: str | None, corpus: dict[str, Path], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("fasttfm.train.pretrain.write_curves", lambda *_: None)
    pretrain(settings_of(corpus, family, steps=2, objective=objective), run_of(tmp_path / "run"))
    row = read_rows(tmp_path / "run" / "log.csv")[-1]
    assert {"masked_lm", "next_sentence", "sentence_order"} & row.keys() == {"masked_lm", term} - {None}
    if term is not None:  # otherwise the only term is the loss
        check_loss(row, {"masked_lm": 1.0, term: 1.0})


def test_electras_losses_and_their_weights(corpus: dict[str, Path], tmp_path: Path) -> None:
    summary = pretrain(settings_of(corpus, "electra", steps=2), run_of(tmp_path / "run"))
    assert summary is not None
    row = read_rows(tmp_path / "run" / "log.csv")[-1]
    check_loss(row, {"masked_lm": 1.0, "replaced_tokens": 50.0})  # of the generator, of the discriminator
    terms = [float(row[name]) for name in ("loss", "masked_lm", "replaced_tokens")]
    expected = "{:.3f} = masked lm {:.3f} + 50 x replaced tokens {:.3f}".format(*terms)
    assert summary.loss_sum == expected  # the last lines of the command
    assert _title("loss", row) == "loss = masked lm + 50 x replaced tokens"  # of the panel in curves.png


@pytest.mark.parametrize(
    ("recipe", "options", "weights"),
    [
        ("distilbert", [], {"soft_targets": 5.0, "masked_lm": 2.0, "cosine": 1.0}),
        (
            "tinybert",
            ["--layers", "2", "--width", "32"],
            dict.fromkeys(("embeddings", "attention_1", "hidden_1", "attention_2", "hidden_2"), 1.0),
        ),
    ],
)
def test_the_losses_of_students(
    recipe: str,
    options: list[str],
    weights: dict[str, float],
    corpus: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """DistilBERT's three, TinyBERT's by layer, in the log and in the last lines."""
    teacher = save_bert(load_tokenizer(corpus["wordpiece"]), tmp_path / "teacher", num_hidden_layers=4)
    call = ["distill", "--recipe", recipe, "--teacher", str(teacher), "--data", str(corpus["data"]), "--device", "cpu"]
    call += ["--steps", "2", "--max-length", "32", "--tokens-per-batch", "128", "--held-out", "0.1"]
    assert main([*call, *options, "--output", str(tmp_path / "student")]) == 0
    with (tmp_path / "student" / "log.csv").open() as file:
        row = list(csv.DictReader(file))[-1]
    check_loss(row, weights)
    said = capsys.readouterr().out
    for name, weight in weights.items():
        factor = "" if weight == 1 else f"{weight:g} x "
        assert f"{factor}{name.replace('_', ' ')} {float(row[name]):.3f}" in said
