"""Students of a RoBERTa and of an ELECTRA generator: models of the teacher's kind with some of its layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fasttfm import models
from fasttfm.tasks.distillation_recipes import DistilBertRecipe
from fasttfm.tasks.distillation_runs import distilbert_student

SIZES = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 60}


def teacher_of(family: str) -> Any:
    torch.manual_seed(0)
    more = {"embedding_size": 16} if family == "Electra" else {}
    return getattr(models, f"{family}ForMaskedLM")(getattr(models, f"{family}Config")(**SIZES, **more)).eval()


@pytest.mark.parametrize("family", ["Roberta", "Electra"])
def test_layers_are_the_teachers(family: str) -> None:
    teacher = teacher_of(family)
    student: Any = distilbert_student(teacher)
    assert type(student) is type(teacher)
    assert student.config.num_hidden_layers == 2
    own, theirs = student.encoder, teacher.encoder
    for ours, number in zip(own.encoder.layers, (0, 2), strict=True):
        assert torch.equal(ours.qkv.weight, theirs.encoder.layers[number].qkv.weight)
    assert torch.equal(own.embeddings.word.weight, theirs.embeddings.word.weight)
    assert torch.equal(student.lm_head.dense.weight, teacher.lm_head.dense.weight)
    assert student.lm_head.decoder.weight is own.embeddings.word.weight
    whole: Any = distilbert_student(teacher, 4).eval()
    ids = torch.randint(5, 60, (2, 7))
    assert torch.equal(whole(ids).logits, teacher(ids).logits)


@pytest.mark.parametrize("family", ["Roberta", "Electra"])
def test_the_recipe_trains_them(family: str) -> None:
    teacher = teacher_of(family)
    recipe = DistilBertRecipe(distilbert_student(teacher, 1), teacher)
    batch = SimpleNamespace(
        input_ids=torch.randint(5, 60, (12,)),
        token_type_ids=None,
        cu_seqlens=torch.tensor([0, 5, 12], dtype=torch.int32),
        max_seqlen=64,
        positions=torch.tensor([1, 7]),
        labels=torch.tensor([9, 11]),
        predictions=2,
        tokens=12,
    )
    terms = recipe(batch)
    sum(terms).backward()
    assert all(bool(term.isfinite()) and float(term.detach()) > 0 for term in terms)
    assert all(parameter.grad is None for parameter in teacher.parameters())
