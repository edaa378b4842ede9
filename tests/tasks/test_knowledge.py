"""Relations and types of entities: markers, alignment, scores; a model with the vectors of a graph against one
without."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from fasttfm import models
from fasttfm.cli.main import main
from fasttfm.data import Tokenizer
from fasttfm.data.knowledge import RelationExample, Span, TypingExample, read_triples
from fasttfm.data.texts import shipped_knowledge
from fasttfm.tasks import prepare, read_examples
from fasttfm.tasks.knowledge import EntityFeature
from fasttfm.tasks.metrics import type_scores
from fasttfm.train.transe import TransESettings, train_transe

TEXT = "trade with Spain, with Cuba and with Mexico"
SPAIN, CUBA, MEXICO = Span(11, 16, "Spain"), Span(23, 27, "Cuba"), Span(37, 43, "Mexico")
RELATIONS = [RelationExample(TEXT, CUBA, SPAIN, [MEXICO], "a"), RelationExample(TEXT, SPAIN, CUBA, [], "b")]
TYPES = [TypingExample(TEXT, SPAIN, [CUBA], ("country", "place")), TypingExample(TEXT, CUBA, [], ("place",))]


@pytest.fixture(scope="module")
def ernie(wordpiece: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with random parameters and the vectors of the shipped graph."""
    graph = read_triples(shipped_knowledge("triples"))
    vectors = train_transe(graph, TransESettings(width=32, epochs=200, learning_rate=0.02, held_out=0.0))
    assert vectors.hits(10) > 0.9
    return saved(wordpiece, tmp_path_factory.mktemp("ernie"), graph.entities, vectors.entities)


def saved(tokenizer: Tokenizer, directory: Path, names: list[str], vectors: torch.Tensor) -> Path:
    torch.manual_seed(0)
    config = models.ErnieKnowledgeConfig.named("tiny", hidden_size=64, intermediate_size=128)
    config.vocab_size, config.max_position_embeddings, config.initializer_range = tokenizer.vocab_size, 128, 0.05
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    made = models.ErnieKnowledgeForMaskedLM(config)
    made.set_entities(names, vectors)
    made.save_pretrained(directory)
    tokenizer.save(directory)
    return directory


