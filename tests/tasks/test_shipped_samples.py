"""Fine-tuning of every task on its shipped sample, from random parameters to files, in seconds."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import save_bert

from fasttfm.cli.main import main
from fasttfm.data import read_documents, shipped_corpus, train_tokenizer
from fasttfm.data.question_files import read_questions
from fasttfm.data.task_files import read_conll
from fasttfm.data.texts import shipped_task
from fasttfm.inference.opening import open_model
from fasttfm.tasks.registry import TASKS

# Epochs, learning rate, the score that is tested, and by how much it must exceed the majority baseline.
RUNS = {
    "classify": (6, 3e-3, "accuracy", 0.15),
    "pair": (5, 3e-3, "accuracy", 0.2),
    "tag": (15, 5e-3, "f1", 0.3),
    "qa": (5, 3e-3, "exact", 0.08),
    "choice": (6, 3e-3, "accuracy", 0.3),
}
FILES = {"classify": "tsv", "pair": "tsv", "tag": "conll", "qa": "json", "choice": "csv"}


def finetune(task: str, model: Path, output: Path, *options: str) -> dict[str, Any]:
    epochs, rate, _, _ = RUNS[task]
    arguments = ["finetune", "--task", task, "--model", str(model), "--output", str(output), "--quiet"]
    arguments += ["--epochs", str(epochs), "--learning-rate", str(rate), "--tokens-per-batch", "1024"]
    assert main([*arguments, "--max-length", "64", "--device", "cpu", *options]) == 0
    return json.loads((output / "metrics.json").read_text())


@pytest.mark.parametrize("task", RUNS)
def test_a_model_beats_the_majority_baseline(task: str, bert_directory: Path, tmp_path: Path) -> None:
    metrics = finetune(task, bert_directory, tmp_path)
    _, _, score, margin = RUNS[task]
    assert metrics["dev"][score] > metrics["majority"][score] + margin, metrics
    for name in (f"predictions.{FILES[task]}", "log.csv", "curves.png", "tokenizer.json", "config.json"):
        assert (tmp_path / name).stat().st_size > 0
    assert not list(tmp_path.glob("*.partial"))
    check_predictions(task, tmp_path, metrics)
    check_with_transformers(task, tmp_path)


def test_korean_answers_beat_the_majority_baseline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``finetune --task qa --language korean``, with words and characters counted as KorQuAD counts them."""
    tokenizer = train_tokenizer("wordpiece", list(read_documents(shipped_corpus("korean")))[:400], 2000)
    directory = save_bert(tokenizer, tmp_path / "bert", num_hidden_layers=1)
    arguments = ["--task=qa", "--language=korean", "--model", str(directory), "--output", str(tmp_path / "run")]
    options = ["--epochs=3", "--learning-rate=3e-3", "--max-length=96", "--batch-size=16", "--device=cpu"]
    assert main(["finetune", *arguments, *options]) == 0
    assert "328 training examples, 85 in the dev set: the shipped sample in Korean" in capsys.readouterr().out
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["dev"]["f1"] > metrics["majority"]["f1"] + 0.15, metrics


def check_predictions(task: str, output: Path, metrics: dict[str, Any]) -> None:
    """The file contains the predictions that the scores are computed from."""
    gold = shipped_task(task)["dev"]
    text = (output / f"predictions.{FILES[task]}").read_text()
    if task == "qa":
        examples = read_questions(gold)
        assert list(json.loads(text)) == [example.id for example in examples]
    elif task == "tag":
        rows = [line.split(" ") for line in text.splitlines() if line]
        assert [row[:2] for row in rows] == [
            [*pair] for sentence in read_conll(gold) for pair in zip(sentence.words, sentence.tags, strict=True)
        ]
        assert sum(tag == predicted for _, tag, predicted in rows) / len(rows) == pytest.approx(
            metrics["dev"]["accuracy"]
        )
    else:
        form = {} if task == "choice" else {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
        predicted_labels = [row[1] for row in csv.reader(text.splitlines()[1:], **form)]
        with gold.open(newline="") as file:
            labels = [row["label"] for row in csv.DictReader(file, **form)]
        right = [a == b for a, b in zip(predicted_labels, labels, strict=True)]
        assert sum(right) / len(right) == pytest.approx(metrics["dev"]["accuracy"])


def check_with_transformers(task: str, directory: Path) -> None:
    """transformers loads the directory and makes the same predictions."""
    import transformers

    classes = {
        "classify": "AutoModelForSequenceClassification",
        "pair": "AutoModelForSequenceClassification",
        "tag": "AutoModelForTokenClassification",
        "qa": "AutoModelForQuestionAnswering",
        "choice": "AutoModelForMultipleChoice",
    }
    theirs = getattr(transformers, classes[task]).from_pretrained(directory).eval()
    ours = open_model(directory, TASKS[task].head)
    ids = torch.arange(5, 17).view(1, 4, 3) if task == "choice" else torch.arange(5, 17).view(2, 6)
    with torch.no_grad():
        for mine, other in zip(ours(ids).to_tuple(), theirs(ids).to_tuple(), strict=True):
            assert torch.allclose(mine, other, atol=1e-4)
    words = transformers.AutoTokenizer.from_pretrained(directory)
    assert words.decode(words("the Congress", "of peace").input_ids) == "[CLS] the congress [SEP] of peace [SEP]"
    if task == "classify":
        assert theirs.config.id2label == {0: "1801-1870", 1: "1901-1950", 2: "1991-2021"}


def test_a_gpt_chooses_as_gpt_1(gpt_directory: Path, tmp_path: Path) -> None:
    metrics = finetune("choice", gpt_directory, tmp_path, "--epochs", "2", "--max-length", "100")
    assert metrics["dev"]["accuracy"] > metrics["majority"]["accuracy"] + 0.2, metrics
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["vocab_size"] == json.loads((gpt_directory / "config.json").read_text())["vocab_size"] + 3
