"""Loads and stores convert as torch does, on every instruction set, for each 16-bit pattern and rounding boundary."""

from __future__ import annotations

import pytest
import torch
from native.calls import elementwise
from torch import Tensor

pytestmark = pytest.mark.usefixtures("isa")
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
INFINITY = torch.tensor(float("inf"))


def all_patterns(dtype: torch.dtype) -> Tensor:
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, except that any NaN equals any NaN."""
    bits = {2: torch.int16, 4: torch.int32}[a.element_size()]
    both_nan = a.isnan() & b.isnan()
    return a.dtype == b.dtype and bool(((a.view(bits) == b.view(bits)) | both_nan).all())


def neighbours(x: Tensor) -> Tensor:
    """Each number and the fp32 numbers right below and above it."""
    return torch.cat([x, torch.nextafter(x, -INFINITY), torch.nextafter(x, INFINITY)])


def rounding_boundaries(dtype: torch.dtype) -> Tensor:
    """fp32 numbers at and next to every number of ``dtype`` and every midpoint of two, including infinity."""
    positive = all_patterns(dtype)[: 2**15]
    finite = positive[positive.isfinite()].double()
    past_largest = finite[-1] + (
        finite[-1] - finite[-2]
    )  # the number that would follow: from half way on it is infinity
    grid = torch.cat([finite, past_largest[None]])
    points = neighbours(torch.cat([grid, (grid[1:] + grid[:-1]) / 2]).float())
    return torch.cat([points, -points])


@HALVES
def test_widening_every_pattern(dtype: torch.dtype) -> None:
    patterns = all_patterns(dtype)
    assert same(elementwise(patterns, dtype=torch.float32), patterns.float())


@HALVES
def test_narrowing_at_every_rounding_boundary(dtype: torch.dtype) -> None:
    x = rounding_boundaries(dtype)
    assert x.numel() > 6 * 2 * 30000
    assert same(elementwise(x, dtype=dtype), x.to(dtype))


@HALVES
def test_narrowing_special_values(dtype: torch.dtype) -> None:
    nan_bits = [0x7F800001, 0x7F80FFFF, 0x7FBFFFFF, 0x7FC00000, 0x7FFFFFFF]
    patterns = [0, 1, 2, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, *nan_bits]
    x = torch.tensor(patterns, dtype=torch.int32).view(torch.float32)
    x = torch.cat([x, -x])
    assert x.isnan().sum() == 2 * len(nan_bits)
    assert same(elementwise(x, dtype=dtype), x.to(dtype))


@HALVES
def test_narrowing_random_bits(dtype: torch.dtype) -> None:
    bits = torch.randint(-(2**31), 2**31, (2**20,), generator=torch.Generator().manual_seed(0), dtype=torch.int64)
    x = bits.to(torch.int32).view(torch.float32)
    assert same(elementwise(x, dtype=dtype), x.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", range(36))
def test_tails_stay_inside_the_array(dtype: torch.dtype, count: int) -> None:
    x = torch.randn(64, generator=torch.Generator().manual_seed(1)).to(dtype)
    y = torch.full((64,), 7.0, dtype=dtype)
    elementwise(x[:count], out=y[8 : 8 + count])
    assert torch.equal(y[8 : 8 + count], x[:count])
    assert (y[:8] == 7).all()
    assert (y[8 + count :] == 7).all()
