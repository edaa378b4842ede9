"""bias_gelu: cases, costs, peers, bad inputs, broken copies."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fasttfm.bench.peers import Inputs, torch_peers
from fasttfm.kernels.bias_gelu import reference
from fasttfm.ops import ACTIVATIONS, bias_gelu
from fasttfm.testing.random_sizes import random_scale, random_shape, some_of
from fasttfm.testing.row_cases import (
    BAD_ROWS,
    TORCH_ACTIVATIONS,
    bad_parameter,
    draw_rows,
    row_case,
    row_cost,
    row_kernels,
)
from fasttfm.testing.spec import BadCall, OpCase, OpSpec, spoil, triton_kernels


def _inputs(case: OpCase, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
    return draw_rows(case, dtype, device, generator, ("bias",))


def _case(name: str, *shape: int, activation: str = "gelu", **sizes: Any) -> OpCase:
    return row_case(name, *shape, options={"activation": activation}, **sizes)


CASES = (
    _case("typical", 3, 5, 64),
    *(_case(name, 6, 72, activation=name) for name in ("gelu_new", "relu", "silu")),
    *(_case(f"large_{name}", 6, 96, activation=name, scale=300.0) for name in ("gelu", "gelu_new", "relu", "silu")),
    *(
        _case(f"tiny_{name}", 6, 96, activation=name, scale=1e-4, parameters=())
        for name in ("gelu", "gelu_new", "silu")
    ),
    _case("odd", 7, 33),
    _case("one_row", 1, 100, activation="gelu_fast"),
    _case("one_column", 5, 1),
    _case("vector", 40),
    _case("no_rows", 0, 16),
    _case("many_rows", 301, 48),
    _case("wide", 3, 1543),
    replace(_case("very_wide", 2, 16400), interpret=False),
    _case("no_bias", 4, 40, parameters=()),
    _case("fp32_bias", 6, 96, parameter_dtype=torch.float32),
    _case("transposed", 4, 6, 32, layout="transposed"),
    _case("sliced", 9, 32, layout="sliced"),
    _case("strided_columns", 9, 32, layout="strided columns"),
)


def _random_case(source: random.Random) -> OpCase:
    return _case(
        "random",
        *random_shape(source),
        activation=source.choice(sorted(ACTIVATIONS)),
        parameters=some_of(source, ("bias",)),
        parameter_dtype=source.choice((torch.float32, None)),
        scale=random_scale(source),
    )


def _reference(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    return reference.bias_gelu(x, bias, ACTIVATIONS[activation])


def _torch_bias_gelu(inputs: Inputs, options: Mapping[str, Any]) -> Callable[[], Tensor]:
    x, bias, activation = inputs["x"], inputs["bias"], TORCH_ACTIVATIONS[ACTIVATIONS[options["activation"]]]
    return lambda: activation(x if bias is None else x + bias)


BAD_CALLS = (
    *BAD_ROWS,
    *bad_parameter("bias"),
    BadCall("unknown activation", "activation", ValueError, spoil("activation", "quick_gelu")),
    BadCall("activation is a function", "activation", TypeError, spoil("activation", torch.relu)),
)


def _other_form(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    kind = ACTIVATIONS[activation]
    return reference.bias_gelu(x, bias, {"gelu": "gelu_tanh", "gelu_tanh": "gelu"}.get(kind, kind))


def _without_bias(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    dropped = x if bias is None else x + 0 * bias  # the bias still has a gradient
    return reference.bias_gelu(dropped, None, ACTIVATIONS[activation])


class _DroppedTerm(torch.autograd.Function):
    """Right forward, and a dx without the term u * phi(u) of gelu's derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        ctx.save_for_backward(x, bias)
        return reference.bias_gelu(x, bias, ACTIVATIONS[activation])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, bias = ctx.saved_tensors
        dx = dy * torch.special.ndtr(x if bias is None else x + bias)
        return dx, None if bias is None else dx.reshape(-1, x.shape[-1]).sum(dim=0), None


SPEC = OpSpec(
    name="bias_gelu",
    function=bias_gelu,
    reference=_reference,
    inputs=_inputs,
    differentiable=("x", "bias"),
    cases=CASES,
    property_cases=("typical", "gelu_new", "relu", "silu"),
    random_case=_random_case,
    bench_cases=(
        _case("32768x4096", 32768, 4096),
        _case("32768x1024", 32768, 1024),
        _case("32768x3072", 32768, 3072),
        _case("32768x4096 tanh", 32768, 4096, activation="gelu_new"),
    ),
    bench_cases_cpu=(_case("2048x768", 2048, 768), _case("2048x768 tanh", 2048, 768, activation="gelu_new")),
    forward_cost=row_cost(2),
    backward_cost=row_cost(3),
    peers=torch_peers(_torch_bias_gelu),
    bad_calls=BAD_CALLS,
    mutants={
        "the other form of gelu": _other_form,
        "bias dropped": _without_bias,
        "a term of the derivative dropped": lambda x, bias, activation: _DroppedTerm.apply(x, bias, activation),
    },
    triton_kernels=triton_kernels(
        "bias_gelu",
        *((*row, "gelu") for row in row_kernels(64, 1024, 4096)),
        *((*row, kind) for row in row_kernels(1024) for kind in ("gelu_tanh", "relu", "silu")),
    ),
)
