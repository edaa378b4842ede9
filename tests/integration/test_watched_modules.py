"""Patched models with something inside that watches or replaces modules: it gets what transformers passes to it."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from model_parity import theirs_of
from patched_models import IDS, MASKS, batch, changes_of, pair, with_dropout
from torch import Tensor, nn

import fasttfm

pytest.importorskip("transformers")
from fasttfm.patching import packing

HEADS = (
    "BertForMaskedLM",
    "BertForPreTraining",
    "RobertaForMaskedLM",
    "AlbertForMaskedLM",
    "ElectraForMaskedLM",
    "DistilBertForMaskedLM",
    "MPNetForMaskedLM",
    "ModernBertForMaskedLM",
    "EuroBertForMaskedLM",
    "NomicBertForMaskedLM",
    "GPT2LMHeadModel",
)
LAYERS = {
    "BertModel": "encoder.layer",
    "RobertaModel": "encoder.layer",
    "ElectraModel": "encoder.layer",
    "DistilBertModel": "transformer.layer",
    "ModernBertModel": "layers",
    "EuroBertModel": "layers",
    "NomicBertModel": "layers",
}
ROWS = 3  # of a batch with padding
GATE = torch.tensor([1.0, 0.1, -3.0])[:, None, None]  # a number for each sequence


def shapes(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [shapes(each) for each in value]
    return tuple(value.shape) if isinstance(value, Tensor) else None


def watch_shapes(module: nn.Module, seen: list[Any]) -> Any:
    def note(_: nn.Module, inputs: Any, output: Any) -> None:
        seen.append(shapes(output))

    return module.register_forward_hook(note)


@pytest.mark.parametrize("name", HEADS)
def test_hooks_of_every_module_see_the_shapes_of_transformers(name: str) -> None:
    ours, theirs = (module.train() for module in pair(name, **changes_of(name)))
    arguments = {key: value[:ROWS] for key, value in batch(name).items()}
    paths = [
        path
        for path, module in theirs.named_modules()
        if path and not isinstance(module, nn.ModuleList) and not re.search(r"\.(layers?|h)\.0\b", path)
    ]
    expected: dict[str, list[Any]] = {path: [] for path in paths}
    for path in paths:
        watch_shapes(theirs.get_submodule(path), expected[path])
    loss = theirs(**arguments).loss
    called = [path for path in paths if expected[path]]
    assert len(called) > 8
    for path in called:
        seen: list[Any] = []
        handle = watch_shapes(ours.get_submodule(path), seen)
        torch.testing.assert_close(ours(**arguments).loss, loss, msg=lambda text, path=path: f"{path}: {text}")
        handle.remove()
        assert seen == expected[path], path


class Gated(nn.Module):
    """Calls a layer; its output is multiplied for each sequence."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.inner = layer

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "inner" else getattr(self.inner, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return gate(self.inner(*args, **kwargs))


def gate(output: Any) -> Any:
    return output * GATE if isinstance(output, Tensor) else (output[0] * GATE, *output[1:])


def hook(layers: Any) -> Any:
    return layers[1].register_forward_hook(lambda module, inputs, output: gate(output))


def pre_hook(layers: Any) -> Any:
    def multiply(module: nn.Module, inputs: Any) -> Any:
        return (inputs[0] * GATE, *inputs[1:])

    return layers[1].register_forward_pre_hook(multiply)


def hook_of_all_modules(layers: Any) -> Any:
    last = layers[1]
    return nn.modules.module.register_module_forward_hook(
        lambda module, inputs, output: gate(output) if module is last else None
    )


class Restore:
    def __init__(self, restore: Callable[[], Any]) -> None:
        self.remove = restore


def replaced(layers: Any) -> Any:
    old = layers[1]
    layers[1] = Gated(old)
    return Restore(lambda: layers.__setitem__(1, old))


def other_forward(layers: Any) -> Any:
    layer, forward = layers[1], layers[1].forward
    layer.forward = lambda *args, **kwargs: gate(forward(*args, **kwargs))
    return Restore(lambda: layer.__dict__.pop("forward"))


WATCHERS = {each.__name__: each for each in (hook, pre_hook, hook_of_all_modules, replaced, other_forward)}


@pytest.mark.parametrize("watch", WATCHERS.values(), ids=WATCHERS)
@pytest.mark.parametrize("name", LAYERS)
def test_what_depends_on_the_sequence_is_computed_as_in_transformers(name: str, watch: Callable[[Any], Any]) -> None:
    """Also in a model that has run before; afterwards the layers run as before."""
    ours, theirs = pair(name, **changes_of(name))
    tokens = MASKS["right"][:ROWS].bool()
    ids = IDS[:ROWS].where(tokens, 1)

    def states(model: Any) -> Tensor:
        with torch.no_grad():
            out: Tensor = model(ids, attention_mask=tokens.long()).last_hidden_state
        return out[tokens]

    before = states(ours)
    found = []
    for model in (ours, theirs):
        handle = watch(model.get_submodule(LAYERS[name]))
        found.append(states(model))
        handle.remove()
    assert not torch.allclose(found[0], before, atol=1e-2)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    assert torch.equal(states(ours), before)


def test_gradients_that_backward_hooks_see() -> None:
    found = []
    for model in pair("BertModel"):
        seen: list[Any] = []
        model.encoder.layer[0].register_full_backward_hook(
            lambda module, inputs, outputs, seen=seen: seen.append(shapes(outputs))
        )
        model.train()(IDS[:ROWS], attention_mask=MASKS["right"][:ROWS]).last_hidden_state.sum().backward()
        found.append(seen)
    assert found[0] == found[1]


# ---- PEFT ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The number of rows of each call of layers with packed rows."""
    seen: list[int] = []
    called = packing._called
    monkeypatch.setattr(packing, "_called", lambda *args: seen.append(args[2].tokens) or called(*args))
    return seen


def adapted(**options: Any) -> tuple[Any, Any]:
    """A patched model with two adapters, and the same without fasttfm."""
    peft = pytest.importorskip("peft", reason="its models are patched here")
    config = {"r": 4, "target_modules": ["query", "value", "dense"], "init_lora_weights": False, "lora_dropout": 0.0}
    torch.manual_seed(0)
    model = with_dropout(theirs_of("BertForSequenceClassification"), 0.0)
    theirs = peft.get_peft_model(model, peft.LoraConfig(**config, **options), adapter_name="a")
    theirs.add_adapter("b", peft.LoraConfig(**config, **options))
    ours = copy.deepcopy(theirs)
    fasttfm.patch(ours)
    return ours.eval(), theirs.eval()


def logits(model: Any, **options: Any) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(input_ids=IDS[:ROWS], attention_mask=MASKS["right"][:ROWS], **options).logits
    return out


def test_lora_runs_without_padding_unless_each_sequence_has_its_adapter(packed: list[int]) -> None:
    ours, theirs = adapted()
    names = ["a", "b", "__base__"]
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=1e-4, atol=1e-4)
    mixed = logits(ours, adapter_names=names)
    assert packed == [int(MASKS["right"][:ROWS].sum())]
    torch.testing.assert_close(mixed, logits(theirs, adapter_names=names), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(mixed, logits(ours), atol=1e-2)
    assert len(packed) == 2
    for model in (ours, theirs):
        model.set_adapter("b")
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=1e-4, atol=1e-4)
    assert len(packed) == 3


def test_variants_of_lora_and_chunks_keep_padding(packed: list[int]) -> None:
    ours, theirs = adapted(use_dora=True)
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=1e-4, atol=1e-4)
    ours, theirs = adapted()
    for model in (ours, theirs):
        logits(model)
        for layer in model.base_model.model.bert.encoder.layer:
            layer.chunk_size_feed_forward = 4
    packed.clear()
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=1e-4, atol=1e-4)
    assert not packed
