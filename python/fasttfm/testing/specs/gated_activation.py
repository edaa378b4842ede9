"""gated_activation: cases, costs, peers, bad inputs, broken copies."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fasttfm.bench.peers import Inputs, Peer, PeerCall, PeerUnavailable, liger, torch_peers
from fasttfm.kernels.gated_activation import reference
from fasttfm.ops import ACTIVATIONS, gated_activation
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


def _case(name: str, *shape: int, activation: str = "gelu", gate_first: bool = True, **sizes: Any) -> OpCase:
    return row_case(name, *shape, options={"activation": activation, "gate_first": gate_first}, **sizes)


CASES = (
    _case("typical", 3, 5, 128),
    *(_case(name, 6, 144, activation=name) for name in ("gelu_new", "relu", "silu")),
    *(_case(f"large_{name}", 6, 96, activation=name, scale=100.0) for name in ("gelu", "gelu_new", "relu", "silu")),
    *(
        _case(f"tiny_{name}", 6, 96, activation=name, scale=1e-2, parameters=())
        for name in ("gelu", "gelu_new", "silu")
    ),
    _case("gate_last", 5, 80, gate_first=False),
    _case("gate_last_without_bias", 5, 80, activation="silu", gate_first=False, parameters=()),
    _case("odd", 7, 66),
    _case("one_row", 1, 200, activation="gelu_fast"),
    _case("one_column", 5, 2),
    _case("vector", 80),
    _case("no_rows", 0, 16),
    _case("many_rows", 301, 96),
    _case("wide", 3, 3086),
    replace(_case("very_wide", 2, 32800), interpret=False),
    _case("no_bias", 4, 80, parameters=()),
    _case("fp32_bias", 6, 192, parameter_dtype=torch.float32),
    _case("transposed", 4, 6, 64, layout="transposed"),
    _case("sliced", 9, 64, layout="sliced"),
    _case("strided_columns", 9, 64, layout="strided columns"),
)


def _random_case(source: random.Random) -> OpCase:
    *leading, columns = random_shape(source, largest=150)
    return _case(
        "random",
        *leading,
        2 * columns,
        activation=source.choice(sorted(ACTIVATIONS)),
        gate_first=source.random() < 0.7,
        parameters=some_of(source, ("bias",)),
        parameter_dtype=source.choice((torch.float32, None)),
        scale=random_scale(source),
    )


def _reference(x: Tensor, bias: Tensor | None, activation: str, gate_first: bool) -> Tensor:
    return reference.gated_activation(x, bias, ACTIVATIONS[activation], gate_first)


def _torch_gated_activation(inputs: Inputs, options: Mapping[str, Any]) -> Callable[[], Tensor]:
    """As transformers' ModernBERT and Phi-3 write it."""
    x, bias, activation = inputs["x"], inputs["bias"], TORCH_ACTIVATIONS[ACTIVATIONS[options["activation"]]]

    def call() -> Tensor:
        first, second = (x if bias is None else x + bias).chunk(2, dim=-1)
        return activation(first) * second if options["gate_first"] else activation(second) * first

    return call


def _liger_function(names: Mapping[str, str], inputs: Inputs, options: Mapping[str, Any]) -> Callable[..., Tensor]:
    kind = ACTIVATIONS[options["activation"]]
    if kind not in names or inputs["bias"] is not None or not options["gate_first"]:
        raise PeerUnavailable(f"liger has {', '.join(names)} here, without a bias, with the gate first")
    function: Callable[..., Tensor] = liger(*names[kind].rsplit(".", 1)).apply
    return function


def _liger_gated_activation(inputs: Inputs, options: Mapping[str, Any]) -> PeerCall:
    """It takes the halves as two tensors."""
    names = {"silu": "ops.swiglu.LigerSiLUMulFunction", "gelu_tanh": "ops.geglu.LigerGELUMulFunction"}
    function = _liger_function(names, inputs, options)
    leaves = [half.detach().clone() for half in inputs["x"].chunk(2, dim=-1)]
    for leaf in leaves:
        leaf.requires_grad_(inputs["x"].requires_grad)
    return PeerCall(lambda: function(*leaves), leaves)


