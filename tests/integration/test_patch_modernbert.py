"""``fasttfm.patch`` of transformers' ModernBERT: packed layers, calls that stay with transformers, and ``unpatch``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from model_parity import tensors
from patched_models import IDS, MASKS, B, S, batch, check_patched, pair
from torch import Tensor

import fasttfm

transformers = pytest.importorskip("transformers")

# The layers 0 and 3 are global; windows end inside of the sequences.
SMALL: dict[str, Any] = {"num_hidden_layers": 4, "local_attention": 4, "pad_token_id": 0}


def runs(model: Any) -> list[int]:
    """Records the number of tokens of each call of the packed layers of a patched model."""
    found: list[int] = []
    base = model if not hasattr(model, "model") else model.model
    layers = base._layers()
    run = layers.run

    def counted(x: Tensor, *others: Any) -> Tensor:
        found.append(x.shape[0])
        return run(x, *others)

    layers.run = counted
    return found


@pytest.mark.parametrize(
    ("name", "mask"),
    [
        *(("ModernBertModel", mask) for mask in MASKS),
        ("ModernBertForMaskedLM", "right"),
        ("ModernBertForSequenceClassification", "full"),
    ],
)
def test_same_numbers(name: str, mask: str) -> None:
    ours, theirs = (module.train() for module in pair(name, **SMALL))
    given, packed = batch(name, mask), runs(ours)

    def call(module: Any, _: dict[str, Tensor]) -> dict[str, Tensor]:
        found = tensors(module(**given), given.get("attention_mask"))
        return {key: value for key, value in found.items() if key.startswith(("loss", "last_hidden_state"))}

    check_patched(ours, theirs, call)
    assert set(packed) == ({int(MASKS[mask].sum())} if mask != "anywhere" else set())  # gaps count in windows


@pytest.mark.parametrize("name", ["ModernBertForTokenClassification", "ModernBertForQuestionAnswering"])
def test_other_heads(name: str) -> None:
    ours, theirs = (module.train() for module in pair(name, **SMALL))
    given = batch(name)
    check_patched(ours, theirs, lambda module, _: {"loss": module(**given).loss})


def test_evaluation_biases_and_other_inputs() -> None:
    biases = dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), True)
    ours, theirs = pair("ModernBertForMaskedLM", **SMALL, **biases, hidden_activation="silu")
    embedded, positions = torch.randn(B, S, 48), 2 * torch.arange(S)[None]

    def call(module: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        by_id = module(IDS, position_ids=positions)
        given = module(inputs_embeds=inputs["embedded"], attention_mask=MASKS["right"], output_hidden_states=True)
        return {"by id": by_id.logits} | {
            f"state {number}": state[MASKS["right"].bool()] for number, state in enumerate(given.hidden_states)
        }

    check_patched(ours, theirs, call, {"embedded": embedded})
    assert isinstance(ours(IDS, return_dict=False), tuple)


def test_loss_divided_by_the_count_of_a_larger_batch() -> None:
    ours, theirs = (module.train() for module in pair("ModernBertForMaskedLM", **SMALL))
    for count in (torch.tensor(77), 77):
        losses = [module(IDS, labels=IDS, num_items_in_batch=count).loss for module in (ours, theirs)]
        torch.testing.assert_close(*losses)


def test_flattened_inputs_and_dropout() -> None:
    ours, theirs = pair("ModernBertModel", **SMALL)
    lengths = MASKS["right"].sum(1)
    packed = IDS[MASKS["right"].bool()][None]
    bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    positions = torch.cat([torch.arange(int(length)) for length in lengths])[None]
    named = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": S, "max_length_k": S}
    with torch.no_grad():
        expected = theirs(IDS, attention_mask=MASKS["right"]).last_hidden_state[MASKS["right"].bool()]
        found = ours(packed, position_ids=positions, **named).last_hidden_state[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    dropping, _ = pair("ModernBertModel", dropout=0.0, **SMALL, attention_dropout=0.3, mlp_dropout=0.3)
    for each in dropping.modules():
        if isinstance(each, torch.nn.Dropout):
            each.p = 0.3
    dropping.train()
    assert not torch.equal(dropping(IDS).last_hidden_state, dropping(IDS).last_hidden_state)
    dropping.eval()
    assert torch.equal(dropping(IDS).last_hidden_state, dropping(IDS).last_hidden_state)


def test_a_norm_and_a_window_that_are_replaced_after_a_call() -> None:
    ours, theirs = pair("ModernBertModel", **SMALL)
    norm = torch.nn.LayerNorm(48)
    torch.nn.init.normal_(norm.weight)
    with torch.no_grad():
        for model in (ours, theirs):
            model(IDS)
            model.final_norm = copy.deepcopy(norm)
        torch.testing.assert_close(ours(IDS).last_hidden_state, theirs(IDS).last_hidden_state, rtol=1e-4, atol=1e-5)
        for model in (ours, theirs):
            model.config.sliding_window = 1
        torch.testing.assert_close(ours(IDS).last_hidden_state, theirs(IDS).last_hidden_state, rtol=1e-4, atol=1e-5)


def test_checkpointing_hooks_and_unpatch() -> None:
    ours, theirs = pair("ModernBertForMaskedLM", **SMALL)
    given = batch("ModernBertForMaskedLM")
    losses, packed = [], runs(ours)
    for model in (ours, theirs):
        model.train()
        model.gradient_checkpointing_enable()
        loss = model(**given).loss
        loss.backward()
        losses.append((float(loss.detach()), model.model.layers[1].attn.Wqkv.weight.grad))
    assert len(packed) == 1
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-6)
    ours.model.layers[2].register_forward_hook(lambda module, inputs, output: output * 0)
    with torch.no_grad():  # hooks of layers are called
        assert not ours.eval()(IDS).logits.allclose(theirs.eval()(IDS).logits, atol=1e-3)
    assert len(packed) == 1
    again = copy.deepcopy(theirs)
    fasttfm.patch(again)
    fasttfm.unpatch(again)
    assert {type(each) for each in again.modules()} == {type(each) for each in theirs.modules()}
    assert again.config._attn_implementation == theirs.config._attn_implementation
    with torch.no_grad():
        assert torch.equal(again.eval()(IDS).logits, theirs(IDS).logits)
