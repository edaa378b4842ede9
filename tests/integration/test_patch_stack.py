"""Patched encoders as one stack: it gives the results of the single layers, and modules with hooks are still called."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from patched_models import IDS, MASKS, pair
from torch import Tensor, nn

import fasttfm
from fasttfm.nn.plain import Tree

pytest.importorskip("transformers")
from fasttfm.patching import masks, stack

ENCODERS = {
    "BertModel": "encoder",
    "RobertaModel": "encoder",
    "ElectraModel": "encoder",
    "AlbertModel": "encoder",
    "DistilBertModel": "transformer",
}


@pytest.fixture
def stacks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each call of a patched encoder without padding, whether the stack has run the layers."""
    seen: list[bool] = []
    run, of = stack.Stack.run, stack.stack_of

    def noted(self: Any, *args: Any) -> Tensor | None:
        y = run(self, *args)
        seen.append(y is not None)
        return y

    def found(encoder: Any) -> Any:
        own = of(encoder)
        if own is None or not own.fusable:
            seen.append(False)
        return own

    monkeypatch.setattr(stack.Stack, "run", noted)
    monkeypatch.setattr("fasttfm.patching.packing.stack_of", found)
    return seen


def states(model: Any, mask: str = "right") -> Tensor:
    out: Tensor = model(IDS, attention_mask=MASKS[mask]).last_hidden_state
    return out[MASKS[mask].bool()]


@pytest.mark.parametrize("mask", ["full", "right"])
@pytest.mark.parametrize("name", ENCODERS)
def test_a_stack_computes_what_its_layers_do(name: str, mask: str, stacks: list[bool]) -> None:
    ours, _ = pair(name)
    whole = states(ours.train(), mask)
    weights = torch.randn(whole.shape, generator=torch.Generator().manual_seed(5))
    (whole * weights).sum().backward()
    gradients = {key: each.grad for key, each in ours.named_parameters()}
    ours.zero_grad()
    assert stacks == [True]
    encoder = ours.get_submodule(ENCODERS[name])
    encoder.register_forward_hook(lambda *_: None)  # its call runs it
    states(ours, mask)
    next(encoder.children()).register_forward_hook(lambda *_: None)
    called = states(ours, mask)
    (called * weights).sum().backward()
    assert stacks == [True, True, False]
    torch.testing.assert_close(whole, called)
    check_gradients({key: each.grad for key, each in ours.named_parameters()}, gradients)


@pytest.mark.parametrize("name", ENCODERS)
def test_padding_before_tokens_is_kept(name: str, stacks: list[bool]) -> None:
    ours, theirs = pair(name)
    torch.testing.assert_close(states(ours, "anywhere"), states(theirs, "anywhere"))
    assert stacks == []  # the layers were called


