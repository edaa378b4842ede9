"""gelu_layer_norm: cases, costs, peers, bad inputs, broken copies."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fasttfm.bench.peers import Inputs, Peer, liger, torch_peers
from fasttfm.kernels.common.activation import derivative
from fasttfm.kernels.gelu_layer_norm import reference
from fasttfm.ops import gelu_layer_norm
from fasttfm.testing.random_sizes import NORMALISED, random_scale, random_shape, some_of
from fasttfm.testing.row_cases import BAD_EPS, BAD_ROWS, draw_rows, row_case, row_cost, row_kernels
from fasttfm.testing.spec import BadCall, OpCase, OpSpec, spoil, triton_kernels

_PARAMETERS = ("linear_bias", "weight", "bias")
_KINDS = {"none": "gelu", "tanh": "gelu_tanh"}


def _inputs(case: OpCase, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
    return draw_rows(case, dtype, device, generator, _PARAMETERS)


def _case(name: str, *shape: int, approximate: str = "none", eps: float = 1e-12, **sizes: Any) -> OpCase:
    return row_case(name, *shape, options={"approximate": approximate, "eps": eps}, **sizes)


CASES = (
    _case("typical", 3, 5, 64),
    _case("tanh", 6, 72, approximate="tanh"),
    _case("odd", 7, 33),
    _case("one_row", 1, 100, approximate="tanh"),
    _case("one_column", 5, 1, eps=1e-5),
    _case("vector", 40),
    _case("no_rows", 0, 16),
    _case("many_rows", 301, 48),
    _case("wide", 3, 1543),
    _case("two_warps", 5, 1544),
    _case("no_linear_bias", 4, 40, parameters=("weight", "bias")),
    _case("no_weight", 4, 40, parameters=("linear_bias", "bias")),
    _case("no_bias", 4, 40, parameters=("linear_bias", "weight")),
    _case("plain", 4, 40, parameters=()),
    _case("fp32_parameters", 6, 96, parameter_dtype=torch.float32),
    _case("large", 6, 96, scale=300.0),
    _case("large_tanh", 6, 96, approximate="tanh", scale=300.0),
    _case("tiny", 6, 96, scale=1e-3, parameters=("weight", "bias")),
    _case("transposed", 4, 6, 32, layout="transposed"),
    _case("sliced", 9, 32, layout="sliced"),
    _case("strided_columns", 9, 32, layout="strided columns"),
)


def _random_case(source: random.Random) -> OpCase:
    return _case(
        "random",
        *random_shape(source, smallest=NORMALISED),
        approximate=source.choice(("none", "tanh")),
        eps=source.choice((1e-12, 1e-5)),
        parameters=some_of(source, _PARAMETERS),
        parameter_dtype=source.choice((torch.float32, None)),
        scale=random_scale(source),
    )


def _reference(
    x: Tensor, linear_bias: Tensor | None, weight: Tensor | None, bias: Tensor | None, approximate: str, eps: float
) -> Tensor:
    return reference.gelu_layer_norm(x, linear_bias, weight, bias, _KINDS[approximate], eps)


def _torch_gelu(inputs: Inputs, options: Mapping[str, Any]) -> Callable[[], Tensor]:
    x, linear_bias, approximate = inputs["x"], inputs["linear_bias"], options["approximate"]
    return lambda: functional.gelu(x if linear_bias is None else x + linear_bias, approximate=approximate)


def _torch_gelu_layer_norm(inputs: Inputs, options: Mapping[str, Any]) -> Callable[[], Tensor]:
    gelu, weight, bias = _torch_gelu(inputs, options), inputs["weight"], inputs["bias"]
    return lambda: functional.layer_norm(gelu(), inputs["x"].shape[-1:], weight, bias, options["eps"])


def _liger_layer_norm(inputs: Inputs, options: Mapping[str, Any]) -> Callable[[], Tensor]:
    function = liger("ops.layer_norm", "LigerLayerNormFunction").apply
    gelu, weight, bias = _torch_gelu(inputs, options), inputs["weight"], inputs["bias"]
    return lambda: function(gelu(), weight, bias, options["eps"])


BAD_CALLS = (
    *BAD_ROWS,
    BadCall("linear_bias too short", "linear_bias", ValueError, spoil("linear_bias", torch.ones(63))),
    BadCall("weight of two dimensions", "weight", ValueError, spoil("weight", torch.ones(1, 64))),
    BadCall("bias elsewhere", "bias", ValueError, spoil("bias", torch.ones(64, device="meta"))),
    BadCall("linear_bias is a number", "linear_bias", TypeError, spoil("linear_bias", 1.0)),
    BadCall("double weight, single x", "x", TypeError, spoil("weight", torch.ones(64, dtype=torch.float64))),
    BadCall("unknown form of gelu", "approximate", ValueError, spoil("approximate", "erf")),
    BadCall("approximate is a flag", "approximate", TypeError, spoil("approximate", True)),
    *BAD_EPS[:2],
)


def _other_form(**arguments: Any) -> Tensor:
    arguments["approximate"] = {"none": "tanh", "tanh": "none"}[arguments["approximate"]]
    return _reference(**arguments)


def _norm_before_gelu(
    x: Tensor, linear_bias: Tensor | None, weight: Tensor | None, bias: Tensor | None, approximate: str, eps: float
) -> Tensor:
    u = x if linear_bias is None else x + linear_bias
    return functional.gelu(functional.layer_norm(u, x.shape[-1:], weight, bias, eps), approximate=approximate)


class _LinearBiasBeforeGelu(torch.autograd.Function):
    """Right but for dlinear_bias, which is summed before the factor gelu' is applied."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        linear_bias: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        approximate: str,
        eps: float,
    ) -> Tensor:
        arguments = (x, linear_bias, weight, bias, _KINDS[approximate], eps)
        y, statistics = reference.gelu_layer_norm_forward(*arguments)
        ctx.save_for_backward(x, linear_bias, weight, bias, statistics)
        ctx.kind = arguments[4]
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, linear_bias, *parameters = ctx.saved_tensors
        needs = [parameter is not None for parameter in (linear_bias, *parameters[:2])]
        dx, _, dweight, dbias = reference.gelu_layer_norm_backward(dy, x, linear_bias, *parameters, ctx.kind, *needs)
        u = x if linear_bias is None else x + linear_bias
        wrong = (dx / (derivative(u, ctx.kind) + 1e-3)).reshape(-1, x.shape[-1]).sum(dim=0)
        kept = [gradient if want else None for gradient, want in zip((wrong, dweight, dbias), needs, strict=True)]
        return dx, *kept, None, None


