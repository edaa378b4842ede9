"""linear_gelu: cases, costs, peers, bad inputs, broken copies."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fasttfm.bench.peers import Inputs, torch_peers
from fasttfm.kernels.linear_gelu import reference
from fasttfm.ops import ACTIVATIONS, linear_gelu
from fasttfm.testing.random_sizes import random_scale, random_shape, random_size
from fasttfm.testing.row_cases import BAD_ROWS, TORCH_ACTIVATIONS, bare_gemms, linear_cost
from fasttfm.testing.spec import BadCall, OpCase, OpSpec, draw, op_case, spoil


def _inputs(case: OpCase, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
    shape, outputs = case.sizes["shape"], case.sizes["outputs"]
    columns = shape[-1]

    def tensor(*sizes: int, scale: float = 1.0) -> Tensor:
        return draw(generator, *sizes, dtype=dtype, device=device, scale=scale)

    x = tensor(*shape, scale=case.sizes.get("scale", 1.0))
    return {
        "x": x.transpose(0, 1) if case.sizes.get("transposed") else x,
        "weight": tensor(outputs, columns, scale=columns**-0.5),
        "bias": tensor(outputs) if case.sizes.get("bias", True) else None,
    }


def _case(name: str, *shape: int, outputs: int, activation: str = "gelu", **sizes: Any) -> OpCase:
    return op_case(name, {"activation": activation}, shape=shape, outputs=outputs, **sizes)


CASES = (
    _case("typical", 3, 5, 64, outputs=128),
    _case("tanh", 3, 5, 64, outputs=128, activation="gelu_new"),
    _case("relu", 9, 32, outputs=40, activation="relu"),
    _case("silu", 9, 32, outputs=40, activation="silu"),
    _case("odd", 7, 33, outputs=51),
    _case("one_row", 1, 40, outputs=8),
    _case("vector", 40, outputs=24),
    _case("no_rows", 0, 16, outputs=24),
    _case("many_rows", 301, 24, outputs=40),
    _case("no_bias", 9, 32, outputs=48, bias=False),
    _case("large_values", 9, 32, outputs=48, scale=30.0),
    _case("transposed", 4, 6, 32, outputs=16, transposed=True),
)


def _random_case(source: random.Random) -> OpCase:
    return _case(
        "random",
        *random_shape(source, largest=96),
        outputs=random_size(source, 96),
        activation=source.choice(sorted(ACTIVATIONS)),
        bias=source.random() < 0.7,
        scale=random_scale(source),
    )


def _torch_linear(inputs: Inputs, options: Mapping[str, Any]) -> Callable[[], Tensor]:
    activation = TORCH_ACTIVATIONS[ACTIVATIONS[options["activation"]]]
    return lambda: activation(torch.nn.functional.linear(inputs["x"], inputs["weight"], inputs["bias"]))


BAD_CALLS = (
    *BAD_ROWS[:3],
    BadCall("weight of other columns", "weight", ValueError, spoil("weight", torch.ones(128, 63))),
    BadCall("weight of no rows", "weight", ValueError, spoil("weight", torch.ones(0, 64))),
    BadCall("weight of one dimension", "weight", ValueError, spoil("weight", torch.ones(64))),
    BadCall("weight of another type", "weight", TypeError, spoil("weight", torch.ones(128, 64).half())),
    BadCall("weight elsewhere", "weight", ValueError, spoil("weight", torch.ones(128, 64, device="meta"))),
    BadCall("bias too short", "bias", ValueError, spoil("bias", torch.ones(64))),
    BadCall("bias of another type", "bias", TypeError, spoil("bias", torch.ones(128, dtype=torch.float64))),
    BadCall("unknown activation", "activation", ValueError, spoil("activation", "gelux")),
    BadCall("activation is no name", "activation", TypeError, spoil("activation", torch.relu)),
)


def _reference(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    return reference.linear_gelu(x, weight, bias, ACTIVATIONS[activation])


def _without_bias(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    return _reference(x, weight, None, activation)


def _other_gelu(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """The tanh form in place of erf and the other way round."""
    swapped = {"gelu": "gelu_new", "gelu_new": "gelu"}
    return _reference(x, weight, bias, swapped.get(activation, activation))


SPEC = OpSpec(
    name="linear_gelu",
    function=linear_gelu,
    reference=_reference,
    inputs=_inputs,
    differentiable=("x", "weight", "bias"),
    cases=CASES,
    property_cases=("typical", "tanh", "relu"),
    torch_products=True,
    random_case=_random_case,
    bench_cases=(
        _case("32768x768x3072", 32768, 768, outputs=3072),
        _case("32768x1024x4096", 32768, 1024, outputs=4096),
    ),
    # fp32 only: where a CPU has no instructions for bf16, torch's own product takes minutes.
    bench_cases_cpu=(_case("128x768x3072", 128, 768, outputs=3072, dtypes=(torch.float32,)),),
    forward_cost=lambda case, dtype: linear_cost(case, dtype, case.sizes["outputs"], 1),
    backward_cost=lambda case, dtype: linear_cost(case, dtype, case.sizes["outputs"], 2),
    peers=(
        *torch_peers(_torch_linear),
        bare_gemms("weight"),
    ),
    bad_calls=BAD_CALLS,
    mutants={"without the bias": _without_bias, "the other GELU": _other_gelu},
)
