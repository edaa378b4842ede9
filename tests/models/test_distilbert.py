"""DistilBERT against transformers, and students against their teachers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_parity import (
    IDS,
    LABELS,
    MASKS,
    SIZES,
    WORDS,
    V,
    check_layout,
    check_multiple_choice,
    check_question_answering,
    pair,
)

from fasttfm import models

transformers = pytest.importorskip("transformers")

LAYOUTS = [
    ("DistilBertModel", "right", True),
    ("DistilBertModel", "anywhere", False),
    ("DistilBertForMaskedLM", "right", False),
    ("DistilBertForMaskedLM", "full", True),
    ("DistilBertForSequenceClassification", "right", True),
    ("DistilBertForTokenClassification", "anywhere", True),
]


@pytest.mark.parametrize(("name", "kind", "packed"), LAYOUTS)
def test_same_numbers_as_transformers(name: str, kind: str, packed: bool, tmp_path: Path) -> None:
    check_layout(name, *pair(name, tmp_path), kind, packed=packed, segments=False)


def test_multiple_choice(tmp_path: Path) -> None:
    check_multiple_choice(*pair("DistilBertForMultipleChoice", tmp_path))


def test_question_answering(tmp_path: Path) -> None:
    check_question_answering(*pair("DistilBertForQuestionAnswering", tmp_path, num_labels=2))


def test_segments_are_refused() -> None:
    config = models.DistilBertConfig(vocab_size=V, dim=48, n_heads=3, n_layers=1, hidden_dim=56)
    with pytest.raises(ValueError, match="segment"):
        models.DistilBertModel(config)(IDS, token_type_ids=torch.zeros_like(IDS))


# ---- students --------------------------------------------------------------------------------------------------------


def teacher(name: str = "BertForMaskedLM", **changes: Any) -> Any:
    torch.manual_seed(0)
    made = getattr(models, name)(models.BertConfig(**{**SIZES, "num_hidden_layers": 5, **changes}))
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return made.eval()


@pytest.mark.parametrize("name", ["BertForMaskedLM", "BertForPreTraining"])
def test_students_start_with_every_second_layer(name: str) -> None:
    source = teacher(name)
    student = models.DistilBertForMaskedLM.from_teacher(source)
    assert student.config.n_layers == 3
    for mine, index in zip(student.encoder.encoder.layers, (0, 2, 4), strict=True):
        theirs = source.encoder.encoder.layers[index].state_dict()
        assert all(torch.equal(value, theirs[key]) for key, value in mine.state_dict().items())
        assert mine.qkv.weight is not source.encoder.encoder.layers[index].qkv.weight
    assert student.lm_head.decoder.weight is student.distilbert.embeddings.word.weight
    assert student.lm_head.decoder.weight is not source.lm_head.decoder.weight


def test_a_student_with_every_layer_is_its_teacher() -> None:
    """For a single sentence, whose segment is the first."""
    source = teacher()
    student = models.DistilBertForMaskedLM.from_teacher(source, range(5)).eval()
    expected = source.double()(IDS, MASKS["right"]).logits
    difference = student.double()(IDS, MASKS["right"]).logits - expected
    # The sum of position and segment was rounded to fp32 once.
    assert difference.abs().max() < 1e3 * torch.finfo(torch.float32).eps * expected.abs().max()


def test_students_train_and_keep_type_and_changes(tmp_path: Path) -> None:
    student = models.DistilBertForMaskedLM.from_teacher(teacher().bfloat16(), [4, 1], dropout=0.3)
    assert student.config.dropout == 0.3
    assert student.training
    loss = student(IDS, labels=WORDS).loss
    loss.backward()
    for parameter in student.parameters():
        assert parameter.dtype == torch.bfloat16
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()
    student.save_pretrained(tmp_path)
    theirs = transformers.DistilBertForMaskedLM.from_pretrained(tmp_path)
    assert torch.equal(theirs.vocab_projector.weight, student.lm_head.decoder.weight)


def test_other_teachers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"teacher: expected a BERT with layer_norm_eps 1e-12, got .* 0\.1"):
        models.DistilBertForMaskedLM.from_teacher(teacher(layer_norm_eps=0.1))
    other = models.RobertaForMaskedLM(models.RobertaConfig(**{**SIZES, "num_labels": LABELS}))
    with pytest.raises(ValueError, match="model_type 'roberta'"):
        models.DistilBertForMaskedLM.from_teacher(other)
