from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from fasttfm.ops import ACTIVATIONS, bias_gelu, gated_activation
from fasttfm.testing.pytest_ops import op_tests
from fasttfm.testing.saved import saved_bytes
from fasttfm.testing.specs.gated_activation import SPEC

TestGatedActivation = op_tests(SPEC)


def test_the_gate_is_the_first_half_as_in_modernbert_and_phi3() -> None:
    x = torch.randn(5, 16, dtype=torch.float64)
    gate, up = x.chunk(2, dim=-1)
    torch.testing.assert_close(gated_activation(x, activation="silu"), functional.silu(gate) * up)
    torch.testing.assert_close(gated_activation(x, activation="silu", gate_first=False), gate * functional.silu(up))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_names_mean_what_they_mean_in_bias_gelu(name: str) -> None:
    x, bias = torch.randn(5, 16, dtype=torch.float64), torch.randn(16, dtype=torch.float64)
    gate, up = (x + bias).chunk(2, dim=-1)
    torch.testing.assert_close(gated_activation(x, bias, activation=name), bias_gelu(gate, activation=name) * up)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu", "silu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_large_inputs_give_up_or_zero(dtype: torch.dtype, activation: str) -> None:
    far = torch.tensor([1e3, 1e4, 6e4]).to(dtype).repeat(8)
    up = torch.linspace(-1, 1, len(far)).to(dtype)
    x = torch.cat([torch.stack([far, -far]), up.expand(2, -1)], dim=1).requires_grad_()
    y = gated_activation(x, activation=activation)
    assert torch.isfinite(y).all()
    limit = 1e3 * torch.finfo(torch.float32).tiny
    assert y[1].abs().max() <= limit
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    dgate, dup = dx.chunk(2, dim=-1)
    assert torch.equal(dgate[0], up)
    assert torch.equal(dup[0], far)
    assert dx[1].abs().max() <= limit


def test_only_the_arguments_are_saved() -> None:
    x, bias = torch.randn(6, 64, requires_grad=True), torch.randn(64, requires_grad=True)
    assert saved_bytes(lambda: gated_activation(x, bias)) == x.nbytes + bias.nbytes
