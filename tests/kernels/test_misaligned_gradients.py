"""Gradients and inputs whose rows are not aligned to 16 bytes: views of larger tensors, like those of ``torch.cat``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fasttfm
from fasttfm import _native, ops
from fasttfm.kernels.common.rows import contiguous_rows

C = 64


def _draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def _added(x: Tensor, weight: Tensor) -> Tensor:
    y, z = ops.dropout_add_layer_norm(x, x * 2, weight, weight, prenorm=True)
    return torch.stack([y, z])


# Ops with CUDA kernels that read gradients: of x [8, C] and a parameter [C].
OPS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "layer_norm": lambda x, weight: ops.layer_norm(x, weight, weight),
    "rms_norm": lambda x, weight: ops.rms_norm(x, weight),
    "bias_gelu": lambda x, bias: ops.bias_gelu(x, bias),
    "gated_activation": lambda x, bias: ops.gated_activation(x, bias),
    "gelu_layer_norm": lambda x, weight: ops.gelu_layer_norm(x, weight, weight, weight),
    "dropout_add_layer_norm": lambda x, weight: ops.dropout_add_layer_norm(x, x * 2, weight, weight),
    "dropout_add_layer_norm, two gradients": _added,
    "linear_gelu": lambda x, bias: ops.linear_gelu(x, torch.outer(bias, bias), bias),
    "mlp": lambda x, bias: ops.mlp(x, torch.outer(bias, bias), bias, torch.outer(bias, bias), bias),
    "attention": lambda x, _: ops.attention(*(x.reshape(1, -1, 1, C) for _ in range(3))),
}


def _gradients(op: Callable[[Tensor, Tensor], Any], dtype: torch.dtype, device: str, *, before: int) -> list[Tensor]:
    """The gradients if ``before`` elements precede the op's gradient in memory."""
    x, parameter = _draw(160, C), _draw(C)
    leaves = [each.to(dtype).to(device).requires_grad_() for each in (x, parameter)]
    y = op(*leaves)
    whole = torch.cat([torch.zeros(before, dtype=dtype, device=device), y.flatten()])
    gradient = _draw(1, y.numel()).to(dtype).to(device)[0]
    torch.autograd.backward(whole, torch.cat([gradient.new_zeros(before), gradient]))
    return [each.grad for each in leaves if each.grad is not None]


HOPPER = ("linear_gelu", "mlp", "attention")  # the CUDA kernels take 16-bit types
CALLS = [(name, torch.bfloat16, backend) for name in OPS for backend in (None, "cuda")]
CALLS += [(name, torch.float32, "cuda") for name in OPS if name not in HOPPER]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dtype", "backend"), CALLS)
def test_the_alignment_changes_no_bit_of_the_result(name: str, dtype: torch.dtype, backend: str | None) -> None:
    with fasttfm.use_backend(backend):
        expected, found = (_gradients(OPS[name], dtype, "cuda", before=before) for before in (0, 3))
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


def test_the_copy_is_aligned() -> None:
    whole = _draw(3 + 8 * C)
    part = whole[3:].view(8, C)
    assert part.is_contiguous()
    assert part.data_ptr() % 16
    copied = contiguous_rows(part)
    assert torch.equal(copied, part)
    assert copied.data_ptr() % 16 == 0
    assert contiguous_rows(copied) is copied


@pytest.mark.parametrize("name", [name for name in OPS if any(word in name for word in ("norm", "bias", "gated"))])
def test_launchers_get_aligned_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arguments of the CPU launchers; those of the CUDA kernels have the same alignment."""
    core, seen = _native.core(), []

    class Core:
        def __getattr__(self, launcher: str) -> Any:
            function = getattr(core, launcher)
            if not launcher.endswith("_backward"):
                return function

            def call(dy: Tensor, *others: Any) -> None:
                seen.append(dy.data_ptr())
                function(dy, *others)

            return call

    monkeypatch.setattr(_native, "core", Core)
    _gradients(OPS[name], torch.float32, "cpu", before=3)
    assert seen
    assert all(address % 16 == 0 for address in seen)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("columns", [slice(C), slice(0, 2 * C, 2)], ids=["padded_rows", "strided"])
@pytest.mark.parametrize("name", OPS)
def test_an_empty_tensor_may_have_any_strides(name: str, columns: slice, device: str) -> None:
    x, parameter = torch.empty(0, 2 * C + 2, device=device)[:, columns], torch.zeros(C, device=device)
    leaves = [x.requires_grad_(), parameter.requires_grad_()]
    y = OPS[name](*leaves)
    dx, dparameter = torch.autograd.grad(y, leaves, torch.zeros_like(y), allow_unused=True)
    assert y.numel() == 0
    assert dx is not None
    assert dx.shape == x.shape
    assert dparameter is None or not dparameter.any()