SPEC = OpSpec(
    name="gelu_layer_norm",
    function=gelu_layer_norm,
    reference=_reference,
    inputs=_inputs,
    differentiable=("x", *_PARAMETERS),
    cases=CASES,
    property_cases=("typical", "tanh"),
    random_case=_random_case,
    bench_cases=(
        _case("32768x1024", 32768, 1024),
        _case("32768x4096", 32768, 4096),
        _case("32768x1024 tanh", 32768, 1024, approximate="tanh"),
    ),
    bench_cases_cpu=(_case("2048x768", 2048, 768), _case("2048x768 tanh", 2048, 768, approximate="tanh")),
    forward_cost=row_cost(2),
    backward_cost=row_cost(3),
    peers=(
        *torch_peers(_torch_gelu_layer_norm),
        Peer("liger", _liger_layer_norm),
    ),
    bad_calls=BAD_CALLS,
    mutants={
        "the other form of gelu": _other_form,
        "gelu after the norm": _norm_before_gelu,
        "dlinear_bias without gelu'": lambda x, linear_bias, weight, bias, approximate, eps: (
            _LinearBiasBeforeGelu.apply(x, linear_bias, weight, bias, approximate, eps)
        ),
    },
    triton_kernels=triton_kernels(
        "gelu_layer_norm",
        *((*row, "gelu") for row in row_kernels(64, 768, 1024, 4096, 8192)),
        *((*row, "gelu_tanh") for row in row_kernels(1024)),
    ),
)
