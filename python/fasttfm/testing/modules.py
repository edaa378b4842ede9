"""Holds a module against the one whose place it takes: outputs and every gradient, by the tolerance rule."""

from __future__ import annotations

import contextlib
import copy
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttfm.testing.tolerance import GRADIENT_FACTOR, OUTPUT_FACTOR, Comparison, compare

Tensors = dict[str, Tensor]


class Results(NamedTuple):
    outputs: Tensors
    gradients: Tensors


Call = Callable[[Any, Tensors], Mapping[str, Tensor]]  # of a module and its inputs; gives the outputs to compare


# A few numbers may by chance come out of plain torch exact to the last bit, and would then demand the same of every
# implementation: modules are compared in several runs, with parameters of other sizes and other incoming gradients.
_DRAWS = 4


def run_module(module: torch.nn.Module, call: Call, inputs: Mapping[str, Tensor], draw: int = 0) -> Results:
    """The outputs, and the gradients of floating inputs and of all parameters, each by name.

    Floating inputs take the module's type. Incoming gradients are random, but the same for every module.
    """
    parameters = dict(module.named_parameters())
    dtype = next(iter(parameters.values())).dtype
    prepared = {
        name: value.detach().to(dtype).requires_grad_() if value.is_floating_point() else value
        for name, value in inputs.items()
    }
    outputs = call(module, prepared)
    wanted = {name: value for name, value in prepared.items() if value.is_floating_point()} | parameters
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
) -> list[Comparison]:
    """Every output and gradient of ``ours`` against those of ``theirs`` in fp64, with ``theirs`` as the measure.

    ``translate`` turns tensors by their parameters' names into tensors by ours: gradients are compared as we keep them.
    """
    runs: list[list[Results]] = [[], [], []]  # ours, theirs, theirs in fp64
    for draw in range(_DRAWS):
        with _scaled(ours, draw), _scaled(theirs, draw):
            results = (
                run_module(ours, call, inputs, draw),
                run_module(theirs, call, inputs, draw),
                run_module(copy.deepcopy(theirs).double(), call, inputs, draw),
            )
        for collected, result in zip(runs, results, strict=True):
            if translate is not None and collected is not runs[0]:
                result = Results(result.outputs, translate(result.gradients))
            collected.append(result)
    out, naive, exact = (_stacked(collected) for collected in runs)
    for found, expected in zip(out, exact, strict=True):
        if found.keys() != expected.keys():
            raise AssertionError(f"the names differ: {sorted(found.keys() ^ expected.keys())}")
    return [
        *(
            compare(name, out.outputs[name], naive.outputs[name], exact.outputs[name], OUTPUT_FACTOR)
            for name in exact.outputs
        ),
        *(
            compare(f"d{name}", out.gradients[name], naive.gradients[name], exact.gradients[name], GRADIENT_FACTOR)
            for name in exact.gradients
        ),
    ]


def check_modules(*args: Any, **kwargs: Any) -> None:
    wrong = [str(comparison) for comparison in compare_modules(*args, **kwargs) if not comparison.ok]
    assert not wrong, "; ".join(wrong)


def _stacked(runs: list[Results]) -> Results:
    outputs, gradients = (
        {name: torch.stack([run[part][name] for run in runs]) for name in runs[0][part]} for part in (0, 1)
    )
    return Results(outputs, gradients)


@contextlib.contextmanager
def _scaled(module: torch.nn.Module, draw: int) -> Iterator[None]:
    """The module with parameters that differ from draw to draw."""
    before = [parameter.detach().clone() for parameter in module.parameters()]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1 + draw / 16)
    yield
    with torch.no_grad():
        for parameter, value in zip(module.parameters(), before, strict=True):
            parameter.copy_(value)


def _incoming(name: str, output: Tensor, draw: int) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {draw}".encode()))
    return torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype)
