"""The commonsense task: the paths of a graph answer what the text does not, and explain the answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fasttfm import models
from fasttfm.cli.main import main
from fasttfm.data import Tokenizer
from fasttfm.data.commonsense import CommonsenseExample, read_commonsense
from fasttfm.data.graphs import read_graph
from fasttfm.data.lines import DataError
from fasttfm.data.texts import shipped_graph, shipped_task
from fasttfm.models.entity_files import write_embeddings
from fasttfm.tasks.commonsense import CommonsenseTask, path_text
from fasttfm.tasks.finetuning import FinetuneSettings, FineTuning, predict, prepare
from fasttfm.tasks.rates import Rates

OPTIONS = ["--learning-rate", "2e-3", "--epochs", "6", "--tokens-per-batch", "1024", "--device", "cpu", "--quiet"]


@pytest.fixture(scope="module")
def trained(bert_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("kagnet")
    command = ["finetune", "--task", "commonsense", "--model", str(bert_directory), "--output", str(output)]
    assert main([*command, "--path-length", "2", *OPTIONS]) == 0
    return output


@pytest.fixture(scope="module")
def examples() -> dict[str, list[CommonsenseExample]]:
    return {part: read_commonsense(path) for part, path in shipped_task("commonsense").items()}


def accuracy(name: str, directory: Path, examples: dict[str, list[Any]], **options: Any) -> float:
    model, task = prepare(name, directory, examples["train"], **options)
    settings = FinetuneSettings(rates=Rates(2e-3), epochs=6, tokens_per_batch=1024)
    FineTuning(model, task, examples["train"], settings).run(lambda results: None)
    return task.scores(examples["dev"], predict(model, task, examples["dev"]))["accuracy"]


def test_the_graph_is_better_than_the_text(
    trained: Path, bert_directory: Path, examples: dict[str, list[CommonsenseExample]]
) -> None:
    """The same encoder with the same steps: no question of the dev set is about a thing of the training set."""
    text = accuracy("choice", bert_directory, examples)
    metrics = json.loads((trained / "metrics.json").read_text())
    assert metrics["dev"]["accuracy"] > text + 0.2
    assert metrics["dev"]["accuracy"] > metrics["majority"]["accuracy"] + 0.2


def test_predictions_have_explanations(trained: Path, examples: dict[str, list[CommonsenseExample]]) -> None:
    rows = [json.loads(line) for line in (trained / "predictions.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == [example.id for example in examples["dev"]]
    gold = [example.keys[example.label or 0] for example in examples["dev"]]
    right = [row["answerKey"] == key for row, key in zip(rows, gold, strict=True)]
    metrics = json.loads((trained / "metrics.json").read_text())
    assert sum(right) / len(right) == pytest.approx(metrics["dev"]["accuracy"])
    for row, example in zip(rows, examples["dev"], strict=True):
        chosen = example.endings[example.keys.index(row["answerKey"])].replace(" ", "_")
        assert all(path["path"].endswith(f" {chosen}") for path in row["paths"])
        assert sum(path["weight"] for path in row["paths"]) <= 1.001


def test_the_checkpoint_gives_the_same_answers(trained: Path, examples: dict[str, list[CommonsenseExample]]) -> None:
    model, task = prepare("commonsense", trained, examples["dev"], path_length=2)
    assert isinstance(model, models.BertKagNet)
    assert (
        task.scores(examples["dev"], predict(model, task, examples["dev"]))
        == json.loads((trained / "metrics.json").read_text())["dev"]
    )
    models.BertModel.from_pretrained(trained)  # the encoder opens without the graph


def test_another_graph_is_refused(trained: Path, tmp_path: Path) -> None:
    lines = shipped_graph().read_text().splitlines()
    (tmp_path / "other.tsv").write_text("\n".join([*reversed(lines)]) + "\n")
    train = read_commonsense(shipped_task("commonsense")["dev"])
    with pytest.raises(DataError, match=r"other.tsv: expected the graph that the model was trained with, got one with"):
        prepare("commonsense", trained, train, graph=tmp_path / "other.tsv")


def test_explain(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["explain", "--model", str(trained), "--device", "cpu"]
    dev = str(shipped_task("commonsense")["dev"])
    assert main([*command, "--data", dev, "--number", "2", "--output", str(tmp_path / "pictures")]) == 0
    said = capsys.readouterr().out
    assert "(right)" in said
    assert "-->" in said
    pictures = sorted((tmp_path / "pictures").iterdir())
    assert [path.name for path in pictures] == ["001.png", "002.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
    asked = ["--question", "Where would you find a kettle?", "--choices", "kitchen", "xyzzy"]
    assert main([*command, *asked]) == 0
    assert "kettle --AtLocation--> kitchen" in capsys.readouterr().out
    assert main([*command, "--question", "Where is it?", "--choices", "kitchen", "xyzzy"]) == 0
    assert "no path connects the question with this answer" in capsys.readouterr().out


def test_explain_rejects_wrong_arguments(
    trained: Path, bert_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for options, status, message in (
        (["--model", str(trained)], 2, "expected either --data or --question"),
        (["--model", str(trained), "--question", "Where?", "--choices", "here"], 2, "--choices: expected two answers"),
        (["--model", str(bert_directory), "--question", "?", "--choices", "a", "b"], 1, "got one that knows no graph"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["explain", *options])
        assert stopped.value.code == status
        assert message in capsys.readouterr().err


# ---- vectors ---------------------------------------------------------------------------------------------------------


def test_given_vectors_are_kept_and_prune(bert_directory: Path, tmp_path: Path) -> None:
    graph = read_graph(shipped_graph())
    random = np.random.default_rng(0)
    rows = [
        random.integers(-9, 9, size=(len(names), 8)).astype(np.float32) for names in (graph.concepts, graph.relations)
    ]
    write_embeddings(tmp_path, graph.concepts, graph.relations, *map(torch.from_numpy, rows))
    train = read_commonsense(shipped_task("commonsense")["dev"])[:8]
    model, task = prepare("commonsense", bert_directory, train, graph_vectors=tmp_path, path_score=0.3)
    assert isinstance(task, CommonsenseTask)
    assert isinstance(model, models.BertKagNet)
    assert model.config.concept_size == 8
    FineTuning(model, task, train, FinetuneSettings(rates=Rates(1e-3), epochs=1)).run(lambda results: None)
    assert torch.equal(model.graph.concepts.weight, torch.from_numpy(rows[0]))
    assert torch.equal(model.graph.relations.weight[len(graph.relations) :], -torch.from_numpy(rows[1]))
    _, unpruned = prepare("commonsense", bert_directory, train)
    counts = [
        sum(len(pair.paths) for feature in kind.features(train) for schema in feature.graphs for pair in schema.pairs)  # type: ignore[attr-defined]
        for kind in (task, unpruned)
    ]
    assert 0 < counts[0] < counts[1]


def test_a_score_of_paths_needs_vectors(bert_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = read_commonsense(shipped_task("commonsense")["dev"])[:1]
    with pytest.raises(ValueError, match="path_score: expected with graph_vectors"):
        prepare("commonsense", bert_directory, train, path_score=0.3)
    with pytest.raises(SystemExit):
        main(["finetune", "--task", "commonsense", "--model", str(bert_directory), "--path-score", "0.3"])
    assert "--path-score: expected with --graph-vectors" in capsys.readouterr().err


# ---- other languages -------------------------------------------------------------------------------------------------

KOREAN_EDGES = """\
AtLocation	꽃	흙
UsedFor	삽	흙을_파다
HasPrerequisite	꽃을_심다	흙을_파다
AtLocation	흙	정원
"""


def korean_question(answer: str, *others: str) -> str:
    choices = [{"label": key, "text": text} for key, text in zip("ABC", (answer, *others), strict=False)]
    row = {"id": answer, "question": {"stem": "꽃을 심으려면 무엇이 필요한가?", "choices": choices}, "answerKey": "A"}
    return json.dumps(row, ensure_ascii=False) + "\n"


def test_korean_questions_have_paths(bert_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The flower, the soil and the shovel."""
    (tmp_path / "graph.tsv").write_text(KOREAN_EDGES)
    (tmp_path / "train.jsonl").write_text(korean_question("삽으로 판 흙", "구름") + korean_question("자동차", "구름"))
    train = read_commonsense(tmp_path / "train.jsonl")
    _, task = prepare("commonsense", bert_directory, train, graph=tmp_path / "graph.tsv")
    assert isinstance(task, CommonsenseTask)
    schema = task.schema(train[0].context, train[0].endings[0])
    lines = {path_text(task.graph, path) for pair in schema.pairs for path in pair.paths}
    assert "꽃을_심다 --HasPrerequisite--> 흙을_파다 <--UsedFor-- 삽" in lines
    features = task.features(train)
    assert task.remark(features) == "1 of 2 questions have no path in the graph to any of their answers"
    assert str(task.remark(features[1:])).endswith("in the language of the questions?")
    command = ["finetune", "--task", "commonsense", "--model", str(bert_directory), "--output", str(tmp_path / "run")]
    files = [f"--{name}={tmp_path / file}" for name, file in (("data", "train.jsonl"), ("graph", "graph.tsv"))]
    assert main([*command, *files, f"--dev={tmp_path / 'train.jsonl'}", "--epochs", "1", "--device", "cpu"]) == 0
    assert "dev: 1 of 2 questions have no path in the graph" in capsys.readouterr().out


