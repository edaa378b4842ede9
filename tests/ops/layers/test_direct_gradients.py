"""Gradients that the backward of a stack of layers writes to ``.grad`` itself: the same bits as autograd's."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import VOCABULARY, small_bert
from torch import Tensor, nn

from fasttfm import _native, models
from fasttfm.ops.core import direct_gradients
from fasttfm.ops.layers import support
from fasttfm.optim import AdamW

takes_cpu = pytest.mark.skipif(support.missing_cpu() is not None, reason=f"CPU: {support.missing_cpu()}")
hopper = pytest.mark.skipif(_native.missing_hopper() is not None, reason=f"Hopper: {_native.missing_hopper()}")
DEVICES = [
    pytest.param("cpu", marks=takes_cpu),
    pytest.param("cuda", marks=[pytest.mark.gpu, hopper]),
]
IDS = torch.randint(1, VOCABULARY, (3, 20), generator=torch.Generator().manual_seed(0))
LENGTHS = [20, 7, 12]


def bert(device: str = "cpu") -> Any:
    return small_bert(hidden_size=128, num_hidden_layers=3).to(device).train()


def albert(device: str = "cpu") -> Any:
    """Its layers share their parameters."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "embedding_size": 64, "hidden_size": 128, "intermediate_size": 96}
    heads = {"num_hidden_layers": 3, "num_attention_heads": 2, "max_position_embeddings": 128}
    dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    config = models.AlbertConfig(**sizes, **heads, **dropout)
    return models.AlbertForSequenceClassification(config).to(device).train()


def device_of(model: Any) -> torch.device:
    device: torch.device = next(model.parameters()).device
    return device


def loss_of(model: Any, seed: int = 0) -> Tensor:
    device = device_of(model)
    torch.manual_seed(seed)  # of dropout
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=device.type == "cuda"):
        logits: Tensor = model(IDS.to(device), lengths=LENGTHS).logits
    return logits.float().square().sum()


def leaves_of(loss: Tensor) -> set[int]:
    """The ids of the leaves of a loss's graph."""
    waiting: list[Any] = [loss.grad_fn]
    seen, found = set(), set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        waiting += [each for each, _ in node.next_functions]
    return found


def is_direct(model: Any) -> bool:
    """Whether a call's graph has no parameter of a layer."""
    leaves = leaves_of(loss_of(model))
    inside = [id(each) in leaves for each in model.encoder.encoder.layers.parameters()]
    assert any(inside) == all(inside)
    return not any(inside)


def gradients(model: Any) -> list[Tensor | None]:
    return [None if each.grad is None else each.grad.clone() for each in model.parameters()]


def same(found: list[Tensor | None], expected: list[Tensor | None]) -> bool:
    def equal(one: Tensor | None, other: Tensor | None) -> bool:
        return one is other if one is None or other is None else torch.equal(one, other)

    return all(equal(*pair) for pair in zip(found, expected, strict=True))


def once(model: Any) -> None:
    loss_of(model).backward()


def accumulated(model: Any) -> None:
    once(model)
    loss_of(model, 1).backward()


def twice_through_one_graph(model: Any) -> None:
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    loss.backward()


def two_calls_in_one_graph(model: Any) -> None:
    (loss_of(model) + loss_of(model, 1)).backward()


def on_a_stream(model: Any) -> None:
    """The backward runs on the stream of the forward, and its caller on another one."""
    if device_of(model).type == "cpu":
        return once(model)
    with torch.cuda.stream(torch.cuda.Stream()):
        loss = loss_of(model)
        torch.cuda._sleep(10_000_000)
    return loss.backward()


USES = [once, accumulated, twice_through_one_graph, two_calls_in_one_graph, on_a_stream]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", [bert, albert])
@pytest.mark.parametrize("use", USES)
def test_same_bits_as_autograd(make: Callable[[str], Any], use: Callable[[Any], None], device: str) -> None:
    results = []
    for direct in (False, True):
        model = make(device)
        optimizer = AdamW(model.parameters(), direct_gradients=direct)
        assert is_direct(model) == direct
        use(model)
        results.append(gradients(model))
        optimizer.step()
        results[-1] += [each.detach().clone() for each in model.parameters()]
    assert same(*results)


