"""The check for equal bits detects results that depend on alignment or on the number of threads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fasttfm.testing.harness import check_same_bits
from fasttfm.testing.spec import OpCase, OpSpec, draw

CASE = OpCase("rows", {"shape": (3, 5)})


def doubled(x: Tensor, backend: str | None = None) -> Tensor:
    return x + x


def where_it_begins(x: Tensor, backend: str | None = None) -> Tensor:
    return x + x.data_ptr() % 64


def how_many_threads(x: Tensor, backend: str | None = None) -> Tensor:
    return x + torch.get_num_threads()


def check(function: Callable[..., Tensor], *, torch_products: bool = False) -> None:
    spec = OpSpec(
        name="made_up",
        function=function,
        reference=doubled,
        inputs=lambda case, dtype, device, generator: {
            "x": draw(generator, *case.sizes["shape"], dtype=dtype, device=device)
        },
        differentiable=(),
        cases=(CASE,),
        torch_products=torch_products,
    )
    check_same_bits(spec, CASE, torch.float32, "cpu")


def test_a_function_of_its_input_passes() -> None:
    check(doubled)


def test_a_result_that_depends_on_alignment_is_rejected() -> None:
    with pytest.raises(AssertionError, match="elsewhere in memory differs"):
        check(where_it_begins)


@pytest.mark.parametrize("torch_products", [False, True])
def test_a_result_that_depends_on_the_number_of_threads_is_rejected(torch_products: bool) -> None:
    with pytest.raises(AssertionError, match=r"run \d differs"):
        check(how_many_threads, torch_products=torch_products)
