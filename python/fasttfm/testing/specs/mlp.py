"""mlp: cases, costs, peers, bad inputs, broken copies."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fasttfm.bench.peers import Inputs, torch_peers
from fasttfm.kernels.mlp import reference
from fasttfm.ops import ACTIVATIONS, mlp
from fasttfm.testing.random_sizes import random_shape, random_size
from fasttfm.testing.row_cases import BAD_ROWS, TORCH_ACTIVATIONS, bare_gemms, linear_cost
from fasttfm.testing.spec import BadCall, OpCase, OpSpec, draw, op_case, spoil


def _inputs(case: OpCase, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
    shape, inner = case.sizes["shape"], case.sizes["inner"]
    columns = shape[-1]
    outputs = case.sizes.get("outputs", columns)
    biased = case.sizes.get("bias", True)

    def tensor(*sizes: int, scale: float = 1.0) -> Tensor:
        return draw(generator, *sizes, dtype=dtype, device=device, scale=scale)

    x = tensor(*shape)
    return {
        "x": x.transpose(0, 1) if case.sizes.get("transposed") else x,
        "w1": tensor(inner, columns, scale=columns**-0.5),
        "b1": tensor(inner) if biased else None,
        "w2": tensor(outputs, inner, scale=inner**-0.5),
        "b2": tensor(outputs) if biased else None,
    }


def _case(name: str, *shape: int, inner: int, activation: str = "gelu", recompute: bool = True, **sizes: Any) -> OpCase:
    return op_case(name, {"activation": activation, "recompute": recompute}, shape=shape, inner=inner, **sizes)


CASES = (
    _case("typical", 3, 5, 64, inner=128),
    _case("saved", 3, 5, 64, inner=128, recompute=False),
    _case("tanh", 3, 5, 32, inner=64, activation="gelu_new"),
    _case("relu", 9, 32, inner=40, activation="relu"),
    _case("silu", 9, 32, inner=40, activation="silu", recompute=False),
    _case("odd", 7, 33, inner=51),
    _case("one_row", 1, 40, inner=24),
    _case("vector", 40, inner=24),
    _case("no_rows", 0, 16, inner=24),
    _case("many_rows", 301, 24, inner=40),
    _case("no_bias", 9, 32, inner=48, bias=False),
    _case("other_outputs", 9, 32, inner=48, outputs=20),
    _case("transposed", 4, 6, 32, inner=16, transposed=True),
)


def _random_case(source: random.Random) -> OpCase:
    return _case(
        "random",
        *random_shape(source, largest=96),
        inner=random_size(source, 96),
        outputs=random_size(source, 96),
        activation=source.choice(sorted(ACTIVATIONS)),
        recompute=source.random() < 0.5,
        bias=source.random() < 0.7,
    )


def _torch_mlp(inputs: Inputs, options: Mapping[str, Any]) -> Callable[[], Tensor]:
    linear, activation = torch.nn.functional.linear, TORCH_ACTIVATIONS[ACTIVATIONS[options["activation"]]]
    x, w1, b1, w2, b2 = (inputs[name] for name in ("x", "w1", "b1", "w2", "b2"))
    return lambda: linear(activation(linear(x, w1, b1)), w2, b2)


BAD_CALLS = (
    *BAD_ROWS[:2],
    BadCall("w1 of other columns", "w1", ValueError, spoil("w1", torch.ones(128, 63))),
    BadCall("w1 of another type", "w1", TypeError, spoil("w1", torch.ones(128, 64).bfloat16())),
    BadCall("b1 too short", "b1", ValueError, spoil("b1", torch.ones(64))),
    BadCall("w2 of other columns", "w2", ValueError, spoil("w2", torch.ones(64, 127))),
    BadCall("w2 elsewhere", "w2", ValueError, spoil("w2", torch.ones(64, 128, device="meta"))),
    BadCall("w2 is missing", "w2", TypeError, spoil("w2", None)),
    BadCall("b2 too long", "b2", ValueError, spoil("b2", torch.ones(65))),
    BadCall("b2 of another type", "b2", TypeError, spoil("b2", torch.ones(64, dtype=torch.float64))),
    BadCall("unknown activation", "activation", ValueError, spoil("activation", "gelux")),
    BadCall("recompute is a number", "recompute", TypeError, spoil("recompute", 1)),
)


def _reference(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, activation: str, recompute: bool
) -> Tensor:
    return reference.mlp(x, w1, b1, w2, b2, ACTIVATIONS[activation])


def _without_first_bias(**arguments: Any) -> Tensor:
    return _reference(**{**arguments, "b1": None})


def _without_second_bias(**arguments: Any) -> Tensor:
    return _reference(**{**arguments, "b2": None})


class _SameActivation(torch.autograd.Function):
    """Right forward, and a dw2 from the activation before the bias."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        x, w1, b1, w2, b2, kind = arguments
        y, h, _ = reference.mlp_forward(x, w1, b1, w2, b2, kind, False)
        ctx.save_for_backward(x, w1, b1, w2, h)
        ctx.kind, ctx.needs = kind, [True, True, b1 is not None, True, b2 is not None]
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, w1, b1, w2, h = ctx.saved_tensors
        gradients = reference.mlp_backward(dy, x, w1, b1, w2, h, h, ctx.kind, ctx.needs)
        return *(gradient if want else None for gradient, want in zip(gradients, ctx.needs, strict=True)), None


def _wrong_activation(activation: str, recompute: bool, **tensors: Any) -> Tensor:
    y: Tensor = _SameActivation.apply(*tensors.values(), ACTIVATIONS[activation])
    return y


SPEC = OpSpec(
    name="mlp",
    function=mlp,
    reference=_reference,
    inputs=_inputs,
    differentiable=("x", "w1", "b1", "w2", "b2"),
    cases=CASES,
    property_cases=("typical", "saved"),
    torch_products=True,
    random_case=_random_case,
    bench_cases=(
        _case("32768x768x3072", 32768, 768, inner=3072),
        _case("32768x1024x4096", 32768, 1024, inner=4096),
        _case("32768x1024x4096, saved", 32768, 1024, inner=4096, recompute=False),
        _case("4096x768x3072", 4096, 768, inner=3072),
    ),
    # fp32 only: where a CPU has no instructions for bf16, torch's own product takes minutes.
    bench_cases_cpu=(_case("128x768x3072", 128, 768, inner=3072, dtypes=(torch.float32,)),),
    # Both layers count as the first.
    forward_cost=lambda case, dtype: linear_cost(case, dtype, case.sizes["inner"], 2),
    backward_cost=lambda case, dtype: linear_cost(case, dtype, case.sizes["inner"], 4),
    peers=(
        *torch_peers(_torch_mlp),
        bare_gemms("w1", "w2"),
    ),
    bad_calls=BAD_CALLS,
    mutants={
        "without the first bias": _without_first_bias,
        "without the second bias": _without_second_bias,
        "dw2 from the pre-activation": _wrong_activation,
    },
)