@takes_cpu
def test_gradients_of_requested_tensors_are_not_accumulated() -> None:
    model = bert()
    word = model.encoder.embeddings.word.weight
    (expected,) = torch.autograd.grad(loss_of(model), [word])
    optimizer = AdamW(model.parameters(), direct_gradients=True)
    assert is_direct(model)
    (found,) = torch.autograd.grad(loss_of(model), [word])
    assert torch.equal(found, expected)
    assert not any(each is not None for each in gradients(model))
    loss_of(model).backward(inputs=[word])
    assert [name for name, each in model.named_parameters() if each.grad is not None] == [
        name for name, each in model.named_parameters() if each is word
    ]
    parameter = model.encoder.encoder.layers[0].up.bias
    with pytest.raises(RuntimeError, match="to not have been used in the graph"):
        torch.autograd.grad(loss_of(model), [parameter])
    del optimizer


@takes_cpu
def test_frozen_inputs() -> None:
    """The graph has no leaf except the parameters of the layers."""
    model = bert()
    for each in (model.encoder.embeddings, model.encoder.pooler, model.classifier):
        each.requires_grad_(False)
    once(model)
    expected = gradients(model)
    optimizer = AdamW((each for each in model.parameters() if each.requires_grad), direct_gradients=True)
    optimizer.zero_grad()
    once(model)
    assert same(gradients(model), expected)


@takes_cpu
@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_run(kind: str) -> None:
    model = bert()
    optimizer = AdamW(model.parameters(), direct_gradients=True)
    called: list[Tensor] = []
    hook = getattr(model.encoder.encoder.layers[1].up.bias, kind)(lambda given: called.append(given))
    assert not is_direct(model)
    once(model)
    assert len(called) == 1
    hook.remove()
    assert is_direct(model)
    loss = loss_of(model)
    getattr(model.encoder.encoder.layers[1].up.bias, kind)(lambda given: None)
    with pytest.raises(RuntimeError, match="a hook was added to a parameter"):
        loss.backward()
    del optimizer


@takes_cpu
def test_which_models_are_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    model = bert()
    assert not is_direct(model)
    optimizer = AdamW(model.parameters(), direct_gradients=True)
    assert is_direct(model)
    assert not is_direct(bert())  # of another optimizer
    with torch.autograd.set_detect_anomaly(True):
        assert not is_direct(model)
    with monkeypatch.context() as patch:
        patch.setattr(torch.distributed, "is_initialized", lambda: True)
        assert not is_direct(model)
    for each in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        ids = {id(parameter) for group in each.param_groups for parameter in group["params"]}
        assert each._enrolled.ids == ids
    del optimizer, each
    assert not is_direct(model)  # its optimizer is gone


@takes_cpu
def test_groups_that_are_added() -> None:
    model = bert()
    first, *others = model.encoder.encoder.layers.parameters()
    optimizer = AdamW([first], direct_gradients=True)
    assert not is_direct(model)
    optimizer.add_param_group({"params": others})
    assert is_direct(model)


def test_gradients_of_another_dtype_are_left_out() -> None:
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    if not hasattr(parameters[0], "grad_dtype"):
        pytest.skip("torch has no grad_dtype")
    parameters[1].grad_dtype = torch.bfloat16
    enrolled = direct_gradients.Enrolled(parameters)
    by_id = {id(each): each for each in parameters}
    assert not direct_gradients.is_accepted(by_id)
    del by_id[id(parameters[1])]
    assert direct_gradients.is_accepted(by_id)
    del enrolled


@pytest.mark.parametrize("device", DEVICES)
def test_parameters_that_are_frozen_before_the_backward_have_no_gradient(device: str) -> None:
    model = bert(device)
    optimizer = AdamW(model.parameters(), direct_gradients=True)
    loss = model(IDS.to(device), lengths=LENGTHS).logits.square().sum()
    layer = model.bert.encoder.layers[0]
    layer.qkv.weight.requires_grad_(False)
    loss.backward()
    assert layer.qkv.weight.grad is None
    assert layer.out.weight.grad is not None
    del optimizer


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("direct", [True, False])
def test_each_gradient_has_a_storage(direct: bool, device: str) -> None:
    model = bert(device)
    optimizer = AdamW(model.parameters(), direct_gradients=direct)
    model(IDS.to(device), lengths=LENGTHS).logits.square().sum().backward()
    gradients = [each.grad for each in model.bert.encoder.parameters()]
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in gradients)
    del optimizer
