"""GEMMs of few rows on a CPU, which read the weight once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.ops.layers.support import missing_cpu
from fasttfm.testing import compare

pytestmark = pytest.mark.skipif(missing_cpu() is not None, reason=f"CPU: {missing_cpu()}")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = x.new_full((len(x), len(weight)), torch.nan)
    _native.core().linear_cpu(x, weight, bias, y)
    return y


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 9, 16, 17, 30])
@pytest.mark.parametrize(("columns", "inner"), [(1, 1), (3, 15), (33, 64), (50, 100), (160, 257)])
def test_results(rows: int, columns: int, inner: int) -> None:
    generator = torch.Generator().manual_seed(rows * columns)
    x, weight, bias = (torch.randn(size, generator=generator) for size in ((rows, inner), (columns, inner), (columns,)))
    for given in (bias, None):
        exact = torch.nn.functional.linear(x.double(), weight.double(), None if given is None else given.double())
        comparison = compare("y", linear(x, weight, given), torch.nn.functional.linear(x, weight, given), exact, 2.0)
        assert comparison.ok, str(comparison)


def test_a_row_has_the_same_bits_in_every_batch_and_with_any_threads() -> None:
    x, weight = torch.randn(8, 100), torch.randn(70, 100)
    expected = linear(x, weight, None)
    before = torch.get_num_threads()
    for rows, threads in ((1, 1), (3, 1), (6, 3), (8, 2)):
        torch.set_num_threads(threads)
        try:
            assert torch.equal(linear(x[:rows].contiguous(), weight, None), expected[:rows])
        finally:
            torch.set_num_threads(before)


def test_values_that_are_not_finite_stay_in_their_row_and_column() -> None:
    x, weight = torch.randn(4, 32), torch.randn(20, 32)
    x[1, 5], weight[7, 3] = torch.inf, torch.nan
    found = linear(x, weight, None)
    wrong = ~found.isfinite()
    assert wrong[1].all()
    assert wrong[:, 7].all()
    assert int(wrong.sum()) == 20 + 4 - 1
