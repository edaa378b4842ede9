"""The comparison of modules: with a result in fp64 throughout, over a number of runs that depends on the sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from fasttfm.testing.modules import check_other_derivatives, compare_modules


class Scores(torch.nn.Module):
    """The logarithm of a sum over columns, of fp32 at least, as losses of transformers are."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 7 * 64).view(64, 7))
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return torch.logsumexp((x @ self.weight).float(), dim=-1) * self.factor


def call(module: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"y": module(inputs["x"])}


INPUTS = {"x": torch.randn(5, 64, generator=torch.Generator().manual_seed(0))}


def test_the_truth_is_not_rounded_to_fp32() -> None:
    (y, *_) = compare_modules(Scores(), Scores(), call, INPUTS)
    assert y.name == "y"
    assert y.naive_error > 0
    assert y.naive_error < y.bound


@pytest.mark.parametrize("rows", [5, 8])
@pytest.mark.parametrize("factor", [1.0, 1.001])
def test_only_sizes_decide_the_number_of_runs(factor: float, rows: int) -> None:
    calls = 0

    def counted(module: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        nonlocal calls
        calls += module is ours
        return call(module, inputs)

    ours = Scores(factor)
    inputs = {"x": torch.randn(rows, 64, generator=torch.Generator().manual_seed(0))}
    comparisons = compare_modules(ours, Scores(), counted, inputs)
    assert calls == (10 if rows < 8 else 5)
    assert all(comparison.ok for comparison in comparisons) == (factor == 1.0)


class _Exponential(torch.autograd.Function):
    """Its gradient is correct, but a second derivative takes it for a constant."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return dy * y.detach()


class Exponential(torch.nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 7))
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        z = x * self.weight
        if self.form == "refuses" and (torch.is_grad_enabled() or forward_ad._current_level >= 0):
            raise NotImplementedError("layer_norm: second derivatives: not implemented; use torch's")
        if self.form == "constant gradient":
            return _Exponential.apply(z) if forward_ad._current_level < 0 else z.exp()
        return (forward_ad.unpack_dual(z).primal if self.form == "no tangent" else z).exp()


@pytest.mark.parametrize("form", ["right", "refuses", "constant gradient", "no tangent"])
def test_other_derivatives_that_are_silently_wrong_are_found(form: str) -> None:
    arguments = (Exponential(form), Exponential("right"), call, {"x": torch.linspace(0, 1, 7)})
    if form in ("right", "refuses"):
        check_other_derivatives(*arguments)
    else:
        with pytest.raises(AssertionError, match="not close"):
            check_other_derivatives(*arguments)


def test_an_error_that_names_no_op_is_no_refusal() -> None:
    def fails(module: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        if module is ours:
            raise RuntimeError("something else")
        return call(module, inputs)

    ours = Exponential("right")
    with pytest.raises(AssertionError, match="expected an error that names the op"):
        check_other_derivatives(ours, Exponential("right"), fails, {"x": torch.linspace(0, 1, 7)})