def test_the_korean_sample(bert_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--language`` selects the questions and the graph; explain finds the flower, the soil and the shovel."""
    command = ["finetune", "--task=commonsense", "--model", str(bert_directory), "--language=korean", "--device=cpu"]
    assert main([*command, "--output", str(tmp_path / "run"), "--epochs=1", "--path-length=2"]) == 0
    said = capsys.readouterr().out
    assert "138 training examples, 45 in the dev set: the shipped sample in Korean" in said
    assert "dev: 0 of 45 questions have no path" in said
    asked = ["--question", "꽃을 심으려면 무엇이 필요할까?", "--choices", "흙을 파는 삽", "구름"]
    assert main(["explain", "--model", str(tmp_path / "run"), "--device", "cpu", *asked]) == 0
    assert "꽃을_심다 --HasPrerequisite--> 흙을_파다" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*command, "--data", str(tmp_path)])
    assert "language: expected without data: it selects the sample" in capsys.readouterr().err
    for language, message in (
        ("latin", "expected one of english, korean, got 'latin'"),
        ("korean", "in Korean, got 'ta"),
    ):
        with pytest.raises(SystemExit):
            main(["finetune", "--task", "tag", "--model", str(bert_directory), "--language", language])
        assert message in capsys.readouterr().err


# ---- other families --------------------------------------------------------------------------------------------------

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
FAMILIES = {
    "Roberta": SMALL,
    "XLMRoberta": SMALL,
    "Camembert": SMALL,
    "Albert": {**SMALL, "embedding_size": 16},
    "Electra": {**SMALL, "embedding_size": 16},
    "DistilBert": {"dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 64},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_encoder(family: str, wordpiece: Tokenizer, tmp_path: Path) -> None:
    """A masked-LM checkpoint of each family becomes a KagNet, which gives the same answers after saving and loading."""
    fields = {**FAMILIES[family], "vocab_size": wordpiece.vocab_size, "max_position_embeddings": 130}
    config = getattr(models, f"{family}Config")(**fields)
    torch.manual_seed(0)
    getattr(models, f"{family}ForMaskedLM")(config).save_pretrained(tmp_path / "lm")
    wordpiece.save(tmp_path / "lm")
    some = read_commonsense(shipped_task("commonsense")["dev"])[:4]
    model, task = prepare("commonsense", tmp_path / "lm", some)
    assert type(model).__name__ == f"{family}KagNet"
    loss = task.loss(model, task.batch(task.features(some)))
    loss.backward()
    assert bool(loss.isfinite())
    model.save_pretrained(tmp_path / "kagnet")
    wordpiece.save(tmp_path / "kagnet")
    again, _ = prepare("commonsense", tmp_path / "kagnet", some)
    assert [answer.scores for answer in predict(again, task, some)] == [
        answer.scores for answer in predict(model, task, some)
    ]


def test_a_gpt_has_no_head_for_it(gpt_directory: Path) -> None:
    some = read_commonsense(shipped_task("commonsense")["dev"])[:4]
    with pytest.raises(ValueError, match=r"commonsense: expected a model of bert, .*; openai-gpt has no head for it"):
        prepare("commonsense", gpt_directory, some)


def test_the_numbers_of_graphs_and_sequences_must_match(bert_directory: Path) -> None:
    some = read_commonsense(shipped_task("commonsense")["dev"])[:4]
    model, task = prepare("commonsense", bert_directory, some)
    whole, part = (task.batch(task.features(part_examples)) for part_examples in (some, some[:2]))
    with pytest.raises(ValueError, match="BertKagNet: graph: expected 20 graphs, one per choice, got 10"):
        model(**{**whole.inputs(), "graph": part.inputs()["graph"]}, num_choices=5)


def test_a_path_in_words_follows_the_edges(bert_directory: Path) -> None:
    _, task = prepare("commonsense", bert_directory, read_commonsense(shipped_task("commonsense")["dev"])[:1])
    assert isinstance(task, CommonsenseTask)
    ends = [task.graph.numbers[name] for name in ("kitchen", "porcelain")]
    lines = [path_text(task.graph, path) for path in task.finder.find(*ends)]
    assert "kitchen <--AtLocation-- cup --MadeOf--> porcelain" in lines
