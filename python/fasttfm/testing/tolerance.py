"""The tolerance of a result: derived from the data, never hard-coded.

With ``exact`` the reference in fp64 and ``naive`` the reference in the tested type, both on the same low-precision
inputs:

    max|out - exact| <= factor * max|naive - exact| + floor        factor 2 for outputs, 3 for gradients

where ``floor`` is one rounding step of the output's type at max|exact|. Where ``exact`` is infinite, ``out`` must be
the same infinity.

An element of a gradient can be a difference of equal sums: 0, or fp64's rounding error. Plain torch may give exactly 0
where a kernel that adds in another order does not. Elements below 2**-40 of the terms that cancel are therefore
compared separately, with a tolerance of one rounding step at the largest of these terms.

Plain torch's error in a single number, such as a loss, depends on luck: it may be 0. If a tensor is a single number,
several draws of the inputs are compared, and the maxima are over all of them. Only the size decides this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

OUTPUT_FACTOR = 2.0
GRADIENT_FACTOR = 3.0
_CANCELLED = 2.0**-40


@dataclass(frozen=True)
class Comparison:
    """One tensor's errors against fp64, and its tolerance."""

    name: str
    error: float  # max|out - exact|
    naive_error: float  # max|naive - exact|
    bound: float

    @property
    def ok(self) -> bool:
        return self.error <= self.bound  # False for NaN

    @property
    def ratio(self) -> float:
        """The error divided by plain torch's, which should be at most 1; 0 if both are exact."""
        if self.naive_error == 0:
            return 0.0 if self.error == 0 else math.inf
        return self.error / self.naive_error

    def __str__(self) -> str:
        return f"{self.name}: error {self.error:.3e}, bound {self.bound:.3e}, plain torch {self.naive_error:.3e}"


def rounding_step(value: float, dtype: torch.dtype) -> float:
    """The distance between neighbouring numbers of ``dtype`` just above ``value``."""
    information = torch.finfo(dtype)
    if value <= information.tiny:
        return information.tiny * information.eps
    return 2.0 ** math.floor(math.log2(value)) * information.eps


def compare(name: str, out: Tensor, naive: Tensor, exact: Tensor, factor: float) -> Comparison:
    """Compares ``out`` with ``exact`` by the rule above. Shapes and dtypes must be equal."""
    if out.shape != exact.shape:
        raise AssertionError(f"{name}: shape {tuple(out.shape)}, expected {tuple(exact.shape)}")
    if out.dtype != naive.dtype:
        raise AssertionError(f"{name}: dtype {out.dtype}, expected {naive.dtype}")
    if exact.numel() == 0:
        return Comparison(name, 0.0, 0.0, 0.0)
    exact = exact.double()
    infinite = exact.isinf()
    differs = bool((infinite & (out.double() != exact)).any())
    error = math.inf if differs else _largest_error(out, exact, infinite)
    naive_error = _largest_error(naive, exact, infinite)
    floor = rounding_step(exact.masked_fill(infinite, 0.0).abs().max().item(), out.dtype)
    return Comparison(name, error, naive_error, factor * naive_error + floor)


def compare_with_terms(
    name: str, out: Tensor, naive: Tensor, exact: Tensor, factor: float, terms: Tensor
) -> tuple[Comparison, Comparison]:
    """Compares the elements that do not cancel, and those that do, with ``exact`` by the rule above.

    Args:
        terms: The sums of the magnitudes of the terms whose difference is ``exact``.
    """
    cancels = (terms > 0) & (exact.double().abs() <= _CANCELLED * terms)
    rest = compare(name, out[~cancels], naive[~cancels], exact[~cancels], factor)
    cancelled = compare(f"{name}, where it cancels", out[cancels], naive[cancels], exact[cancels], factor)
    if cancels.any():
        cancelled = replace(cancelled, bound=rounding_step(terms[cancels].max().item(), out.dtype))
    return rest, cancelled


def _largest_error(out: Tensor, exact: Tensor, infinite: Tensor) -> float:
    """max|out - exact| where ``exact`` is not infinite."""
    return (out.double() - exact).masked_fill(infinite, 0.0).abs().max().item()


def root_mean_square(numbers: Sequence[float]) -> float:
    return math.sqrt(sum(number * number for number in numbers) / len(numbers))


def summary(draws: Sequence[Comparison], of: Callable[[list[float]], float] = max) -> Comparison:
    """Several draws' comparisons of a tensor as one: ``of`` their errors against ``of`` their bounds."""
    errors = [draw.error for draw in draws]
    error = of(errors) if all(map(math.isfinite, errors)) else math.nan
    naive_error, bound = (of([getattr(draw, name) for draw in draws]) for name in ("naive_error", "bound"))
    return Comparison(draws[0].name, error, naive_error, bound)
