"""Fields of ``config.json`` that say what a call returns: they are respected, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fasttfm import models
from fasttfm.inference.network import EmbedSettings, Inputs, Network, Output
from fasttfm.models.checkpoint_files import CheckpointError
from fasttfm.models.text_model import BaseModel
from fasttfm.tasks.inputs import TaskBatch

SIZES = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
GPT_SIZES = {"vocab_size": 61, "n_positions": 20, "n_embd": 16, "n_layer": 2, "n_head": 2}
DISTILBERT_SIZES = {"vocab_size": 61, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}
VIT_SIZES = {**SIZES, "image_size": 8, "patch_size": 4}
NAMES = (
    "BertModel",
    "BertForMaskedLM",
    "RobertaForSequenceClassification",
    "AlbertForTokenClassification",
    "ElectraForPreTraining",
    "DistilBertForQuestionAnswering",
    "ModernBertForMaskedLM",
    "ErnieKnowledgeForPreTraining",
    "GPT2LMHeadModel",
    "GPT3Model",
    "OpenAIGPTForSequenceClassification",
    "ViTForImageClassification",
)
IDS = torch.randint(5, 60, (2, 7), generator=torch.Generator().manual_seed(0))


def make(name: str) -> Any:
    torch.manual_seed(0)
    kind = getattr(models, name)
    sizes: dict[str, Any] = GPT_SIZES if "GPT" in name else DISTILBERT_SIZES if "Distil" in name else SIZES
    if name.startswith("ViT"):
        sizes = {key: value for key, value in VIT_SIZES.items() if key != "vocab_size"}
    own: dict[str, Any] = {"embedding_size": 12} if name.startswith(("Albert", "Electra")) else {}
    own = (
        {"entity_hidden_size": 8, "layer_types": ["norm", "norm"], "num_entities": 5}
        if name.startswith("Ernie")
        else own
    )
    own = {"pad_token_id": 0} if name.startswith(("Modern", "GPT", "OpenAI")) else own
    return kind(kind.config_class(**sizes, **own)).eval()


def inputs_of(model: Any) -> Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)) if "ViT" in type(model).__name__ else IDS


def same(one: tuple[Tensor, ...] | None, other: tuple[Tensor, ...] | None) -> bool:
    if one is None or other is None:
        return one is other
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_a_configuration_requests_hidden_states_and_attention_weights(name: str, tmp_path: Path) -> None:
    model = make(name)
    expected = model(inputs_of(model), output_hidden_states=True, output_attentions=True)
    assert len(expected.hidden_states) == 3
    assert len(expected.attentions) == 2
    model.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "output_hidden_states": True}))
    loaded = getattr(models, name).from_pretrained(tmp_path, output_attentions=True)
    output = loaded(inputs_of(model))
    assert same(output.hidden_states, expected.hidden_states)
    assert same(output.attentions, expected.attentions)
    output = loaded(inputs_of(model), output_hidden_states=False, output_attentions=False)
    assert output.hidden_states is None
    assert output.attentions is None
    loaded.save_pretrained(tmp_path / "again")
    fields = json.loads((tmp_path / "again" / "config.json").read_text())
    assert (fields["output_hidden_states"], fields["output_attentions"]) == (True, True)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("field", "value"), [("return_dict", False), ("torchscript", True)])
def test_a_configuration_that_requests_tuples_is_refused(name: str, field: str, value: bool, tmp_path: Path) -> None:
    model = make(name)
    model.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, field: value}))
    expected = rf"{field}: expected {not value} \(others are not supported\)"
    with pytest.raises(CheckpointError, match=f"config.json: {expected}"):
        type(model).from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=expected):
        type(model)(type(model.config).from_dict({**fields, field: value}))
    (tmp_path / "config.json").write_text(json.dumps({**fields, field: not value}))
    type(model).from_pretrained(tmp_path)


def test_from_dict_refuses_what_from_pretrained_refuses() -> None:
    with pytest.raises(ValueError, match="is_decoder: expected False"):
        models.BertModel(models.BertConfig.from_dict({**SIZES, "is_decoder": True}))
    with pytest.raises(ValueError, match="scale_attn_by_inverse_layer_idx: expected False"):
        models.GPT2Model(models.GPT2Config.from_dict({**GPT_SIZES, "scale_attn_by_inverse_layer_idx": True}))


def test_callers_that_read_only_the_last_states_compute_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("attention weights were computed")

    model = make("BertForSequenceClassification")
    model.config.output_attentions = True
    monkeypatch.setattr(BaseModel, "attentions", refuse)
    with pytest.raises(AssertionError, match="were computed"):
        model(IDS)
    boundaries = torch.tensor([0, 7, 14], dtype=torch.int32)
    batch = TaskBatch([], IDS.flatten(), torch.zeros(14, dtype=torch.int64), boundaries, 7, {})
    assert model(**batch.inputs()).attentions is None
    joint = models.ElectraForJointPreTraining(
        models.ElectraConfig(**SIZES, embedding_size=16, generator_size=0.5, output_attentions=True)
    )
    joint(IDS, labels=IDS).loss.backward()
    network = Network(model, EmbedSettings(), torch.device("cpu"), torch.float32)
    for output in (Output.LOGITS, Output.VECTORS):
        network.run(output, Inputs(IDS.flatten(), None, boundaries, 7))


def test_roberta_without_a_padding_id_needs_positions() -> None:
    config = models.RobertaConfig(**SIZES, pad_token_id=None)
    model = models.RobertaModel(config).eval()
    with pytest.raises(ValueError, match="pad_token_id: expected a number, after which positions start"):
        model(IDS)
    model(IDS, position_ids=torch.arange(7))


def test_outputs_can_be_read_like_a_dictionary() -> None:
    output = make("BertForMaskedLM")(IDS)
    assert "logits" in output
    assert "loss" not in output
    assert 0 not in output
    assert output.get("loss", 3) == 3
    assert output.get("logits") is output.logits
    assert [(name, id(value)) for name, value in output.items()] == [("logits", id(output.logits))]
    assert output.values()[0] is dict(**output)["logits"] is output["logits"]


def test_outputs_can_be_unpacked_in_a_compiled_function() -> None:
    model = make("BertForMaskedLM")

    def unpacked(ids: Tensor) -> tuple[Tensor, ...]:
        output = model(ids, labels=ids, output_logits=True)
        loss, logits = output
        return loss, logits, output[0], *output.to_tuple()

    expected = unpacked(IDS)
    found = torch.compile(unpacked, fullgraph=True, backend="eager")(IDS)
    assert same(found, expected)