def check_gradients(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """In fp32, with another order of sums; test_patch.py compares both paths with fp64."""
    there = {key: each for key, each in expected.items() if each is not None}
    assert there.keys() == {key for key, each in found.items() if each is not None}
    largest = max(float(each.abs().max()) for each in there.values())
    for key, each in there.items():
        torch.testing.assert_close(found[key], each, rtol=1e-4, atol=1e-5 * largest)


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def replaced(layer: Any) -> None:
    old = layer.output.dense
    layer.output.dense = Doubled(old.in_features, old.out_features)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "hook of a linear layer": lambda layer: layer.attention.self.query.register_forward_hook(lambda *_: None),
    "hook before a layer": lambda layer: layer.register_forward_pre_hook(lambda *_: None),
    "backward hook": lambda layer: layer.output.register_full_backward_hook(lambda *_: None),
    "forward of its own": lambda layer: setattr(layer.intermediate, "forward", layer.intermediate.forward),
    "another linear layer": replaced,
    "parametrization": lambda layer: nn.utils.parametrizations.weight_norm(layer.output.dense),
    "another epsilon": lambda layer: setattr(layer.output.LayerNorm, "eps", 1e-3),
    "another scale": lambda layer: setattr(layer.attention.self, "scaling", 0.5),
    "other activation": lambda layer: setattr(layer.intermediate, "intermediate_act_fn", nn.Softplus()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_later_changes_are_seen(change: Callable[[Any], Any], stacks: list[bool]) -> None:
    ours, theirs = pair("BertModel")
    states(ours)
    for model in (ours, theirs):
        torch.manual_seed(3)
        change(model.encoder.layer[1])
    assert stacks == [True]
    torch.testing.assert_close(states(ours), states(theirs), rtol=1e-4, atol=1e-4)
    assert stacks == [True, False]


def test_removed_hooks_and_hooks_that_collect_outputs(stacks: list[bool]) -> None:
    ours, _ = pair("BertModel")
    seen: list[Any] = []
    handle = ours.encoder.layer[0].register_forward_hook(lambda *_: seen.append(1))
    states(ours)
    assert seen
    handle.remove()
    states(ours)
    assert len(ours(IDS, output_hidden_states=True).hidden_states) == 3
    states(ours)  # transformers' hooks are still there
    assert stacks == [False, True, True]


def test_copies_pickles_and_unpatched_models_have_no_stack(stacks: list[bool]) -> None:
    ours, theirs = pair("BertModel")
    expected = states(ours)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        with torch.no_grad():
            other.encoder.layer[0].output.dense.weight.zero_()
        assert not torch.equal(states(other), expected)
        other.encoder.layer[0].register_forward_hook(lambda *_: None)
        states(other)
    assert torch.equal(states(ours), expected)
    assert stacks == [True, True, False, True, False, True]
    fasttfm.unpatch(ours)
    assert ours.encoder.__dict__.keys() == theirs.encoder.__dict__.keys()
    gone = weakref.ref(ours.encoder)
    del ours
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("change", ["data", "in place", "load_state_dict", "assigned"])
def test_weights_are_read_in_every_call(change: str) -> None:
    """Also after changes that torch does not count in the version."""
    ours, theirs = pair("BertModel")
    with torch.no_grad():
        states(ours)
        for model in (ours, theirs):
            weight = model.encoder.layer[0].attention.self.value.weight
            if change == "data":
                weight.data.mul_(3)
            elif change == "in place":
                weight.mul_(3)
            elif change == "assigned":
                weight.data = 3 * weight.data
            else:
                state = {key: 3 * value for key, value in model.state_dict().items()}
                model.load_state_dict(state)
        torch.testing.assert_close(states(ours), states(theirs), rtol=1e-4, atol=1e-4)


def test_padding_that_is_kept_is_computed(stacks: list[bool]) -> None:
    theirs = pair("BertModel")[1]
    ours = copy.deepcopy(theirs)
    fasttfm.patch(ours, remove_padding=False)
    for mask in ("right", "full"):
        given = {"attention_mask": MASKS[mask]}
        torch.testing.assert_close(ours(IDS, **given)[0], theirs(IDS, **given)[0], rtol=1e-4, atol=1e-4)
    assert stacks == [True]  # without padding


class Wrapper(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.inner = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def test_a_wrapped_layer(stacks: list[bool]) -> None:
    ours, theirs = pair("BertModel")
    ours.encoder.layer[0] = Wrapper(ours.encoder.layer[0])
    torch.testing.assert_close(states(ours), states(theirs), rtol=1e-4, atol=1e-4)
    assert stacks == [False]


def test_gradient_checkpointing_runs_layers_again(stacks: list[bool]) -> None:
    found = []
    for checkpointed in (False, True):
        ours, _ = pair("BertModel", dropout=0.1)
        ours.train()
        ours.enable_input_require_grads()  # a hook, as checkpointing makes one
        if checkpointed:
            ours.gradient_checkpointing_enable()
        torch.manual_seed(7)
        y = states(ours)
        (y * torch.arange(48).cos()).sum().backward()
        found.append([y, *(each.grad for each in ours.parameters() if each.grad is not None)])
    assert stacks == [True, True]
    assert all(map(torch.equal, *found))


def test_layers_without_gradients_and_biases() -> None:
    ours, theirs = pair("BertModel")
    for model in (ours, theirs):
        for parameter in model.encoder.layer[0].parameters():
            parameter.requires_grad_(False)
        model.encoder.layer[1].attention.self.key.bias = None
    for model in (ours, theirs):
        (states(model) * torch.arange(48).cos()).sum().backward()
    found, expected = ({key: each.grad for key, each in model.named_parameters()} for model in (ours, theirs))
    check_gradients(found, expected)


def test_a_mask_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = pair("BertModel")
    reads: list[Any] = []
    from_mask = masks.PackedBatch.from_mask
    monkeypatch.setattr(masks.PackedBatch, "from_mask", staticmethod(lambda mask: reads.append(1) or from_mask(mask)))
    states(ours)
    assert len(reads) == 1


def test_a_tree_detects_every_change() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    tree = Tree(model)
    assert tree.is_unchanged()
    assert pickle.loads(pickle.dumps(tree)) is None
    assert copy.deepcopy(tree) is None
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert not tree.is_unchanged()
    handle.remove()
    assert tree.is_unchanged()
    model[1].append(nn.ReLU())
    assert not tree.is_unchanged()
    tree = Tree(model)
    model[0].__class__ = Doubled
    assert not tree.is_unchanged()
