"""Training vectors of tokens: the loss, distillation, the scores, and the saved folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fasttfm.cli.main import main
from fasttfm.data.lines import DataError
from fasttfm.data.pair_files import SimilarityExample
from fasttfm.inference import Session
from fasttfm.tasks.finetuning import predict, prepare

EXAMPLES = [
    SimilarityExample("the whale swam in the sea", "a whale is in the water", ("the senate met", "taxes are due")),
    SimilarityExample("the congress voted", "the senate met and voted", ("a ship with sails",)),
]


def score(one: Tensor, other: Tensor) -> Tensor:
    return (one @ other.T).amax(1).sum()


def token_vectors(model: Any, batch: Any) -> list[Tensor]:
    with torch.no_grad():
        states = functional.normalize(model(**batch.inputs()).last_hidden_state, dim=-1)
    return list(states.split(batch.cu_seqlens.diff().tolist()))


@pytest.mark.filterwarnings("ignore:.*randomly initialized")
def test_losses_are_their_formulas(bert_directory: Path) -> None:
    model, task = prepare("similarity", bert_directory, EXAMPLES, vectors="tokens", temperature=0.5)
    batch = task.batch(task.features(EXAMPLES))
    texts = token_vectors(model, batch)
    queries, documents = [texts[0], texts[4]], [texts[n] for n in (1, 5, 2, 3, 6)]
    scores = torch.stack([torch.stack([score(q, d) for d in documents]) for q in queries]) / 0.5
    whole = task.loss(model, batch)
    torch.testing.assert_close(whole.detach(), functional.cross_entropy(scores, torch.arange(2)))
    whole.backward()
    expected = {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    model.zero_grad()
    task.mini_batch = 1
    task.loss(model, batch).backward()
    for name, gradient in expected.items():
        torch.testing.assert_close(model.get_parameter(name).grad, gradient, atol=1e-5, rtol=1e-4)
    teachers = ((3.0, 1.0, -2.0), (0.5, 1.5))
    taught = [replace(example, teacher=teacher) for example, teacher in zip(EXAMPLES, teachers, strict=True)]
    model, task = prepare("similarity", bert_directory, taught, vectors="tokens", temperature=0.5)
    parts = []
    for number, (columns, teacher) in enumerate(zip(((0, 2, 3), (1, 4)), teachers, strict=True)):
        target, predicted = torch.tensor(teacher).softmax(0), scores[number, list(columns)].softmax(0)
        parts.append((target * (target / predicted).log()).sum())
    loss = task.loss(model, task.batch(task.features(taught))).detach()
    torch.testing.assert_close(loss, torch.stack(parts).mean())


@pytest.mark.filterwarnings("ignore:.*randomly initialized")
def test_scores_are_ranks_by_maxsim(bert_directory: Path) -> None:
    model, task = prepare("similarity", bert_directory, EXAMPLES, vectors="tokens")
    predictions = predict(model, task, EXAMPLES)
    texts = token_vectors(model, task.batch(task.features(EXAMPLES)))
    np.testing.assert_allclose(predictions[1].second, texts[5], atol=1e-5)
    assert predictions[0].cosine == pytest.approx(float(score(texts[0], texts[1])) / len(texts[0]), abs=1e-5)
    ranks = []
    for query, positive in ((texts[0], texts[1]), (texts[4], texts[5])):
        others = [score(query, document) for document in (texts[1], texts[5])]
        ranks.append(1 + sum(bool(other > score(query, positive) + 1e-6) for other in others))
    metrics = task.scores(EXAMPLES, predictions)
    assert metrics == {"accuracy": ranks.count(1) / 2, "mrr": pytest.approx(np.mean([1 / rank for rank in ranks]))}


def test_what_is_refused(bert_directory: Path) -> None:
    with pytest.raises(ValueError, match=r"dimensions: expected with mean vectors, got .* with tokens"):
        prepare("similarity", bert_directory, EXAMPLES, vectors="tokens", dimensions=(8,))
    scored = [SimilarityExample("a", "b", (), 1.0)]
    with pytest.raises(DataError, match="expected pairs or triplets to train vectors of tokens, got pairs with scores"):
        prepare("similarity", bert_directory, scored, vectors="tokens")


@pytest.mark.filterwarnings("ignore:.*truncated", "ignore:.*randomly initialized")
def test_the_command_saves_a_model_of_late_interaction(bert_directory: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    arguments = ["finetune", "--task", "similarity", "--vectors", "tokens", "--model", str(bert_directory)]
    arguments += ["--output", str(output), "--epochs", "1", "--learning-rate", "1e-3", "--max-length", "32"]
    assert main([*arguments, "--batch-size", "64", "--quiet", "--device", "cpu"]) == 0
    metrics = json.loads((output / "metrics.json").read_text())
    assert metrics["dev"]["mrr"] > metrics["majority"]["mrr"]
    texts = ["the whale, the sea", "the debts of the nation"]
    with Session(output, device="cpu") as session:
        assert session.max_length == 32
        vectors = session.encode(texts, output="multi")
    library = pytest.importorskip("sentence_transformers", reason="it opens the folder")
    theirs = library.MultiVectorEncoder(str(output), device="cpu").encode_document(texts)
    for one, other in zip(vectors, theirs, strict=True):
        np.testing.assert_allclose(one, np.asarray(other), atol=1e-5)
