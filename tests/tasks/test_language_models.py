"""Predictions for masks and likelihoods of texts against those of single sequences; ``fasttfm fill-mask`` and ``fasttfm
score``."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from model_families import save_small

from fasttfm.cli.main import main
from fasttfm.data import DataError, Tokenizer
from fasttfm.models import CheckpointError
from fasttfm.tasks.language_models import LanguageModel, load_language_model
from fasttfm.tasks.masking_rates import accuracy_by_rate, fill_at_rates

TEXTS = ["The state of the union is strong.", "war", "", "peace and commerce with all nations, and an army"]


@pytest.fixture(scope="module")
def masked(bert_directory: Path) -> LanguageModel:
    return load_language_model(bert_directory, device="cpu", tokens_per_batch=40)


@pytest.fixture(scope="module")
def causal(gpt_directory: Path) -> LanguageModel:
    return load_language_model(gpt_directory, device="cpu", tokens_per_batch=40)


def log_likelihoods(language_model: LanguageModel, ids: list[int]) -> torch.Tensor:
    """log P [tokens, vocabulary] from a call of the model."""
    with torch.no_grad():
        logits: torch.Tensor = language_model.model(torch.tensor([ids])).logits[0]
    return logits.log_softmax(-1)


def pseudo(language_model: LanguageModel, text: str, begin: int = 0) -> list[float]:
    special = language_model.tokenizer.special
    ids = [special.cls, *language_model.tokenizer.encode(text), special.sep]
    likelihoods = []
    for position in range(1 + begin, len(ids) - 1):
        changed = [*ids[:position], special.mask, *ids[position + 1 :]]
        likelihoods.append(float(log_likelihoods(language_model, changed)[position, ids[position]]))  # type: ignore[arg-type]
    return likelihoods


def test_likelihoods_of_a_causal_model(causal: LanguageModel) -> None:
    for text, score in zip(TEXTS, causal.score(TEXTS), strict=True):
        ids = causal.tokenizer.encode(text)
        rows = log_likelihoods(causal, ids) if ids else None
        expected = (
            [float(rows[position - 1, ids[position]]) for position in range(1, len(ids))] if rows is not None else []
        )
        assert score.tokens == len(expected)
        assert score.log_likelihood == pytest.approx(sum(expected), abs=1e-4)
        if expected:
            assert score.perplexity == pytest.approx(math.exp(-sum(expected) / len(expected)), rel=1e-4)
        else:
            assert score.perplexity is None


def test_pseudo_likelihoods_of_a_masked_model(masked: LanguageModel) -> None:
    for text, score in zip(TEXTS, masked.score(TEXTS), strict=True):
        expected = pseudo(masked, text)
        assert score.tokens == len(expected)
        assert score.log_likelihood == pytest.approx(sum(expected), abs=1e-4)


def test_continuations(causal: LanguageModel, masked: LanguageModel) -> None:
    text, continuation = "The state of the", " union"
    whole, before, rest = causal.score([text + continuation, text, (text, continuation)])
    assert rest.log_likelihood == pytest.approx(whole.log_likelihood - before.log_likelihood, abs=1e-4)
    assert rest.tokens == whole.tokens - before.tokens > 0
    (score,) = masked.score([(text, continuation)])
    begin = len(masked.tokenizer.encode(text))
    assert score.log_likelihood == pytest.approx(sum(pseudo(masked, text + continuation, begin)), abs=1e-4)


@pytest.mark.parametrize("stride", [None, 50, 127])
def test_texts_longer_than_the_model(causal: LanguageModel, stride: int | None) -> None:
    text = "the state of the union and the army " * 60
    ids = causal.tokenizer.encode(text)
    assert len(ids) > 3 * causal.longest
    (score,) = causal.score([text], stride=stride)
    step = causal.longest // 2 if stride is None else stride
    expected, done = [], 1
    for start in range(0, len(ids), step):
        rows = log_likelihoods(causal, ids[start : start + causal.longest])
        end = min(len(ids), start + causal.longest)
        expected += [float(rows[position - start - 1, ids[position]]) for position in range(max(done, start + 1), end)]
        done = end
        if end == len(ids):
            break
    assert score.tokens == len(expected) == len(ids) - 1
    assert score.log_likelihood == pytest.approx(sum(expected), rel=1e-5)


def test_predictions_for_masks(masked: LanguageModel) -> None:
    texts = ["The [MASK] of the [MASK].", "[MASK]", "peace and [MASK] with all"]
    special = masked.tokenizer.special
    for text, masks in zip(texts, masked.fill_mask(iter(texts), top_k=3), strict=True):
        ids = [special.cls, *masked.tokenizer.encode(text), special.sep]
        positions = [position for position, id in enumerate(ids) if id == special.mask]
        assert len(masks) == len(positions) == text.count("[MASK]")
        rows = log_likelihoods(masked, ids)  # type: ignore[arg-type]
        for guesses, position in zip(masks, positions, strict=True):
            best = rows[position].exp().topk(3)
            assert [guess.token for guess in guesses] == [masked.tokenizer.token(id) for id in best.indices.tolist()]
            assert [guess.probability for guess in guesses] == pytest.approx(best.values.tolist(), abs=1e-6)
    with pytest.raises(DataError, match=r"text 2: expected \[MASK\] where a word is missing, got 'none here'"):
        list(masked.fill_mask(["[MASK]", "none here"]))
    with pytest.raises(DataError, match="got none in its first 128 tokens"):
        list(masked.fill_mask(["war " * 300 + "[MASK]"]))


def test_electras_generator_fills_masks(wordpiece: Tokenizer, tmp_path: Path) -> None:
    for part, head in (("discriminator", "ForPreTraining"), ("generator", "ForMaskedLM")):
        save_small("electra", wordpiece, tmp_path / "latest" / part, head=head)
    model = load_language_model(tmp_path, device="cpu")
    assert type(model.model).__name__ == "ElectraForMaskedLM"
    assert len(next(model.fill_mask(["the [MASK]"], 2))[0]) == 2
    with pytest.raises(CheckpointError, match="expected a model with a trained head"):
        load_language_model(tmp_path / "latest" / "discriminator", device="cpu")


# ---- commands --------------------------------------------------------------------------------------------------------


def called(command: str, folder: Path, *options: Any) -> int:
    return main([command, "--model", str(folder), "--device", "cpu", "--quiet", *map(str, options)])


def test_fill_mask_on_the_terminal(
    bert_directory: Path, masked: LanguageModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "The [MASK] of the [MASK]."
    ((first, second),) = masked.fill_mask([text], 2)
    assert called("fill-mask", bert_directory, "--text", text, "--top-k", 2) == 0
    lines = [text]
    for number, guesses in ((1, first), (2, second)):
        lines += [f"mask {number}", *(f"  {guess.probability:.4f}  {guess.token}" for guess in guesses)]
    assert capsys.readouterr().out.splitlines() == lines
    (tmp_path / "texts.txt").write_text(f"{text}\n[MASK]\n")
    options = ("--data", tmp_path / "texts.txt", "--top-k", 2, "--output")
    assert called("fill-mask", bert_directory, *options, tmp_path / "words.csv") == 0
    rows = list(csv.DictReader(io.StringIO((tmp_path / "words.csv").read_text())))
    assert [row["token"] for row in rows[:4]] == [guess.token for guess in (*first, *second)]
    assert [(row["mask"], row["rank"]) for row in rows] == [*zip("112211", "121212", strict=True)]


def test_score_of_a_file_and_of_stdin(
    gpt_directory: Path,
    causal: LanguageModel,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = list(causal.score(TEXTS))
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    options = ("--data", tmp_path / "texts.txt", "--output", tmp_path / "scores.jsonl")
    assert called("score", gpt_directory, *options) == 0
    total, tokens = sum(score.log_likelihood for score in expected), sum(score.tokens for score in expected)
    said = capsys.readouterr().out
    assert f"all texts  perplexity {math.exp(-total / tokens):.3f} over {tokens} tokens" in said
    rows = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert [row["text"] for row in rows] == TEXTS
    assert [each["log_likelihood"] for each in rows] == pytest.approx([each.log_likelihood for each in expected])
    assert [row["perplexity"] for row in rows] == [
        None if score.perplexity is None else pytest.approx(score.perplexity) for score in expected
    ]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(TEXTS)))
    assert called("score", gpt_directory, "--data", "-", "--format", "jsonl") == 0
    assert [json.loads(line)["tokens"] for line in capsys.readouterr().out.splitlines()] == [
        score.tokens for score in expected
    ]


def test_score_of_continuations(
    gpt_directory: Path, causal: LanguageModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (expected,) = causal.score([("The state of the", " union")])
    call = ("--text", "The state of the", "--continuation", " union", "--format", "jsonl")
    assert called("score", gpt_directory, *call) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["probability"] == pytest.approx(math.exp(expected.log_likelihood), rel=1e-4)
    line = {"text": "The state of the", "continuation": " union"}
    (tmp_path / "a.jsonl").write_text(json.dumps(line) + "\n")
    assert called("score", gpt_directory, "--data", tmp_path / "a.jsonl", "--format", "jsonl") == 0
    assert json.loads(capsys.readouterr().out) == row


# ---- masking rates ---------------------------------------------------------------------------------------------------


def test_texts_masked_at_several_rates(masked: LanguageModel) -> None:
    text = "The state of the union is strong, and peace is with all of the nations."
    ids, special = masked.tokenizer.encode(text), masked.tokenizer.special
    ((low, middle, high),) = fill_at_rates(masked, [text], [0.15, 0.5, 1.0], seed=3)
    assert [text.tokens for text in (low, middle, high)] == [round(rate * len(ids)) for rate in (0.15, 0.5, 1.0)]
    assert [text.masked.count("[MASK]") for text in (low, middle, high)] == [low.tokens, middle.tokens, len(ids)]
    at_low, at_middle = (
        {place for place, id in enumerate(masked.tokenizer.encode(text.masked)) if id == special.mask}
        for text in (low, middle)
    )
    assert at_low < at_middle  # what is masked at a rate is masked at higher ones
    read = [special.cls, *(special.mask if place in at_middle else id for place, id in enumerate(ids)), special.sep]
    best = log_likelihoods(masked, read)[1:-1].argmax(-1).tolist()  # type: ignore[arg-type]
    assert middle.right == sum(best[place] == ids[place] for place in at_middle)
    shown = re.findall(r"\[([^\]]*)\]", middle.filled)
    decode = masked.tokenizer.decode
    assert [token.partition(", not ")[0] for token in shown] == [decode([best[place]]) for place in sorted(at_middle)]
    assert list(fill_at_rates(masked, [text], [0.5], seed=3)) == [[middle]]
    assert list(fill_at_rates(masked, [text], [0.5], seed=4)) != [[middle]]


def test_right_and_wrong_predictions_are_shown(masked: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    war, peace = masked.tokenizer.encode("war peace")
    monkeypatch.setattr(LanguageModel, "best_at", lambda self, features: [war] * sum(len(at) for _, at in features))
    texts = list(fill_at_rates(masked, ["war, war & peace", "peace"], [1.0]))
    assert [text.filled for (text,) in texts] == [
        "[war][war, not ,] [war] [war, not &] [war, not peace]",
        "[war, not peace]",
    ]
    assert accuracy_by_rate(texts) == [{"rate": 1.0, "tokens": 6, "right": 2, "accuracy": 2 / 6}]
    assert peace != war


def test_fill_mask_at_rates(bert_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("The state of the union.\nWe have peace.\n")
    call = ["fill-mask", "--model", str(bert_directory), "--device", "cpu", "--quiet", "--rates", "0.25,1"]
    assert main([*call, "--data", str(tmp_path / "a.txt"), "--output", str(tmp_path / "a.csv")]) == 0
    with (tmp_path / "a.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["rate"], row["tokens"]) for row in rows] == [("0.25", "2"), ("1.0", "6"), ("0.25", "1"), ("1.0", "4")]
    right = sum(int(row["right"]) for row in rows[1::2])
    assert f"| 1.000 | 10 | {right} | {right / 10:.3f} |" in capsys.readouterr().out
    assert main([*call, "--text", "We have peace."]) == 0
    assert "\n 100%  [MASK] [MASK] [MASK][MASK]\n" in capsys.readouterr().out
    for wrong, expected in (("0,1", "--rates: expected numbers above 0 and up to 1"), ("x", "got 'x'")):
        with pytest.raises(SystemExit):
            main([*call, "--text", "a", "--rates", wrong])
        assert expected in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*call, "--text", "the [MASK]"])
    assert "text 1: expected words and no [MASK], which --rates puts in, got the [MASK]" in capsys.readouterr().err
