"""Holds a module against the one whose place it takes: outputs and every gradient, by the tolerance rule."""

from __future__ import annotations

import contextlib
import copy
import math
import statistics
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from fasttfm.testing.tolerance import GRADIENT_FACTOR, OUTPUT_FACTOR, Comparison, compare

Tensors = dict[str, Tensor]


class Results(NamedTuple):
    outputs: Tensors
    gradients: Tensors


Call = Callable[[Any, Tensors], Mapping[str, Tensor]]  # of a module and its inputs; gives the outputs to compare


# In a whole module, an error is the rounding of some early operation that the later ones enlarge: of two equally good
# implementations, now one and now the other comes out several times better. So modules are compared in several runs,
# with parameters of other sizes and other incoming gradients, and the medians of the errors are held to the rule. Where
# there is but one number to compare, as in a loss, the draws are the rule's elements: of them it takes the largest.
# Five runs tell most modules from broken ones. Where those do not keep the rule, which a rounding of a few numbers can
# decide, more runs are made and all of them count.
_DRAWS = 5
_MOST_DRAWS = 20


def run_module(module: torch.nn.Module, call: Call, inputs: Mapping[str, Tensor], draw: int = 0) -> Results:
    """The outputs, and the gradients of floating inputs and of all parameters that want one, each by name.

    Inputs go to the module's device, floating ones take its type. Incoming gradients are random, but the same for every
    module.
    """
    parameters = dict(module.named_parameters())
    first = next(iter(parameters.values()))
    prepared = {
        name: value.detach().to(first).requires_grad_() if value.is_floating_point() else value.to(first.device)
        for name, value in inputs.items()
    }
    outputs = call(module, prepared)
    wanted = {name: value for name, value in (prepared | parameters).items() if value.requires_grad}
    differentiable = {name: value for name, value in outputs.items() if value.requires_grad}
    incoming = [_incoming(name, value, draw) for name, value in differentiable.items()]
    found = torch.autograd.grad(list(differentiable.values()), list(wanted.values()), incoming, allow_unused=True)
    gradients = {
        name: torch.zeros_like(value) if gradient is None else gradient
        for (name, value), gradient in zip(wanted.items(), found, strict=True)
    }
    return Results({name: value.detach() for name, value in outputs.items()}, gradients)


def compare_modules(
    ours: torch.nn.Module,
    theirs: torch.nn.Module,
    call: Call,
    inputs: Mapping[str, Tensor],
    *,
    translate: Callable[[Tensors], Tensors] | None = None,
    draws: int = _DRAWS,
    most_draws: int = _MOST_DRAWS,
) -> list[Comparison]:
    """Every output and gradient of ``ours`` against those of ``theirs`` in fp64, with ``theirs`` as the measure.

    ``translate`` turns tensors by their parameters' names into tensors by ours: gradients are compared as we keep them.
    There are ``draws`` runs, and up to ``most_draws`` where those do not keep the rule.
    """
    comparisons: dict[str, list[Comparison]] = {}
    single: set[str] = set()
    summaries: list[Comparison] = []
    for draw in range(most_draws):
        with _scaled(ours, draw), _scaled(theirs, draw):
            out = run_module(ours, call, inputs, draw)
            naive = run_module(theirs, call, inputs, draw)
            with _float_keeps_double():
                exact = run_module(copy.deepcopy(theirs).double(), call, inputs, draw)
        if translate is not None:
            naive, exact = (Results(run.outputs, translate(run.gradients)) for run in (naive, exact))
        for comparison, elements in _compare_runs(out, naive, exact):
            comparisons.setdefault(comparison.name, []).append(comparison)
            if elements == 1:
                single.add(comparison.name)
        summaries = [
            _summary(found, max if name in single else statistics.median) for name, found in comparisons.items()
        ]
        if draw + 1 >= draws and all(summary.ok for summary in summaries):
            break
    return summaries


def check_modules(*args: Any, **kwargs: Any) -> None:
    wrong = [str(comparison) for comparison in compare_modules(*args, **kwargs) if not comparison.ok]
    assert not wrong, "; ".join(wrong)


def _compare_runs(out: Results, naive: Results, exact: Results) -> Iterator[tuple[Comparison, int]]:
    """Every tensor's comparison, and its number of elements."""
    for kind, factor in (("outputs", OUTPUT_FACTOR), ("gradients", GRADIENT_FACTOR)):
        found, measure, expected = (getattr(run, kind) for run in (out, naive, exact))
        if found.keys() != expected.keys():
            raise AssertionError(f"the names of {kind} differ: {sorted(found.keys() ^ expected.keys())}")
        for name in expected:
            shown = name if kind == "outputs" else f"d{name}"
            yield compare(shown, found[name], measure[name], expected[name], factor), expected[name].numel()


def _summary(runs: list[Comparison], of: Callable[[list[float]], float]) -> Comparison:
    errors = [run.error for run in runs]
    error = of(errors) if all(map(math.isfinite, errors)) else math.nan
    naive_error, bound = (of([getattr(run, name) for run in runs]) for name in ("naive_error", "bound"))
    return Comparison(runs[0].name, error, naive_error, bound)


@contextlib.contextmanager
def _scaled(module: torch.nn.Module, draw: int) -> Iterator[None]:
    """The module with parameters that differ from draw to draw."""
    before = [parameter.detach().clone() for parameter in module.parameters()]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1 + (draw % _DRAWS + draw // _DRAWS * _DRAWS / _MOST_DRAWS) / 16)
    yield
    with torch.no_grad():
        for parameter, value in zip(module.parameters(), before, strict=True):
            parameter.copy_(value)


@contextlib.contextmanager
def _float_keeps_double() -> Iterator[None]:
    """Losses in transformers take ``logits.float()``, which means fp32 at least: fp64 stays what it is."""
    narrow = Tensor.float

    def at_least_float(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor if tensor.dtype == torch.float64 else narrow(tensor, *args, **kwargs)

    with mock.patch.object(Tensor, "float", at_least_float):
        yield


def _incoming(name: str, output: Tensor, draw: int) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {draw}".encode()))
    return torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)
