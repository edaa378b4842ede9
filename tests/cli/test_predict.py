"""``fasttfm predict``: input and output files of every task, with and without labels."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fasttfm.cli.main import main
from fasttfm.data import shipped_task
from fasttfm.tasks import loading
from fasttfm.tasks.finetuning import predict, prepare, save
from fasttfm.tasks.questions import Answer as QuestionAnswer
from fasttfm.tasks.questions import QuestionTask
from fasttfm.tasks.registry import TASKS
from fasttfm.tasks.results import AnswerResult

pytestmark = pytest.mark.filterwarnings("ignore:.*randomly initialized, to be trained")

PREDICTING = [name for name, kind in TASKS.items() if kind.json_fields != "none" and kind.reads == "text"]


@pytest.fixture(scope="module")
def trained(bert_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any, Any, Any]]:
    """For every task: a saved model with a random head, the model, the task and labelled examples."""
    saved = {}
    for name in PREDICTING:
        kind = TASKS[name]
        examples = kind.read_file(shipped_task(name)["dev"])
        torch.manual_seed(0)
        model, task = prepare(name, bert_directory, examples, max_length=48)
        folder = tmp_path_factory.mktemp(name)
        save(model, task, folder)
        saved[name] = (folder, model, task, examples)
    return saved


def predicted(folder: Path, source: Any, *options: Any) -> int:
    call = ("predict", "--model", folder, "--data", source, "--device", "cpu", "--quiet", *options)
    return main([str(word) for word in call])


def objects(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("name", PREDICTING)
def test_labelled_files_of_every_task(
    name: str,
    trained: dict[str, tuple[Path, Any, Any, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, model, task, examples = trained[name]
    monkeypatch.setattr(loading, "_WINDOW", 40)
    source = shipped_task(name)["dev"]
    assert predicted(folder, source, "--output", tmp_path / "found.jsonl") == 0
    said = capsys.readouterr().out
    expected = predict(model, task, examples)
    scores = ", ".join(f"{key.replace('_', ' ')} {value:.3f}" for key, value in task.scores(examples, expected).items())
    assert f"scores     {scores}\n" in said
    records = objects(tmp_path / "found.jsonl")
    assert len(records) == len(examples)
    fields = {"tag": "tags", "qa": "answer", "choice": "choice", "commonsense": "choice", "entity-typing": "labels"}
    parts = {
        "qa": lambda answer: answer.text,
        "commonsense": lambda answer: answer.choice,
        "entity-typing": list,
    }
    field, plain = fields.get(name, "label"), parts.get(name, lambda prediction: prediction)
    assert [record[field] for record in records] == [plain(prediction) for prediction in expected]
    assert [record["gold"] for record in records] == [task.gold(example) for example in examples]
    assert all(records[0].keys() >= set(task.inputs(examples[0])) for record in records)
    assert predicted(folder, source, "--output", tmp_path / "found.csv") == 0
    with (tmp_path / "found.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    if name == "tag":
        assert [row["tag"] for row in rows] == [tag for record in records for tag in record["tags"]]
        assert [row["word"] for row in rows] == [word for record in records for word in record["words"]]
        assert rows[-1]["sentence"] == str(len(examples))
    elif name != "entity-typing":
        assert [row[field] for row in rows] == [str(record[field]) for record in records]
    if name in ("classify", "pair"):
        for row, record in zip(rows, records, strict=True):
            shares = {label: float(row[f"probability_{label}"]) for label in task.labels}
            assert shares == record["probabilities"]


UNLABELLED = {
    "classify": [("a.txt", "the war\n\npeace\n", 3), ("a.tsv", "sentence\nthe war\npeace\n", 2),
                 ("a.jsonl", '{"text": "the war"}\n\n{"text": "peace"}\n', 2)],
    "pair": [("a.txt", "the war\tpeace\n", 1), ("a.tsv", "sentence1\tsentence2\na\tb\n", 1),
             ("a.jsonl", '{"text": "a", "text_pair": "b"}\n', 1)],
    "tag": [("a.txt", "The war ended .\n", 1), ("a.conll", "The\nwar\n\nended\n", 2),
            ("a.jsonl", '{"words": ["The", "war"]}\n{"text": "The war"}\n', 2)],
    "qa": [("a.txt", "When?\tThe war of 1812.\n", 1), ("a.jsonl", '{"question": "When?", "context": "In 1812."}\n', 1),
           ("a.json", json.dumps({"data": [{"paragraphs": [{"context": "In 1812.", "qas": [
               {"id": "x", "question": "When?"}]}]}]}), 1)],
    "choice": [("a.txt", "The war\tended\twent on\n", 1), ("a.csv", "sent1,sent2,ending0,ending1\na,b,c,d\n", 1),
               ("a.jsonl", '{"context": "a", "endings": ["b", "c"]}\n', 1)],
}  # fmt: skip


@pytest.mark.parametrize("name", UNLABELLED)
def test_files_without_labels(
    name: str,
    trained: dict[str, tuple[Path, Any, Any, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = trained[name][0]
    for file, text, count in UNLABELLED[name]:
        (tmp_path / file).write_text(text)
        output = tmp_path / f"{file}.out"
        assert predicted(folder, tmp_path / file, "--output", output) == 0
        records = objects(output)
        assert len(records) == count
        assert all("gold" not in record for record in records)
        assert "scores" not in capsys.readouterr().out
        if file.endswith((".txt", ".jsonl")):
            monkeypatch.setattr(sys, "stdin", io.StringIO(text))
            assert predicted(folder, "-") == 0
            assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == records


def test_labels_that_the_model_does_not_have_are_reported(
    trained: dict[str, tuple[Path, Any, Any, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _, task, _ = trained["classify"]
    lines = [{"text": "the war", "label": "unheard of"}, {"text": "peace", "label": task.labels[0]}, {"text": "a"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert predicted(folder, tmp_path / "a.jsonl", "--output", tmp_path / "b.jsonl") == 0
    said = capsys.readouterr()
    assert "note: 2 of 3 examples have labels; they are scored" in said.err
    assert "got 'unheard of' in 1 of 2 examples; they count as wrong" in said.err
    assert "scores     accuracy" in said.out
    assert [record.get("gold") for record in objects(tmp_path / "b.jsonl")] == ["unheard of", task.labels[0], None]


def test_a_bad_line_leaves_no_file(
    trained: dict[str, tuple[Path, Any, Any, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("a\tb\nonly one\n")
    with pytest.raises(SystemExit) as error:
        predicted(trained["pair"][0], tmp_path / "a.txt", "--output", tmp_path / "b.csv")
    assert error.value.code == 1
    assert "a.txt, line 2: expected two texts with a tab between them" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_truncation_and_thresholds(
    trained: dict[str, tuple[Path, Any, Any, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("war " * 100 + "\npeace\n")
    assert predicted(trained["classify"][0], tmp_path / "a.txt") == 0
    assert "note: 1 of 2 examples do not fit into 48 tokens and are truncated: 54 tokens" in capsys.readouterr().err
    (tmp_path / "a.txt").write_text("When?\tThe war of 1812.\n")
    for threshold, empty in ((-1e9, True), (1e9, False)):
        assert predicted(trained["qa"][0], tmp_path / "a.txt", f"--threshold={threshold}") == 0
        assert (json.loads(capsys.readouterr().out)["answer"] == "") == empty


def test_scores_of_coqa_by_domain(
    bert_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """finetune and predict print CoQA's table of domains, and metrics.json has it. The model answers "white" if a story
    contains it, so that every score is known."""
    monkeypatch.setattr(QuestionTask, "predictions", _answers_white)
    monkeypatch.setattr(QuestionTask, "_result", lambda self, answer: AnswerResult(answer.text, None, None, 0.0, 0.0))
    stories = [
        ("mctest", "The white cat.", "white"),
        ("cnn", "The white house.", "house"),
        ("cnn", "A white dog.", "white"),
    ]
    data = {"data": [_coqa(*story) for story in stories]}
    (tmp_path / "coqa-dev-v1.0.json").write_text(json.dumps(data))
    source, model = str(tmp_path / "coqa-dev-v1.0.json"), str(tmp_path / "model")
    call = ["finetune", "--task", "qa", "--model", str(bert_directory), "--data", source, "--dev", source]
    assert main([*call, "--test", source, "--output", model, "--epochs", "1", "--quiet", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    for part in ("dev", "test"):
        assert (
            f"""{part + ", by domain":18}  questions  exact     f1
