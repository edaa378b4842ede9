"""layer_norm: cases, costs, peers, bad inputs, broken copies."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fasttfm.bench.peers import Inputs, Peer, liger, torch_peers
from fasttfm.kernels.layer_norm import reference
from fasttfm.ops import layer_norm
from fasttfm.testing.random_sizes import NORMALISED, random_scale, random_shape, some_of
from fasttfm.testing.row_cases import BAD_EPS, BAD_ROWS, draw_rows, row_case, row_cost, row_kernels
from fasttfm.testing.spec import BadCall, OpCase, OpSpec, spoil, triton_kernels


def _inputs(case: OpCase, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
    return draw_rows(case, dtype, device, generator, ("weight", "bias"))


def _case(name: str, *shape: int, eps: float = 1e-5, **sizes: Any) -> OpCase:
    return row_case(name, *shape, options={"eps": eps}, **sizes)


CASES = (
    _case("typical", 3, 5, 64),
    _case("odd", 7, 33),
    _case("one_row", 1, 100),
    _case("one_column", 5, 1),
    _case("vector", 40),
    _case("no_rows", 0, 16),
    _case("many_rows", 301, 48),
    _case("wide", 3, 1543),
    _case("no_weight", 4, 40, parameters=("bias",)),
    _case("no_bias", 4, 40, parameters=("weight",)),
    _case("plain", 4, 40, parameters=()),
    _case("fp32_parameters", 6, 96, parameter_dtype=torch.float32),
    _case("large_mean", 6, 96, offset=100.0),
    _case("large_scale", 6, 96, scale=300.0),
    _case("tiny_scale", 6, 96, scale=1e-3, eps=1e-12),
    _case("transposed", 4, 6, 32, layout="transposed"),
    _case("sliced", 9, 32, layout="sliced"),
    _case("strided_columns", 9, 32, layout="strided columns"),
)


def _random_case(source: random.Random) -> OpCase:
    return _case(
        "random",
        *random_shape(source, smallest=NORMALISED),
        eps=source.choice((1e-12, 1e-5, 0.1)),
        parameters=some_of(source, ("weight", "bias")),
        parameter_dtype=source.choice((torch.float32, None)),
        scale=random_scale(source),
        offset=source.choice((0.0, 0.0, 3.0)),
    )


def _torch_layer_norm(inputs: Inputs, options: Mapping[str, Any]) -> Callable[[], Tensor]:
    x, weight, bias = inputs["x"], inputs["weight"], inputs["bias"]
    return lambda: torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, options["eps"])


def _liger_layer_norm(inputs: Inputs, options: Mapping[str, Any]) -> Callable[[], Tensor]:
    function = liger("ops.layer_norm", "LigerLayerNormFunction").apply
    return lambda: function(inputs["x"], inputs["weight"], inputs["bias"], options["eps"])


BAD_CALLS = (
    *BAD_ROWS,
    BadCall("weight too short", "weight", ValueError, spoil("weight", torch.ones(63))),
    BadCall("weight of two dimensions", "weight", ValueError, spoil("weight", torch.ones(1, 64))),
    BadCall("bias elsewhere", "bias", ValueError, spoil("bias", torch.ones(64, device="meta"))),
    BadCall("bias is a number", "bias", TypeError, spoil("bias", 1.0)),
    BadCall("double weight, single x", "x", TypeError, spoil("weight", torch.ones(64, dtype=torch.float64))),
    *BAD_EPS,
)


def _without_mean(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    y = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return y * (1 if weight is None else weight) + (0 if bias is None else bias)


def _one_column_short(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    centered = x - x.mean(-1, keepdim=True)
    variance = centered.square().sum(-1, keepdim=True) / max(1, x.shape[-1] - 1)
    return centered * (variance + eps).rsqrt() * (1 if weight is None else weight) + (0 if bias is None else bias)


class _DroppedTerm(torch.autograd.Function):
    """Right forward, and a dx that lacks the xhat * mean(g * xhat) term."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        y, statistics = reference.layer_norm_forward(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, statistics)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, statistics = ctx.saved_tensors
        needs = (weight is not None, bias is not None)
        _, dweight, dbias = reference.layer_norm_backward(dy, x, weight, bias, statistics, *needs)
        g = dy if weight is None else dy * weight
        dx = statistics[1].reshape(*x.shape[:-1], 1) * (g - g.mean(-1, keepdim=True))
        return dx, None if weight is None else dweight, None if bias is None else dbias, None


SPEC = OpSpec(
    name="layer_norm",
    function=layer_norm,
    reference=reference.layer_norm,
    inputs=_inputs,
    differentiable=("x", "weight", "bias"),
    cases=CASES,
    random_case=_random_case,
    bench_cases=(
        _case("32768x1024", 32768, 1024),
        _case("32768x4096", 32768, 4096),
        _case("32768x768", 32768, 768),
        _case("512x768", 512, 768),
    ),
    bench_cases_cpu=(_case("2048x768", 2048, 768), _case("128x256", 128, 256)),
    forward_cost=row_cost(2),
    backward_cost=row_cost(3),
    peers=(
        *torch_peers(_torch_layer_norm),
        Peer("liger", _liger_layer_norm),
    ),
    bad_calls=BAD_CALLS,
    mutants={
        "without the mean": _without_mean,
        "variance over C - 1": _one_column_short,
        "a term of dx dropped": lambda x, weight, bias, eps: _DroppedTerm.apply(x, weight, bias, eps),
    },
    triton_kernels=triton_kernels("layer_norm", *row_kernels(64, 768, 1024, 4096, 8192)),
)
