"""Students of a RoBERTa, of an ELECTRA generator and of GPTs: models of the teacher's kind with some of its layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

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


# ---- GPTs ------------------------------------------------------------------------------------------------------------


def gpt(name: str = "GPT2", seed: int = 0) -> Any:
    torch.manual_seed(seed)
    cls = {"GPT2": "GPT2LMHeadModel", "OpenAIGPT": "OpenAIGPTLMHeadModel"}[name]
    sizes = {"n_embd": 32, "n_layer": 4, "n_head": 2, "vocab_size": 60, "n_positions": 16}
    return getattr(models, cls)(getattr(models, f"{name}Config")(**sizes, initializer_range=0.2)).eval()


@pytest.mark.parametrize("name", ["GPT2", "OpenAIGPT"])
def test_a_gpt_has_a_gpt(name: str) -> None:
    teacher = gpt(name)
    student: Any = distilbert_student(teacher)
    assert type(student) is type(teacher)
    assert student.config.n_layer == 2
    for ours, number in zip(student.encoder.encoder.layers, (0, 2), strict=True):
        assert torch.equal(ours.qkv.weight, teacher.encoder.encoder.layers[number].qkv.weight)
    whole: Any = distilbert_student(teacher, 4).eval()
    ids = torch.randint(5, 60, (2, 7))
    assert torch.equal(whole(ids, output_logits=True).logits, teacher(ids, output_logits=True).logits)


def test_terms_of_a_gpt() -> None:
    teacher, student = gpt(), distilbert_student(gpt(seed=1)).eval()
    recipe = DistilBertRecipe(student, teacher, weights=(1.0, 1.0, 1.0)).eval()
    ids = torch.randint(5, 60, (12,))
    batch = SimpleNamespace(
        input_ids=ids,
        token_type_ids=None,
        cu_seqlens=torch.tensor([0, 5, 12], dtype=torch.int32),
        max_seqlen=64,
        positions=None,
        labels=None,
        predictions=10,
        tokens=12,
    )
    assert recipe.counts(batch) == (12, 10, 12)
    layout = {"cu_seqlens": batch.cu_seqlens, "max_seqlen": 64, "output_logits": True, "output_hidden_states": True}
    ours, theirs = (model(ids, **layout) for model in (student, teacher))
    soft = 4 * functional.kl_div((ours.logits / 2).log_softmax(-1), (theirs.logits / 2).softmax(-1), reduction="sum")
    followed = [*range(4), *range(5, 11)]
    words = functional.cross_entropy(ours.logits[followed], ids[[place + 1 for place in followed]], reduction="sum")
    states = [
        model.encoder(ids, cu_seqlens=batch.cu_seqlens, max_seqlen=64).last_hidden_state for model in (student, teacher)
    ]
    cosine = (1 - functional.cosine_similarity(*states, dim=-1)).sum()
    terms = recipe(batch)
    for found, expected in zip(terms, (soft, words, cosine), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    sum(terms).backward()
    assert all(parameter.grad is not None for parameter in student.parameters())
    with pytest.raises(ValueError, match="soft targets: expected those of all tokens of a GPT"):
        DistilBertRecipe(student, teacher, all_tokens=False)
