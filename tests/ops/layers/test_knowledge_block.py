"""A layer over tokens and entities in one native call, against the same layer op by op and in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fasttfm import _native, nn, use_backend
from fasttfm.ops.layers import knowledge_block, knowledge_native, support
from fasttfm.ops.layers.knowledge_block import Alignment

takes_cpu = pytest.mark.skipif(support.missing_cpu() is not None, reason=f"CPU: {support.missing_cpu()}")
hopper = pytest.mark.skipif(_native.missing_hopper() is not None, reason=f"Hopper: {_native.missing_hopper()}")
DEVICES = [
    pytest.param("cpu", torch.float32, torch.float32, marks=takes_cpu, id="cpu"),
    pytest.param("cuda", torch.bfloat16, torch.float32, marks=[pytest.mark.gpu, hopper], id="bf16-fp32"),
    pytest.param("cuda", torch.float16, torch.float16, marks=[pytest.mark.gpu, hopper], id="fp16"),
]
LAYER = {"width": 128, "heads": 2, "intermediate": 192, "entity_width": 100, "entity_heads": 4}
BOUNDS = [0, 9, 10, 80, 80, 211]  # one sequence is empty
# Errors of either path against fp64 are of one size; the factor leaves room for two orders of summation.
FACTOR = 2.0

CHANGES = [
    pytest.param({}, (), id="norm"),
    pytest.param({"last": True, "keep_activation": True}, ("up", "entity_out.bias"), id="last"),
    pytest.param({"entity_attention": False, "recompute": True}, ("entity_up", "down"), id="mix"),
    pytest.param({"entity_width": 24, "activation": "relu"}, ("qkv", "entity_qkv", "entity_norm2"), id="narrow"),
    pytest.param({"keep_activation": True, "entity_width": 136}, ("entity_down", "up.bias"), id="wide"),
]


class Problem:
    """A layer and its inputs, drawn from a fixed seed."""

    def __init__(self, changes: dict[str, Any], frozen: tuple[str, ...], rate: float) -> None:
        torch.manual_seed(0)
        self.frozen, self.drops = frozen, rate > 0
        self.settings = {**LAYER, **changes, "dropout": rate, "attention_dropout": rate}
        self.state = {
            name: torch.randn(value.shape) * 0.1 + (name.endswith(("norm1.weight", "norm2.weight")))
            for name, value in nn.KnowledgeLayer(**self.settings).state_dict().items()
        }
        tokens, width = BOUNDS[-1], self.settings["entity_width"]
        self.entity_ids = torch.where(torch.rand(tokens) < 0.25, torch.arange(tokens), -1)
        cu_seqlens = torch.tensor(BOUNDS, dtype=torch.int32)
        self.aligned = nn.AlignedEntities.of(self.entity_ids, cu_seqlens, 160)
        self.cu_seqlens = cu_seqlens
        self.x, self.entities = torch.randn(tokens, self.settings["width"]), torch.randn(self.aligned.count, width)
        self.weights = [torch.randn_like(self.x), torch.randn_like(self.entities)]

    def layer(self, device: str, dtype: torch.dtype) -> Any:
        layer = nn.KnowledgeLayer(**self.settings).to(device, dtype)
        layer.load_state_dict(self.state)
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and not name.startswith(self.frozen or ("-",)))
        return layer

    def run(
        self, device: str, dtype: torch.dtype, parameters: torch.dtype, *, native: bool = True, unused: bool = False
    ) -> dict[str, Tensor]:
        """Both outputs and all gradients, of a weighted sum of the outputs; ``unused``: of the first only."""
        layer = self.layer(device, parameters)
        x, entities = (each.to(device, dtype, copy=True).requires_grad_() for each in (self.x, self.entities))
        aligned, cu_seqlens = self.aligned.to(device), self.cu_seqlens.to(device)
        seeds = (torch.arange(6) * 7919 + 3).to(device) if self.drops else None
        with use_backend("cuda" if native and device == "cuda" else None):
            found = layer(x, cu_seqlens, 160, entities=entities, aligned=aligned, seeds=seeds)
        outputs = [each for each in found[: 1 if unused else 2] if each is not None]
        weights = [each.to(device, torch.promote_types(dtype, torch.float32)) for each in self.weights]
        sum((out * weight).sum() for out, weight in zip(outputs, weights, strict=False)).backward()  # type: ignore[union-attr]
        gradients = {name: each.grad for name, each in layer.named_parameters() if each.grad is not None}
        named = {f"out{number}": each for number, each in enumerate(outputs)}
        return {**named, "x": x.grad, "entities": entities.grad, **gradients}

    def reason(self, device: str, dtype: torch.dtype, parameters: torch.dtype) -> str | None:
        """Why the call is not native."""
        layer, aligned = self.layer(device, parameters), self.aligned.to(device)
        with use_backend("cuda" if device == "cuda" else None):
            options = layer._knowledge_options(160, aligned)
        where = Alignment(self.cu_seqlens.to(device), aligned.cu_seqlens, aligned.positions)
        modules = layer._knowledge_modules()
        values = [None if each is None else getattr(each, name) for each in modules for name in ("weight", "bias")]
        own = (knowledge_block.BlockParameters(*values[:12]), knowledge_block.BlockParameters(*values[12:]))
        return knowledge_block.refused(self.x.to(device, dtype), self.entities.to(device, dtype), where, options, own)


def compare(found: dict[str, Tensor], peer: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    assert found.keys() == peer.keys() == exact.keys()
    for name, expected in exact.items():
        error, other = ((each[name].double().cpu() - expected).abs().max().item() for each in (found, peer))
        assert found[name].dtype == peer[name].dtype
        unit = torch.finfo(found[name].dtype).eps * expected.abs().max().item()
        assert error <= FACTOR * other + unit, f"{name}: {error} against {other}"


def op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knowledge_native, "call_of", lambda *_: "takes no calls in this test")


@pytest.mark.parametrize(("device", "dtype", "parameters"), DEVICES)
@pytest.mark.parametrize("rate", [0.0, 0.25])
@pytest.mark.parametrize(("changes", "frozen"), CHANGES)
def test_the_native_layer_has_the_numbers_of_the_ops(
    device: str,
    dtype: torch.dtype,
    parameters: torch.dtype,
    rate: float,
    changes: dict[str, Any],
    frozen: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = Problem(changes, frozen, rate)
    assert problem.reason(device, dtype, parameters) is None
    found = problem.run(device, dtype, parameters)
    again = problem.run(device, dtype, parameters)
    assert all(torch.equal(value, again[name]) for name, value in found.items())
    op_by_op(monkeypatch)
    peer = problem.run(device, dtype, parameters, native=False)
    compare(found, peer, problem.run("cpu", torch.float64, torch.float64))


@pytest.mark.parametrize(("device", "dtype", "parameters"), DEVICES)
@pytest.mark.parametrize("attention", [True, False])
def test_entities_that_leave_a_layer_unused(
    device: str, dtype: torch.dtype, parameters: torch.dtype, attention: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Problem({"entity_attention": attention}, (), 0.0)
    found = problem.run(device, dtype, parameters, unused=True)
    op_by_op(monkeypatch)
    exact = problem.run("cpu", torch.float64, torch.float64, unused=True)
    compare(found, problem.run(device, dtype, parameters, native=False, unused=True), exact)


@pytest.mark.parametrize(("device", "dtype", "parameters"), DEVICES)
def test_without_gradients(device: str, dtype: torch.dtype, parameters: torch.dtype) -> None:
    problem = Problem({}, (), 0.0)
    layer, aligned = problem.layer(device, parameters), problem.aligned.to(device)
    inputs = (problem.x.to(device, dtype), problem.cu_seqlens.to(device), 160)
    entities = problem.entities.to(device, dtype)
    with use_backend("cuda" if device == "cuda" else None):
        trained = layer(*inputs, entities=entities, aligned=aligned)
        with torch.no_grad():
            found = layer(*inputs, entities=entities, aligned=aligned)
    assert all(torch.equal(one, other) for one, other in zip(found, trained, strict=True))


@takes_cpu
def test_a_backward_that_does_not_fit_runs_by_the_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem({}, ("up",), 0.25)
    expected = problem.run("cpu", torch.float32, torch.float32)

    def refuse(*_: Any) -> None:
        raise _native.DoesNotFit

    monkeypatch.setattr(knowledge_native, "backward", refuse)
    found = problem.run("cpu", torch.float32, torch.float32)
    exact = problem.run("cpu", torch.float64, torch.float64)
    compare(found, expected, exact)


@takes_cpu
def test_a_parameter_that_changes_before_the_backward_is_noticed() -> None:
    problem = Problem({}, (), 0.0)
    layer = problem.layer("cpu", torch.float32)
    y, _ = layer(problem.x, problem.cu_seqlens, 160, entities=problem.entities, aligned=problem.aligned)
    with torch.no_grad():
        layer.entity_up.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="a parameter of a transformer layer has changed"):
        y.sum().backward()


def test_calls_that_the_core_does_not_support() -> None:
    problem = Problem({}, (), 0.0)
    assert "float32 on the CPU" in str(problem.reason("cpu", torch.float64, torch.float64))
    problem.entities = problem.entities[:0]
    assert "at least one" in str(problem.reason("cpu", torch.float32, torch.float32))
