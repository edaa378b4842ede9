from __future__ import annotations

import pytest
import torch

from fasttfm.ops import gelu_layer_norm
from fasttfm.testing.pytest_ops import op_tests
from fasttfm.testing.saved import saved_bytes
from fasttfm.testing.specs.gelu_layer_norm import SPEC

TestGeluLayerNorm = op_tests(SPEC)


def test_saved_are_the_arguments_and_two_numbers_a_row() -> None:
    x = torch.randn(6, 5, 64, requires_grad=True)
    parameters = [torch.randn(64, requires_grad=True) for _ in range(3)]
    arguments = sum(tensor.nbytes for tensor in (x, *parameters))
    assert saved_bytes(lambda: gelu_layer_norm(x, *parameters)) == arguments + 30 * 2 * 4


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_row_of_large_inputs_stays_finite(backend: str, approximate: str) -> None:
    x = torch.randn(4, 64) * 1e4
    x[1] = -1e4  # gelu is zero all along
    x[2] = 0.0
    x.requires_grad_()
    y = gelu_layer_norm(x, approximate=approximate, eps=1e-5, backend=backend)
    (dx,) = torch.autograd.grad(y, x, torch.randn_like(y))
    assert y.isfinite().all()
    assert dx.isfinite().all()
    assert torch.equal(y[1:3], torch.zeros(2, 64))
