"""rms_norm: cases, costs, peers, bad inputs, broken copies."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fasttfm.bench.peers import Inputs, Peer, liger, torch_peers
from fasttfm.kernels.rms_norm import reference
from fasttfm.ops import rms_norm
from fasttfm.testing.random_sizes import NORMALISED, random_scale, random_shape, some_of
from fasttfm.testing.row_cases import BAD_EPS, BAD_ROWS, bad_parameter, draw_rows, row_case, row_cost, row_kernels
from fasttfm.testing.spec import OpCase, OpSpec, triton_kernels


def _inputs(case: OpCase, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
    return draw_rows(case, dtype, device, generator, ("weight",))


def _case(name: str, *shape: int, eps: float = 1e-6, **sizes: Any) -> OpCase:
    return row_case(name, *shape, options={"eps": eps}, **sizes)


CASES = (
    _case("typical", 3, 5, 64),
    _case("odd", 7, 33),
    _case("one_row", 1, 104),
    _case("one_column", 5, 1, eps=0.1),  # with a small eps, dx is the rounding error of a difference
    _case("vector", 40),
    _case("no_rows", 0, 16),
    _case("many_rows", 301, 48),
    _case("two_warps", 5, 1000),  # two warps share a row in the CUDA forward
    _case("wide", 3, 1543),
    _case("plain", 4, 40, parameters=()),
    _case("fp32_weight", 6, 96, parameter_dtype=torch.float32),
    _case("large_scale", 6, 96, scale=300.0),
    _case("tiny_scale", 6, 96, scale=1e-3, eps=1e-12),
    _case("large_eps", 6, 96, eps=10.0),
    _case("transposed", 4, 6, 32, layout="transposed"),
    _case("sliced", 9, 32, layout="sliced"),
    _case("strided_columns", 9, 32, layout="strided columns"),
)


def _random_case(source: random.Random) -> OpCase:
    return _case(
        "random",
        *random_shape(source, smallest=NORMALISED),
        eps=source.choice((1e-12, 1e-6, 0.1)),
        parameters=some_of(source, ("weight",)),
        parameter_dtype=source.choice((torch.float32, None)),
        scale=random_scale(source),
    )


def _torch_rms_norm(inputs: Inputs, options: Mapping[str, Any]) -> Callable[[], Tensor]:
    x, weight = inputs["x"], inputs["weight"]
    return lambda: torch.nn.functional.rms_norm(x, x.shape[-1:], weight, options["eps"])


def _liger_rms_norm(inputs: Inputs, options: Mapping[str, Any]) -> Callable[[], Tensor]:
    """Liger's mode "llama", which computes the statistics in fp32, without its default of writing dx over dy."""
    function = liger("ops.rms_norm", "LigerRMSNormFunction").apply
    return lambda: function(inputs["x"], inputs["weight"], options["eps"], 0.0, "llama", False)


def _with_mean(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    centered = x - x.mean(-1, keepdim=True)
    return centered * (centered.square().mean(-1, keepdim=True) + eps).rsqrt() * (1 if weight is None else weight)


def _one_column_short(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    mean_square = x.square().sum(-1, keepdim=True) / max(1, x.shape[-1] - 1)
    return x * (mean_square + eps).rsqrt() * (1 if weight is None else weight)


def _weight_plus_one(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return reference.rms_norm(x, None if weight is None else 1 + weight, eps)


class _DroppedTerm(torch.autograd.Function):
    """Right forward, and a dx that lacks the xhat * mean(g * xhat) term."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        y, rstd = reference.rms_norm_forward(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        _, dweight = reference.rms_norm_backward(dy, x, weight, rstd, weight is not None)
        g = dy if weight is None else dy * weight
        return rstd.reshape(*x.shape[:-1], 1) * g, None if weight is None else dweight, None


SPEC = OpSpec(
    name="rms_norm",
    function=rms_norm,
    reference=reference.rms_norm,
    inputs=_inputs,
    differentiable=("x", "weight"),
    cases=CASES,
    random_case=_random_case,
    bench_cases=(
        _case("32768x1024", 32768, 1024),
        _case("32768x4096", 32768, 4096),
        _case("32768x768", 32768, 768),
    ),
    bench_cases_cpu=(_case("2048x768", 2048, 768), _case("128x256", 128, 256)),
    forward_cost=row_cost(2),
    backward_cost=row_cost(3),
    peers=(
        *torch_peers(_torch_rms_norm),
        Peer("liger", _liger_rms_norm),
    ),
    bad_calls=(*BAD_ROWS, *bad_parameter("weight"), *BAD_EPS),
    mutants={
        "with the mean": _with_mean,
        "mean over C - 1": _one_column_short,
        "weight plus one": _weight_plus_one,
        "a term of dx dropped": lambda x, weight, eps: _DroppedTerm.apply(x, weight, eps),
    },
    triton_kernels=triton_kernels("rms_norm", *row_kernels(64, 1024, 8192)),
)
