"""ALBERT against transformers, and the parameters that its layers share."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_parity import (
    IDS,
    MASKS,
    SIZES,
    WORDS,
    check_layout,
    check_multiple_choice,
    check_question_answering,
    pair,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from fasttfm import models
from fasttfm.models import CheckpointError
from fasttfm.models.checkpoint_names import from_checkpoint
from fasttfm.testing.modules import check_modules

transformers = pytest.importorskip("transformers")

NARROW = {"embedding_size": 20, "num_hidden_layers": 3}
TWO_LABELS = {**NARROW, "num_labels": 2}
LAYOUTS = [
    ("AlbertModel", "full", True),
    ("AlbertModel", "right", False),
    ("AlbertForPreTraining", "right", True),
    ("AlbertForPreTraining", "full", False),
    ("AlbertForMaskedLM", "right", False),
    ("AlbertForMaskedLM", "anywhere", True),
    ("AlbertForSequenceClassification", "right", True),
    ("AlbertForTokenClassification", "right", True),
    ("AlbertForTokenClassification", "anywhere", False),
]


@pytest.mark.parametrize(("name", "kind", "packed"), LAYOUTS)
def test_same_numbers_as_transformers(name: str, kind: str, packed: bool, tmp_path: Path) -> None:
    changes = TWO_LABELS if name == "AlbertForPreTraining" else NARROW
    check_layout(name, *pair(name, tmp_path, **changes), kind, packed=packed)


@pytest.mark.parametrize(("layers", "groups", "inner"), [(5, 2, 1), (2, 1, 2), (3, 3, 1)])
def test_groups(layers: int, groups: int, inner: int, tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": layers, "num_hidden_groups": groups, "inner_group_num": inner}
    ours, theirs = pair("AlbertForMaskedLM", tmp_path, embedding_size=20, **sizes)
    assert len(ours.encoder.encoder.layers) == groups * inner
    check_layout("AlbertForMaskedLM", ours, theirs, "right", packed=False)


def test_multiple_choice(tmp_path: Path) -> None:
    check_multiple_choice(*pair("AlbertForMultipleChoice", tmp_path, **NARROW))


def test_question_answering(tmp_path: Path) -> None:
    check_question_answering(*pair("AlbertForQuestionAnswering", tmp_path, **TWO_LABELS))


# ---- sharing ---------------------------------------------------------------------------------------------------------

ATTENTION = {"qkv", "out", "norm1"}
FFN = {"up", "down", "norm2"}
SHARED = {"all": ATTENTION | FFN, "attention": ATTENTION, "ffn": FFN, "none": set()}


def model(sharing: str, groups: int = 1, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = models.AlbertConfig(
        **{**SIZES, **NARROW, "num_hidden_groups": groups, "parameter_sharing": sharing, **changes}
    )
    made = models.AlbertForMaskedLM(config)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return made.eval()


@pytest.mark.parametrize("sharing", SHARED)
@pytest.mark.parametrize("groups", [1, 2])
def test_shared_parameters_are_one_tensor(sharing: str, groups: int, tmp_path: Path) -> None:
    made = model(sharing, groups)
    made.save_pretrained(tmp_path)
    for each in (made, models.AlbertForMaskedLM.from_pretrained(tmp_path)):
        layers = each.albert.encoder.in_order()
        assert len(layers) == 3
        for part in ATTENTION | FFN:
            weights = {id(getattr(layer, part).weight) for layer in layers}
            assert len(weights) == (groups if part in SHARED[sharing] else 3)
        optimizer = torch.optim.AdamW(each.parameters())
        each(IDS, labels=WORDS).loss.backward()
        optimizer.step()
        moments = sum(state["exp_avg"].numel() for state in optimizer.state.values())
        distinct = {parameter.data_ptr(): parameter.numel() for parameter in each.state_dict().values()}
        assert moments == sum(distinct.values())


@pytest.mark.parametrize("layers", [1, 24])
def test_memory_does_not_grow_with_layers(layers: int) -> None:
    made = model("all", num_hidden_layers=layers)
    assert len(made.albert.encoder.in_order()) == layers
    assert sum(parameter.numel() for parameter in made.parameters()) == sum(
        parameter.numel() for parameter in model("all").parameters()
    )


@pytest.mark.parametrize(("sharing", "groups"), [("attention", 1), ("ffn", 2), ("none", 1)])
def test_transformers_gets_copies_of_shared_parameters(sharing: str, groups: int, tmp_path: Path) -> None:
    """The same outputs; a shared parameter's gradient is the sum of those of its copies."""
    ours = model(sharing, groups)
    ours.save_pretrained(tmp_path)
    theirs = transformers.AlbertForMaskedLM.from_pretrained(tmp_path)
    assert theirs.config.num_hidden_groups == 3

    def translate(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        own = {name: name for name, _ in ours.named_parameters()}
        for name, tied_to in {**own, **ours.repeated()}.items():
            read = from_checkpoint(ours.names, name, gradients.__getitem__)
            found[tied_to] = found[tied_to] + read if tied_to in found else read
        return found

    def call(module: Any, _: dict[str, Tensor]) -> dict[str, Tensor]:
        mask = MASKS["right"]
        return {"loss": module(IDS, attention_mask=mask, labels=torch.where(mask, WORDS, -100)).loss}

    check_modules(ours, theirs, call, {}, translate=translate)


def test_a_checkpoint_whose_copies_differ_is_refused(tmp_path: Path) -> None:
    model("attention").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    key = "albert.encoder.albert_layer_groups.1.albert_layers.0.attention.key.bias"
    stored[key] += 1
    save_file(stored, path)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: {key}: expected the values of .*groups\.0"):
        models.AlbertForMaskedLM.from_pretrained(tmp_path)
    read = models.AlbertForMaskedLM.from_pretrained(tmp_path, parameter_sharing="none")
    assert not torch.equal(read.albert.encoder.layers[0].qkv.bias, read.albert.encoder.layers[1].qkv.bias)
    del stored[key]
    save_file(stored, path)
    with pytest.raises(CheckpointError, match=f"{key}: missing"):
        models.AlbertForMaskedLM.from_pretrained(tmp_path)


def test_configurations_come_back(tmp_path: Path) -> None:
    for sharing in SHARED:
        config = model(sharing, 2).config
        config.save_pretrained(tmp_path)
        stored = json.loads((tmp_path / "config.json").read_text())
        assert stored["num_hidden_groups"] == (2 if sharing == "all" else 3)
        again = models.AlbertConfig.from_pretrained(tmp_path)
        assert dataclasses.replace(again, extra={}) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sharing": "half"}, "parameter_sharing: expected all, attention, ffn, none, got 'half'"),
        ({"sharing": "all", "groups": 4}, "num_hidden_groups: expected 1 to 3, got 4"),
        ({"sharing": "none", "groups": 0}, "num_hidden_groups: expected a whole number from 1 on, got 0"),
    ],
)
def test_bad_sharing_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model(**changes)


def test_attentions(tmp_path: Path) -> None:
    ours, theirs = pair("AlbertModel", tmp_path, attn_implementation="eager", **NARROW)
    found = ours(IDS, output_attentions=True).attentions
    expected = theirs.double()(IDS, output_attentions=True).attentions
    assert len(found) == len(expected) == 3
    for a, b in zip(found, expected, strict=True):
        assert (a.double() - b).abs().max() < torch.finfo(torch.float32).eps * 100


def test_training_step_reaches_every_parameter() -> None:
    sizes = {**SIZES, **TWO_LABELS, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    module = models.AlbertForPreTraining(models.AlbertConfig(**sizes, parameter_sharing="ffn"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = module(IDS, MASKS["right"], labels=WORDS, sentence_order_label=torch.tensor([0, 1, 0])).loss
    loss.backward()
    assert loss.dtype == torch.float32
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in module.parameters())