def prepared(task: str, directory: Path, train: list[Any], **options: Any) -> tuple[Any, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return prepare(task, directory, train, **options)


def read(task: Any, feature: Any) -> str:
    return str(task.language.tokenizer.decode(feature.sequences[0].ids, skip_special_tokens=False))


# ---- inputs ----------------------------------------------------------------------------------------------------------


def test_marks_and_entities_of_relations(ernie: Path) -> None:
    model, task = prepared("relation", ernie, RELATIONS)
    first, second = task.features(RELATIONS)
    assert read(task, first) == "[CLS] trade with [TL] spain [TL], with [HD] cuba [HD] and with mexico [SEP]"
    assert read(task, second) == "[CLS] trade with [HD] spain [HD], with [TL] cuba [TL] and with mexico [SEP]"
    assert isinstance(first, EntityFeature)
    assert len(first.entities) == len(first.sequences[0].ids)
    named = [model.entity_names[id] for id in first.entities if id >= 0]
    assert named == ["Spain", "Cuba", "Mexico"]
    assert model.config.vocab_size == task.language.tokenizer.vocab_size
    batch = task.batch([first, second])
    assert batch.others["entities"].count == 3 + 2 + 2  # and the first tokens
    assert model(**batch.inputs(), **batch.targets).loss.isfinite()


def test_a_long_text_keeps_its_marks(ernie: Path) -> None:
    long = "and so on " * 30
    at = len(long)
    example = RelationExample(
        long + TEXT + long, *(Span(s + at, e + at, name) for s, e, name in (CUBA, SPAIN)), [], "a"
    )
    _, task = prepared("relation", ernie, [example, RELATIONS[1]], max_length=24)
    (feature,) = task.features([example])
    assert "[TL] spain [TL], with [HD] cuba [HD]" in read(task, feature)
    assert len(feature.sequences[0].ids) == len(feature.entities) == 24
    assert feature.cut > 0


def test_marks_and_targets_of_types(ernie: Path) -> None:
    model, task = prepared("entity-typing", ernie, TYPES)
    first, _ = features = task.features(TYPES)
    assert read(task, first) == "[CLS] trade with [ENT] spain [ENT], with cuba and with mexico [SEP]"
    assert task.labels == ["country", "place"]
    batch = task.batch(features)
    assert batch.targets["labels"].tolist() == [[1.0, 1.0], [0.0, 1.0]]
    assert model(**batch.inputs(), **batch.targets).loss.isfinite()
    logits = task.read(batch, torch.tensor([[1.0, 2.0], [-1.0, -1.0]]))
    assert task.predictions(TYPES, features, logits) == [("country", "place"), ()]


def test_a_model_without_entities_reads_the_marks(bert_directory: Path) -> None:
    model, task = prepared("relation", bert_directory, RELATIONS)
    batch = task.batch(task.features(RELATIONS))
    assert not batch.others
    assert model(**batch.inputs(), **batch.targets).loss.isfinite()


def test_a_gpt_is_refused(gpt_directory: Path) -> None:
    with pytest.raises(ValueError, match="relation: expected an encoder, got GPT"):
        prepared("relation", gpt_directory, RELATIONS)


def test_scores_of_types() -> None:
    gold = [("a", "b"), ("a",), ("c",)]
    scores = type_scores(gold, [("a", "b"), ("a", "b"), ()])
    assert scores["accuracy"] == pytest.approx(1 / 3)
    precision, recall = (1 + 0.5 + 0) / 3, (1 + 1 + 0) / 3
    assert scores["macro_f1"] == pytest.approx(2 * precision * recall / (precision + recall))
    assert scores["micro_f1"] == pytest.approx(2 * 3 / (4 + 4))
    assert type_scores(gold, gold) == {"accuracy": 1.0, "macro_f1": 1.0, "micro_f1": 1.0}


# ---- benefit of the graph --------------------------------------------------------------------------------------------


def finetuned(task: str, model: Path, output: Path, *, epochs: int) -> dict[str, Any]:
    options = ["--epochs", str(epochs), "--learning-rate", "2e-3", "--batch-size", "16", "--device", "cpu"]
    assert main(["finetune", "--task", task, "--model", str(model), "--output", str(output), "--quiet", *options]) == 0
    metrics: dict[str, Any] = json.loads((output / "metrics.json").read_text())
    return metrics


@pytest.mark.slow
def test_knowledge_of_a_graph_helps(ernie: Path, tmp_path: Path) -> None:
    """The places of the dev set are in no training example, so that only the graph describes them."""
    known = finetuned("relation", ernie, tmp_path / "known", epochs=12)["dev"]["accuracy"]
    made = models.ErnieKnowledgeForMaskedLM.from_pretrained(ernie)
    made.set_entities(made.entity_names, torch.zeros_like(made.knowledge.entity_embeddings.weight))
    blind = tmp_path / "blind"
    made.save_pretrained(blind)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (blind / name).write_bytes((ernie / name).read_bytes())
    unknown = finetuned("relation", blind, tmp_path / "unknown", epochs=12)["dev"]["accuracy"]
    assert known > unknown + 0.1  # of 88 examples: an accuracy has a standard error of 0.05, the two differ by 0.25
    again = models.ErnieKnowledgeForSequenceClassification.from_pretrained(tmp_path / "known")
    assert again.entity_names == made.entity_names
    _, opened = prepared("relation", tmp_path / "known", read_examples("relation").train)
    assert set(opened.entities) == set(made.entity_names)


def test_types_of_entities_are_found(ernie: Path, tmp_path: Path) -> None:
    metrics = finetuned("entity-typing", ernie, tmp_path, epochs=4)
    assert metrics["dev"]["micro_f1"] > metrics["majority"]["micro_f1"] + 0.05, metrics
    rows = [json.loads(line) for line in (tmp_path / "predictions.jsonl").read_text().splitlines()]
    assert len(rows) == metrics["examples"]["dev"]
    assert all("place" in row["labels"] for row in rows)
