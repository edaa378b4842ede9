"""MPNet against transformers: the same checkpoint, the same outputs and gradients, padded and packed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_parity import IDS, MASKS, SIZES, check_layout, check_multiple_choice, check_question_answering, pair

from fasttfm import models
from fasttfm.models.relative_bias import buckets

pytest.importorskip("transformers")

HEADS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
LAYOUTS = [
    (head, kind, packed) for head in HEADS for kind, packed in (("right", False), ("right", True), ("full", True))
]


@pytest.mark.parametrize(("head", "kind", "packed"), [*LAYOUTS, ("ForMaskedLM", "anywhere", False)])
def test_same_numbers_as_transformers(head: str, kind: str, packed: bool, tmp_path: Path) -> None:
    """Also with padding between tokens: distances are those of the padded batch."""
    ours, theirs = pair(f"MPNet{head}", tmp_path)
    check_layout(f"MPNet{head}", ours, theirs, kind, packed=packed, segments=False)


def test_multiple_choice(tmp_path: Path) -> None:
    check_multiple_choice(*pair("MPNetForMultipleChoice", tmp_path))


def test_question_answering(tmp_path: Path) -> None:
    check_question_answering(*pair("MPNetForQuestionAnswering", tmp_path, num_labels=2))


def test_buckets_of_all_distances() -> None:
    from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

    positions = torch.arange(600)
    expected = MPNetEncoder.relative_position_bucket(positions[None, :] - positions[:, None])
    assert torch.equal(buckets(positions, 32, 128), expected)
    assert torch.equal(buckets(positions[None].repeat(2, 1) + 5, 32, 128)[1], expected)
    assert expected.unique().tolist() == list(range(16)) + list(range(17, 32))


def test_attentions(tmp_path: Path) -> None:
    ours, theirs = pair("MPNetModel", tmp_path)
    mask = MASKS["right"]
    found = ours(IDS, mask, output_attentions=True).attentions
    expected = theirs.double()(IDS, attention_mask=mask, output_attentions=True).attentions
    for a, b in zip(found, expected, strict=True):
        rows = mask[:, None, :, None].expand_as(b)
        assert (a.double() - b)[rows].abs().max() < torch.finfo(torch.float32).eps * 100


def test_dropout_and_checkpointing() -> None:
    """The same seed drops the same elements, also when layers run again in the backward."""
    model = models.MPNetForMaskedLM(models.MPNetConfig(**SIZES)).train()

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
    model = models.MPNetForMaskedLM(models.MPNetConfig(**SIZES)).train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(IDS, MASKS["right"], labels=IDS).loss
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


def test_another_number_of_buckets_is_refused() -> None:
    with pytest.raises(ValueError, match=r"relative_attention_num_buckets: expected 32 \(others .* got 16"):
        models.MPNetModel(models.MPNetConfig.from_dict({**SIZES, "relative_attention_num_buckets": 16}))
