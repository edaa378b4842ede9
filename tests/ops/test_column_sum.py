import torch

from fasttfm.ops import column_sum
from fasttfm.testing.pytest_ops import op_tests
from fasttfm.testing.specs.column_sum import SPEC

TestColumnSum = op_tests(SPEC)


def test_sums_of_16_bit_inputs_are_fp32() -> None:
    x = torch.full((1000, 16), 1.0 + 2.0**-7, dtype=torch.bfloat16)  # bf16 stops counting at 256
    total = column_sum(x, dtype=torch.float32)
    assert total.dtype == torch.float32
    assert torch.equal(total, torch.full((16,), 1000 * (1.0 + 2.0**-7)))


def test_the_gradient_takes_no_memory() -> None:
    x = torch.randn(64, 16, dtype=torch.bfloat16, requires_grad=True)
    (gradient,) = torch.autograd.grad(column_sum(x).sum(), x)
    assert gradient.shape == x.shape
    assert gradient.stride(0) == 0
