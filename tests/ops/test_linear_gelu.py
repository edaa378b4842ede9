import pytest
import torch

from fasttfm.ops import linear_gelu
from fasttfm.testing.pytest_ops import op_tests
from fasttfm.testing.saved import saved_bytes
from fasttfm.testing.specs.linear_gelu import SPEC

TestLinearGelu = op_tests(SPEC)


def tensors(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    shapes = ((3, 5, 16), (24, 16), (24,))
    return tuple(torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saves_input_parameters_and_pre_activation(dtype: torch.dtype) -> None:
    x, weight, bias = tensors(dtype)
    expected = x.nbytes + weight.nbytes + bias.nbytes + 15 * 24 * dtype.itemsize
    assert saved_bytes(lambda: linear_gelu(x, weight, bias)) == expected


def test_result_may_be_changed_in_place() -> None:
    x, weight, bias = tensors()
    linear_gelu(x, weight, bias).mul_(2.0).sum().backward()
    assert x.grad is not None
