"""Students of teachers other than BERT: models of the teacher's family, with some of its layers or other sizes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from fasttfm import models
from fasttfm.inference.opening import base_of
from fasttfm.tasks.distillation_recipes import DistilBertRecipe, TinyBertRecipe
from fasttfm.tasks.distillation_runs import distilbert_student, tinybert_student

SIZES = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 60}


def teacher_of(family: str) -> Any:
    torch.manual_seed(0)
    more = {"embedding_size": 16} if family == "Electra" else {}
    return getattr(models, f"{family}ForMaskedLM")(getattr(models, f"{family}Config")(**SIZES, **more)).eval()


@pytest.mark.parametrize("family", ["Roberta", "XLMRoberta", "Camembert", "Electra"])
def test_layers_are_those_of_the_teacher(family: str) -> None:
    teacher = teacher_of(family)
    student: Any = distilbert_student(teacher)
    assert type(student) is type(teacher)
    assert student.config.num_hidden_layers == 2
    encoder, theirs = student.encoder, teacher.encoder
    for ours, number in zip(encoder.encoder.layers, (0, 2), strict=True):
        assert torch.equal(ours.qkv.weight, theirs.encoder.layers[number].qkv.weight)
    assert torch.equal(encoder.embeddings.word.weight, theirs.embeddings.word.weight)
    assert torch.equal(student.lm_head.dense.weight, teacher.lm_head.dense.weight)
    assert student.lm_head.decoder.weight is encoder.embeddings.word.weight
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
    sizes = {"n_embd": 32, "n_layer": 4, "n_head": 2, "vocab_size": 60, "n_positions": 16}
    sizes |= {"local_window": 3} if name == "GPT3" else {}
    config = getattr(models, f"{name}Config")(**sizes, initializer_range=0.2)
    return getattr(models, f"{name}LMHeadModel")(config).eval()


@pytest.mark.parametrize("name", ["GPT2", "OpenAIGPT"])
def test_the_student_of_a_gpt_is_a_gpt(name: str) -> None:
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
    words = functional.cross_entropy(
        ours.logits[followed], ids[[position + 1 for position in followed]], reduction="sum"
    )
    states = [
        model.encoder(ids, cu_seqlens=batch.cu_seqlens, max_seqlen=64).last_hidden_state for model in (student, teacher)
    ]
    cosine = (1 - functional.cosine_similarity(*states, dim=-1)).sum()
    terms = recipe(batch)
    for term, expected in zip(terms, (soft, words, cosine), strict=True):
        torch.testing.assert_close(term, expected, rtol=1e-4, atol=1e-4)
    sum(terms).backward()
    assert all(parameter.grad is not None for parameter in student.parameters())
    with pytest.raises(ValueError, match="soft targets: expected all tokens for a GPT"):
        DistilBertRecipe(student, teacher, all_tokens=False)


# ---- TinyBERT's ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family", ["Roberta", "XLMRoberta", "Electra", "Albert", "DistilBert", "GPT2", "OpenAIGPT", "GPT3"]
)
@pytest.mark.parametrize("attention", ["scores", "weights"])
def test_tinyberts_terms_of_other_kinds(family: str, attention: str) -> None:
    """Against the formulas, over the keys that each query attends to. The terms are computed in fp32."""
    teacher = base_of(gpt(family) if "GPT" in family else tiny_teacher(family)).double()
    student: Any = tinybert_student(teacher, layers=2).double().eval()
    assert type(student) is type(teacher)
    assert student.encoder.in_order()[0].width == 16
    recipe = TinyBertRecipe(student, teacher, attention=attention).double().eval()
    ids, lengths = torch.randint(5, 60, (12,)), (5, 7)
    batch = SimpleNamespace(
        input_ids=ids, token_type_ids=None, cu_seqlens=torch.tensor([0, 5, 12]).int(), max_seqlen=7, tokens=12
    )
    options = {"output_hidden_states": True, "output_attentions": True, "cu_seqlens": batch.cu_seqlens, "max_seqlen": 7}
    with torch.no_grad():
        ours, theirs = (model(ids, **options) for model in (student, teacher))
        terms = [float(term) for term in recipe(batch)]
    project, x, y = recipe.projections, ours.hidden_states, theirs.hidden_states
    assert terms[0] == pytest.approx(distance(project["embeddings"](x[0]), y[0]), rel=1e-5)
    for m in (1, 2):
        assert terms[2 + m] == pytest.approx(distance(project["hidden"](x[m]), y[2 * m]), rel=1e-5)
    for m in (0, 1):
        maps = 0.0
        weights = [output.attentions[layer] for output, layer in ((ours, m), (theirs, 2 * m + 1))]
        for row, length in enumerate(lengths):
            for query in range(length):
                a, b = (maps[row, :, query, :length] for maps in weights)
                keys = (a[0] > 0) & (b[0] > 0)
                if attention == "scores":
                    a = score_row(student, ours, m, row, query)
                    b = score_row(teacher, theirs, 2 * m + 1, row, query)
                maps += float((a - b)[:, keys].square().mean().detach())
        assert terms[1 + m] == pytest.approx(maps, rel=1e-5)
    assert min(terms) > 1e-6


def score_row(model: Any, output: Any, layer: int, row: int, query: int) -> torch.Tensor:
    """A query's scores [H, keys], from the layer's own parameters."""
    begin, end = ((0, 5), (5, 12))[row]
    module = model.encoder.in_order()[layer]
    x = output.hidden_states[layer][begin:end]
    x = module.norm1(x) if module.norm_first else x
    q, k, _ = module.qkv(x).unflatten(-1, (3, module.heads, -1)).unbind(-3)
    return torch.einsum("hd,khd->hk", q[query], k) / q.shape[-1] ** 0.5


def distance(x: torch.Tensor, target: torch.Tensor) -> float:
    return float((x - target).square().mean(-1).sum().detach())


def tiny_teacher(family: str) -> Any:
    torch.manual_seed(0)
    names = {"hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"}
    names |= {"intermediate_size": "hidden_dim"}
    sizes: dict[str, Any] = {**SIZES, "initializer_range": 0.2}
    if family == "DistilBert":
        sizes = {names.get(key, key): value for key, value in sizes.items()}
    more = {"embedding_size": 16} if family in ("Electra", "Albert") else {}
    return getattr(models, f"{family}Model")(getattr(models, f"{family}Config")(**sizes, **more)).eval()


def test_invalid_sizes_of_a_student() -> None:
    with pytest.raises(ValueError, match="intermediate: expected 64, four times the width, as in every GPT-1, got 20"):
        tinybert_student(gpt("OpenAIGPT"), intermediate=20)
    assert tinybert_student(gpt("GPT2"), intermediate=20).config.n_inner == 20
    with pytest.raises(ValueError, match=r"teacher: expected a BERT, RoBERTa, .* or GPT, got 'modernbert'"):
        tinybert_student(models.ModernBertModel(models.ModernBertConfig(**SIZES, pad_token_id=0)))
