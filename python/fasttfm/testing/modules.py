"""Compares a module with the one that it replaces: outputs and every gradient, by the tolerance rule; also second
derivatives and forward mode, which it may refuse."""

from __future__ import annotations

import contextlib
import copy
import itertools
import statistics
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from fasttfm.testing.properties import refusal_allowed
from fasttfm.testing.tolerance import GRADIENT_FACTOR, OUTPUT_FACTOR, Comparison, compare, summary

Tensors = dict[str, Tensor]


class Results(NamedTuple):
    outputs: Tensors
    gradients: Tensors


Call = Callable[[Any, Tensors], Mapping[str, Tensor]]  # from a module and its inputs to the outputs to compare


# The error of a whole module is the rounding error of an early operation, amplified by the later ones: of two equally
# good implementations, either can be several times better than the other. Modules are therefore compared in several
# runs, with parameters of other scales and other incoming gradients, and the rule applies to the medians of the errors.
# If there is only one number to compare, as in a loss, the rule applies to the largest error of all draws. Five runs
# suffice to detect broken modules; tensors with few numbers need more runs, since single roundings can decide. The
# number of runs depends only on sizes, and every run counts.
_DRAWS = 5
_DRAWS_OF_FEW_NUMBERS = 10
_FEW_NUMBERS = 8


def run_module(module: torch.nn.Module, call: Call, inputs: Mapping[str, Tensor], draw: int = 0) -> Results:
    """The outputs, and the gradients of floating inputs and of all parameters that require one, each by name.

    Inputs are moved to the module's device, floating ones converted to its dtype. Incoming gradients are random, but
    the same for every module.
    """
    parameters = dict(module.named_parameters())
    prepared = _prepared(module, inputs)
    outputs = call(module, prepared)
    leaves = {name: value for name, value in (prepared | parameters).items() if value.requires_grad}
    differentiable = {name: value for name, value in outputs.items() if value.requires_grad}
    incoming = [_incoming(name, value, draw) for name, value in differentiable.items()]
    computed = torch.autograd.grad(list(differentiable.values()), list(leaves.values()), incoming, allow_unused=True)
    gradients = {
        name: torch.zeros_like(value) if gradient is None else gradient
        for (name, value), gradient in zip(leaves.items(), computed, strict=True)
    }
    return Results({name: value.detach() for name, value in outputs.items()}, gradients)


def _prepared(module: torch.nn.Module, inputs: Mapping[str, Tensor]) -> Tensors:
    first = next(module.parameters())
    return {
        name: value.detach().to(first).requires_grad_() if value.is_floating_point() else value.to(first.device)
        for name, value in inputs.items()
    }


def compare_modules(
    ours: torch.nn.Module,
    theirs: torch.nn.Module,
    call: Call,
    inputs: Mapping[str, Tensor],
    *,
    translate: Callable[[Tensors], Tensors] | None = None,
    draws: int | None = None,
) -> list[Comparison]:
    """Compares every output and gradient of ``ours`` with ``theirs`` in fp64; ``theirs`` in the tested dtype gives the
    tolerance.

    ``translate`` converts a dict of tensors from their parameters' names and shapes to ours.
    There are ``draws`` runs; by default five, or ten where a compared tensor has fewer than eight elements.
    """
    comparisons: dict[str, list[Comparison]] = {}
    sizes: dict[str, int] = {}
    for draw in itertools.count():
        with _scaled(ours, draw), _scaled(theirs, draw):
            out = run_module(ours, call, inputs, draw)
            naive = run_module(theirs, call, inputs, draw)
            with _float_keeps_double():
                exact = run_module(copy.deepcopy(theirs).double(), call, inputs, draw)
        if translate is not None:
            naive, exact = (Results(run.outputs, translate(run.gradients)) for run in (naive, exact))
        for comparison, elements in _compare_runs(out, naive, exact):
            comparisons.setdefault(comparison.name, []).append(comparison)
            sizes[comparison.name] = elements
        if draws is None:
            draws = _DRAWS_OF_FEW_NUMBERS if any(size < _FEW_NUMBERS for size in sizes.values()) else _DRAWS
        if draw + 1 >= draws:
            break
    return [summary(compared, max if sizes[name] == 1 else statistics.median) for name, compared in comparisons.items()]


def check_modules(*args: Any, **kwargs: Any) -> None:
    wrong = [str(comparison) for comparison in compare_modules(*args, **kwargs) if not comparison.ok]
    assert not wrong, "; ".join(wrong)


