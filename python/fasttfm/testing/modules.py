"""Holds a module against the one whose place it takes: outputs and every gradient, by the tolerance rule."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fasttfm.testing.tolerance import GRADIENT_FACTOR, OUTPUT_FACTOR, Comparison, compare

Tensors = dict[str, Tensor]
Call = Callable[[Any, Tensors], Mapping[str, Tensor]]  # of a module and its inputs; gives the outputs to compare


# A single small gradient may by chance come out of plain torch exact to the last bit, and would then demand the same of
# every implementation: gradients are compared over several incoming ones.
_DRAWS = 4


def run_module(module: torch.nn.Module, call: Call, inputs: Mapping[str, Tensor]) -> tuple[Tensors, Tensors]:
    """The outputs, and the gradients [draws, ...] of floating inputs and of all parameters, each by name.

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

    def gradients(draw: int) -> tuple[Tensor, ...]:
        incoming = [_incoming(name, value, draw) for name, value in differentiable.items()]
        leaves = list(wanted.values())
        found = torch.autograd.grad(
            list(differentiable.values()), leaves, incoming, allow_unused=True, retain_graph=True
        )
        return tuple(
            torch.zeros_like(leaf) if gradient is None else gradient
            for leaf, gradient in zip(leaves, found, strict=True)
        )

    draws = zip(*(gradients(draw) for draw in range(_DRAWS)), strict=True)
    stacked = {f"d{name}": torch.stack(found) for name, found in zip(wanted, draws, strict=True)}
    return {name: value.detach() for name, value in outputs.items()}, stacked


def compare_modules(
    ours: torch.nn.Module,
    theirs: torch.nn.Module,
    call: Call,
    inputs: Mapping[str, Tensor],
    *,
    translate: Callable[[Tensors], Tensors] | None = None,
) -> list[Comparison]:
    """Every output and gradient of ``ours`` against those of ``theirs`` in fp64, with ``theirs`` as the measure.

    ``translate`` turns gradients by our parameters' names into gradients by their names.
    """
    out, gradients = run_module(ours, call, inputs)
    if translate is not None:
        translated = translate({name[1:]: value for name, value in gradients.items()})
        gradients = {f"d{name}": value for name, value in translated.items()}
    naive, naive_gradients = run_module(theirs, call, inputs)
    exact, exact_gradients = run_module(copy.deepcopy(theirs).double(), call, inputs)
    for found, expected in ((out, exact), (gradients, exact_gradients)):
        if found.keys() != expected.keys():
            raise AssertionError(f"the names differ: {sorted(found.keys() ^ expected.keys())}")
    return [
        *(compare(name, out[name], naive[name], exact[name], OUTPUT_FACTOR) for name in exact),
        *(
            compare(name, gradients[name], naive_gradients[name], exact_gradients[name], GRADIENT_FACTOR)
            for name in exact_gradients
        ),
    ]


def check_modules(*args: Any, **kwargs: Any) -> None:
    wrong = [str(comparison) for comparison in compare_modules(*args, **kwargs) if not comparison.ok]
    assert not wrong, "; ".join(wrong)


def _incoming(name: str, output: Tensor, draw: int) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {draw}".encode()))
    return torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype)
