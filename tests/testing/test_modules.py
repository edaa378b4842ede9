"""How modules are compared: against a truth that is fp64 throughout, in more runs where few do not keep the rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fasttfm.testing.modules import compare_modules


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


@pytest.mark.parametrize(("factor", "runs"), [(1.0, 5), (1.001, 20)])
def test_what_does_not_keep_the_rule_in_a_few_runs_gets_more(factor: float, runs: int) -> None:
    calls = 0

    def counted(module: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        nonlocal calls
        calls += module is ours
        return call(module, inputs)

    ours = Scores(factor)
    comparisons = compare_modules(ours, Scores(), counted, INPUTS)
    assert calls == runs
    assert all(comparison.ok for comparison in comparisons) == (factor == 1.0)
