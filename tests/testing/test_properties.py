"""Each property of fasttfm.testing.properties rejects an op that does not have it; and evaluation before training."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from fasttfm.testing.call import Call
from fasttfm.testing.properties import PROPERTIES, WrapperTensor, check_inference_first
from fasttfm.testing.specs.layer_norm import SPEC

Op = Callable[..., Tensor]


def right(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def check(name: str, op: Op) -> None:
    PROPERTIES[name](Call(SPEC, SPEC.cases[0], torch.float32, None, function=op))


class Broken(torch.autograd.Function):
    """layer_norm whose backward is ``change(ctx, dy, gradients of x, weight and bias)``."""

    change: Callable[..., Any]

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        ctx.save_for_backward(*args[:3])
        ctx.eps = args[3]
        return right(*args)

    @classmethod
    def op(cls, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        y: Tensor = cls.apply(x, weight, bias, eps)
        return y

    @staticmethod
    def gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        leaves = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            y = right(*leaves, ctx.eps)
        return *torch.autograd.grad(y, leaves, dy), None


class ReadsAsContiguous(Broken):
    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        if dy.untyped_storage().nbytes() < dy.nbytes:  # expanded
            return Broken.gradients(ctx, dy)
        return Broken.gradients(ctx, dy.as_strided(dy.shape, dy.contiguous().stride()))


class ReadsAligned(Broken):
    """Rounds the address of a contiguous gradient down, like a vector load that ignores the lowest bits."""

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return Broken.gradients(ctx, dy.as_strided(dy.shape, dy.stride(), dy.storage_offset() // 4 * 4))


class TakesOneNumber(Broken):
    """Reads past the end of an expanded gradient, here as NaN."""

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return Broken.gradients(ctx, dy if dy.stride(-1) else torch.full_like(dy, float("nan")))


class NeedsAll(Broken):
    """Does not compute dx if the weight requires no gradient."""

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        dx, *others = Broken.gradients(ctx, dy)
        return dx if ctx.needs_input_grad[1] else torch.zeros_like(dy), *others


class ConstantStatistics(Broken):
    """Second derivatives as if the derivative of y by x did not depend on x."""

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        xhat = right(x, None, None, ctx.eps).detach()
        rstd = (x.var(-1, keepdim=True, correction=0) + ctx.eps).rsqrt().detach()
        g = dy * weight
        dx = rstd * (g - g.mean(-1, keepdim=True) - xhat * (g * xhat).mean(-1, keepdim=True))
        rows = dy.reshape(-1, dy.shape[-1])
        return dx, (rows * xhat.reshape(rows.shape)).sum(0), rows.sum(0), None


def swallows_nan(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return right(x, weight, bias, eps).nan_to_num()


def swallows_infinity(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return right(x.clamp(-100, 100), weight, bias, eps)


def spreads_nan(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return right(x, weight, bias, eps) + 0 * x.detach().sum()


def leaves_a_subclass_out(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return right(x, weight, None if isinstance(bias, WrapperTensor) else bias, eps)


def fails_without_a_name(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    if isinstance(x, WrapperTensor) or x.is_meta:
        raise RuntimeError("Attempted to access the data pointer on an invalid python storage.")
    return right(x, weight, bias, eps)


def drops_tangents(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return right(forward_ad.unpack_dual(x).primal if x.requires_grad is False else x, weight, bias, eps)


def writes_not_every_element(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    y = torch.empty_like(x)
    y[..., :-1] = right(x, weight, bias, eps)[..., :-1]
    return y


def reads_a_workspace(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return right(x, weight, bias, eps) + 0 * torch.empty(x.shape[-1])


def other_type_without_data(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    y = right(x, weight, bias, eps)
    return y.double() if x.is_meta else y


def other_strides_without_data(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    y = right(x, weight, bias, eps)
    return y if type(x) is Tensor else y.transpose(0, 1).contiguous().transpose(0, 1)


_workspace = torch.empty(3, 5, 64)


def shares_a_workspace(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    _workspace.copy_(x.detach())
    if threading.current_thread() is not threading.main_thread():
        time.sleep(0.001)
    return right(x, weight, bias, eps) + (x.detach() - _workspace)


BROKEN: list[tuple[str, Op]] = [
    ("non_finite", swallows_nan),
    ("non_finite", swallows_infinity),
    ("non_finite", spreads_nan),
    ("gradient_layouts", ReadsAsContiguous.op),
    ("gradient_layouts", ReadsAligned.op),
    ("gradient_layouts", TakesOneNumber.op),
    ("absent_gradients", NeedsAll.op),
    ("subclass", leaves_a_subclass_out),
    ("subclass", fails_without_a_name),
    ("second_order", ConstantStatistics.op),
    ("forward_mode", drops_tangents),
    ("poisoned_memory", writes_not_every_element),
    ("poisoned_memory", reads_a_workspace),
    ("without_data", fails_without_a_name),
    ("without_data", other_type_without_data),
    ("without_data", other_strides_without_data),
    ("threads", shares_a_workspace),
]


@pytest.mark.parametrize(("name", "op"), BROKEN, ids=lambda value: getattr(value, "__qualname__", value))
def test_a_broken_op_is_rejected(name: str, op: Op) -> None:
    with pytest.raises(AssertionError):
        check(name, op)


def test_every_property_can_fail() -> None:
    assert {name for name, _ in BROKEN} == set(PROPERTIES)


@pytest.mark.parametrize("name", PROPERTIES)
def test_plain_torch_has_every_property(name: str) -> None:
    check(name, right)


def test_a_buffer_of_inference_mode_is_rejected() -> None:
    kept: list[Tensor] = []

    def keeps_a_buffer(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        if not kept:
            kept.append(torch.ones(1))
        return right(x * kept[0], weight, bias, eps)

    with pytest.raises(RuntimeError, match="Inference tensors"):
        check_inference_first(Call(SPEC, SPEC.cases[0], torch.float32, None, function=keeps_a_buffer))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_evaluation_before_training(device: str) -> None:
    """Every op on every backend, in a process where the first calls are under inference_mode."""
    command = [sys.executable, "-m", "fasttfm.testing.inference_first", device]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
