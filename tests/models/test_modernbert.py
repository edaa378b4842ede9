"""ModernBERT against transformers: the same checkpoint, the same outputs and gradients, padded and packed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_parity import IDS, MASKS, SIZES, check_layout, check_multiple_choice, check_question_answering, pair

from fasttfm import models
from fasttfm.models import CheckpointError

transformers = pytest.importorskip("transformers")

# Three layers: the first is global, the others are local with a window that ends inside of the sequences.
LOCAL = {"num_hidden_layers": 3, "local_attention": 4, "pad_token_id": 0}
LAYOUTS = [
    ("ModernBertModel", "right", True),
    ("ModernBertModel", "full", False),
    ("ModernBertForMaskedLM", "right", False),
    ("ModernBertForMaskedLM", "full", True),
    ("ModernBertForSequenceClassification", "right", True),
    ("ModernBertForTokenClassification", "right", True),
]


@pytest.mark.parametrize(("name", "kind", "packed"), LAYOUTS)
def test_same_numbers_as_transformers(name: str, kind: str, packed: bool, tmp_path: Path) -> None:
    check_layout(name, *pair(name, tmp_path, **LOCAL), kind, packed=packed, segments=False)


@pytest.mark.parametrize("biases", [True, False])
def test_biases_and_pooling(biases: bool, tmp_path: Path) -> None:
    names = ("norm_bias", "attention_bias", "mlp_bias", "classifier_bias")
    changes = {**LOCAL, **dict.fromkeys(names, biases), "classifier_pooling": "mean"}
    name = "ModernBertForSequenceClassification"
    check_layout(name, *pair(name, tmp_path, **changes), "right", packed=False, segments=False)


def test_multiple_choice(tmp_path: Path) -> None:
    check_multiple_choice(*pair("ModernBertForMultipleChoice", tmp_path, **LOCAL))


def test_question_answering(tmp_path: Path) -> None:
    check_question_answering(*pair("ModernBertForQuestionAnswering", tmp_path, **{**LOCAL, "num_labels": 2}))


def test_a_released_configuration(tmp_path: Path) -> None:
    """Its fields for the rotary base and the global layers have other names than those that transformers writes."""
    own = {**SIZES, **LOCAL, "num_hidden_layers": 5}
    released = {"global_attn_every_n_layers": 2, "global_rope_theta": 1000.0, "local_rope_theta": 10.0}
    theirs = transformers.ModernBertModel(transformers.ModernBertConfig(**own, **released)).eval()
    theirs.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    for name in ("layer_types", "rope_parameters"):
        del written[name]
    (tmp_path / "config.json").write_text(json.dumps({**written, **released}))
    ours = models.ModernBertModel.from_pretrained(tmp_path)
    assert [layer.theta for layer in ours.encoder.in_order()] == [1000.0, 10.0, 1000.0, 10.0, 1000.0]
    mask = MASKS["right"].long()
    with torch.no_grad():
        expected = theirs(IDS, mask).last_hidden_state
        found = ours(IDS, mask).last_hidden_state
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-4)
    ours.save_pretrained(tmp_path / "again")
    again = transformers.ModernBertModel.from_pretrained(tmp_path / "again")
    assert again.config.layer_types == theirs.config.layer_types
    assert again.config.rope_parameters == theirs.config.rope_parameters


def made(**changes: Any) -> Any:
    torch.manual_seed(0)
    model = models.ModernBertModel(models.ModernBertConfig(**{**SIZES, **LOCAL, **changes})).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def test_positions_count_by_their_distance() -> None:
    model = made()
    with torch.no_grad():
        plain = model(IDS).last_hidden_state
        moved = model(IDS, position_ids=torch.arange(IDS.shape[1]) + 7).last_hidden_state
        spread = model(IDS, position_ids=2 * torch.arange(IDS.shape[1])).last_hidden_state
    torch.testing.assert_close(moved, plain, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(spread, plain, atol=1e-3)


def test_sequences_beyond_the_configured_positions(tmp_path: Path) -> None:
    """transformers computes the angles of any position; our tables are extended."""
    name = "ModernBertForMaskedLM"
    ours, theirs = pair(name, tmp_path, **{**LOCAL, "max_position_embeddings": 4})
    assert ours.model.encoder.positions == 4
    check_layout(name, ours, theirs, "right", packed=False, segments=False)
    ids = IDS.repeat(1, 4)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=1e-4, atol=1e-4)
    ((cos, _), _) = ours.model.encoder.tables(torch.ones(1), 1).values()
    assert len(cos) == 64


def test_weights_of_local_layers_end_at_the_window() -> None:
    weights = made()(IDS, output_attentions=True).attentions
    distance = (torch.arange(IDS.shape[1])[:, None] - torch.arange(IDS.shape[1])).abs()
    assert (weights[0] > 0).all()
    for layer in weights[1:]:
        assert torch.equal(layer[0, 0] > 0, distance <= 2)


def test_dropout_and_checkpointing_give_the_same_gradients() -> None:
    """Layers that are recomputed in the backward drop the same elements."""
    config = models.ModernBertConfig(**{**SIZES, **LOCAL, "attention_dropout": 0.2, "mlp_dropout": 0.2})
    torch.manual_seed(0)
    model = models.ModernBertForMaskedLM(config).train()
    gradients = []
    for checkpointing in (False, True):
        (model.gradient_checkpointing_enable if checkpointing else model.gradient_checkpointing_disable)()
        torch.manual_seed(1)
        model.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, again)


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("layer_types", ["full_attention"], "layer_types: expected full_attention or sliding_attention for each of 3"),
        ("rope_parameters", {"full_attention": {"rope_type": "longrope"}}, "rope_type: .* got 'longrope'"),
    ],
)
def test_what_is_not_supported_is_refused(field: str, value: Any, sentence: str, tmp_path: Path) -> None:
    made().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(CheckpointError, match=sentence):
        models.ModernBertModel.from_pretrained(tmp_path)


def test_segments_are_refused() -> None:
    with pytest.raises(ValueError, match="segment"):
        made()(IDS, token_type_ids=torch.zeros_like(IDS))
    with pytest.raises(ValueError, match="position_ids: expected None with output_attentions"):
        made()(IDS, position_ids=torch.arange(IDS.shape[1]), output_attentions=True)


@pytest.mark.gpu
def test_sequences_beyond_the_configured_positions_on_a_gpu() -> None:
    """Positions outside of the tables would give NaN there."""
    model = made(max_position_embeddings=4).cuda()
    with torch.no_grad():
        short, long = model(IDS.cuda()).last_hidden_state, model(IDS.cuda().repeat(1, 3)).last_hidden_state
    assert short.isfinite().all()
    assert long.isfinite().all()


def test_training_after_an_evaluation_in_inference_mode() -> None:
    model = models.ModernBertForMaskedLM(models.ModernBertConfig(**{**SIZES, "pad_token_id": 0}))
    with torch.inference_mode():
        model(IDS)
    model.train()(IDS, labels=IDS).loss.backward()
