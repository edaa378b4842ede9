from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fasttfm.kernels.common.activation import derivative
from fasttfm.ops import ACTIVATIONS, bias_gelu
from fasttfm.ops.core.backends import triton_interpreted
from fasttfm.testing.pytest_ops import op_tests
from fasttfm.testing.saved import saved_bytes
from fasttfm.testing.specs.bias_gelu import SPEC
from fasttfm.testing.tolerance import GRADIENT_FACTOR, compare

TestBiasGelu = op_tests(SPEC)

KINDS = ("gelu", "gelu_new", "relu", "silu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CALLS = [
    *(("cpu", "cpu", dtype) for dtype in DTYPES),
    *(("reference", "cpu", dtype) for dtype in DTYPES),
    *((backend, "cuda", dtype) for backend in ("cuda", "triton") for dtype in DTYPES),
]
if triton_interpreted():
    CALLS.append(("triton", "cpu", torch.float32))

backends = pytest.mark.parametrize(
    ("backend", "device", "dtype"),
    [pytest.param(*call, marks=[pytest.mark.gpu] if call[1] == "cuda" else []) for call in CALLS],
)


def value_and_gradient(x: Tensor, activation: str, backend: str) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    y = bias_gelu(x, activation=activation, backend=backend)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    return y.detach(), dx


@backends
@pytest.mark.parametrize("activation", KINDS)
def test_large_inputs_give_the_identity_or_zero(backend: str, device: str, dtype: torch.dtype, activation: str) -> None:
    """Also where squares and cubes overflow. The fit of GPU kernels for 16-bit types tends to 1e-16, not to 0."""
    far = torch.tensor([1e3, 1e4, 6e4] if dtype == torch.float16 else [1e3, 1e4, 1e13, 1e25, 3e38])
    far = far.to(dtype).to(device).repeat(8)
    y, dx = value_and_gradient(torch.cat([far, -far]), activation, backend)
    fitted = device == "cuda" and activation == "gelu" and dtype != torch.float32
    limit = 1e-15 if fitted else 1e3 * torch.finfo(torch.float32).tiny
    assert torch.equal(y[: len(far)], far)
    assert y[len(far) :].abs().max() <= limit
    assert torch.equal(dx[: len(far)], torch.ones_like(far))
    assert dx[len(far) :].abs().max() <= limit


@backends
@pytest.mark.parametrize("activation", KINDS)
def test_the_backward_can_recompute_y(backend: str, device: str, dtype: torch.dtype, activation: str) -> None:
    x = torch.linspace(-6, 6, 37 * 264).view(37, 264).to(device, dtype)
    bias = torch.linspace(-1, 1, 264).to(device, dtype)
    call = (torch.ones_like(x), x, bias, ACTIVATIONS[activation], True)
    dx, dbias, y = torch.ops.fasttfm.bias_gelu_backward(*call, True, backend)
    alone = torch.ops.fasttfm.bias_gelu_backward(*call, False, backend)
    assert torch.equal(y, bias_gelu(x, bias, activation=activation, backend=backend))
    assert torch.equal(dx, alone[0])
    assert torch.equal(dbias, alone[1])


@backends
@pytest.mark.parametrize("activation", KINDS)
def test_zero_gives_zero_and_a_slope_of_one_half(
    backend: str, device: str, dtype: torch.dtype, activation: str
) -> None:
    y, dx = value_and_gradient(torch.zeros(5, 40, dtype=dtype, device=device), activation, backend)
    assert torch.equal(y, torch.zeros_like(y))
    assert torch.equal(dx, torch.full_like(dx, 0.0 if activation == "relu" else 0.5))


@backends
@pytest.mark.parametrize("activation", KINDS)
def test_nan_and_infinity_propagate(backend: str, device: str, dtype: torch.dtype, activation: str) -> None:
    x = torch.tensor([float("nan"), float("inf")] * 8, dtype=dtype, device=device)
    y = bias_gelu(x, activation=activation, backend=backend)
    assert y[::2].isnan().all()
    assert (y[1::2] == float("inf")).all()


@backends
@pytest.mark.parametrize("activation", KINDS)
def test_the_derivative_has_the_precision_of_fp32(
    backend: str, device: str, dtype: torch.dtype, activation: str
) -> None:
    """If x is zero, the gradient of an fp32 bias is the derivative at the bias, whatever the type of x."""
    bias = torch.linspace(-9, 9, 4096).requires_grad_()
    y = bias_gelu(
        torch.zeros(1, 4096, dtype=dtype, device=device), bias.to(device), activation=activation, backend=backend
    )
    (dbias,) = torch.autograd.grad(y, bias, torch.ones_like(y))
    naive, exact = (derivative(bias.detach().to(t), ACTIVATIONS[activation]) for t in (torch.float32, torch.float64))
    comparison = compare("dbias", dbias, naive, exact, GRADIENT_FACTOR)
    assert comparison.ok, comparison


def test_error_of_the_references_derivative() -> None:
    """Two rounding steps at 1; in the tail u^2 rounding steps at the derivative, because of the exponent."""
    u = torch.linspace(-12, 6, 4096)
    found, exact = derivative(u, "gelu"), derivative(u.double(), "gelu")
    size = torch.where(u < -3, u.double().square() * exact.abs(), 2.0)
    assert ((found - exact).abs() <= torch.finfo(torch.float32).eps * size).all()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_names_mean_what_torch_means(name: str) -> None:
    x = torch.linspace(-4, 4, 101, dtype=torch.float64)
    expected = {
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda u: 0.5 * u * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (u + 0.044715 * u**3))),
        "relu": torch.relu,
        "silu": lambda u: u * torch.sigmoid(u),
    }[ACTIVATIONS[name]]
    torch.testing.assert_close(bias_gelu(x, activation=name), expected(x))


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=", ".join(ACTIVATIONS)):
        bias_gelu(torch.ones(8), activation="mish")


def test_only_the_arguments_are_saved() -> None:
    x, bias = torch.randn(6, 64, requires_grad=True), torch.randn(64, requires_grad=True)
    assert saved_bytes(lambda: bias_gelu(x, bias)) == x.nbytes + bias.nbytes
