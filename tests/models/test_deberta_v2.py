"""DeBERTa-v2 and -v3 against transformers: the same checkpoint, the same outputs and gradients, padded and packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_parity import (
    IDS,
    MASKS,
    SIZES,
    check_layout,
    check_multiple_choice,
    check_question_answering,
    pair,
)

from fasttfm import models, ops

pytest.importorskip("transformers")

V3 = {
    "relative_attention": True,
    "position_buckets": 4,  # of 9 tokens some are further apart than a bucket for each distance reaches
    "max_relative_positions": 8,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": "p2c|c2p",
    "position_biased_input": False,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "v3": {},
    "c2p": {"pos_att_type": ["c2p"]},
    "p2c": {"pos_att_type": "p2c"},
    "no terms": {"pos_att_type": None},
    "own projections": {"share_att_key": False},
    "own c2p": {"share_att_key": False, "pos_att_type": "c2p"},
    "own p2c": {"share_att_key": False, "pos_att_type": ["p2c"]},
    "every distance": {"position_buckets": -1, "max_relative_positions": -1},
    "few distances": {"position_buckets": -1, "max_relative_positions": 3},
    "absolute": {"relative_attention": False, "position_biased_input": True, "norm_rel_ebd": "none"},
    "both positions": {"position_biased_input": True, "norm_rel_ebd": "none", "type_vocab_size": 2},
    "convolution": {"conv_kernel_size": 3, "conv_act": "gelu"},
    "grouped convolution": {"conv_kernel_size": 5, "conv_groups": 3, "relative_attention": False},
    "narrow tables": {"embedding_size": 24, "type_vocab_size": 2, "position_biased_input": True},
    "paper's head": {"legacy": False},
}
HEADS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
LAYOUTS = [
    (head, kind, packed) for head in HEADS for kind, packed in (("right", False), ("right", True), ("full", True))
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_has_the_numbers_of_transformers(variant: str, tmp_path: Path) -> None:
    ours, theirs = pair("DebertaV2ForMaskedLM", tmp_path, **{**V3, **VARIANTS[variant]})
    check_layout("DebertaV2ForMaskedLM", ours, theirs, "right", packed=False)


@pytest.mark.parametrize(("head", "kind", "packed"), [*LAYOUTS, ("ForMaskedLM", "anywhere", False)])
def test_same_numbers_as_transformers(head: str, kind: str, packed: bool, tmp_path: Path) -> None:
    """Also with padding between tokens: distances and neighbours are those of the padded batch."""
    ours, theirs = pair(f"DebertaV2{head}", tmp_path, **V3, conv_kernel_size=3)
    check_layout(f"DebertaV2{head}", ours, theirs, kind, packed=packed)


def test_multiple_choice(tmp_path: Path) -> None:
    check_multiple_choice(*pair("DebertaV2ForMultipleChoice", tmp_path, **V3))


def test_question_answering(tmp_path: Path) -> None:
    check_question_answering(*pair("DebertaV2ForQuestionAnswering", tmp_path, **V3, num_labels=2))


@pytest.mark.parametrize(
    "labels",
    [
        torch.tensor([2, -1, 0]),
        torch.tensor([-1, -1, -1]),
        torch.tensor([[0.2, 0.5, 0.3], [1.0, 0.0, 0.0], [0.0, 0.1, 0.9]]),
    ],
    ids=["one ignored", "all ignored", "probabilities"],
)
def test_the_loss_of_labels(labels: torch.Tensor, tmp_path: Path) -> None:
    """It is another than that of transformers' other models."""
    ours, theirs = pair("DebertaV2ForSequenceClassification", tmp_path, **V3)
    found, expected = (module(IDS, attention_mask=MASKS["full"], labels=labels).loss for module in (ours, theirs))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("span", "farthest", "longest"), [(256, 512, 600), (32, 512, 700), (4, 9, 20), (512, None, 700)]
)
def test_rows_of_all_distances(span: int, farthest: int | None, longest: int) -> None:
    from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

    sizes = {} if farthest is None else {"bucket_size": span, "max_position": farthest}
    states = torch.empty(1, longest, 1)
    expected = (build_relative_position(states, states, **sizes)[0] + span).clamp(0, 2 * span - 1)
    index = torch.arange(longest)
    rows = ops.log_distance_rows(longest, span, farthest).long()
    assert torch.equal(rows[index[:, None] - index + longest - 1], expected)


