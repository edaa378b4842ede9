"""What can be set on a model of transformers counts at each call of the patched one: losses, buffers, configuration."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from patched_models import IDS, MASKS, WORDS, changes_of, pair
from torch import Tensor, nn
from torch.nn import functional

import fasttfm

transformers = pytest.importorskip("transformers")
fasttfm.register_attention()

MODERN: dict[str, Any] = {"num_hidden_layers": 4, "local_attention": 4, "pad_token_id": 0}
ROWS = 3


def twins(name: str) -> tuple[Any, Any]:
    return pair(name, **(MODERN if name.startswith("ModernBert") else changes_of(name)))


def states(model: Any, **options: Any) -> Tensor:
    tokens = MASKS["right"][:ROWS].bool()
    ids = IDS[:ROWS].where(tokens, 1)
    with torch.no_grad():
        return model(ids, attention_mask=tokens.long(), **options)[0][tokens]


# ---- losses ----------------------------------------------------------------------------------------------------------


def smoothed(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    return 3 * functional.cross_entropy(logits.reshape(-1, vocab_size), labels.reshape(-1), label_smoothing=0.3)


def check_losses(ours: Any, theirs: Any, labels: Tensor, **options: Any) -> None:
    """In training, where the patched model computes no logits, and in evaluation."""
    for training in (True, False):
        found = [model.train(training)(IDS, labels=labels, **options).loss for model in (ours, theirs)]
        torch.testing.assert_close(
            *found, rtol=1e-4, atol=1e-4, msg=lambda text, mode=training: f"training={mode}: {text}"
        )


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "ModernBertForMaskedLM", "EuroBertForMaskedLM"])
def test_a_loss_function_of_the_user(name: str) -> None:
    ours, theirs = twins(name)
    check_losses(ours, theirs, IDS)
    for model in (ours, theirs):
        model.loss_function = smoothed
    check_losses(ours, theirs, IDS)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "ModernBertForMaskedLM", "EuroBertForMaskedLM"])
def test_the_loss_of_the_configuration(name: str) -> None:
    ours, theirs = twins(name)
    for model in (ours, theirs):
        model.loss_type = "ForMaskedLM" if name.startswith("GPT2") else "ForCausalLM"
    check_losses(ours, theirs, IDS)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "ModernBertForMaskedLM", "EuroBertForMaskedLM"])
def test_arguments_of_the_loss(name: str) -> None:
    labels = IDS.clone()
    labels[:, ::2] = 7
    check_losses(*twins(name), labels, ignore_index=7, num_items_in_batch=50)
    check_losses(*twins(name), labels, ignore_index=7)


def test_sparse_prediction_of_modernbert() -> None:
    labels = torch.where(WORDS == -100, 7, WORDS)
    labels[0, :3] = -100
    ours, theirs = pair("ModernBertForMaskedLM", **MODERN, sparse_prediction=True, sparse_pred_ignore_index=7)
    check_losses(ours, theirs, labels)
    for model in (ours, theirs):
        model.sparse_prediction = False
    check_losses(ours, theirs, labels)


LOSSES = {
    "label_smoothing": lambda: nn.CrossEntropyLoss(label_smoothing=0.3),
    "weights": lambda: nn.CrossEntropyLoss(torch.linspace(0.01, 1, 61)),
    "ignore_index": lambda: nn.CrossEntropyLoss(ignore_index=int(IDS[0, 0])),
    "sum": lambda: nn.CrossEntropyLoss(reduction="sum"),
    "another class": lambda: nn.MultiMarginLoss(),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_the_loss_module_of_distilbert(loss: Callable[[], nn.Module]) -> None:
    ours, theirs = twins("DistilBertForMaskedLM")
    check_losses(ours, theirs, IDS)
    ours.mlm_loss_fct = theirs.mlm_loss_fct = loss()
    check_losses(ours, theirs, IDS)


# ---- masks -----------------------------------------------------------------------------------------------------------

DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32)
MODELS = (
    *("BertModel", "RobertaModel", "AlbertModel", "ElectraModel", "DistilBertModel"),
    *("ModernBertModel", "EuroBertModel", "NomicBertModel", "GPT2Model"),
)


@pytest.mark.parametrize("implementation", ["patched", "patched fasttfm_flash", "fasttfm", "fasttfm_flash"])
@pytest.mark.parametrize("name", MODELS)
def test_masks_of_every_dtype(name: str, implementation: str) -> None:
    _, theirs = twins(name)
    ours = copy.deepcopy(theirs)
    if implementation != "patched":
        ours.set_attn_implementation(implementation.removeprefix("patched "))
    if implementation.startswith("patched"):
        fasttfm.patch(ours)
    for key in ("right", "anywhere"):
        tokens = MASKS[key][:ROWS].bool()
        if key == "anywhere" and ("flash" in implementation or implementation == "fasttfm"):
            continue  # windows count no padding between tokens there
        for dtype in DTYPES:
            mask = tokens.to(dtype)
            with torch.no_grad():
                expected = theirs(IDS[:ROWS], attention_mask=tokens.long())[0][tokens]
                found = ours(IDS[:ROWS], attention_mask=mask)[0][tokens]
            torch.testing.assert_close(
                found, expected, rtol=1e-4, atol=1e-4, msg=lambda text, dtype=dtype, key=key: f"{key} {dtype}: {text}"
            )


# ---- buffers and configuration ---------------------------------------------------------------------------------------


def rotary_buffers(model: Any, change: Callable[[Tensor], Any]) -> None:
    for name, buffer in model.rotary_emb.named_buffers():
        if "original" not in name:
            change(buffer)


def other_rotary_buffers(model: Any) -> None:
    for name, buffer in list(model.rotary_emb.named_buffers()):
        setattr(model.rotary_emb, name, buffer * 0.5)


def head_size(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "attention_head_size"):
            module.attention_head_size //= 2
        elif hasattr(module, "head_dim"):
            module.head_dim //= 2


def flipped_positions(model: Any) -> None:
    model.embeddings.position_ids = model.embeddings.position_ids.flip(1)


def positions_in_place(model: Any) -> None:
    model.embeddings.position_ids = model.embeddings.position_ids.clone()
    states(model)
    model.embeddings.position_ids.add_(3).remainder_(model.embeddings.position_ids.shape[1])


def segments_in_place(model: Any) -> None:
    model.embeddings.token_type_ids[:, 3:] = 1


def activation_functions(model: Any) -> None:
    for layer in model.encoder.layer:
        del layer.intermediate.intermediate_act_fn
        layer.intermediate.intermediate_act_fn = functional.relu
    states(model)
    for layer in model.encoder.layer:
        layer.intermediate.intermediate_act_fn = functional.silu


def gelu_of_layers(model: Any) -> None:
    for layer in model.layers:
        layer.mlp.act = nn.GELU()
    states(model)
    for layer in model.layers:
        layer.mlp.act.approximate = "tanh"


SETTINGS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "fewer layers of ALBERT": ("AlbertModel", lambda model: setattr(model.config, "num_hidden_layers", 1)),
    "more layers of ALBERT": ("AlbertModel", lambda model: setattr(model.config, "num_hidden_layers", 5)),
    "rotary buffers": ("ModernBertModel", lambda model: rotary_buffers(model, lambda each: each.mul_(0.25))),
    "data of rotary buffers": ("ModernBertModel", lambda model: rotary_buffers(model, lambda each: each.data.mul_(3))),
    "other rotary buffers": ("ModernBertModel", other_rotary_buffers),
    "scale of the rotation": (
        "ModernBertModel",
        lambda model: setattr(model.rotary_emb, "sliding_attention_attention_scaling", 1.5),
    ),
    "window": ("ModernBertModel", lambda model: setattr(model.config, "sliding_window", 1)),
    "kind of a layer": ("ModernBertModel", lambda model: setattr(model.layers[1], "attention_type", "full_attention")),
    "activation's option": ("ModernBertModel", gelu_of_layers),
    "norm's epsilon of ModernBERT": ("ModernBertModel", lambda model: setattr(model.layers[1].mlp_norm, "eps", 0.5)),
    "final norm's epsilon": ("ModernBertModel", lambda model: setattr(model.final_norm, "eps", 0.5)),
    "activation functions": ("BertModel", activation_functions),
    "epsilon of the embeddings": ("BertModel", lambda model: setattr(model.embeddings.LayerNorm, "eps", 0.5)),
    "chunks": (
        "BertModel",
        lambda model: [setattr(each, "chunk_size_feed_forward", 4) for each in model.encoder.layer],
    ),
    "fewer layers of BERT": ("BertModel", lambda model: model.encoder.layer.pop(1)),
    "scale of attention": ("GPT2Model", lambda model: setattr(model.h[0].attn, "scaling", 1.0)),
    **{
        f"{change.__name__} {name}": (name, change)
        for change, names in (
            (head_size, ("BertModel", "AlbertModel", "DistilBertModel", "GPT2Model")),
            (flipped_positions, ("BertModel", "AlbertModel", "ElectraModel", "DistilBertModel", "RobertaModel")),
            (positions_in_place, ("BertModel", "DistilBertModel")),
            (segments_in_place, ("BertModel", "AlbertModel", "ElectraModel", "RobertaModel", "XLMRobertaModel")),
        )
        for name in names
    },
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_that_changes_after_a_call(setting: str) -> None:
    name, change = SETTINGS[setting]
    ours, theirs = twins(name)
    torch.testing.assert_close(states(ours), states(theirs), rtol=1e-4, atol=1e-4)
    for model in (ours, theirs):
        change(model)
    torch.testing.assert_close(states(ours), states(theirs), rtol=1e-4, atol=1e-4)


def test_positions_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = twins("BertModel")
    compared: list[int] = []
    equal = torch.equal
    monkeypatch.setattr(torch, "equal", lambda *tensors: compared.append(1) or equal(*tensors))
    for _ in range(3):
        states(ours)
    assert len(compared) == 2  # positions and segments
    monkeypatch.undo()
    fasttfm.unpatch(ours)
    assert ours.embeddings.__dict__.keys() == theirs.embeddings.__dict__.keys()


@pytest.mark.parametrize(
    "name", ["BertModel", "AlbertModel", "ModernBertModel", "EuroBertModel", "NomicBertModel", "BertForMaskedLM"]
)
def test_the_form_of_the_output_in_the_configuration(name: str) -> None:
    ours, theirs = twins(name)
    labels = {"labels": IDS} if "For" in name else {}
    for training in (True, False):
        for model in (ours, theirs):
            model.config.return_dict = False
        found = [model.train(training)(IDS, **labels) for model in (ours, theirs)]
        assert {type(each) for each in found} == {tuple}
        for model in (ours, theirs):
            model.config.return_dict = True
            model.config.output_hidden_states = True
        found = [model.train(training)(IDS, **labels).hidden_states for model in (ours, theirs)]
        assert [len(each) for each in found] == [len(found[0])] * 2
        for model in (ours, theirs):
            model.config.output_hidden_states = False
