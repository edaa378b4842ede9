"""exp, exp2, erf and tanh of common/cpu/simd_math.h against fp64: all magnitudes, both signs, special values."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from native.calls import elementwise
from torch import Tensor

pytestmark = pytest.mark.usefixtures("isa")
REFERENCES: dict[str, Callable[[Tensor], Tensor]] = {"exp": torch.exp, "erf": torch.special.erf, "tanh": torch.tanh}
FUNCTIONS = pytest.mark.parametrize("name", REFERENCES)
PROMISED_ULPS = 2.0  # the header's figures are measured with fused multiply-add; without it they are a little larger


def samples() -> Tensor:
    """Every 1009th fp32 number, infinities and NaN left out, and a dense grid where the functions are not constant."""
    bits = torch.arange(-(2**31), 2**31, 1009, dtype=torch.int64).to(torch.int32)
    spread = bits.view(torch.float32)
    return torch.cat([spread[spread.isfinite()], torch.linspace(-12, 12, 2_000_001), torch.linspace(-105, 90, 500_001)])


def error_in_ulps(y: Tensor, exact: Tensor) -> Tensor:
    """Distance to the exact result in units of its last place in fp32; infinite where only one of the two is."""
    rounded = exact.float()
    _, exponent = torch.frexp(rounded.double())
    ulp = torch.exp2((exponent - 24).clamp(min=-149).double())
    error = (y.double() - exact).abs() / ulp
    return torch.where(rounded.isinf(), torch.where(y == rounded, 0.0, math.inf).double(), error)


@FUNCTIONS
def test_error(name: str) -> None:
    x = samples()
    error = error_in_ulps(elementwise(x, name), REFERENCES[name](x.double()))
    worst = int(error.argmax())
    assert error[worst] <= PROMISED_ULPS, f"{name}({x[worst].item()!r}) is {error[worst].item():.2f} ulp off"


@FUNCTIONS
def test_special_values(name: str) -> None:
    x = torch.tensor([0.0, -0.0, math.inf, -math.inf, 1e-45, -1e-45, 3.4e38, -3.4e38])
    y = elementwise(x, name)
    expected = REFERENCES[name](x.double()).float()
    assert torch.equal(y, expected)
    assert torch.equal(y.signbit(), expected.signbit())
    assert elementwise(torch.tensor([math.nan, -math.nan] * 9), name).isnan().all()


@pytest.mark.parametrize("name", ["erf", "tanh"])
def test_odd_functions_are_odd(name: str) -> None:
    x = samples()
    assert torch.equal(elementwise(-x, name), -elementwise(x, name))


@pytest.mark.parametrize("name", ["erf", "tanh"])
def test_results_stay_within_one(name: str) -> None:
    assert elementwise(samples(), name).abs().max() <= 1


def test_exp_of_subnormal_results_and_of_overflow() -> None:
    x = torch.linspace(-104, -87, 100_001)
    exact = torch.exp(x.double())
    assert (elementwise(x, "exp").double() - exact).abs().max() <= 2.0**-149
    assert elementwise(torch.tensor([88.72283172607422]), "exp").isfinite()
    assert elementwise(torch.tensor([88.7228469848633]), "exp").isinf()


def test_exp2_in_its_range() -> None:
    x = torch.cat([torch.linspace(-126, 127, 2_000_001), torch.linspace(-1, 1, 1_000_001), torch.arange(-126.0, 127.0)])
    exact = torch.exp2(x.double())
    assert ((elementwise(x, "exp2_in_range").double() - exact).abs() / exact).max() <= 2.0**-23
    whole = torch.arange(-126.0, 128.0)
    assert torch.equal(elementwise(whole, "exp2_in_range"), torch.exp2(whole))
    assert elementwise(torch.full((17,), math.nan), "exp2_in_range").isnan().all()


def test_threads_do_not_change_bits() -> None:
    x = torch.randn(100_003, generator=torch.Generator().manual_seed(0))
    assert torch.equal(elementwise(x, "erf", threads=1), elementwise(x, "erf", threads=4))