def test_attentions(tmp_path: Path) -> None:
    ours, theirs = pair("DebertaV2Model", tmp_path, **V3)
    mask = MASKS["right"]
    found = ours(IDS, mask, output_attentions=True).attentions
    expected = theirs.double()(IDS, attention_mask=mask, output_attentions=True).attentions
    for a, b in zip(found, expected, strict=True):
        rows = mask[:, None, :, None].expand_as(b)
        assert (a.double() - b)[rows].abs().max() < torch.finfo(torch.float32).eps * 100


def test_dropout_and_checkpointing() -> None:
    """The same seed drops the same elements, also when layers run again in the backward."""
    model = models.DebertaV2ForMaskedLM(models.DebertaV2Config(**SIZES, **V3, conv_kernel_size=3)).train()

    def gradients(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        model.zero_grad()
        model(IDS, MASKS["right"], labels=IDS).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    first, again, other = gradients(0), gradients(0), gradients(1)
    assert len(first) == len([*model.parameters()])
    assert all(map(torch.equal, first, again))
    assert not all(map(torch.equal, first, other))
    model.gradient_checkpointing_enable()
    assert all(map(torch.equal, first, gradients(0)))


def test_a_training_step_in_bf16() -> None:
    model = models.DebertaV2ForMaskedLM(models.DebertaV2Config(**SIZES, **V3)).train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(IDS, MASKS["right"], labels=IDS).loss
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


def test_files_of_microsofts_releases(tmp_path: Path) -> None:
    """They have heads for masked and for replaced tokens, and tables of positions that no model reads."""
    ours, theirs = pair("DebertaV2ForMaskedLM", tmp_path, **V3, legacy=False)
    state = dict(theirs.state_dict())
    state["deberta.embeddings.position_embeddings.weight"] = torch.ones(21, 48)
    state["mask_predictions.dense.weight"] = torch.ones(48, 48)
    (tmp_path / "model.safetensors").unlink()
    torch.save(state, tmp_path / "pytorch_model.bin")
    again = models.DebertaV2ForMaskedLM.from_pretrained(tmp_path)
    assert torch.equal(again(IDS).logits, ours(IDS).logits)
    with pytest.warns(UserWarning, match=r"has no trained head \(lm_head\)"):  # as in transformers, whose default it is
        models.DebertaV2ForMaskedLM.from_pretrained(tmp_path, legacy=True)
    with pytest.warns(UserWarning, match=r"has no trained head \(classifier, summary\)"):
        models.DebertaV2ForSequenceClassification.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("attention_head_size", 8, "attention_head_size: expected hidden_size / num_attention_heads, got 8"),
        ("conv_act", "celu", "conv_act: expected one of gelu, relu, tanh, got 'celu'"),
        ("pooler_hidden_act", "mish", "pooler_hidden_act: expected one of gelu, relu, tanh, got 'mish'"),
        ("conv_kernel_size", 4, "conv_kernel_size: expected 0 or an odd number, got 4"),
        ("position_buckets", -2, "position_buckets: expected a whole number from -1 on, got -2"),
        ("pos_att_type", ["p2p"], r"pos_att_type: expected c2p, p2c or both, got \['p2p'\]"),
    ],
)
def test_what_is_not_supported_is_refused(field: str, value: Any, message: str) -> None:
    config = models.DebertaV2Config(**{**SIZES, **V3, "conv_kernel_size": 3, field: value})
    with pytest.raises(ValueError, match=message):
        models.DebertaV2ForSequenceClassification(config)
