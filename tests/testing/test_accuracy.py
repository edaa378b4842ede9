"""The comparison of an op's outputs: a single number over several random inputs, infinities, cancellation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fasttfm.testing.attention_random import without_delta
from fasttfm.testing.call import Call
from fasttfm.testing.fuzz import RandomCall
from fasttfm.testing.harness import accuracy
from fasttfm.testing.specs import attention
from fasttfm.testing.specs.distillation_loss import SPEC
from fasttfm.testing.tolerance import GRADIENT_FACTOR, OUTPUT_FACTOR, compare, compare_with_terms


@pytest.mark.parametrize(("name", "draws"), [("masked", 5), ("none", 1)])
def test_a_single_number_is_compared_in_several_draws(name: str, draws: int) -> None:
    case = next(case for case in SPEC.cases if case.name == name)
    seen: list[Tensor] = []

    def wrong_in_the_last_draw(**arguments: Any) -> Tensor:
        seen.append(arguments["student_hidden"].detach())
        return SPEC.reference(**arguments) * (1.001 if len(seen) == draws else 1.0)

    loss, *gradients = accuracy(SPEC, case, torch.float32, None, function=wrong_in_the_last_draw)
    assert len(seen) == len({tensor.sum().item() for tensor in seen}) == draws
    assert not loss.ok
    assert len(gradients) == 3
    assert all(gradient.ok for gradient in gradients) == (draws > 1)  # of the first inputs


def test_infinities_must_be_the_same() -> None:
    exact = torch.tensor([-torch.inf, 1.0, torch.inf], dtype=torch.float64)
    right = exact.float()
    assert compare("lse", right, right, exact, OUTPUT_FACTOR).ok
    assert compare("lse", right, torch.zeros(3), exact, OUTPUT_FACTOR).naive_error == 1.0
    for wrong in ([-1e30, 1.0, torch.inf], [torch.inf, 1.0, torch.inf], [-torch.inf, 1.1, torch.inf]):
        assert not compare("lse", torch.tensor(wrong), right, exact, OUTPUT_FACTOR).ok
    assert not compare("lse", torch.tensor([-torch.inf, torch.nan, torch.inf]), right, exact, OUTPUT_FACTOR).ok


def test_elements_that_cancel_are_compared_with_their_terms() -> None:
    exact = torch.tensor([0.0, 1e-17, 0.0, 2.0], dtype=torch.float64)
    terms = torch.tensor([1.0, 3.0, 0.0, 3.0], dtype=torch.float64)
    naive = exact.float()

    def held(*out: float) -> list[bool]:
        comparisons = compare_with_terms("dq", torch.tensor(out), naive, exact, GRADIENT_FACTOR, terms)
        return [comparison.ok for comparison in comparisons]

    assert held(0.0, 0.0, 0.0, 2.0) == [True, True]
    assert held(2e-7, 0.0, 0.0, 2.0) == [True, True]  # one rounding step at 3
    assert held(4e-7, 0.0, 0.0, 2.0) == [True, False]
    assert held(0.0, 0.0, 1e-6, 2.0) == [False, True]  # there is no cancellation there
    assert held(0.0, 0.0, 0.0, 2.000001) == [False, True]


ONE_TOKEN = attention._case("one token", (1, 1, 1), 2, 15, layout="fused")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", [None, without_delta], ids=["reference", "broken"])
def test_the_gradient_of_a_score_cancels_for_one_key(dtype: torch.dtype, function: Any) -> None:
    """Plain torch gives exactly 0. The difference of two sums is not exactly 0, and a gradient without it is wrong."""
    call = RandomCall(Call(attention.SPEC, ONE_TOKEN, dtype, "reference", function=function), 0, 0)
    if function is None:
        call.check()
    else:
        with pytest.raises(AssertionError, match="where it cancels"):
            call.check()
