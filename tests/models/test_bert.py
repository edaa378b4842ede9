"""BERT, RoBERTa and the families like it against transformers: the same checkpoint, outputs and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_parity import (
    IDS,
    LABELS,
    MASKS,
    ROBERTAS,
    SIZES,
    WORDS,
    B,
    S,
    check_layout,
    check_multiple_choice,
    check_question_answering,
    pair,
    tensors,
)
from torch import Tensor

from fasttfm import models
from fasttfm.models.outputs import ModelOutput
from fasttfm.testing.modules import check_modules

pytest.importorskip("transformers")

CLASSES = [
    "BertModel",
    "BertForPreTraining",
    "BertForMaskedLM",
    "BertForNextSentencePrediction",
    "BertForSequenceClassification",
    "BertForTokenClassification",
    *(
        f"{family}{head}"
        for family in ROBERTAS
        for head in ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
    ),
]
# Padded and packed against transformers on padded sequences. Heads do not depend on whether a mask has gaps.
LAYOUTS = [(name, "right") for name in CLASSES] + [
    *((name, "full") for name in CLASSES if name.startswith(("Bert", "Roberta"))),
    ("BertForMaskedLM", "anywhere"),
    ("RobertaForTokenClassification", "anywhere"),
]


@pytest.mark.parametrize(("name", "kind"), LAYOUTS)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_same_numbers_as_transformers(name: str, kind: str, packed: bool, tmp_path: Path) -> None:
    ours, theirs = pair(name, tmp_path, **({"type_vocab_size": 2} if name.startswith(ROBERTAS) else {}))
    check_layout(name, ours, theirs, kind, packed=packed)


@pytest.mark.parametrize("family", ["Bert", *ROBERTAS])
def test_multiple_choice(family: str, tmp_path: Path) -> None:
    check_multiple_choice(*pair(f"{family}ForMultipleChoice", tmp_path))


@pytest.mark.parametrize("family", ["Bert", *ROBERTAS])
def test_question_answering(family: str, tmp_path: Path) -> None:
    check_question_answering(*pair(f"{family}ForQuestionAnswering", tmp_path, num_labels=2))


def test_answers_are_not_in_padding(tmp_path: Path) -> None:
    ours, _ = pair("BertForQuestionAnswering", tmp_path, num_labels=2)
    mask = MASKS["right"].bool()
    spans = {"start_positions": torch.tensor([1, 2, 0]), "end_positions": torch.tensor([3, 8, 0])}
    padded = ours(IDS, mask, **spans)
    cu_seqlens = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0)).int()
    packed = ours(IDS[mask], cu_seqlens=cu_seqlens, max_seqlen=S, **spans)
    assert torch.equal(padded.loss, packed.loss)
    assert torch.equal(padded.start_logits[mask], packed.start_logits)
    assert (padded.start_logits.softmax(-1)[~mask] == 0).all()
    assert torch.equal(padded.no_answer_scores(), padded.start_logits[:, 0] + padded.end_logits[:, 0])


def test_attentions(tmp_path: Path) -> None:
    ours, theirs = pair("BertModel", tmp_path, attn_implementation="eager")
    mask = MASKS["right"]
    found = ours(IDS, mask, output_attentions=True).attentions
    expected = theirs.double()(IDS, attention_mask=mask, output_attentions=True).attentions
    assert len(found) == len(expected) == 2
    for a, b in zip(found, expected, strict=True):
        rows = mask[:, None, :, None].expand_as(b)
        assert (a.double() - b)[rows].abs().max() < torch.finfo(torch.float32).eps * 100
        assert not a[~rows].any()


def test_lengths_are_equivalent_to_a_mask(tmp_path: Path) -> None:
    ours, _ = pair("BertForMaskedLM", tmp_path)
    by_mask = ours(IDS, MASKS["right"], labels=WORDS)
    by_lengths = ours(IDS, lengths=[4, 9, 1], labels=WORDS)
    assert torch.equal(by_mask.loss, by_lengths.loss)
    assert by_mask.logits is None


@pytest.mark.parametrize(
    ("labels", "problem_type", "num_labels"),
    [
        (torch.tensor([0.5, -1.0, 2.0]), None, 1),
        (torch.tensor([2, 0, 1]), "single_label_classification", LABELS),
        (torch.rand(B, LABELS), None, LABELS),
    ],
    ids=["regression", "classes", "several"],
)
def test_problem_types(labels: Tensor, problem_type: str | None, num_labels: int, tmp_path: Path) -> None:
    changes = {"num_labels": num_labels, "problem_type": problem_type}
    ours, theirs = pair("BertForSequenceClassification", tmp_path, **changes)

    def call(module: Any, _: dict[str, Tensor]) -> dict[str, Tensor]:
        dtype = next(module.parameters()).dtype
        own = labels.to(dtype) if labels.is_floating_point() else labels
        return tensors(module(IDS, labels=own))

    check_modules(ours, theirs, call, {}, translate=ours.own_tensors)


def test_predicted_positions(tmp_path: Path) -> None:
    ours, _ = pair("BertForMaskedLM", tmp_path)
    expected = ours(IDS, labels=WORDS).loss
    rows = (WORDS.flatten() != -100).nonzero().squeeze(1)
    assert torch.equal(ours(IDS, labels=WORDS.flatten()[rows], positions=rows).loss, expected)
    assert torch.equal(ours(IDS, labels=WORDS, max_predictions=20).loss, expected)


def test_outputs_by_name_index_and_tuple() -> None:
    module = models.BertForSequenceClassification(models.BertConfig(**SIZES)).eval()
    output = module(IDS, labels=torch.tensor([0, 1, 2]))
    assert isinstance(output, ModelOutput)
    assert output.keys() == ["loss", "logits"]
    assert output[0] is output.loss is output["loss"] is output.to_tuple()[0]
    assert len(output) == len(output.to_tuple())
    loss, logits = output
    assert (loss is output.loss, logits is output.logits) == (True, True)
    leaves = torch.utils._pytree.tree_leaves(output)
    assert any(leaf is output.logits for leaf in leaves)


def test_training_step_reaches_every_parameter() -> None:
    module = models.BertForPreTraining(models.BertConfig(**SIZES))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = module(IDS, MASKS["right"], labels=WORDS, next_sentence_label=torch.tensor([0, 1, 0])).loss
    loss.backward()
    assert loss.dtype == torch.float32
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in module.parameters())


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_labels_in_padding_are_ignored_by_question_answering(packed: bool) -> None:
    model = models.BertForQuestionAnswering(models.BertConfig(**SIZES)).eval()
    mask = MASKS["right"]
    lengths = mask.sum(1)
    inputs: dict[str, Any] = {"input_ids": IDS, "attention_mask": mask}
    if packed:
        cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        inputs = {"input_ids": IDS[mask], "cu_seqlens": cu_seqlens, "max_seqlen": S}
    first = torch.zeros(B, dtype=torch.int64)
    beyond = torch.where(lengths < S, lengths, 0)  # the first padding
    found = model(**inputs, start_positions=beyond, end_positions=first).loss
    expected = model(**inputs, start_positions=torch.where(lengths < S, S, 0), end_positions=first).loss
    assert torch.equal(found, expected)
    assert found < 10


@pytest.mark.parametrize("rows", [1, B])
@pytest.mark.filterwarnings("error")
def test_regression_of_one_label(rows: int) -> None:
    model = models.BertForSequenceClassification(models.BertConfig(**{**SIZES, "num_labels": 1})).eval()
    labels = torch.arange(0.0, rows)
    given = [labels, labels[:, None]]
    logits = model(IDS[:rows]).logits
    expected = (logits[:, 0] - labels).square().mean()
    for each in given:
        torch.testing.assert_close(model(IDS[:rows], labels=each).loss, expected)


def test_a_regression_of_several_labels_needs_all_of_them() -> None:
    config = models.BertConfig(**{**SIZES, "num_labels": 3}, problem_type="regression")
    model = models.BertForSequenceClassification(config)
    with pytest.raises(ValueError, match=r"labels: expected shape \(3, 3\) for a regression, got shape \(3,\)"):
        model(IDS, labels=torch.ones(B))


@pytest.mark.parametrize("argument", ["inputs_embeds", "head_mask", "return_dict"])
@pytest.mark.parametrize("name", ["BertModel", "BertForMaskedLM"])
def test_arguments_that_are_not_supported_are_named(name: str, argument: str) -> None:
    model = getattr(models, name)(models.BertConfig(**SIZES))
    with pytest.raises(TypeError, match=f"BertModel: {argument}: expected no such argument"):
        model(IDS, **{argument: None})


def test_a_batch_without_tokens() -> None:
    output = models.BertModel(models.BertConfig(**SIZES))(IDS, torch.zeros(B, S))
    assert output.last_hidden_state.shape == (B, S, SIZES["hidden_size"])
    assert output.pooler_output.shape == (B, SIZES["hidden_size"])