def _compare_runs(out: Results, naive: Results, exact: Results) -> Iterator[tuple[Comparison, int]]:
    """Every tensor's comparison, and its number of elements."""
    for kind, factor in (("outputs", OUTPUT_FACTOR), ("gradients", GRADIENT_FACTOR)):
        tested, measure, expected = (getattr(run, kind) for run in (out, naive, exact))
        if tested.keys() != expected.keys():
            raise AssertionError(f"the names of {kind} differ: {sorted(tested.keys() ^ expected.keys())}")
        for name in expected:
            shown = name if kind == "outputs" else f"d{name}"
            yield compare(shown, tested[name], measure[name], expected[name], factor), expected[name].numel()


@contextlib.contextmanager
def _scaled(module: torch.nn.Module, draw: int) -> Iterator[None]:
    """The module with parameters that differ from draw to draw."""
    before = [parameter.detach().clone() for parameter in module.parameters()]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1 + (draw % _DRAWS + draw // _DRAWS * _DRAWS / _DRAWS_OF_FEW_NUMBERS) / 16)
    yield
    with torch.no_grad():
        for parameter, value in zip(module.parameters(), before, strict=True):
            parameter.copy_(value)


@contextlib.contextmanager
def _float_keeps_double() -> Iterator[None]:
    """Keeps fp64 in ``logits.float()``, which losses in transformers call: it should mean at least fp32."""
    narrow = Tensor.float

    def at_least_float(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor if tensor.dtype == torch.float64 else narrow(tensor, *args, **kwargs)

    with mock.patch.object(Tensor, "float", at_least_float):
        yield


# ---- other ways to differentiate -------------------------------------------------------------------------------------


def check_other_derivatives(
    ours: torch.nn.Module, theirs: torch.nn.Module, call: Call, inputs: Mapping[str, Tensor]
) -> None:
    """Checks that second derivatives, and tangents in forward mode, are those of ``theirs`` in fp64, or that an error
    which names the op is raised."""
    for derivatives in (second_derivatives, tangents):
        expected = list(derivatives(theirs.double(), call, inputs).values())
        with refusal_allowed():
            torch.testing.assert_close(list(derivatives(ours.double(), call, inputs).values()), expected)


def second_derivatives(module: torch.nn.Module, call: Call, inputs: Mapping[str, Tensor]) -> Tensors:
    """For each input and parameter, by name: the derivative of a weighted sum of all first derivatives."""
    prepared = _prepared(module, inputs)
    leaves = {
        name: value
        for name, value in {**prepared, **dict(module.named_parameters())}.items()
        if value.is_floating_point()
    }
    with sdpa_kernel(SDPBackend.MATH):  # torch's other kernels have no second derivatives
        outputs = call(module, prepared)
        sums = [(value * _incoming(name, value, 0)).sum() for name, value in outputs.items()]
        first = torch.autograd.grad(torch.stack(sums).sum(), list(leaves.values()), create_graph=True)
        # The weights depend on the index: the two modules may name the same parameters differently.
        weighted = [(value * _incoming(str(index), value, 1)).sum() for index, value in enumerate(first)]
        second = torch.autograd.grad(
            torch.stack(weighted).sum(), list(leaves.values()), allow_unused=True, materialize_grads=True
        )
    return dict(zip(leaves, second, strict=True))


def tangents(module: torch.nn.Module, call: Call, inputs: Mapping[str, Tensor]) -> Tensors:
    """For each output, by name: its tangent if every floating input and every parameter has one."""

    def dual(index: int, value: Tensor) -> Tensor:
        return forward_ad.make_dual(value.detach(), _incoming(str(index), value, 0))

    with forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
        prepared = {
            name: dual(-1 - index, value) if value.is_floating_point() else value
            for index, (name, value) in enumerate(_prepared(module, inputs).items())
        }
        parameters = {name: dual(index, value) for index, (name, value) in enumerate(module.named_parameters())}
        outputs = _call_with(module, parameters, call, prepared)
        pairs = {name: forward_ad.unpack_dual(value) for name, value in outputs.items()}
        return {
            name: torch.zeros_like(primal) if tangent is None else tangent.detach()
            for name, (primal, tangent) in pairs.items()
        }


class _Called(torch.nn.Module):
    """``call`` as a module's forward, so that ``functional_call`` can replace the parameters."""

    def __init__(self, module: torch.nn.Module, call: Call) -> None:
        super().__init__()
        self.module, self.call = module, call

    def forward(self, inputs: Tensors) -> Mapping[str, Tensor]:
        return self.call(self.module, inputs)


def _call_with(module: torch.nn.Module, parameters: Tensors, call: Call, inputs: Tensors) -> Mapping[str, Tensor]:
    renamed = {f"module.{name}": value for name, value in parameters.items()}
    outputs: Mapping[str, Tensor] = functional_call(_Called(module, call), renamed, (inputs,))
    return outputs


def _incoming(name: str, output: Tensor, draw: int) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {draw}".encode()))
    return torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)
