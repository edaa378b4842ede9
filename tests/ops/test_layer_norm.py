import pytest
import torch

from fasttfm.kernels.layer_norm import reference
from fasttfm.ops import layer_norm
from fasttfm.testing.pytest_ops import op_tests
from fasttfm.testing.specs.layer_norm import SPEC

TestLayerNorm = op_tests(SPEC)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_more_than_two_to_the_31_elements(backend: str) -> None:
    """Row offsets are 64-bit: the last rows of a tensor of 2.15 billion elements come out right, forward and backward."""
    rows, columns = 2_100_000, 1024
    x = torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")
    x[-2:] = torch.randn(2, columns, device="cuda")
    x.requires_grad_()
    y = layer_norm(x, backend=backend)
    dy = torch.zeros_like(y)
    dy[-2:] = torch.randn(2, columns, device="cuda")
    (dx,) = torch.autograd.grad(y, x, dy)

    tail = x[-2:].detach().requires_grad_()
    expected = reference.layer_norm(tail, None, None, 1e-5)
    (expected_dx,) = torch.autograd.grad(expected, tail, dy[-2:])
    torch.testing.assert_close(y[-2:], expected)
    torch.testing.assert_close(dx[-2:], expected_dx)
