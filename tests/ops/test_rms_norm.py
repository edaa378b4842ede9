from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fasttfm.kernels.rms_norm import reference
from fasttfm.ops import rms_norm
from fasttfm.testing.pytest_ops import op_tests
from fasttfm.testing.saved import saved_bytes
from fasttfm.testing.specs.rms_norm import SPEC
from fasttfm.testing.tolerance import GRADIENT_FACTOR, OUTPUT_FACTOR, compare

TestRmsNorm = op_tests(SPEC)


def test_it_is_torchs_formula() -> None:
    x, weight = torch.randn(5, 3, 24, dtype=torch.float64), torch.randn(24, dtype=torch.float64)
    for eps in (1e-6, 0.5):
        torch.testing.assert_close(rms_norm(x, weight, eps=eps), torch.nn.functional.rms_norm(x, (24,), weight, eps))


def test_x_the_weight_and_a_number_for_each_row_are_saved() -> None:
    x, weight = torch.randn(6, 64, requires_grad=True), torch.randn(64, requires_grad=True)
    assert saved_bytes(lambda: rms_norm(x, weight)) == x.nbytes + weight.nbytes + 4 * 6


@pytest.mark.gpu
@pytest.mark.large_memory
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_more_than_two_to_the_31_elements(backend: str) -> None:
    """Row offsets are 64-bit: the last rows of a tensor of 2.15 billion elements are correct in both directions."""
    rows, columns = 2_100_000, 1024
    x = torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")
    dy = torch.zeros_like(x)
    x[-2:], dy[-2:] = torch.randn(2, 2, columns, device="cuda")
    y = rms_norm(x.requires_grad_(), backend=backend)
    (dx,) = torch.autograd.grad(y, x, dy)

    def tail(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        last = x[-2:].detach().to(dtype).requires_grad_()
        expected = reference.rms_norm(last, None, 1e-6)
        return expected, torch.autograd.grad(expected, last, dy[-2:].to(dtype))[0]

    naive, exact = tail(torch.bfloat16), tail(torch.float64)
    assert compare("y", y[-2:], naive[0], exact[0], OUTPUT_FACTOR).ok
    assert compare("dx", dx[-2:], naive[1], exact[1], GRADIENT_FACTOR).ok
