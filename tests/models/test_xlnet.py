"""XLNet against transformers: the same checkpoint, the same outputs and gradients, padded and packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_parity import IDS, LABELS, MASKS, SEGMENTS, check_layout, check_question_answering, config_of, pair, tensors

from fasttfm import models
from fasttfm.testing.modules import check_modules

pytest.importorskip("transformers")

NAMES = (
    "XLNetModel",
    "XLNetLMHeadModel",
    "XLNetForSequenceClassification",
    "XLNetForTokenClassification",
)
VARIANTS: dict[str, dict[str, Any]] = {
    "clamped": {"clamp_len": 3},
    "relu": {"ff_activation": "relu"},
    "first": {"summary_type": "first"},
    "no projection": {"summary_use_proj": False},
    "no activation": {"summary_activation": ""},
}


@pytest.mark.parametrize(
    ("name", "kind", "packed"),
    [(name, kind, packed) for name in NAMES for kind, packed in (("left", False), ("left", True), ("full", True))],
)
def test_same_numbers_as_transformers(name: str, kind: str, packed: bool, tmp_path: Path) -> None:
    ours, theirs = pair(name, tmp_path)
    check_layout(name, ours, theirs, kind, packed=packed)


@pytest.mark.parametrize("kind", ["right", "anywhere"])
def test_padding_elsewhere(kind: str, tmp_path: Path) -> None:
    """Distances are those of the padded batch."""
    ours, theirs = pair("XLNetForTokenClassification", tmp_path)
    check_layout("XLNetForTokenClassification", ours, theirs, kind, packed=False)


def test_without_segments(tmp_path: Path) -> None:
    """They have no part in the scores then, in transformers as here."""
    ours, theirs = pair("XLNetModel", tmp_path)
    found = ours(IDS, MASKS["left"]).last_hidden_state
    expected = theirs(IDS, attention_mask=MASKS["left"].long()).last_hidden_state
    torch.testing.assert_close(found[MASKS["left"]], expected[MASKS["left"]])
    assert not torch.allclose(found, ours(IDS, MASKS["left"], SEGMENTS).last_hidden_state)


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(variant: str, tmp_path: Path) -> None:
    ours, theirs = pair("XLNetForSequenceClassification", tmp_path, **VARIANTS[variant])
    check_layout("XLNetForSequenceClassification", ours, theirs, "full", packed=False)


def test_multiple_choice(tmp_path: Path) -> None:
    ours, theirs = pair("XLNetForMultipleChoice", tmp_path)
    ids, mask = IDS[:2].unsqueeze(0).repeat(2, 1, 1), MASKS["left"].long()[:2].repeat(2, 1, 1)
    ids[1] = ids[1].flip(-1)
    segments = (ids % 3).long()

    def call(module: Any, _: Any) -> Any:
        options = {"attention_mask": mask, "token_type_ids": segments, "labels": torch.tensor([1, 0])}
        return tensors(module(ids, **options))

    check_modules(ours, theirs, call, {}, translate=ours.own_tensors)


def test_question_answering(tmp_path: Path) -> None:
    check_question_answering(*pair("XLNetForQuestionAnsweringSimple", tmp_path, num_labels=2))


@pytest.mark.parametrize("name", [*NAMES, "XLNetForMultipleChoice", "XLNetForQuestionAnsweringSimple"])
def test_checkpoints_both_ways(name: str, tmp_path: Path) -> None:
    import transformers

    ours, theirs = pair(name, tmp_path / "theirs", **({"num_labels": 2} if "Answering" in name else {}))
    ours.save_pretrained(tmp_path / "ours")
    again, loading = getattr(transformers, name).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(loading.values())
    state = again.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in theirs.state_dict().items())


def test_a_head_of_another_task(tmp_path: Path) -> None:
    """Classifiers of sequences and of tokens have different names in checkpoints."""
    pair("XLNetForSequenceClassification", tmp_path)
    with pytest.warns(UserWarning, match=r"has no trained head \(classifier\)"):
        models.XLNetForTokenClassification.from_pretrained(tmp_path)


def test_attentions(tmp_path: Path) -> None:
    ours, theirs = pair("XLNetModel", tmp_path)
    mask = MASKS["left"]
    found = ours(IDS[1:2], token_type_ids=SEGMENTS[1:2], output_attentions=True).attentions
    options = {"token_type_ids": SEGMENTS[1:2], "output_attentions": True}
    expected = theirs.double()(IDS[1:2], attention_mask=mask[1:2].long(), **options).attentions
    for a, b in zip(found, expected, strict=True):
        assert (a.double() - b).abs().max() < torch.finfo(torch.float32).eps * 100


def test_dropout_and_checkpointing() -> None:
    """The same seed drops the same elements, also when layers run again in the backward."""
    model = models.XLNetForTokenClassification(
        config_of(models, "XLNetModel", {"vocab_size": 61, "d_model": 48, "n_head": 3, "n_layer": 2, "d_inner": 56})
    ).train()

    def gradients(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        model.zero_grad()
        model(IDS, MASKS["left"], SEGMENTS, labels=IDS % 2).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    first, again, other = gradients(0), gradients(0), gradients(1)
    assert len(first) == len([*model.parameters()])
    assert all(map(torch.equal, first, again))
    assert not all(map(torch.equal, first, other))
    model.gradient_checkpointing_enable()
    assert all(map(torch.equal, first, gradients(0)))


def test_a_training_step_in_bf16() -> None:
    model = models.XLNetLMHeadModel(
        models.XLNetConfig(vocab_size=61, d_model=48, n_layer=2, n_head=3, d_inner=56)
    ).train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(IDS, MASKS["right"], SEGMENTS, labels=IDS).loss
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("name", ["mems", "perm_mask", "target_mapping", "input_mask"])
def test_what_pretraining_passes_is_refused(name: str) -> None:
    model = models.XLNetModel(models.XLNetConfig.named("tiny", vocab_size=61))
    with pytest.raises(TypeError, match=f"XLNetModel: {name}: expected no such argument"):
        model(IDS, **{name: IDS})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("d_head", 8, "d_head: expected d_model / n_head, got 8"),
        ("summary_type", "mean", "summary_type: expected one of last, first, got 'mean'"),
        ("summary_activation", "mish", "summary_activation: expected null or one of"),
    ],
)
def test_what_is_not_supported_is_refused(field: str, value: Any, message: str) -> None:
    config = models.XLNetConfig.named("tiny", num_labels=LABELS, **{field: value})
    with pytest.raises(ValueError, match=message):
        models.XLNetForSequenceClassification(config)


def test_a_one_way_model_is_refused(tmp_path: Path) -> None:
    config_of(models, "XLNetModel", {"extra": {"attn_type": "uni"}}).save_pretrained(tmp_path)
    with pytest.raises(models.CheckpointError, match="attn_type: expected 'bi'"):
        models.XLNetModel.from_pretrained(tmp_path)