def _liger_fused_gate_up(inputs: Inputs, options: Mapping[str, Any]) -> Callable[[], Tensor]:
    """It takes both halves in one tensor, as this op does."""
    function = _liger_function({"silu": "ops.swiglu.LigerFusedGateUpSiLUMulFunction"}, inputs, options)
    return lambda: function(inputs["x"])


BAD_CALLS = (
    *BAD_ROWS,
    BadCall("x has an odd number of columns", "x", ValueError, spoil("x", torch.ones(3, 127))),
    BadCall("bias of one half", "bias", ValueError, spoil("bias", torch.ones(64))),
    *bad_parameter("bias", 128)[1:],
    BadCall("unknown activation", "activation", ValueError, spoil("activation", "quick_gelu")),
    BadCall("activation is a function", "activation", TypeError, spoil("activation", torch.relu)),
    BadCall("gate_first is a number", "gate_first", TypeError, spoil("gate_first", 1)),
)


def _other_half(x: Tensor, bias: Tensor | None, activation: str, gate_first: bool) -> Tensor:
    return reference.gated_activation(x, bias, ACTIVATIONS[activation], not gate_first)


def _other_form(x: Tensor, bias: Tensor | None, activation: str, gate_first: bool) -> Tensor:
    kind = ACTIVATIONS[activation]
    return reference.gated_activation(x, bias, {"gelu": "gelu_tanh", "gelu_tanh": "gelu"}.get(kind, kind), gate_first)


def _without_bias(x: Tensor, bias: Tensor | None, activation: str, gate_first: bool) -> Tensor:
    dropped = x if bias is None else x + 0 * bias  # the bias still has a gradient
    return reference.gated_activation(dropped, None, ACTIVATIONS[activation], gate_first)


class _DerivativeOfOne(torch.autograd.Function):
    """Right forward, and a gradient of the gate without the activation's derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, activation: str, gate_first: bool) -> Tensor:
        ctx.save_for_backward(x, bias)
        ctx.kind, ctx.gate_first = ACTIVATIONS[activation], gate_first
        return reference.gated_activation(x, bias, ctx.kind, gate_first)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, bias = ctx.saved_tensors
        biased = x if bias is None else x + bias
        dx, dbias = reference.gated_activation_backward(dy, x, bias, ctx.kind, ctx.gate_first, bias is not None)
        up = biased.chunk(2, dim=-1)[1 if ctx.gate_first else 0]
        dx = torch.cat([dy * up, dx.chunk(2, dim=-1)[1]] if ctx.gate_first else [dx.chunk(2, -1)[0], dy * up], dim=-1)
        return dx, None if bias is None else dbias, None, None


def _bench_case(activation: str, columns: int, rows: int = 32768) -> OpCase:
    """Named by x's shape. Models that have gated activations have no bias there."""
    return _case(f"{rows}x{columns} {activation}", rows, columns, activation=activation, parameters=())


SPEC = OpSpec(
    name="gated_activation",
    function=gated_activation,
    reference=_reference,
    inputs=_inputs,
    differentiable=("x", "bias"),
    cases=CASES,
    property_cases=("typical", "gelu_new", "relu", "silu"),
    random_case=_random_case,
    bench_cases=(
        *(_bench_case("silu", columns) for columns in (1024, 4096, 8192)),
        *(_bench_case(activation, 4096) for activation in ("gelu", "gelu_tanh")),
        _case("32768x4096 gelu bias", 32768, 4096),
    ),
    bench_cases_cpu=(_bench_case("gelu", 1536, rows=2048), _bench_case("silu", 1536, rows=2048)),
    forward_cost=row_cost(1.5),  # y has half as many columns as x
    backward_cost=row_cost(2.5),
    peers=(
        *torch_peers(_torch_gated_activation),
        Peer("liger", _liger_gated_activation),
        Peer("liger fused", _liger_fused_gate_up),
    ),
    bad_calls=BAD_CALLS,
    mutants={
        "the other half is the gate": _other_half,
        "the other form of gelu": _other_form,
        "bias dropped": _without_bias,
        "a derivative of 1": lambda x, bias, activation, gate_first: _DerivativeOfOne.apply(
            x, bias, activation, gate_first
        ),
    },
    triton_kernels=triton_kernels(
        "gated_activation",
        *((*row, "gelu") for row in row_kernels(64, 1024)),
        *((1024, "bf16", "fp32", kind) for kind in ("gelu_tanh", "relu", "silu")),
    ),
)