children's stories          1  1.000  1.000
news                        2  0.500  0.500
"""
            in said
        )
    domains = {
        "children's stories": {"questions": 1, "exact": 1.0, "f1": 1.0},
        "news": {"questions": 2, "exact": 0.5, "f1": 0.5},
    }
    metrics = json.loads((tmp_path / "model" / "metrics.json").read_text())
    assert metrics["dev_domains"] == metrics["test_domains"] == domains
    assert predicted(tmp_path / "model", source, "--output", tmp_path / "found.jsonl") == 0
    assert "news                        2  0.500  0.500\n" in capsys.readouterr().out
    del data["data"][0]  # one domain: the scores of all are its own
    (tmp_path / "coqa-dev-v1.0.json").write_text(json.dumps(data))
    assert predicted(tmp_path / "model", source, "--output", tmp_path / "one.jsonl") == 0
    assert "by domain" not in capsys.readouterr().out


def _coqa(source: str, story: str, answer: str) -> dict[str, Any]:
    start = story.index(answer)
    turn = {"input_text": answer, "span_start": start, "span_end": start + len(answer), "turn_id": 1}
    asked = [{"input_text": "What?", "turn_id": 1}]
    return {"id": story, "source": source, "story": story, "questions": asked, "answers": [turn]}


def _answers_white(self: Any, examples: Any, features: Any, read: Any) -> list[Any]:
    return [QuestionAnswer("white" if "white" in example.context else "", -1.0) for example in examples]
