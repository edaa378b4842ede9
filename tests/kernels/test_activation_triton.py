"""GELU as Triton kernels compute it for bf16 and fp16, in fp32, which Triton's interpreter rounds as a GPU does."""

from __future__ import annotations

import pytest
import torch

from fasttfm.ops.core.backends import triton_absent

if triton_absent() is not None:
    pytest.skip(f"needs Triton: {triton_absent()}", allow_module_level=True)

import triton
import triton.language as tl

from fasttfm.kernels.common.triton.activation import activated

COUNT = 4096


@triton.jit
def _kernel(x, value, derivative, EXACT: tl.constexpr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    found, slope = activated(tl.load(x + at), "gelu", EXACT=EXACT)
    tl.store(value + at, found)
    tl.store(derivative + at, slope)


@pytest.mark.parametrize("exact", [True, False])
def test_error_of_gelu(exact: bool) -> None:
    """In fp32's form a few of its rounding steps, in the 16-bit types' a small part of fp16's."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.linspace(-5, 5, COUNT, device=device)
    value, derivative = torch.empty_like(x), torch.empty_like(x)
    _kernel[(1,)](x, value, derivative, EXACT=exact, COUNT=COUNT)
    wide = x.double().requires_grad_()
    y = torch.nn.functional.gelu(wide)
    (slope,) = torch.autograd.grad(y.sum(), wide)
    single = torch.finfo(torch.float32).eps
    relative = 0.0 if exact else 0.05 * torch.finfo(torch.float16).eps / 2
    assert ((value - y).abs() <= relative * y.abs() + 4 * single).all()
    assert ((derivative - slope).abs() <= relative + 4 * single).all()
